"""Model states on one rank: weights, gradients, optimizer states; and other persistent tensors."""
