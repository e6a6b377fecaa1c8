"""What the values of small tensors cost a training step on the null device: `python benchmarks/values_cost.py PYTHON`.

Two processes run the same steps, one on a device without src/values.cpp, and take turns on one core: step for step, in
the order ABBA, so that whatever else the machine does slows both alike. A step is measured in seconds of the processor.
The figure is the median of the ratios of neighboring steps, with the interval that has the true median in it 95 times
out of 100 (order statistics). Bar: 10 %.

PYTHON has PyTorch's CUDA build, and transformers.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.nullcuda import STEPS  # noqa: E402
from memcalc.nullcuda import environment  # noqa: E402
from memcalc.nullcuda.build import VALUES  # noqa: E402

WARM = 3  # steps before the first that counts
IN_TURN = """
import sys, time
def train(loss):
    while sys.stdin.readline():
        start = time.process_time()
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(time.process_time() - start, flush=True)
"""


class Stepper:
    """A process that runs a step when it is asked to.

    Args:
        python: its interpreter.
        name: of the model, see `benchmarks.nullcuda.STEPS`.
        variables: its environment.
    """

    def __init__(self, python: str, name: str, variables: dict[str, str]) -> None:
        script, words = STEPS[name]
        self._process = subprocess.Popen(
            [python, "-c", IN_TURN + script, *words.split()],
            env=os.environ | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def step(self) -> float:
        """Return the seconds of the processor that one step took."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the median, by the normal approximation of the binomial distribution."""
    ordered, half = sorted(ratios), 0.98 * len(ratios) ** 0.5
    middle = len(ratios) / 2
    return ordered[max(int(middle - half), 0)], ordered[min(int(middle + half), len(ratios) - 1)]


def main() -> None:
    """Measure each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="an interpreter with PyTorch's CUDA build, and transformers")
    parser.add_argument("--pairs", type=int, default=200, help="of steps, for each model")
    arguments = parser.parse_args()
    python = os.path.abspath(arguments.python)  # noqa: PTH100 -- resolve() would leave the environment
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with_values = environment("b200", pythons=[python])
    with tempfile.TemporaryDirectory() as folder:
        device, bare = with_values["MEMCALC_NULL_DEVICE"], str(Path(folder) / "device")
        shutil.copytree(device, bare, symlinks=True)
        (Path(bare) / VALUES).unlink()
        without = {name: value.replace(device, bare) for name, value in with_values.items()}
        for name in STEPS:
            steppers = [Stepper(python, name, variables) for variables in (with_values, without)]
            for stepper in steppers:
                for _ in range(WARM):
                    stepper.step()
            knowing, bare_steps = [], []
            for number in range(arguments.pairs):
                order = (0, 1) if number % 2 == 0 else (1, 0)
                taken = {which: steppers[which].step() for which in order}
                knowing.append(taken[0])
                bare_steps.append(taken[1])
            for stepper in steppers:
                stepper.close()
            ratios = [a / b for a, b in zip(knowing, bare_steps, strict=True)]
            low, high = interval(ratios)
            print(
                f"{name}: {1000 * statistics.median(bare_steps):.1f} ms without, "
                f"{1000 * statistics.median(knowing):.1f} ms with; {100 * (statistics.median(ratios) - 1):+.1f} % "
                f"({100 * (low - 1):+.1f} to {100 * (high - 1):+.1f} %) of {arguments.pairs} pairs",
                flush=True,
            )


if __name__ == "__main__":
    main()
