"""Predictions against measured runs: one run, many runs, and what the records of many say. Importing loads no torch."""
