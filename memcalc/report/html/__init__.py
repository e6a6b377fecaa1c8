"""Results as self-contained HTML: a file, and the output of a notebook's cell."""
