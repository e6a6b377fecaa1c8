"""Comparison of predictions with measured runs: one run, a suite, a summary of records. Importing loads no torch."""
