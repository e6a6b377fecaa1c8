"""PaddlePaddle's allocators, and its garbage collection and in-place strategies."""
