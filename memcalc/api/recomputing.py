"""Plan activation recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memcalc.api.sources import Source, assignments, run_of
from memcalc.progress import Progress, silent

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
    """Plan which activations to save and which to recompute. Needs no torch.

    Return the cheapest plan with the verdict "fits". If no plan fits for sure, return the plan with the lowest
    peak, with `verdict.answer` "unknown".

    Args:
        source: as for `load`; its own recomputation settings are ignored.
        overrides: as for `load`.
        gpu: as for `load`.
        budget: memory limit per GPU in bytes, or "70GiB"; None: that of the GPU.
        strategy: "optimal"; "selective", inside the layers, for which it needs SciPy; or a rule: "none",
            "every-layer", "sqrt", "every-k", "smallest".
        maximize: whether to raise micro_batch_size to the largest for which a plan fits and the next one does not.
        host_gb_per_second: 10^9 bytes per second each way to host memory, for offload; PCIe 4.0 x16 may reach 25.
        progress: called with the number of finished plans.
        fields: as for `load`.

    Raises:
        DoesNotFit: no plan fits; the message states what the smallest plan needs, by component.
    """
    from memcalc.recomputation.recommendation import plan_recompute
    from memcalc.units import parse_bytes

    limit = parse_bytes(budget) if isinstance(budget, str) else budget
    run = run_of(source, *overrides, *assignments(fields), verb="recompute", gpu=gpu)
    link = round(host_gb_per_second * 10**9)
    return plan_recompute(run, limit, strategy, maximize=maximize, host_bytes_per_second=link, progress=progress)


def describes_chain(path: str) -> bool:
    """Return whether the file describes a chain of blocks (docs/guides/recompute.md), not a model."""
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
    """Plan which blocks of a chain, described in a YAML file, save their outputs. Needs no torch.

    Args:
        path: the YAML file of the chain.
        gpu: the GPU, less its context and the most that recorded runs reserved beyond what they allocated.
        budget: bytes that may be allocated, or "20GiB".
        strategy: as for `recompute`, without "selective".
        saved: positions, from 1, of the blocks of each branch that save their outputs: a plan to evaluate instead; it
            needs neither a GPU nor a budget.
        maximize: whether to raise the batch to the largest that fits.

    Raises:
        DoesNotFit: no plan fits, or the given plan does not.
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
    """Trace a planned step, and return planned and traced bytes by phase for each device. Needs torch.

    Args:
        planning: a result of `recompute`.
        devices: "fake": tensors without values; "null": PyTorch's CUDA build without a GPU. If "null" is not
            installed and not the only device, the result lists it as missing.
        python: as for `trace`.
        progress: called with the progress of the traces.
    """
    from memcalc.recomputation.verification import verified as trace_planned

    return trace_planned(planning, devices, python, progress)
