"""A planned run's requests, played to the allocator: all that the estimate counts is requested, and no more."""

from collections.abc import Callable, Sequence

import pytest

import memcalc
from memcalc.allocator.pytorch.lean import LeanAllocator
from memcalc.errors import OutOfMemory
from memcalc.estimation.estimate import estimate
from memcalc.recomputation.config_chain import with_recompute
from memcalc.simulation.simulated_run import SimulatedRun, run_requests, simulate, unsupported_reason
from memcalc.stream.requests import AllocatorOverhead, Requests, replay, reserved_upper_bound
from memcalc.verdict.judge import size
from tests.thinning import quick_every

KIB, MIB = 2**10, 2**20
GPT2 = ("b=8", "s=1024", "training.dropout=0.1")
RUNS = [
    ("gpt2", ("implementation=huggingface", "recipe=mixed-18", "recompute=full")),
    ("gpt2", ("zero_grad=zero", "optimizer=sgd")),
    ("gpt2", ("gradient_accumulation_steps=3", "recipe=amp")),
    ("gpt2", ("gradient_accumulation_steps=2", "zero_grad=zero", "recipe=mixed-18")),
    ("llama-3.2-1b", ("gradient_accumulation_steps=2", "recipe=mixed-20")),
    ("gpt2", ("attention=eager", "optimizer_implementation=fused", "recompute=[0, 1, '2-5']")),
    ("llama-3.2-1b", ("implementation=huggingface", "recipe=amp", "recompute=['0-7']")),
    ("llama-3-8b", ("recipe=pure", "s=4096", "recompute=[3]", "gpu=h100-80gb")),
    ("codegen-350m", ("recipe=amp", "recompute=every-2")),
    ("mixtral-8x7b", ("recipe=amp", "l=2", "recompute=[1]")),
    ("llama-3.2-1b", ("lora.rank=8", "recipe=pure")),
    ("gpt2", ("lora.rank=8", "recompute=full", "implementation=huggingface", "training.dropout=0.1")),
    ("llama-3.2-1b", ("qlora.block_size=64", "recompute=full")),
    ("gpt2", ("pairs=true", "reference_model=true", "evaluation_batch_size=4", "b=4")),
    ("gpt2", ("pairs=true", "lora.rank=8", "recompute=full", "implementation=huggingface", "b=4")),
    ("gpt2", ("optimizer=adam-8bit",)),
    ("gpt2", ("optimizer=adam-8bit", "optimizer_options.paged=true")),
    ("gpt2", ("optimizer=adafactor", "recipe=pure", "b=1", "s=256")),
    ("gpt2", ("optimizer=muon", "recipe=pure", "b=1", "s=256")),
]


def test_a_rest_of_a_mebibyte_stays_and_a_larger_one_is_split_off() -> None:
    """The product of q, k and v of gpt2-large, 2·2·1024·3840 = 15 MiB, has a segment of 16 MiB."""
    requests = Requests()
    requests.begin("forward_1")
    first = requests.take(2 * 2 * 1024 * 3840)
    assert replay(requests).rests == {"forward_1": MIB}
    assert replay(requests).asked == {"forward_1": 15 * MIB}

    requests.drop((first,))
    requests.begin("backward_1")
    requests.take(14 * MIB)  # of the same segment: 2 MiB are split off
    assert replay(requests).rests == {"forward_1": MIB, "backward_1": 0}


def test_settings_of_the_allocator_hold() -> None:
    """An expandable segment grows by 20 MiB; else a segment of 15 MiB is one of 16."""
    for settings, reserved in (("", 16 * MIB), ("expandable_segments:True", 20 * MIB)):
        requests = Requests()
        requests.take(15 * MIB)
        assert replay(requests, settings).reserved_bytes == reserved


