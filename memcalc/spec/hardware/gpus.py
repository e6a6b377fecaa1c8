"""The GPU table: names of each GPU, and the memory that a training process can use."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml

from memcalc.errors import InputError
from memcalc.units import parse_bytes

FILE = Path(__file__).parents[2] / "data" / "gpus.yaml"

# CSafeLoader is about ten times faster, but absent if PyYAML was built without libyaml.
LOADER: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

AUTO = "auto"
DEFAULT_CARD = "a100-80gb"  # its kernels are assumed for a GPU without a name
_FEWEST_BARE_BYTES = 2**20  # a smaller number without a unit is ambiguous
# "12GiB", "rtx-4090:20 GiB": a GPU's own name may also end with its memory, but has no colon and is found first.
_SIZED = re.compile(r"(?:(?P<card>[^:]{1,60}):)?(?P<size>\d{1,30}(?:\.\d{1,30})?\s*(?:[KMGTkmgt]i?)?[Bb])")

# In the table: the first line of a row, and its list of aliases, which is one line.
_ROW = re.compile(r"^  ([a-z0-9][a-z0-9-]*):$", re.MULTILINE)
_ALIASES = re.compile(r"^    aliases: \[(.*)\]$", re.MULTILINE)

# A name with a memory size appended: "h100-80g", "rtx-4060-ti-16380mib", "a100-80".
_MEMORY = re.compile(r"(?P<name>.+?)-(?P<size>\d{1,6})-?(?:g|gb|gib|mib)?")
_SEVERAL = re.compile(r"(\d{1,5})\s*[xX×*]\s*(\D.{0,60})")  # "8xH100"

# "NVIDIA GeForce RTX 3090" and "rtx-3090" are the same GPU.
_MAKERS = re.compile(r"^(nvidia-|amd-|intel-|huawei-|tesla-|geforce-|instinct-|radeon-)+")


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU, as a rank uses it."""

    name: str  # its key in the table
    label: str  # its vendor's name
    device_name: str  # the driver's name, as in torch.cuda.get_device_name
    vendor: str  # nvidia, amd, intel, huawei or google
    aliases: tuple[str, ...]  # other names for lookup
    advertised_bytes: int  # advertised memory, read as GiB: vendors print "GB" for GiB of DRAM
    smi_bytes: int | None  # total memory in the vendor's tool; None: not published
    usable_bytes: int  # total memory that frameworks can allocate, the lowest seen; decides whether a run fits
    context_bytes: int  # memory of a process without its tensors (CUDA context, loaded kernels)
    compute_capability: tuple[int, int] | None  # (major, minor) of CUDA; None: not a CUDA GPU
    multiprocessors: int | None  # streaming multiprocessors, or compute units; None: uncertain
    max_threads_per_multiprocessor: int | None  # None: uncertain
    l2_bytes: int | None  # L2 cache; None: uncertain
    bf16_tflops: float | None  # dense bf16 rate; None: no bf16 matrix units
    source: str  # source of usable_bytes
    row: str  # the row of the table with the GPU's kernels and rates: its name without a budget


def with_budget(gpu: str | None, budget: str) -> str:
    """Return the name of a GPU with a memory budget: "rtx-4090:20GiB"; without a GPU "12GiB".

    Raises:
        InputError: the budget is not a size with a unit, or not positive.
    """
    size = parse_bytes(budget)
    if size <= 0 or (budget.strip().isdecimal() and size < _FEWEST_BARE_BYTES):
        raise InputError(f"budget = {budget[:60]} has no unit.", f"Write one, such as {budget.strip()[:30]}GiB.")
    text = re.sub(r"\s+", "", budget)
    return text if gpu is None else f"{gpu.partition(':')[0]}:{text}"


@lru_cache(maxsize=256)
def find_gpu(name: str) -> GpuSpec:
    """Return the GPU with this name or alias; case, spaces and the vendor's name are ignored.

    A size alone ("12GiB"), or after a name and a colon, is a memory budget of at most the GPU's usable memory. Without
    a name the kernels are those of an A100. "auto" is the GPU of this machine.

    Raises:
        InputError: the GPU is unknown; the message suggests the nearest names.
        Unavailable: "auto", and this machine has no NVIDIA GPU.
    """
    if name == AUTO:
        from memcalc.spec.hardware.local_gpu import local_gpu_spec

        return local_gpu_spec()
    row = _index().get(_normalized(name))
    if row is not None:
        return _parsed_gpu(row)
    limited = _SIZED.fullmatch(name)
    if limited is not None:
        return _limited(limited["card"], limited["size"])
    spelled = _respelled(name)
    if spelled is not None:
        return spelled
    several = _SEVERAL.fullmatch(name.strip())
    if several is not None:
        raise InputError(f"{name[:60]!r} names {several[1]} GPUs.", f"Write --gpu {several[2]} --gpus {several[1]}.")
    sizes = _sizes_of(name)
    if len(sizes) > 1:
        asked = " or ".join(f"{gpu.advertised_bytes / 2**30:g}" for gpu in sizes)
        names = " or ".join(gpu.name for gpu in sizes)
        raise InputError(f"{name[:60]!r} is sold with {asked} GB of memory.", f"Write {names}.")
    nearest = _nearest(name)
    raise InputError(
        f"{name[:60]!r} is not a known GPU." + (f" Nearest: {', '.join(nearest)}." if nearest else ""),
        "`memcalc gpus` lists all GPUs; --budget SIZE takes the memory of any other GPU.",
    )


