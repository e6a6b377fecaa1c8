"""Checks the catalogue of published models against transformers: `python tools/catalogue.py [HUB_ID ...]`.

Each configuration is built on the meta device, which takes no memory, and its elements are counted, tied matrices once.
Without ids all distinct configurations are checked, in about two minutes. It exits with 1 if a count differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from memcalc.catalogue.shipped import CatalogueEntry, find_shipped, shipped_entries

# transformers' automatic classes by kind; the first that knows the configuration is taken.
CLASSES = {
    "encoder": ("AutoModel", "AutoModelForMaskedLM"),
    "encoder-decoder": ("AutoModelForSeq2SeqLM",),
    "vision-language": ("AutoModelForImageTextToText", "AutoModelForCausalLM"),
}
DECODERS = ("AutoModelForCausalLM",)


def counts(config: dict[str, Any], kind: str) -> list[int]:
    """Return the elements of the models that transformers builds from a config, tied matrices once.

    One number for each class that may be published under the kind: an encoder has its head for masked words, or not.
    """
    import torch
    import transformers

    rest = dict(config)
    built = transformers.AutoConfig.for_model(rest.pop("model_type"), **rest)
    found = []
    for name in CLASSES.get(kind, DECODERS):
        automatic = getattr(transformers, name)
        if type(built) in automatic._model_mapping:  # noqa: SLF001 -- transformers has no public question for it
            with torch.device("meta"):
                found.append(sum(each.numel() for each in automatic.from_config(built).parameters()))
    return found


def distinct(entries: Iterable[CatalogueEntry]) -> Iterator[CatalogueEntry]:
    """One model for each configuration: the others of it would give the same count."""
    seen = set()
    for entry in entries:
        key = json.dumps([entry.config, entry.parameters], sort_keys=True)
        if key not in seen:
            seen.add(key)
            yield entry


def differences(entries: Iterable[CatalogueEntry]) -> Iterator[str]:
    """One line for each model with a different count, or that transformers does not build."""
    for entry in entries:
        try:
            found = counts(entry.config, entry.model_class)
        except Exception as error:  # noqa: BLE001 -- whatever transformers says is the finding
            yield f"{entry.hub_id}: {' '.join(str(error).split())[:200]}"
            continue
        if entry.parameters not in found:
            built = " or ".join(f"{each:,}" for each in found) or "no model of"
            yield f"{entry.hub_id}: transformers builds {built} parameters, the catalogue has {entry.parameters:,}"


def main() -> int:
    """Check the models that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("hub_ids", nargs="*")
    names = parser.parse_args().hub_ids
    entries = [entry for name in names if (entry := find_shipped(name))] if names else list(shipped_entries())
    checked = list(distinct(entries))
    found = list(differences(checked))
    print("\n".join(found))
    print(f"{len(checked)} configurations of {len(entries)} ids checked, {len(found)} differ")
    return 1 if found or len(entries) < len(names) else 0


if __name__ == "__main__":
    sys.exit(main())