@pytest.mark.parametrize("settings", ["", "roundup_power2_divisions:4"])
def test_on_a_gpu_cached_blocks_go_before_it_fails(settings: str) -> None:
    """24 MiB find no place in a free segment of 20: without end there are two, in 32 MiB the first one goes."""
    requests = Requests()
    requests.drop((requests.take(20 * MIB),))
    requests.take(24 * MIB)
    found = [replay(requests, settings, room=room) for room in (None, 32 * MIB)]
    assert [(each.reserved_bytes, each.retries) for each in found] == [(44 * MIB, 0), (24 * MIB, 1)]
    requests.take(16 * MIB)
    with pytest.raises(OutOfMemory):
        replay(requests, settings, room=32 * MIB)


def test_a_run_that_fills_its_gpu_reserves_what_the_gpu_has() -> None:
    """Llama-3-8B on 80 GB, as recorded on the null device; on a smaller GPU it runs out of memory, and has no end."""
    run = ("b=1", "s=2048", "attention=flash", "recipe=pure")
    large, small = (memcalc.estimate("llama-3-8b", *run, gpu=gpu) for gpu in ("a100-80gb", "a100-40gb"))
    assert (large.headline.reserved_bytes, large.fits) == (84_162_904_064, True)
    assert (small.headline.reserved_bytes, small.fits) == (86_085_992_448, False)


def test_a_storage_is_freed_by_its_last_owner() -> None:
    requests = Requests()
    requests.begin("forward_1")
    storage = requests.take(512)
    requests.hold(storage)
    requests.drop((storage,))
    requests.take(512)
    assert replay(requests).asked == {"forward_1": 1024}
    requests.drop((storage,))
    requests.take(512)
    assert replay(requests).asked == {"forward_1": 1024}


def test_buffers_of_an_operator_are_freed_inside_it_or_with_its_results() -> None:
    """Two MiB stay of five, and go together; an operator without any leaves a storage all the same."""
    requests = Requests()
    requests.begin("forward_1")
    left, nothing = requests.play((MIB, 2 * MIB, -2 * MIB, 2 * MIB, MIB, -2 * MIB)), requests.play((512, -512))
    requests.begin("backward_1")
    requests.drop((left, nothing, requests.take(0)))
    requests.begin("end")
    assert replay(requests).asked == {"forward_1": 4 * MIB, "backward_1": 2 * MIB, "end": 0}


def test_what_comes_again_makes_new_storages_and_leaves_out_what_stays() -> None:
    """The second time without the workspace, and the remainder is freed by its new number."""
    requests = Requests()
    requests.begin("forward_1")
    before = requests.take(3 * MIB)
    mark = requests.mark()
    kept = requests.take(MIB)
    requests.take_once(8 * MIB)
    requests.take_once(0)
    requests.drop((requests.take(2 * MIB),))
    written = requests.since(mark)
    requests.drop((kept, before))
    requests.begin("forward_2")
    new: dict[int, int] = {}
    requests.again(written, new)
    requests.drop((new[kept],))
    requests.begin("end")

    assert requests.stretches[2].script == [MIB, 2 * MIB, ~6, ~5]
    assert replay(requests).asked == {"forward_1": 14 * MIB, "forward_2": 11 * MIB, "end": 8 * MIB}


@pytest.mark.parametrize(
    ("recipe", "recompute", "keep"),
    [
        ("pure", "none", ()),
        ("amp", "full", ("attention", "mlp.up_proj")),
        ("mixed-16", "every-3", ()),
        ("mixed-18", ["0-2", "3-5", 6, 7, [8, [9, 10]]], ()),
        ("amp", ["0-2", "3-5", 6, 7, [8, [9, 10]]], ()),
        ("mixed-20", [[0, [1, 2]], [3, [4, [5, 6]]]], ()),
    ],
)
def test_the_replay_equals_the_estimate(recipe: str, recompute: str | list[object], keep: tuple[str]) -> None:
    """Phase by phase the most that is requested at once is the estimate but for what blocks keep beside it."""
    spec = with_recompute(memcalc.load("gpt2", f"recipe={recipe}", *GPT2), recompute, keep)
    requests = simulate(spec)
    totals = estimate(spec, AllocatorOverhead(dict.fromkeys(requests.rests, 0), 0)).ledger.totals
    assert requests.asked == totals
    rehearsed = size(spec).ledger.totals
    assert rehearsed == {phase: amount + requests.rests[phase] for phase, amount in totals.items()}


