"""A running step seen from outside: every storage's life as the event stream, each with what it is for and who made it.

Blind to the device: fake tensors, a null CUDA device, a CPU and a GPU are recorded alike. Importing this loads no
torch; `recorder` and `observer` do, `ledger` and `trace` read what was recorded and do not.
"""
