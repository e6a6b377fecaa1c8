"""Which small changes of a run save memory, what each costs, and whether training comes out the same."""
