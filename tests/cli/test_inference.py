"""`memcalc` with an inference block: screens, documents, exit codes."""

import json
from pathlib import Path

import pytest

from tests.schemas import validate_result

# Each new token is a forward that is replayed.
FEW_TOKENS = ["--set", "inference.new_tokens=16"]
SCREENS = {
    "llama": [
        *["llama-3-8b", "--gpu", "h100-80gb", "--set", "inference.batch_size=16"],
        *["--set", "inference.context_length=8192", *FEW_TOKENS],
    ],
    "gemma_does_not_fit": [
        *["gemma-3-1b", "--gpu", "l4", "--set", "inference.batch_size=64", "--set", "inference.cache=static"],
        *["--set", "inference.context_length=32768", "--explain", "kv_cache", *FEW_TOKENS],
    ],
    "deepseek_ranks": [
        *["deepseek-v3", "--gpu", "h200", "--set", "inference.cache=paged", "--set", "inference.batch_size=32"],
        *["--set", "inference.prefill_chunk=2048", "--set", "inference.context_length=8192"],
        *["--set", "inference.kv_cache_dtype=fp8", "--set", "tensor_parallel=8", "--set", "pipeline_parallel=2"],
        *["--all-ranks", *FEW_TOKENS],
    ],
}


@pytest.mark.parametrize("name", SCREENS)
def test_screens(name: str, run, golden) -> None:
    code, out, err = run("estimate", *SCREENS[name])

    assert (code, err) == (0, "")
    golden(f"inference_{name}_80", out)


def test_the_document(run) -> None:
    code, out, _ = run("estimate", *SCREENS["llama"], "--format", "json")
    document = json.loads(out)

    assert code == 0
    validate_result(document)
    assert sum(document["components"].values()) == document["peak"]["allocated_bytes"]
    assert (
        sum(row["bytes"] for row in document["ledger"] if document["peak"]["phase"] in row["phases"])
        == (document["peak"]["allocated_bytes"])
    )
    assert document["kv_cache"] == {
        "bytes_per_token": 131_072,
        "bytes_per_sequence": 8192 * 131_072,
        "largest": {"batch_size": 27, "context_length": 8192, "all_positions": True},
    }
    assert document["spec"]["inference"]["prompt_length"] == 8176
    assert "kv_cache" not in json.loads(run("estimate", "gpt2", "--format", "json").out)


def test_other_forms(run) -> None:
    words = ["gpt2", "--set", "inference.batch_size=2"]

    assert "KV cache, all layers" in run("estimate", *words, "--format", "markdown").out
    assert "kv_cache" in run("estimate", *words, "--format", "csv").out


REFUSED = {
    ("fit",): "error: inference: fit supports training only",
    ("trace", "--device", "null"): "error: inference: trace --device null supports training only",
    ("recompute",): "error: inference: recompute supports training only",
    ("estimate", "--measure"): "error: inference: measure supports training only",
}


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_commands_of_training_refuse(words: tuple[str, ...], run) -> None:
    verb, *options = words
    code, out, err = run(verb, "gpt2", "--gpu", "l4", *options, "--set", "inference.batch_size=2")

    assert (code, out) == (2, "")
    assert err.startswith(REFUSED[words])


def test_measure_refuses(run) -> None:
    """`memcalc measure` has no --gpu, because it runs on a local GPU."""
    code, out, err = run("measure", "gpt2", "--device", "cpu", "--set", "inference.batch_size=2")

    assert (code, out) == (2, "")
    assert err.startswith("error: inference: measure supports training only")


def test_the_interval_is_that_of_recorded_generations(run) -> None:
    code, out, _ = run("estimate", "gpt2", "--gpu", "t4", "--set", "inference.batch_size=2", *FEW_TOKENS, "--full")

    assert code == 0
    assert "of 286 recorded runs (generation, modules of the family;" in " ".join(out.split())


def test_check_judges_them(run, tmp_path: Path) -> None:
    fits, too_large = tmp_path / "fits.yaml", tmp_path / "too-large.yaml"
    fits.write_text("preset: llama-3-8b\ninference: {batch_size: 4, new_tokens: 16}\n")
    too_large.write_text("preset: llama-3-8b\ninference: {batch_size: 64, context_length: 8192, new_tokens: 16}\n")

    assert run("check", str(fits), "--gpu", "h100-80gb").code == 0
    assert run("check", str(too_large), "--gpu", "h100-80gb").code == 1


def test_diff_lays_two_beside_each_other(run) -> None:
    words = ["--set", "inference.batch_size=8", *FEW_TOKENS, "--set-b", "inference.cache=static"]
    code, out, _ = run("diff", "llama-3-8b", "llama-3-8b", *words)

    assert code == 0
    assert "decode_last" in out