@pytest.mark.parametrize(("config", "overrides"), quick_every(4, RUNS, unpack=True))
def test_of_any_plain_run(config: str, overrides: tuple[str, ...]) -> None:
    spec = memcalc.load(config, *overrides)
    requests = simulate(spec)
    totals = estimate(spec, AllocatorOverhead(dict.fromkeys(requests.rests, 0), 0)).ledger.totals
    hidden = 2 * spec.training.micro_batch_size * spec.training.sequence_length * spec.model.hidden_size
    table = KIB * (spec.training.finetune == "qlora")  # bitsandbytes' own, of the scales' 8 bits, is in no row
    for phase, most in requests.asked.items():
        asked = most - table
        # transformers' model lets its variables go before the head; the formulas count them until forward ends.
        named = hidden if spec.training.implementation == "huggingface" and phase.startswith("forward") else 0
        if phase == "model" and spec.training.finetune == "qlora":
            # A matrix is whole, in 16 bits, until it is quantized, which no formula counts: the last one of a layer.
            widest = 2 * spec.model.hidden_size * spec.model.intermediate_size
            assert 0 <= asked - totals[phase] < 1.1 * widest
            continue
        if phase == "model" and spec.training.finetune == "lora":
            # An adapter in the base's dtype is there until it has been cast, which no formula counts.
            assert 0 <= asked - totals[phase] < MIB
            continue
        assert totals[phase] - 4 * named <= asked <= totals[phase], phase
        assert named or asked == totals[phase], phase


class Walked(Requests):
    """Requests that are all walked through, none copied from those before."""


@pytest.mark.parametrize(("config", "overrides"), quick_every(4, RUNS, unpack=True, first=1))
def test_what_is_copied_is_what_is_walked_through(config: str, overrides: tuple[str, ...]) -> None:
    """Micro-batches and optimizer steps after the first of their kind: the same requests and the same storages."""
    spec = memcalc.load(config, *overrides)
    copied, walked = (SimulatedRun(spec, requests).play() for requests in (Requests(), Walked()))
    assert (copied.repeats, walked.repeats) == (True, False)
    assert copied.stretches == walked.stretches
    assert copied.labels == walked.labels


@pytest.mark.parametrize(("config", "overrides"), quick_every(4, RUNS, unpack=True))
def test_no_run_reserves_more_than_the_bound(config: str, overrides: tuple[str, ...]) -> None:
    """In none of the releases that break ties in their own way; and the bound says something."""
    requests = SimulatedRun(memcalc.load(config, *overrides), Requests()).play()
    bound = reserved_upper_bound(requests)
    for torch in ("2.11", "2.12", "2.13"):
        assert bound / 10 < replay(requests, torch=torch).reserved_bytes <= bound


@pytest.mark.parametrize(
    "overrides",
    [
        ("pipeline_parallel=2",),
        ("data_parallel=2", "zero_stage=2", "engine=deepspeed", "versions.deepspeed=0.19.7"),
    ],
)
def test_runs_that_allocate_more_are_not_replayed(overrides: tuple[str, ...]) -> None:
    """The estimate is then unchanged, and its notes say why there is no replay."""
    spec = memcalc.load("gpt2", *overrides)
    result = size(spec)
    assert result.ledger.totals == estimate(spec).ledger.totals
    assert result.confidence == "formula"
    assert result.notes[-1] == f"Allocator not replayed: {unsupported_reason(spec)}."


