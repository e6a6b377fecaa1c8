"""Entry point of `python -m memcalc`, the same program as the command `memcalc`."""

from __future__ import annotations

import sys

from memcalc.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
