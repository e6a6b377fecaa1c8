"""Options of the parts of a block's structure: each file has the parts of one subject, and how a run sets them."""
