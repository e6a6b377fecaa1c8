"""Sweeps by traces or dry runs: each cell of the grid runs in a separate process, locally or on a Dask cluster."""
