"""The catalogue of published models: every id resolves offline, and the formulas give the published counts exactly."""

import json
from collections import Counter

import pytest

from memcalc.catalogue.resolution import resolve_offline
from memcalc.catalogue.shipped import FILE, find_shipped, search_shipped, shipped_entries, shipped_ids
from memcalc.layout.parameters import count_parameters
from memcalc.spec.derive import derive_model
from memcalc.spec.model import ModelSpec
from memcalc.spec.model_families.conversion import has_family_formulas
from memcalc.spec.model_families.multimodal import language_config
from memcalc.spec.published import read_config, read_published
from memcalc.spec.towers import TOWERS

ENTRIES = list(shipped_entries())


def test_every_id_resolves_offline() -> None:
    # 1,784 ids in /data/models.jsonl: one JSON object per configuration, its ids under "ids".
    lines = FILE.read_text().splitlines()[1:]

    assert len(ENTRIES) == sum(len(json.loads(line)["ids"]) for line in lines) >= 1784
    assert len(set(shipped_ids())) == len(ENTRIES)
    for entry in ENTRIES[::50]:
        found = resolve_offline(entry.hub_id)
        assert found is not None
        assert found.entry == entry


def test_formulas_give_the_exact_count_of_every_model_of_a_known_family() -> None:
    """The counts are those of transformers 5.23 on the meta device (tools/catalogue.py), not of memcalc.

    A vision-language model is counted whole, its language model and its vision tower.
    """
    exact, wrong = Counter[bool](), []
    sizes: dict[str, int] = {}  # ids that share a configuration are counted once
    for entry in ENTRIES:
        language = language_config(entry.config) if entry.config["model_type"] in TOWERS else None
        if not has_family_formulas(language or entry.config):
            continue
        key = json.dumps(entry.config, sort_keys=True)
        if key not in sizes:
            published = resolve_offline(entry.hub_id)
            assert published is not None
            block = read_published(published).model
            sizes[key] = count_parameters(ModelSpec.model_validate(derive_model(block)))
        exact[language is not None] += sizes[key] == entry.parameters
        if sizes[key] != entry.parameters:
            wrong.append((entry.hub_id, sizes[key], entry.parameters))

    assert wrong == []
    assert exact[True] >= 232  # vision-language models
    assert exact.total() >= 1636


def test_language_models_without_a_known_tower_leave_it_out_and_say_so() -> None:
    """None of the catalogue today; a config.json of another family with Llama's language model is one."""
    text = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    reading = read_config({"model_type": "idefics3", "text_config": text | {"vocab_size": 100}}, "config.json", 500_000)

    assert "vision_config" not in reading.model
    assert reading.limits[0].parameters_of_whole == 500_000
    assert reading.limits[0].holds_memory


def test_case_does_not_matter_and_the_spelling_of_the_hub_is_shown() -> None:
    found = find_shipped("qwen/qwen3-14b")

    assert found is not None
    assert found.hub_id == "Qwen/Qwen3-14B"
    assert find_shipped("Qwen/Qwen3-14") is None
    # Two ids that differ in case alone: each is found by its own spelling.
    assert {str(find_shipped(name) and find_shipped(name).hub_id) for name in PHI} == set(PHI)  # type: ignore[union-attr]


PHI = ("microsoft/Phi-3-mini-4k-instruct", "microsoft/phi-3-mini-4k-instruct")


def test_entries_say_where_they_come_from() -> None:
    entry = find_shipped("meta-llama/Llama-3.1-8B")

    assert entry is not None
    assert (
        entry.parameters == 8_030_261_248
    )  # 2·128256·4096 + 32·(2·4096² + 2·4096·1024 + 3·4096·14336 + 2·4096) + 4096
    assert entry.verified
    assert entry.check == "equal to the published parameter total"
    assert entry.source.startswith("github citsjtu2020/LLM-Prof@8434c8d19c")
    assert all(each.source and each.check for each in ENTRIES)


@pytest.mark.parametrize(
    ("query", "first"),
    [("qwen3 14b", "Qwen/Qwen3-14B"), ("LLAMA-3.1-405b", "meta-llama/Llama-3.1-405B")],
)
def test_search_takes_words_in_any_case(query: str, first: str) -> None:
    assert search_shipped(query)[0].hub_id == first


def test_mistral_without_a_window_is_not_given_the_default_of_its_class() -> None:
    """transformers' MistralConfig has a window of 4,096 tokens by default; models after v0.1 have none."""

    def window(hub_id: str) -> tuple[object, bool]:
        published = resolve_offline(hub_id)
        assert published is not None
        reading = read_published(published)
        return reading.model.get("sliding_window"), any("lacks sliding_window" in note for note in reading.notes)

    assert window("mistralai/Mistral-7B-v0.1") == (4096, False)  # the catalogue holds it
    assert window("mistralai/Mistral-Small-24B-Instruct-2501") == (0, False)
    assert window("HuggingFaceH4/zephyr-7b-beta") == (4096, True)  # of the shape that v0.1 and v0.2 share


@pytest.mark.parametrize(
    ("hub_id", "tied", "published"),
    [
        # Totals of the model cards: 0.49 B, 1.7 B, 0.36 B, 3.09 B, 1.54 B, 4.0 B and 3.8 B.
        ("Qwen/Qwen2.5-0.5B-Instruct", True, 494_032_768),
        ("HuggingFaceTB/SmolLM2-1.7B", True, 1_711_376_384),
        ("HuggingFaceTB/SmolLM2-360M-Instruct", True, 361_821_120),
        ("Qwen/Qwen2.5-3B-Instruct", True, 3_085_938_688),
        ("Qwen/Qwen2.5-Math-1.5B", True, 1_543_714_304),
        ("Qwen/Qwen3-4B-Instruct-2507", True, 4_022_468_096),
        ("microsoft/Phi-3-mini-4k-instruct", False, 3_821_079_552),
    ],
)
def test_models_with_a_source_that_omits_tying(hub_id: str, tied: bool, published: int) -> None:
    """LitGPT's table has no such field; the published totals decide."""
    entry = find_shipped(hub_id)

    assert entry is not None
    assert entry.config["tie_word_embeddings"] is tied
    assert entry.parameters == published
