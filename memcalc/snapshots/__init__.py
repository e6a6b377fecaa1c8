"""PyTorch's memory snapshots: read without running anything, turned into events, and checked against the allocator."""
