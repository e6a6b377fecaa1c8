"""The two published examples of fragmentation, and what each cause's advice promises."""

import io

import pytest

from memcalc.diagnosis.diagnosis import Finding, diagnose
from memcalc.diagnosis.sizes import PrintedSize

GIB = 2**30
FIRST = (
    "RuntimeError: CUDA out of memory. Tried to allocate 1.24 GiB (GPU 0; 15.78 GiB total capacity; 10.34 GiB already "
    "allocated; 435.50 MiB free; 14.21 GiB reserved in total by PyTorch)"
)
# Of the second one only the two figures are published, 17.62 GiB reserved and 11.39 GiB allocated: any request between
# what is free and what is cached tells the same story.
SECOND = (
    "RuntimeError: CUDA out of memory. Tried to allocate 5.00 GiB (GPU 0; 24.00 GiB total capacity; 11.39 GiB already "
    "allocated; 3.00 GiB free; 17.62 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try "
    "setting max_split_size_mb to avoid fragmentation."
)


def finding_of(text: str) -> Finding:
    return diagnose("error.log", io.BytesIO(text.encode())).finding


def gib(figure: PrintedSize | None) -> float | None:
    return None if figure is None else round(figure.bytes / GIB, 2)


def test_the_first_example_is_fragmentation() -> None:
    finding = finding_of(FIRST)

    assert finding.cause.name == "fragmentation"
    assert gib(finding.account.cached) == 3.87  # 14.21 - 10.34
    assert gib(finding.account.unexplained) == 1.14  # 15.78 - 14.21 - 435.50 / 1024
    assert finding.account.shortfall == round(1.24 * GIB) - round(435.5 * 2**20)
    assert all(check.holds for check in finding.checks)


def test_the_second_example_names_its_lever() -> None:
    finding = finding_of(SECOND)

    assert finding.cause.name == "fragmentation"
    assert gib(finding.account.cached) == 6.23  # 17.62 - 11.39
    levers = [advice.lever for advice in finding.advice]
    assert levers[:2] == [
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512",
    ]
    assert [(advice.gain_bytes, advice.enough) for advice in finding.advice[:2]] == [
        (finding.account.cached.bytes, True)  # type: ignore[union-attr]
    ] * 2


@pytest.mark.parametrize(
    ("asked", "split"),
    [
        ("5.00 GiB", "512"),
        ("1.00 GiB", "512"),
        ("1023.00 MiB", "256"),  # half of it is 511.5
        ("80.00 MiB", "32"),
        ("63.00 MiB", None),  # half of it is below 32: too small to keep whole
    ],
)
def test_blocks_that_could_have_held_the_request_are_never_split(asked: str, split: str | None) -> None:
    text = FIRST.replace("1.24 GiB (", f"{asked} (").replace("435.50 MiB free", "2.00 MiB free")
    levers = [advice.lever for advice in finding_of(text).advice]

    assert [lever for lever in levers if "max_split" in lever] == (
        [] if split is None else [f"PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:{split}"]
    )


def test_a_cache_no_larger_than_in_healthy_runs_is_not_the_cause() -> None:
    # 75.00 * 1.0958 = 82.19, the median of recorded runs of one GPU: below that a cache is what any run has.
    text = (
        "CUDA out of memory. Tried to allocate 1.00 GiB (GPU 0; 90.00 GiB total capacity; 75.00 GiB already allocated; "
        "0.50 GiB free; {reserved} GiB reserved in total by PyTorch)"
    )

    assert finding_of(text.format(reserved="82.10")).cause.name != "fragmentation"
    assert finding_of(text.format(reserved="82.30")).cause.name == "fragmentation"


@pytest.mark.parametrize(
    ("frame", "first"),
    [
        ('  File "/x/torch/optim/adamw.py", line 3, in adamw', "reduce the optimizer state"),
        ('  File "/x/torch/autograd/__init__.py", line 3, in backward', "halve the micro-batch"),
        ('  File "/x/torch/nn/modules/module.py", line 3, in _apply', "put fewer weights on this device"),
    ],
)
def test_the_traceback_decides_what_helps(frame: str, first: str) -> None:
    full = (
        "CUDA out of memory. Tried to allocate 1.00 GiB (GPU 0; 79.00 GiB total capacity; 76.00 GiB already allocated; "
        "0.50 GiB free; 77.00 GiB reserved in total by PyTorch)"
    )
    text = f"Traceback (most recent call last):\n{frame}\n    code\nRuntimeError: {full}"

    assert finding_of(text).advice[0].lever.startswith(first)


def test_without_the_other_process_it_would_have_fitted() -> None:
    finding = finding_of(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.00 GiB of which 1.00 GiB is "
        "free. Process 77 has 30.00 GiB memory in use. Including non-PyTorch memory, this process has 48.00 GiB memory "
        "in use. Of the allocated memory 46.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but "
        "unallocated."
    )

    assert finding.cause.name == "memory outside the framework"
    assert gib(finding.account.other_processes) == 30.0
    assert gib(finding.account.outside) == 1.0  # 48 - (46 + 1)
    assert gib(finding.account.unexplained) == 0.0  # 79 - 1 - 47 - 1 - 30
    assert finding.advice[0].lever == "use another device, or stop the other processes on this one"
    assert finding.advice[0].enough is True
