"""Tapes of operators, and the programs of allocations and releases compiled from them."""
