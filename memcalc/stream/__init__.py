"""A run as a list of allocator requests, and the result of replaying it."""