def _respelled(name: str) -> GpuSpec | None:
    """Return the GPU of a name with its memory size appended, as users and nvidia-smi write it; None: there is none.

    "H100 80G" and "NVIDIA GeForce RTX 4060 Ti, 16380MiB" are found; "4090 48GB" is not: there is no such GPU.
    """
    parts = _MEMORY.fullmatch(_normalized(name))
    if parts is None:
        return None
    bare, size = parts["name"], int(parts["size"])
    known = [_parsed_gpu(_index()[bare])] if bare in _index() else []
    known += [gpu for gpu in all_gpus() if gpu.name.startswith(f"{bare}-") or _normalized(gpu.device_name) == bare]
    known += [gpu for gpu in all_gpus() if gpu.name.startswith(f"rtx-{bare}-")]
    sizes = {gpu.name: (gpu.advertised_bytes >> 30, (gpu.smi_bytes or 0) >> 20) for gpu in known}
    return next((gpu for gpu in known if size in sizes[gpu.name]), None)


def _sizes_of(name: str) -> list[GpuSpec]:
    """Return the GPUs that a name without a memory size may refer to: a100 is a100-40gb or a100-80gb."""
    bare = _normalized(name[:60])
    found: dict[int, GpuSpec] = {}
    for gpu in all_gpus():
        stem = re.sub(r"-\d+gb.*$", "", gpu.name)
        if stem != gpu.name and bare in (stem, stem.removeprefix("rtx-"), stem.replace("rtx-", "rtx", 1)):
            found.setdefault(gpu.advertised_bytes, gpu)
    return list(found.values())


@lru_cache(maxsize=1)
def all_gpus() -> tuple[GpuSpec, ...]:
    """Return every GPU, in the order of the table."""
    return tuple(_parsed_gpu(name) for name in _rows())


@lru_cache(maxsize=1)
def _rows() -> dict[str, str]:
    """Return the text of each GPU's row by name: one row is parsed in 1% of the table's time."""
    table = _text().partition("\ncards:\n")[2]
    starts = [*_ROW.finditer(table)]
    ends = [match.start() for match in starts[1:]] + [len(table)]
    return {match[1]: table[match.start() : end] for match, end in zip(starts, ends, strict=True)}


@lru_cache(maxsize=1)
def _text() -> str:
    return FILE.read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _head() -> tuple[int, dict[str, str]]:
    """Return the bytes of the default context, and the sources that the rows refer to."""
    data = yaml.load(_text().partition("\ncards:\n")[0], Loader=LOADER)
    return data["context_mib"] * 2**20, data["sources"]


@cache
def _parsed_gpu(name: str) -> GpuSpec:
    return _gpu(name, yaml.load(_rows()[name], Loader=LOADER)[name], *_head())


def _gpu(name: str, row: dict[str, Any], context_bytes: int, sources: dict[str, str]) -> GpuSpec:
    smi_mib = row["smi_mib"]
    return GpuSpec(
        name=name,
        label=row["label"],
        device_name=row.get("device_name", row["label"]),
        vendor=row["vendor"],
        aliases=tuple(row.get("aliases", ())),
        advertised_bytes=row["advertised_gib"] * 2**30,
        smi_bytes=None if smi_mib is None else smi_mib * 2**20,
        usable_bytes=int(row["usable_gib"] * 2**30),
        context_bytes=context_bytes,
        compute_capability=_capability(row["capability"]),
        multiprocessors=row["sm"],
        max_threads_per_multiprocessor=row["threads"],
        l2_bytes=None if "l2_mib" not in row else row["l2_mib"] * 2**20,
        bf16_tflops=row["bf16_tflops"],
        source=sources[row["source"]],
        row=name,
    )


def _limited(gpu: str | None, size: str) -> GpuSpec:
    """Return the GPU with a memory budget of `size`; without a name, the default GPU."""
    budget = parse_bytes(size)
    if gpu is None:
        label = f"a GPU with {size}"
        return replace(
            find_gpu(DEFAULT_CARD),
            name=size,
            label=label,
            device_name=label,
            aliases=(),
            advertised_bytes=budget,
            smi_bytes=None,
            usable_bytes=budget,
            source="a budget",
        )
    gpu_spec = find_gpu(gpu)
    usable = min(budget, gpu_spec.usable_bytes)
    return replace(
        gpu_spec, name=f"{gpu_spec.name}:{size}", label=f"{gpu_spec.label} (budget {size})", usable_bytes=usable
    )


def _capability(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    major, _, minor = text.partition(".")
    return int(major), int(minor)


@lru_cache(maxsize=1)
def _index() -> dict[str, str]:
    """Return the row's name by each name of its GPU, in the form of `_normalized`."""
    names = {row: (row, *_aliases(text)) for row, text in _rows().items()}
    found = {_normalized(name): row for row, each in names.items() for name in each}
    for row, each in names.items():
        for name in each:
            if re.match(r"rtx-\d", name):  # also "4090" and "rtx4090"
                found.setdefault(name.removeprefix("rtx-"), row)
                found.setdefault(name.replace("rtx-", "rtx", 1), row)
    return found


def _aliases(text: str) -> list[str]:
    listed = _ALIASES.search(text)
    return [] if listed is None else [name.strip(" \"'") for name in listed[1].split(",")]


def _normalized(name: str) -> str:
    hyphened = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return _MAKERS.sub("", hyphened).removesuffix("-gpu")


def _nearest(name: str) -> list[str]:
    """Return similar names, those with the same beginning first: "a100-sxm" is an abbreviation, not a misspelling."""
    wanted = _normalized(name[:60])
    first = wanted.partition("-")[0]
    alike = [gpu.name for gpu in all_gpus() if wanted and gpu.name.startswith(wanted)]
    alike += [gpu.name for gpu in all_gpus() if first and gpu.name.partition("-")[0] == first and first != "rtx"]
    spelled = [_index()[key] for key in difflib.get_close_matches(wanted, _index(), n=5, cutoff=0.6)]
    return list(dict.fromkeys(alike + spelled))[:5]
