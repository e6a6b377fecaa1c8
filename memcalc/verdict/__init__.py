"""Whether a run fits: bounds, the allocator replay, and how far recorded runs of its kind were off."""
