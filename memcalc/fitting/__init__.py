"""What fits on given cards: the largest batch, sequence or model, the fewest cards, the best layouts."""
