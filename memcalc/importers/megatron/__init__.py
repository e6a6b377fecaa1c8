"""Megatron-LM: its arguments, in shell scripts and argument files, and the fields that follow from them."""
