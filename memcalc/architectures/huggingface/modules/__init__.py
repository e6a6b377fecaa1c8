"""Modules that several families of transformers share."""
