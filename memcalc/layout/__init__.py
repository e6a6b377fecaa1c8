"""Weights of a run on one rank: parameters, pipeline stages, tensor-parallel shards, adapters."""
