"""Generate with transformers' models on the null device, and append what prefill and decoding held.

    python benchmarks/record_generation.py benchmarks/recordings/generation/null-h100-80gb-torch-2.13.0.jsonl \
        --python .venv-null/bin/python
    python benchmarks/record_generation.py benchmarks/recordings/gpu/new/FILE.jsonl   # on this machine's GPU

Each case of generation_cases.yaml: a preset, fields of its model (l=4), then fields of its inference block. The model
has the family's own class; tokens are fed as `generate` feeds them, one forward for the prompt, then one a token, the
last position's logits copied to fp32; with program=generate it is `generate` that feeds them. 4-bit weights are loaded
by from_pretrained, of weights that the null device makes, and multiplied in compute_dtype, which is dtype where a case
names none, and BitsAndBytesConfig's default with null. Recorded cases are skipped. `cache_bytes` are those of the
cache's storages, `phases` the peak of allocated bytes in each part, `after` what is allocated when it has ended,
`reserved_bytes` the peak of reserved memory over all parts. Bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import yaml

import memcalc
from memcalc.nullcuda.context import null_device
from memcalc.spec.inference import InferenceSpec
from memcalc.spec.model_families.inverse import write_hf_config

CARD = "h100-80gb"
CASES = Path(__file__).with_name("generation_cases.yaml")
AT_ONCE = 9  # cases of one process, which imports its libraries once


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
    cases = [case for name in arguments.lists or lists for case in lists[name] if case not in known]
    for several in (cases[start : start + AT_ONCE] for start in range(0, len(cases), AT_ONCE)):
        given = [(configuration(case), choices(case)) for case in several]
        for case, found in zip(several, in_a_process(arguments, generate_each, given), strict=True):
            if isinstance(found, str):
                print(f"{case}: {found}", flush=True)
                continue
            record = {"case": case, "date": datetime.now(UTC).isoformat(timespec="seconds")}
            record |= found if arguments.python is None else found | {"device": f"null:{arguments.card}"}
            with arguments.recordings.open("a") as file:
                file.write(json.dumps(record, separators=(",", ":")) + "\n")
            print(f"{case}: {max(record['phases'].values()):,}", flush=True)


def in_a_process(arguments: argparse.Namespace, function: Callable[..., Any], *values: Any) -> Any:
    """What a function answers in a process of its own, on the null device or on the GPU."""
    if arguments.python is not None:
        with null_device(arguments.card, python=arguments.python, random_weights=True) as device:
            return device.call(function, *values)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *values).result()


def fields_of(case: str) -> tuple[str, list[str]]:
    """A case's preset, and its fields as `memcalc estimate --set` takes them."""
    preset, *words = case.split()
    given = dict(word.split("=", 1) for word in words)
    if "program=generate" not in words:
        words.append("program=loop")
    if "quantization" in given and "compute_dtype" not in given:
        words.append(f"compute_dtype={given.get('dtype', 'bf16')}")
    inference = InferenceSpec.model_fields
    return preset, [f"inference.{word}" if word.partition("=")[0] in inference else word for word in words]


def spec_of(case: str, gpu: str | None = None) -> memcalc.Spec:
    """A case's run."""
    preset, fields = fields_of(case)
    return memcalc.load(preset, *fields, gpu=gpu)


def configuration(case: str) -> dict[str, Any]:
    """The config.json of a case's model."""
    preset, fields = fields_of(case)
    model = [field for field in fields if not field.startswith("inference.")]
    return write_hf_config(memcalc.load(preset, *model).model)


def choices(case: str) -> dict[str, Any]:
    """The inference block, and the program."""
    found = spec_of(case).inference
    assert found is not None
    return found.model_dump()


