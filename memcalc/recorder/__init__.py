"""Recording of a running step: every storage's lifetime as a stream of events, with its component and its operator.

The recorder does not depend on the device: fake tensors, a null CUDA device, a CPU and a GPU are recorded the same
way. Importing this package loads no torch. Its modules `recorder` and `observer` do; `ledger` and `trace`, which read
a recording, do not.
"""
