"""The PyTorch caching allocator for CUDA, from 2.6 to 2.15."""
