"""What transformers' modules run, operator by operator (transformers 5.23, models/<family>/modeling_<family>.py)."""
