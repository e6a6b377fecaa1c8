"""TensorFlow's and JAX's best-fit allocator with coalescing (BFC)."""
