"""Plans of recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memcalc.api.sources import Source, load
from memcalc.progress import Progress, silent
from memcalc.spec.rule_sets.inference import of_training

if TYPE_CHECKING:
    from memcalc.recomputation.chain_file import ChainPlanning
    from memcalc.recomputation.recommendation import RecomputeResult
    from memcalc.recomputation.verification import DeviceVerification


def recompute(
    source: Source,
    *overrides: str,
    gpu: str | None = None,
    budget: int | str | None = None,
    strategy: str = "optimal",
    maximize: bool = False,
    host_gb_per_second: float = 25.0,
    progress: Progress = silent,
    **fields: Any,
) -> RecomputeResult:
    """Plan which activations to keep, and which to recompute. No torch.

    The cheapest plan with which the verdict of the run is "fits"; where no plan can be said to fit for sure, the one
    that needs least, with `verdict.answer` "unknown".

    Args:
        source: as for `load`; what it says of recomputation is left aside.
        overrides: as for `load`.
        gpu: as for `load`.
        budget: bytes that a GPU may hold, or "70GiB"; None: the GPU's.
        strategy: "optimal"; "selective", inside the layers, for which it needs SciPy; or a rule: "none",
            "every-layer", "sqrt", "every-k", "smallest".
        maximize: whether to raise micro_batch_size to the largest for which a plan fits and the next one does not.
        host_gb_per_second: 10^9 bytes per second each way to host memory, for offload; PCIe 4.0 x16 may reach 25.
        progress: called with the number of finished plans.
        fields: as for `load`.

    Raises:
        DoesNotFit: no plan is small enough; the message says what the smallest needs, and what holds it.
    """
    from memcalc.recomputation.recommendation import plan_recompute
    from memcalc.units import parse_bytes

    limit = parse_bytes(budget) if isinstance(budget, str) else budget
    spec = of_training(load(source, *overrides, gpu=gpu, **fields), "recompute")
    link = round(host_gb_per_second * 10**9)
    return plan_recompute(spec, limit, strategy, maximize=maximize, host_bytes_per_second=link, progress=progress)


def describes_chain(path: str) -> bool:
    """Whether this is a file that describes a chain of blocks (docs/guides/recompute.md), not a model."""
    from memcalc.recomputation.chain_file import describes_chain as looks_like_one

    return looks_like_one(path)


def recompute_chain(
    path: str,
    *,
    gpu: str | None = None,
    budget: int | str | None = None,
    strategy: str = "optimal",
    saved: Sequence[int] | None = None,
    maximize: bool = False,
) -> ChainPlanning:
    """Which blocks of a chain to keep that a YAML file describes. No torch.

    Args:
        path: of the file.
        gpu: the GPU, less its context and the most that recorded runs reserved beyond what they allocated.
        budget: bytes that may be allocated, or "20GiB".
        strategy: as of `recompute`, but for "selective".
        saved: positions, from 1, of the blocks of each branch that save their outputs: a plan to evaluate instead; it
            needs neither a GPU nor a budget.
        maximize: whether to raise the batch to the largest that fits.

    Raises:
        DoesNotFit: no plan is small enough, or not the given one.
    """
    from memcalc.recomputation.chain_file import plan_chain
    from memcalc.units import parse_bytes

    limit = parse_bytes(budget) if isinstance(budget, str) else budget
    return plan_chain(path, limit, gpu, strategy, saved=saved, maximize=maximize)


def verified(
    planning: RecomputeResult,
    devices: tuple[str, ...] = ("fake", "null"),
    python: str | None = None,
    progress: Progress = silent,
) -> list[DeviceVerification]:
    """A planned step traced: on each device the phases with their planned and their traced bytes. Needs torch.

    Args:
        planning: of `recompute`.
        devices: "fake": tensors without values; "null": PyTorch's CUDA build without a GPU, told as missing where it
            is not there and not asked for alone.
        python: as for `trace`.
        progress: called with the progress of the traces.
    """
    from memcalc.recomputation.verification import verified as trace_planned

    return trace_planned(planning, devices, python, progress)
