"""A run as a list of requests of PyTorch's allocator, and what a replay of it finds."""
