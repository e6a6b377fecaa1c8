"""The optimizer step: what it keeps, and what it makes and drops; one file for each question."""
