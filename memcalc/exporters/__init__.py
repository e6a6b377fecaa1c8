"""A run as another program's file, and the settings that complete it."""
