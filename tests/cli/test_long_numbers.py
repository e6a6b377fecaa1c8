"""Numbers of more digits than Python reads, wherever one can be given: refused in one short line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from memcalc.allocator import parse_settings, parse_version
from memcalc.allocator.paddle import settings as paddle
from memcalc.allocator.tensorflow.settings import parse_settings as tensorflow_settings
from memcalc.cli.app import main
from memcalc.errors import InputError
from memcalc.units import whole_number
from tests.fuzz.formats import EVENTS

LONG = "9" * 5_000


def pytorch_settings(text: str) -> object:
    return parse_settings(text, parse_version("2.13"))


@pytest.mark.parametrize(
    "words",
    [
        "sweep gpt2 --vary b=1..N",
        "sweep gpt2 --vary b=N",
        "fit gpt2 --gpu t4 --gpus N",
        "estimate gpt2 --set b=N",
        "estimate gpt2 --set recompute=every-N",
        "estimate gpt2 --gpu t4 --alloc-conf max_split_size_mb:N",
        "check gpt2 --budget NGiB",
        "replay EVENTS --sweep max_split_size_mb=N",
        "replay EVENTS --alloc-conf max_split_size_mb:N",
        "replay EVENTS --allocator paddle-auto-growth --alloc-conf FLAGS_auto_growth_chunk_size_in_mb=N",
        "replay EVENTS --release N.N",
        "dry-run --gpu t4 --sweep --micro-batch-flag --b --micro-batches N -- true",
    ],
)
def test_a_number_of_thousands_of_digits(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = tmp_path / "events.jsonl"
    events.write_bytes(EVENTS)
    code = main([str(events) if word == "EVENTS" else word.replace("N", LONG) for word in words.split(" ")])
    out, err = capsys.readouterr()

    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert len(err) < 3_000


@pytest.mark.parametrize(
    ("read", "text", "rule"),
    [
        (pytorch_settings, "max_split_size_mb:N", "The value must be a whole number."),
        (pytorch_settings, "large_segment_size_mb:N", "The value must be a whole number."),
        (pytorch_settings, "roundup_power2_divisions:N", "The value must be a whole number."),
        (pytorch_settings, "roundup_power2_divisions:[256:N,>:4]", "The value must be a whole number."),
        (pytorch_settings, "garbage_collection_threshold:N", "The value must be between 0 and 1, both excluded."),
        (pytorch_settings, "per_process_memory_fraction:N", "The value must be between 0 and 1."),
        (parse_version, "2.N", "Use a version from 2.6 to 2.15."),
        (parse_version, "N.13", "Use a version from 2.6 to 2.15."),
        (paddle.parse_settings, "gpu_memory_limit_mb=N", "The value must be a whole number of MiB, 0 or more."),
        (paddle.parse_settings, "alignment_size=N", "The value must be a power of two, in bytes."),
        (paddle.parse_settings, "eager_delete_tensor_gb=N", "The value must be a finite number below 1e+30."),
        (paddle.parse_version, "N.6", "Name one from 1.0 to 3.x."),
        (tensorflow_settings, "per_process_gpu_memory_fraction=N", "The value must be a finite number below 1e+30."),
    ],
)
def test_settings_of_allocators_in_python(read: Callable[[str], object], text: str, rule: str) -> None:
    with pytest.raises(InputError) as refused:
        read(text.replace("N", LONG))

    assert str(refused.value).endswith(rule)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 3_000


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("007", 7),
        ("9" * 30, 10**30 - 1),
        ("9" * 31, None),
        (LONG, None),
        ("-1", None),
        ("1_0", None),
        ("", None),
    ],
)
def test_a_whole_number(text: str, number: int | None) -> None:
    assert whole_number(text) == number