@pytest.mark.parametrize(
    ("overrides", "recompute", "keep"),
    [
        (("recipe=amp",), list(range(10)), ("attention",)),
        (("recipe=amp",), ["0-2", "3-5", 6, 7], ()),
        (("recipe=pure",), [0, 1, 2], ()),
        (("recipe=mixed-20",), [0, 1, 2, 3], ()),
        (("recipe=fp32", "dtype=fp32", "attention=memory-efficient", "b=4"), ["0-3"], ()),
    ],
)
@pytest.mark.long
def test_blocks_keep_what_they_keep_in_a_run(
    overrides: tuple[str, ...], recompute: list[object], keep: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Where formulas alone are off by up to 0.16 %, the allocator replay equals the trace's peak."""
    pytest.importorskip("torch")
    from memcalc.tracing import trace

    spec = with_recompute(memcalc.load("gpt2", *GPT2, *overrides, gpu="a100-80gb"), recompute, keep)
    traced = trace(spec, 2).result.ledger.peak_bytes
    rehearsed, bare = size(spec).ledger.peak_bytes, estimate(spec).ledger.peak_bytes
    with capsys.disabled():
        print(f"\n{overrides}: {rehearsed / traced - 1:+.4%} rehearsed, {bare / traced - 1:+.4%} by formula")
    assert rehearsed == traced


@pytest.mark.parametrize("overrides", [("gpt2", "recipe=pure"), ("gpt2", "recipe=mixed-20", "recompute=full")])
def test_micro_batches_beyond_three_find_what_the_third_has_found(
    overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = memcalc.load(*overrides, "b=2", "gradient_accumulation_steps=6")
    three = simulate(spec).played
    monkeypatch.setattr("memcalc.simulation.simulated_run.MICRO_BATCHES", 6)

    assert simulate(spec).played == three


def test_recomputed_layers_of_transformers_are_played() -> None:
    """Their embedding's output is named through the model's forward, and handed on all the same."""
    words = ("implementation=huggingface", "recompute=full", "recipe=pure", "l=2", "s=128", "V=1024")

    assert memcalc.estimate("llama-3.2-1b", *words, gpu="a100-80gb").replayed.confidence == "replay"


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        *quick_every(4, RUNS, unpack=True, first=1),
        ("llama-3.2-1b", ("recipe=pure", "gpu=h100-80gb", "b=8")),
        ("llama-3.2-1b", ("recipe=pure", "alloc_conf=expandable_segments:True", "gpu=h100-80gb")),
        ("llama-3.2-1b", ("data_parallel=8", "zero_stage=3")),
        ("gpt2", ("evaluation_batch_size=16",)),
    ],
)
def test_a_steady_step_that_is_left_out_changes_nothing(config: str, overrides: tuple[str, ...]) -> None:
    requests = SimulatedRun(memcalc.load(config, *overrides), Requests()).play()
    conf = next((each.partition("=")[2] for each in overrides if each.startswith("alloc_conf")), "")
    found = replay(requests, conf)
    assert len(requests.steady) == 2
    requests.steady.clear()
    assert found == replay(requests, conf)


def test_most_steady_steps_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the runs of this file, all that fill no GPU."""
    said: list[bool] = []
    would_repeat = LeanAllocator.would_repeat

    def noted(self: LeanAllocator, carried: Callable[[], Sequence[tuple[int, int]] | None]) -> bool:
        said.append(would_repeat(self, carried))
        return said[-1]

    monkeypatch.setattr(LeanAllocator, "would_repeat", noted)
    for config, overrides in RUNS:
        simulate(memcalc.load(config, *overrides))
    assert len(said) == len(RUNS)
    assert sum(said) > len(RUNS) / 2


def test_a_loop_casts_its_weights_on_the_gpu() -> None:
    """All weights are there in fp32 before the first is cast, and each is freed after its cast."""
    script = next(
        interval.script
        for interval in SimulatedRun(memcalc.load("gpt2", "recipe=pure", "framework=loop"), Requests()).play().stretches
        if interval.phase == "model"
    )

    weights = len(script) // 3
    wide, cast, freed = script[:weights], script[weights::2], script[weights + 1 :: 2]
    assert wide == [2 * size for size in cast]
    assert freed == [~number for number in range(weights)]


AMP = ("implementation=huggingface", "recipe=amp", "b=1", "s=512", "optimizer=sgd")


@pytest.mark.parametrize(
    ("version", "recompute", "bytes_per_element"),
    [
        ("v5.0", "none", 0),
        ("v4.56", "none", 8),  # copies of keys and values, both in fp32
        ("v4.55", "none", 4),  # rotated keys in fp32; attention saves the values
        ("v4.56", "full", 0),
    ],
)
def test_kv_cache_of_training_under_transformers_4(version: str, recompute: str, bytes_per_element: int) -> None:
    """The model's output references the keys and values of all layers until the loss is there."""
    words = (*AMP, "framework=trainer", f"recompute={recompute}")
    newest = memcalc.load("llama-3.2-1b", *words)
    older = memcalc.load("llama-3.2-1b", *words, f"versions.transformers={version}")

    model = newest.model
    elements = model.num_layers * 512 * model.num_key_value_heads * model.head_dim
    assert simulate(older).asked["loss_2"] - simulate(newest).asked["loss_2"] == bytes_per_element * elements


