"""Small changes of a run that save memory, the cost of each, and whether they keep the training result."""
