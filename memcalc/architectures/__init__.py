"""Forward of each implementation's modules, written on a tape: the operators, and so what autograd saves."""
