"""A running step seen from outside: every storage's life as the event stream, each with what it is for and who made it.

Blind to the device: fake tensors, a null CUDA device, a CPU and a GPU are recorded alike.
"""

from memcalc.recorder.recorder import Recorder

__all__ = ["Recorder"]
