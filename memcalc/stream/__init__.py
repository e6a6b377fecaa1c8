"""A run as a list of allocator requests, and allocator replay."""
