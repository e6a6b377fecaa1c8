"""The best-fit allocator with coalescing (BFC) of TensorFlow and JAX."""
