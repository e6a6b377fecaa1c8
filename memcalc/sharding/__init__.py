"""Sharding engines as requests around units: the part of an allocator replay that depends on several ranks."""
