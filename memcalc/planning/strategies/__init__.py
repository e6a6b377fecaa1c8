"""One file a strategy; each returns a `Plan` as plain data."""
