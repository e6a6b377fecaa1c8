"""Defaults of the programs that run a file: per framework and version, the defaults and behavior that decide memory."""
