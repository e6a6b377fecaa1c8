"""The machine of a GPU: node, interconnect and network, from published figures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from pathlib import Path

import yaml

from memcalc.errors import InputError
from memcalc.spec.hardware.gpus import LOADER, GpuSpec, all_gpus

FILE = Path(__file__).parents[2] / "data" / "systems.yaml"


@dataclass(frozen=True, slots=True)
class System:
    """Nodes of one kind of GPU."""

    name: str  # its key in the table
    node: int  # GPUs per node
    link: str  # interconnect inside a node
    link_bytes: float  # bytes per second that a GPU sends inside its node, in one direction
    nic_bytes: float  # bytes per second that a GPU sends between nodes
    flops: float  # dense 16-bit FLOPs per second of one GPU
    source: str  # documents of the vendor
    node_assumed: bool  # whether the GPUs per node are a default instead of a vendor's figure
    nic_assumed: bool  # whether the network is a default

    @property
    def assumed(self) -> str:
        """The defaults among these figures, and the options that change them; "": none."""
        node = [(f"{self.node} GPUs per node", "--node")] if self.node_assumed else []
        port = f"{self.nic_bytes * 8 / 1e9:g} Gbit/s per GPU"
        found = node + ([(port, "--nic")] if self.nic_assumed else [])
        if not found:
            return ""
        default = "a default: set yours" if len(found) == 1 else "defaults: set yours"
        return f"{' and '.join(what for what, _ in found)}, {default} with {' and '.join(how for _, how in found)}"

    def group_bytes(self, size: int, stride: int) -> float:
        """Return the bytes per second that each rank of a group sends when all of them communicate at once.

        Ranks of a group are `stride` GPUs apart. Inside a node the interconnect carries the data. Between nodes a ring
        passes
        through every GPU's own network port, so a group with k ranks per node has k ports there.
        """
        here = min(size, max(1, self.node // stride))
        return self.link_bytes if size <= here else min(self.link_bytes, here * self.nic_bytes)


def system_of(gpu: GpuSpec, node: int | None = None, nic_gbit: float | None = None) -> System:
    """Return the system of a GPU; `node` and `nic_gbit` (10^9 bits per second and GPU) override the table.

    Raises:
        InputError: they are not valid sizes.
    """
    if node is not None and node < 1:
        raise InputError(f"{node} GPUs per node are too few.", "Set 1 or more.", "--node")
    if nic_gbit is not None and not 0 < nic_gbit < inf:
        raise InputError(f"{nic_gbit:g} Gbit/s per GPU is not a bandwidth.", "Set more than 0.", "--nic")
    found = _systems()[gpu.row]
    if nic_gbit is not None:
        found = replace(found, nic_bytes=nic_gbit * 1e9 / 8, nic_assumed=False)
    return found if node is None else replace(found, node=node, node_assumed=False)


@lru_cache(maxsize=1)
def _systems() -> dict[str, System]:
    """Return the system of every GPU, by the GPU's name."""
    data = yaml.load(FILE.read_bytes(), Loader=LOADER)
    rates = {gpu.name: gpu.bf16_tflops for gpu in all_gpus()}
    node, port = data["default_gpus"], data["default_nic_gbit_s"]
    systems = {}
    for name, row in data["systems"].items():
        nic, gpus = row.get("nic_gbit_s"), row.get("gpus")
        for gpu_spec in row["cards"]:
            given = row.get("tflops")
            tflops = rates[gpu_spec] or (given[gpu_spec] if isinstance(given, dict) else given)
            systems[gpu_spec] = System(
                name=name,
                node=gpus or node,
                link=row["link"],
                link_bytes=row["link_gb_s"] * 1e9,
                nic_bytes=(nic or port) * 1e9 / 8,
                flops=tflops * 1e12,
                source=row["source"],
                node_assumed=gpus is None,
                nic_assumed=nic is None,
            )
    return systems
