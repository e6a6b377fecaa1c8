"""The generated tables of docs/guides/fit.md: the terms of a layout's cost, and the machines with their GPUs."""

from __future__ import annotations

from collections.abc import Callable

from memcalc.search.costs import TERMS
from memcalc.spec.hardware.gpus import all_gpus
from memcalc.spec.hardware.interconnect import System, system_of
from tools.markdown import table


def cost_terms() -> str:
    """Return a table of the terms of the cost, with their sources."""
    return table(["term", "description", "source"], [[name, *words] for name, words in TERMS.items()])


def systems() -> str:
    """Return a table of machines, with their GPUs."""
    cards: dict[str, list[str]] = {}
    known: dict[str, System] = {}
    for card in all_gpus():
        system = system_of(card)
        cards.setdefault(system.name, []).append(f"`{card.name}`")
        known[system.name] = system

    def row(system: System) -> list[object]:
        network = f"{system.nic_bytes * 8 / 1e9:g}" + (" (default)" if system.nic_assumed else "")
        node = f"{system.node}" + (" (default)" if system.node_assumed else "")
        links = [node, system.link, f"{system.link_bytes / 1e9:g}", network]
        return [", ".join(cards[system.name]), *links, system.source]

    head = ["GPUs", "a node", "link", "GB/s, one direction", "Gbit/s per GPU", "source"]
    return table(head, [row(system) for system in known.values()])


TABLES: dict[str, Callable[..., str]] = {"cost_terms": cost_terms, "systems": systems}
