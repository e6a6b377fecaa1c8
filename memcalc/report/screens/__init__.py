"""The screen of each command: its sentences and tables, drawn on a `Screen`."""