def generate_each(cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any] | str]:
    """The record of each case, or its error, each in a fork of this process, which has no CUDA context."""
    import torch
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM  # noqa: F401 -- loaded once for all

    import memcalc.step.generation  # noqa: F401 -- as above

    found: list[dict[str, Any] | str] = []
    for config, choice in cases:
        assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            answer: dict[str, Any] | str
            try:
                answer = generate(config, choice)
            except Exception as error:  # noqa: BLE001 -- it is printed, and the next case begins
                answer = f"{type(error).__name__}: {error}"
            with os.fdopen(writes, "wb") as file:
                pickle.dump(answer, file)
            os._exit(0)
        os.close(writes)
        with os.fdopen(reads, "rb") as file:
            text = file.read()
        os.waitpid(child, 0)
        found.append(pickle.loads(text) if text else "the process ended without an answer")  # noqa: S301 -- our own
    return found


def loaded(config: dict[str, Any], choice: dict[str, Any]) -> Any:
    """The model on the device, and its config."""
    import torch
    import transformers

    from memcalc.step.generation import placed

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    given = {
        "dtype": dtypes[choice["dtype"]],
        "attn_implementation": "eager" if choice["attention"] == "eager" else "sdpa",
    }
    if choice["quantization"] != "none":
        in_4_bits = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=choice["quantization"],
            bnb_4bit_compute_dtype=None if choice["compute_dtype"] is None else dtypes[choice["compute_dtype"]],
        )
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config))
            return transformers.AutoModelForCausalLM.from_pretrained(
                folder, quantization_config=in_4_bits, device_map={"": 0}, **given
            ).eval()
    if config["model_type"] == "gpt_neo":
        config["attention_types"] = [[["global", "local"], config["num_layers"] // 2]]
    made = transformers.CONFIG_MAPPING[config["model_type"]](**{k: v for k, v in config.items() if k != "model_type"})
    with torch.device("meta"):  # as from_pretrained builds it: no weight exists before it is loaded
        model = transformers.AutoModelForCausalLM.from_config(made, **given)
    return placed(model, torch.device("cuda")).eval()  # tied weights once, as from_pretrained allocates them


def generate(config: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    """What a child process holds on the device, phase by phase."""
    import torch
    import transformers

    torch.backends.cuda.enable_cudnn_sdp(False)  # the null device has no planner of cuDNN's
    torch.backends.cuda.enable_flash_sdp(choice["attention"] != "memory-efficient")
    batch, prompt, new_tokens = (choice[name] for name in ("batch_size", "prompt_length", "new_tokens"))
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

    model = loaded(config, choice)
    note("model")
    with torch.inference_mode():
        tokens = torch.zeros(batch, prompt, dtype=torch.long, device="cuda")
        past: Any
        if choice["cache"] == "static":
            past = transformers.StaticCache(config=model.config, max_cache_len=prompt + new_tokens)
        else:
            past = transformers.DynamicCache(config=model.config)
        note("input")
        if choice["program"] == "generate":
            ends = {"max_new_tokens": new_tokens + 1, "eos_token_id": None, "pad_token_id": None}
            model.generate(tokens, past_key_values=past, do_sample=False, disable_compile=True, **ends)
            note("generate")
        else:
            for phase in fed(model, tokens, past, new_tokens):
                note(phase)
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


def fed(model: Any, tokens: Any, past: Any, new_tokens: int) -> Iterator[str]:
    """Feed the prompt, then token after token; yield the name of each part that has ended."""
    following = forward(model, tokens, past)
    yield "prefill"
    for number in range(1, new_tokens + 1):
        following = forward(model, following, past)
        if number == 1:
            yield "decode_1"
    yield "decode_last"


def forward(model: Any, tokens: Any, past: Any) -> Any:
    """One forward, and the token that follows, as transformers' GenerationMixin._sample does it greedily."""
    import torch

    outputs = model(input_ids=tokens, past_key_values=past, use_cache=True, logits_to_keep=1)
    logits = outputs.logits[:, -1, :].to(copy=True, dtype=torch.float32)
    return torch.argmax(logits, dim=-1)[:, None]


if __name__ == "__main__":
    main()
