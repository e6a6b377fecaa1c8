"""Short options: each is the --set that it stands for, on every command that takes them."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from memcalc.cli.shorthand import with_values
from tests.cli.conftest import Run


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("-b 4", "b=4"),
        ("--batch 4 --seq 512", "b=4 s=512"),
        ("--lora", "finetune=lora"),
        ("--lora 32", "finetune=lora lora.rank=32"),
        ("--qlora 4 --optimizer adamw_8bit", "finetune=qlora lora.rank=4 optimizer=adam-8bit"),
        ("--gpus 8 --fsdp", "data_parallel=8 zero_stage=3 engine=fsdp2"),
        ("-n 8 --zero 2", "data_parallel=8 zero_stage=2 engine=deepspeed"),
        ("--recompute", "recompute=full"),
        ("--recompute every-2", "recompute=every-2"),
        ("--budget 12GiB", "hardware.gpu=12GiB"),
        ("-b 4 --set b=2", "b=2"),
    ],
)
def test_a_short_option_is_what_it_stands_for(short: str, long: str, run: Callable[..., Run]) -> None:
    settings = [word for each in long.split() for word in ("--set", each)]
    asked, meant = (run("estimate", "gpt2", *words, "--format", "json").out for words in (short.split(), settings))

    assert json.loads(asked) == json.loads(meant)


@pytest.mark.parametrize(
    ("given", "filled"),
    [
        (["--lora", "gpt2"], ["--lora=", "gpt2"]),
        (["--lora", "8", "gpt2"], ["--lora", "8", "gpt2"]),
        (["gpt2", "--recompute"], ["gpt2", "--recompute=full"]),
        (["--recompute", "[0, 2]"], ["--recompute", "[0, 2]"]),
        (["--", "--lora"], ["--", "--lora"]),
    ],
)
def test_a_value_may_be_left_out(given: list[str], filled: list[str]) -> None:
    assert with_values(given) == filled


@pytest.mark.parametrize("command", ["estimate", "trace", "fit", "measure"])
def test_every_command_that_takes_them_lists_them(command: str, run: Callable[..., Run]) -> None:
    text = run(command, "--help").out

    for option in ("--batch", "--seq", "--lora", "--qlora", "--gpus", "--fsdp", "--zero", "--recompute", "--budget"):
        assert option in text


@pytest.mark.parametrize("command", ["estimate", "trace", "fit", "measure"])
def test_options_may_stand_without_a_value_on_every_command(command: str, run: Callable[..., Run]) -> None:
    """Each refuses the model, not the value of an option."""
    done = run(command, "--lora", "--recompute", "--qlora", "no-such-model")

    assert done.code == 2
    assert "no-such-model: no file, preset or hub id has this name" in done.err


def test_fit_searches_within_a_budget(run: Callable[..., Run]) -> None:
    found: dict[str, Any] = json.loads(run("fit", "gpt2", "--budget", "12GiB", "-b", "2", "--format", "json").out)

    assert found["gpu"]["usable_bytes"] == 12 * 2**30
    assert run("fit", "gpt2", "--budget", "1GiB").code == 1


def test_every_command_with_a_configuration_and_a_gpu_takes_a_budget(run: Callable[..., Run]) -> None:
    """Needs 4.27 GiB: more than 2 GiB, less than 5."""
    assert "a GPU with 2GiB has 2.00 GiB usable" in run("diff", "gpt2", "gpt2", "--budget", "2GiB").out
    assert (
        "gpt2: 1 configuration on a GPU with 5GiB: 1 fit"
        in run("sweep", "gpt2", "--budget", "5GiB", "--vary", "b=1").out
    )
    assert "on a GPU with 1GiB" in run("replay", "gpt2", "--set", "l=2", "--budget", "1GiB").out
    assert "budget = 12 has no unit" in run("dry-run", "--budget", "12", "--", "python", "train.py").err
    assert "--budget need a configuration" in run("oom", "docs/examples/oom.log", "--budget", "2GiB").err


def test_wrong_values_are_refused(run: Callable[..., Run]) -> None:
    assert run("estimate", "gpt2", "--zero", "7").code == 2
    assert "zero_stage = 7 is too large" in run("estimate", "gpt2", "--zero", "7").err
    assert "budget = 12 has no unit" in run("estimate", "gpt2", "--budget", "12").err
