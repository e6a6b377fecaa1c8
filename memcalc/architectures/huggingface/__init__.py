"""transformers' modules, operator by operator (transformers 5.23, models/<family>/modeling_<family>.py)."""
