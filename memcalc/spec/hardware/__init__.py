"""The table of GPUs, their machines, and what kernels read of them."""
