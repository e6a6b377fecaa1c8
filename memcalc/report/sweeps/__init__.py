"""Reports of grids of configurations: maps with the frontier of what fits, tables, files for other programs."""
