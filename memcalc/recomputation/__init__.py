"""Activation recomputation: chains, plans, and the cost of a plan.

`Chain` is the input: blocks in forward order. `Plan` is the result as plain data. `evaluate` computes what a plan needs
at each point of the step. Each file in `strategies` finds plans, independently of the others.
"""
