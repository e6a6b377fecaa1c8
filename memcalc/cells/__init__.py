"""A grid whose cells are runs, each in a process of its own: traces and dry runs, here or on a Dask cluster."""
