"""Whether a run fits: bounds, the allocator replay, and the errors of recorded runs of its kind."""
