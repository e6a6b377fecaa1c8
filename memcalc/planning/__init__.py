"""Which activations to keep and which to compute a second time: chains, plans, and what a plan costs.

`Chain` is what is planned: blocks in the order in which forward runs them. `Plan` is an answer as plain data.
`evaluate` says what a plan needs, moment by moment; each file in `strategies` finds plans, and knows no other.
"""
