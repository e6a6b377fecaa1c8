"""PyTorch memory snapshots: read without executing anything, converted to events, verified by the allocator model."""
