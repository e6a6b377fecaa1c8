"""Whole screens of `sweep`."""

import io
import re
from collections.abc import Callable

import pytest

import memcalc
from memcalc.report.screen import Screen
from memcalc.report.sweeps.screen import draw_sweep
from memcalc.report.sweeps.svg import cell_of, heat_maps
from memcalc.sweeping.vary_option import parse_axes
from tests.records import pin_records

Golden = Callable[[str, str], None]

ON_A_T4 = ("dtype=fp16", "attention=memory-efficient")  # it has no flash attention, and this kernel in fp16 only

CASES: dict[str, tuple[str, tuple[str, ...], str | None, tuple[str, ...]]] = {
    "frontier": (
        "llama-3-8b",
        ("zero_stage=3", "data_parallel=8"),
        "h100-80gb",
        ("b=1..24", "recompute=none,full"),
    ),
    "several_maps": (
        "llama-3-8b",
        ("data_parallel=8",),
        "h100-80gb",
        ("tensor_parallel=1..4", "zero_stage=0,1,3", "b=1,2,4"),
    ),
    "nothing_fits": ("llama-3-8b", ON_A_T4, "t4", ("b=1,2", "recompute=none,full")),
    "no_card": ("gpt2", (), None, ("b=1,2,4", "s=256,512,1024")),
    "replayed": ("gpt2", ON_A_T4, "t4", ("b=1..24", "s=256,512,1024")),
    "allocator_settings": ("gpt2", (*ON_A_T4, "alloc_conf=expandable_segments:True"), "t4", ("b=10..14",)),
    "one": ("gpt2", ON_A_T4, "t4", ("b=2",)),
}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", CASES)
def test_screens(name: str, width: int, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    pin_records(monkeypatch)
    source, overrides, gpu, vary = CASES[name]
    table = memcalc.sweep(source, parse_axes(vary), *overrides, gpu=gpu)
    file = io.StringIO()
    draw_sweep(Screen(file, width), table, source, gpu or "", "GiB")

    golden(f"sweep_{name}_{width}", file.getvalue())


def test_a_map_on_which_nothing_fits_says_why() -> None:
    """Of what would come closest; a map with something that fits has no such line."""
    none = heat_maps(memcalc.sweep("llama-3-70b", {"b": [1, 2]}, "recipe=pure", gpu="h100-80gb"), "title", "GiB")
    some = heat_maps(memcalc.sweep("gpt2", {"b": [1, 2]}, gpu="h100-80gb"), "title", "GiB")
    assert re.search(
        r"Nothing fits: the closest \(micro_batch_size = [12]\) needs [\d,.]+ GiB, [\d,.]+ GiB of it \w[\w ]+, of 79\.10 GiB\.",
        none,
    )
    assert "Nothing fits" not in some


def test_few_columns_have_their_numbers_in_the_cells() -> None:
    """640 pixels over 4 columns are 80 each, the widest; over 64 columns 14, the narrowest, without room for a number."""
    few, many = cell_of(4), cell_of(64)
    assert (few.width, few.numbered) == (80, True)
    assert (many.width, many.numbered) == (14, False)
    table = memcalc.sweep("gpt2", {"b": [1, 2]}, gpu="h100-80gb")
    svg = heat_maps(table, "title", "GiB")
    for size in table.device_bytes:
        assert f">{size / 2**30:,.2f}</text>" in svg
    assert "numbers: device memory, GiB" in svg
