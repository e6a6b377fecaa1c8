"""Sharding engines as allocator requests around units: the multi-rank part of an allocator replay."""