def test_lightning_caches_no_casts_of_weights() -> None:
    """In a recomputed layer each cast is freed after its matmul, so no layer's casts are live with the logits.

    Lightning's model computes its loss, so a variable references the LM head's input in fp32, (1, 512, 2048).
    """
    words = (*AMP, "recompute=full", "logits_until=loss")
    cached, freed = (
        simulate(memcalc.load("llama-3.2-1b", *words, *more)).asked["loss_1"] for more in ((), ("framework=lightning",))
    )

    layers, elements = 16, 2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 8192 * 2048
    assert cached - freed == 2 * layers * elements - 4 * 512 * 2048


def test_a_padding_mask_has_the_size_of_the_batch_only_once() -> None:
    """Bytes: a causal mask (s, s), then b masks of tokens (b, s) that it is combined with (masking_utils.py)."""
    b, s = 4, 1024
    spec = memcalc.load(
        "llama-3.2-1b", "implementation=huggingface", "framework=trainer", "padding_mask=boolean", f"b={b}", f"s={s}"
    )
    stretches = [stretch.script for stretch in run_requests(spec).stretches if stretch.phase == "forward_1"]
    script = next(script for script in stretches if b * s * s in script)
    before = script[: script.index(b * s * s) + 1]

    assert [size for size in before if size in (s * s, b * s, b * s * s)] == [s * s, s * s, b * s, b * s * s]


def test_a_mask_of_packed_texts_has_three_squares_at_once() -> None:
    """Bytes: one row of 2 * 512 tokens; + in the same text, + and, - first, + not behind, + and, - both before it.

    Recorded: trl-sft-zero held-out-14 1 (masking_utils.py, and_masks). A padding mask has two squares at once.
    """
    square = (2 * 512) ** 2
    words = ("implementation=huggingface", "framework=trainer", "padding_mask=boolean", "padding_free=true")
    requests = run_requests(memcalc.load("llama-3.2-1b", *words, "b=2", "s=512"))
    script = next(each.script for each in requests.stretches if each.phase == "forward_1" and square in each.script)
    sizes = [change for stretch in requests.stretches for change in stretch.script if change >= 0]
    squares = {number for number, size in enumerate(sizes) if size == square}
    events = [change for change in script if change == square or (change < 0 and ~change in squares)]

    assert ["+" if change >= 0 else "-" for change in events[:7]] == ["+", "+", "-", "+", "+", "-", "-"]


@pytest.mark.parametrize(("words", "sizes"), [((), "ssss"), (("framework=trainer",), "ssssstB")])
def test_a_mask_of_windows_is_one_of_each_sequence_if_the_program_passes_a_mask(
    words: tuple[str, ...], sizes: str
) -> None:
    """Bytes: (s, s) in the window, and, not behind, and, and; of tokens (b, s); then one of each sequence (b, s, s).

    Recorded: transformers 5.23's Trainer on blocks of one length, with a mask of ones (masking_utils.py). memcalc's own
    step passes none.
    """
    b, s = 4, 1024
    spec = memcalc.load("gemma-3-1b", "implementation=huggingface", f"b={b}", f"s={s}", *words)
    script = next(stretch.script for stretch in run_requests(spec).stretches if stretch.phase == "forward_1")
    names = {s * s: "s", b * s: "t", b * s * s: "B"}

    found = "".join(names.get(size, "") for size in script)
    assert found.startswith(sizes)
    assert ("tB" in found[: len("ssssstB")]) == ("tB" in sizes)


