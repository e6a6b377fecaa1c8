"""Whose program runs: per framework and release, the defaults and habits that decide memory."""
