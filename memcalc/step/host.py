"""Where offloaded parameters lie."""

from __future__ import annotations

import torch

# With its index: whoever names it so means memory that counts, also where that of the device is only played.
HOST = torch.device("cpu", 0)