def test_a_4_bit_base_is_loaded_in_the_order_of_names() -> None:
    """transformers 5: mlp.down_proj before mlp.gate_proj, up_proj and self_attn.k_proj; 4.57: in that of modules."""
    words = ("framework=trainer", "implementation=huggingface", "finetune=qlora", "lora.rank=8", "dtype=bf16")
    found = {}
    for release in ("5.23.0", "4.57.6"):
        spec = memcalc.load("qwen2.5-7b", *words, f"versions.transformers={release}")
        script = next(stretch.script for stretch in run_requests(spec).stretches if stretch.phase == "model")
        matrices = {2 * 3584 * 18944: "mlp", 2 * 3584 * 3584: "q or o", 2 * 3584 * 512: "k or v"}
        found[release] = [matrices[size] for size in script if size in matrices][:7]

    assert found["5.23.0"] == ["mlp", "mlp", "mlp", "k or v", "q or o", "q or o", "k or v"]
    assert found["4.57.6"] == ["q or o", "k or v", "k or v", "q or o", "mlp", "mlp", "mlp"]


def made_in(phase: str, *words: str) -> int:
    """Return the number of allocations of a phase."""
    requests = SimulatedRun(memcalc.load("gpt2", "l=2", "s=128", *words), Requests()).play()
    scripts = (interval.script for interval in requests.stretches if interval.phase == phase)
    return sum(change > 0 for script in scripts for change in script)


def test_an_evaluation_of_pairs_is_scored_by_the_reference_too() -> None:
    """TRL 1.16 trl/trainer/dpo_trainer.py, prediction_step: the loss of training, with both forwards."""
    evaluation = ("evaluation", "pairs=true", "evaluation_batch_size=2")

    assert made_in(*evaluation, "reference_model=true") == 2 * made_in(*evaluation)


def test_a_policy_scores_pairs_with_its_adapters_disabled() -> None:
    """After the policy's two adapters of each layer, which are all that the second forward lacks."""
    pairs = ("pairs=true", "lora.rank=8", "lora.target_modules=[o_proj, down_proj]", "implementation=huggingface")
    with_adapters = made_in("evaluation", *pairs[1:], "evaluation_batch_size=4")
    both = made_in("evaluation", *pairs, "evaluation_batch_size=2")
    base = made_in("evaluation", "implementation=huggingface", "evaluation_batch_size=4")

    assert both == with_adapters + base


@pytest.mark.parametrize(
    ("words", "emptied"),
    [
        (("empty_cache_steps=1",), ["backward_1", "backward_2", "backward_2", "backward_2"]),
        (("empty_cache_steps=3",), ["backward_1", "backward_2"]),  # every other one of the steps that are replayed
        (("empty_cache_steps=1", "empty_cache_when=after-backward"), ["backward_1", *["backward_2"] * 3]),
        (("empty_cache_steps=9", "gradient_accumulation_steps=2"), [*["backward_1"] * 2, *["backward_2"] * 2]),
        ((), []),
    ],
)
def test_a_program_empties_the_cache(words: tuple[str, ...], emptied: list[str]) -> None:
    requests = SimulatedRun(memcalc.load("gpt2", "l=1", "s=64", *words), Requests()).play()

    assert [interval.phase for interval in requests.stretches if interval.after_empty_cache] == emptied


def test_an_emptied_cache_changes_reserved_memory_alone() -> None:
    words = ("gpt2", "l=1", "s=64", "recipe=pure", "optimizer=sgd")
    kept, emptied = (simulate(memcalc.load(*words, *more)) for more in ((), ("empty_cache_steps=1",)))

    assert emptied.asked == kept.asked
    assert emptied.reserved_bytes != kept.reserved_bytes
