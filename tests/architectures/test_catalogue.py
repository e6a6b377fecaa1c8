"""Parts of a model are compiled once for all runs that they do not tell apart."""

from __future__ import annotations

import memcalc
from memcalc.architectures.catalogue import GradientPolicy, program
from memcalc.architectures.structure import BlockStructure, block_structure

KEPT = GradientPolicy(kept=True, main_dtype=None)


def chunked(chunks: int, padding_mask: str = "none") -> BlockStructure:
    spec = memcalc.load(
        "llama-3.2-1b",
        "implementation=huggingface",
        "recipe=pure",
        "loss=chunked",
        f"training.loss_chunks={chunks}",
        f"training.padding_mask={padding_mask}",
    )
    return block_structure(spec)


def test_only_the_head_depends_on_the_number_of_chunks() -> None:
    few, many = chunked(3), chunked(8)

    assert program(few, "dense layer", False, KEPT) is program(many, "dense layer", False, KEPT)
    assert program(few, "embedding", False, KEPT) is program(many, "embedding", False, KEPT)
    assert len(program(few, "head", False, KEPT).backward) < len(program(many, "head", False, KEPT).backward)


def test_a_tied_embedding_depends_on_whether_there_are_several_chunks() -> None:
    """The head's gradient of one product is a view, to which the embedding's is not added in place."""
    one, several = (program(chunked(chunks), "embedding", False, KEPT) for chunks in (1, 2))

    assert len(one.backward) > len(several.backward)


def test_the_head_does_not_depend_on_the_mask() -> None:
    padded = chunked(3, "boolean")

    assert program(padded, "head", False, KEPT) is program(chunked(3), "head", False, KEPT)
    assert program(padded, "embedding", False, KEPT) is not program(chunked(3), "embedding", False, KEPT)
