"""The reference decoder ("plain"): PyTorch modules arranged as the block of the papers."""
