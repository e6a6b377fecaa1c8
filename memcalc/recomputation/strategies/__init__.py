"""One file per strategy; each returns a `Plan` as plain data."""
