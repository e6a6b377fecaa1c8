"""Search for what fits on given GPUs: layouts, largest values, fewest GPUs, changes."""
