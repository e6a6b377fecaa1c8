"""Backward of every family's layers reaches every parameter: no view on a tape is a tensor that nothing has made."""

from __future__ import annotations

import pytest

from memcalc.api.sources import load
from memcalc.architectures.catalogue import GradientPolicy, Part, program
from memcalc.architectures.huggingface.catalogue import FAMILIES
from memcalc.architectures.structure import block_structure
from memcalc.catalogue.shipped import CatalogueEntry, shipped_entries
from memcalc.layout.stages import LayerModules
from memcalc.ledger.component import Component
from memcalc.spec.model import EXPERTS

KEPT = GradientPolicy(kept=True, main_dtype=None)
# The gradient of an embedding that the LM head shares is that of the LM head, with which it is summed.
SHARED = {"embed_tokens.weight"}


def smallest() -> dict[str, CatalogueEntry]:
    """The smallest published model of each family."""
    found: dict[str, CatalogueEntry] = {}
    for entry in shipped_entries():
        family = entry.config["model_type"]
        if family in FAMILIES and entry.parameters < found.get(family, entry).parameters + 1:
            found[family] = entry
    return found


@pytest.mark.parametrize("entry", [pytest.param(entry, id=family) for family, entry in smallest().items()])
def test_every_parameter_gets_its_gradient(entry: CatalogueEntry) -> None:
    spec = load(entry.hub_id, "sequence_length=256")
    structure = block_structure(spec)
    parts: list[Part] = ["embedding", "dense layer", "head"]
    if spec.model.moe is not None:
        parts.append("expert layer")
    linear = (False, True) if spec.model.linear_attention is not None else (False,)
    kinds = [structure.of_layers(LayerModules(linear=kind)) for kind in linear]
    for part in parts:
        if spec.model.layer_pattern and part.endswith("layer"):
            letters = {*spec.model.mixers} - {EXPERTS} if part == "dense layer" else {EXPERTS}
            kinds = [structure.of_layers(LayerModules(mixer=letter)) for letter in sorted(letters)]
        for kind in kinds:
            block = program(kind, part, False, KEPT)
            made = {event.storage for event in block.backward if event.sign > 0}
            gradients = {
                at: storage.name
                for at, storage in enumerate(block.storages)
                if storage.component is Component.GRADIENTS
            }
            lost = {name for at, name in gradients.items() if at not in made}

            assert gradients
            assert lost <= (SHARED if part == "embedding" and spec.model.tie_word_embeddings else set())
