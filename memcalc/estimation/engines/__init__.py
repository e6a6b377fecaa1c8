"""Engines that spread a step over ranks: what each of them holds beside the shards."""
