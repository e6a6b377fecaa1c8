"""Generate with transformers' models on the null device, and append what prefill and decoding held.

    python benchmarks/record_generation.py benchmarks/recordings/generation/null-h100-80gb-torch-2.13.0.jsonl \
        --python .venv-null/bin/python
    python benchmarks/record_generation.py benchmarks/recordings/gpu/new/FILE.jsonl   # on this machine's GPU

Each case of generation_cases.yaml: a preset, then fields of its inference block. The model has the
family's own class with all its layers; tokens are fed as `generate` feeds them, one forward for the prompt, then one a
token, the last position's logits copied to fp32. Recorded cases are skipped. `cache_bytes` are those of the cache's
storages, `phases` the peak of allocated bytes in each part, `after` what is allocated when it has ended,
`reserved_bytes` the peak of reserved memory over all parts. Bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import yaml

import memcalc
from memcalc.nullcuda.context import null_device
from memcalc.spec.model_families.inverse import write_hf_config

CARD = "h100-80gb"
CASES = Path(__file__).with_name("generation_cases.yaml")


def main() -> None:
    """Parse the command line and run what has no record yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--python", help="for the null device: an interpreter with a CUDA build of torch, transformers")
    parser.add_argument("--card", default=CARD)
    parser.add_argument("--list", action="append", dest="lists", help="of generation_cases.yaml; by default all")
    arguments = parser.parse_args()
    arguments.recordings.parent.mkdir(parents=True, exist_ok=True)
    lines = arguments.recordings.read_text().splitlines() if arguments.recordings.exists() else []
    known = {json.loads(line)["case"] for line in lines}
    lists = yaml.safe_load(CASES.read_text())
    for case in (case for name in arguments.lists or lists for case in lists[name]):
        if case in known:
            continue
        try:
            found = in_a_process(arguments, generate, configuration(case), *choices(case))
        except (RuntimeError, memcalc.MemcalcError) as error:
            print(f"{case}: {error}", flush=True)
            continue
        record = {"case": case, "date": datetime.now(UTC).isoformat(timespec="seconds")}
        record |= found if arguments.python is None else found | {"device": f"null:{arguments.card}"}
        with arguments.recordings.open("a") as file:
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
        print(f"{case}: {max(record['phases'].values()):,}", flush=True)


def in_a_process(
    arguments: argparse.Namespace, function: Callable[..., dict[str, Any]], *values: Any
) -> dict[str, Any]:
    """What a function answers in a process of its own, on the null device or on the GPU."""
    if arguments.python is not None:
        with null_device(arguments.card, python=arguments.python) as device:
            answer: dict[str, Any] = device.call(function, *values)
            return answer
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *values).result()


def configuration(case: str) -> dict[str, Any]:
    """The config.json of a case's preset."""
    return write_hf_config(memcalc.load(case.split(maxsplit=1)[0]).model)


def choices(case: str) -> tuple[int, int, int, str, str, int]:
    """Batch, prompt, new tokens, cache, attention and tokens of a piece of the prompt (0: all at once)."""
    given = dict(word.split("=") for word in case.split()[1:])
    return (
        int(given["batch_size"]),
        int(given["prompt_length"]),
        int(given["new_tokens"]),
        given.get("cache", "dynamic"),
        given.get("attention", "flash"),
        int(given.get("prefill_chunk", 0)),
    )


def generate(
    config: dict[str, Any], batch: int, prompt: int, new_tokens: int, cache: str, attention: str, chunk: int
) -> dict[str, Any]:
    """What a child process holds on the device, phase by phase."""
    import torch
    import transformers

    from memcalc.step.generation import placed

    kernel = "eager" if attention == "eager" else "sdpa"
    torch.backends.cuda.enable_cudnn_sdp(False)  # the null device has no planner of cuDNN's
    kind = config.pop("model_type")
    made = transformers.CONFIG_MAPPING[kind](**config)
    phases: dict[str, int] = {}
    after: dict[str, int] = {}
    reserved = 0

    def note(phase: str) -> None:
        nonlocal reserved
        torch.cuda.synchronize()
        phases[phase] = torch.cuda.max_memory_allocated()
        after[phase] = torch.cuda.memory_allocated()
        reserved = max(reserved, torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()

    with torch.device("meta"):  # as from_pretrained builds it: no weight exists before it is loaded
        model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            made, dtype=torch.bfloat16, attn_implementation=kernel
        )
    model = placed(model, torch.device("cuda")).eval()  # tied weights once, as from_pretrained allocates them
    note("model")
    with torch.inference_mode():
        tokens = torch.zeros(batch, prompt, dtype=torch.long, device="cuda")
        past: Any
        if cache == "static":
            past = transformers.StaticCache(config=made, max_cache_len=prompt + new_tokens)
        else:
            past = transformers.DynamicCache(config=made)
        note("input")
        step = chunk or prompt
        for start in range(0, prompt, step):
            following = forward(model, tokens[:, start : start + step], past)
            if start + step < prompt:
                del following
        note("prefill")
        for number in range(1, new_tokens + 1):
            following = forward(model, following, past)
            if number == 1:
                note("decode_1")
        note("decode_last")
    storages = {}
    for layer in past.layers:
        for tensor in (layer.keys, layer.values):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "parameters": sum(p.numel() for p in model.parameters()),
        "cache_bytes": sum(storages.values()),
        "phases": phases,
        "after": after,
        "reserved_bytes": reserved,
    }


def forward(model: Any, tokens: Any, past: Any) -> Any:
    """One forward, and the token that follows, as transformers' GenerationMixin._sample does it greedily."""
    import torch

    outputs = model(input_ids=tokens, past_key_values=past, use_cache=True, logits_to_keep=1)
    logits = outputs.logits[:, -1, :].to(copy=True, dtype=torch.float32)
    return torch.argmax(logits, dim=-1)[:, None]


if __name__ == "__main__":
    main()
