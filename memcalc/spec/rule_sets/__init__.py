"""The rules of a configuration, by topic; each is checked once, when it is loaded."""
