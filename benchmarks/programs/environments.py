"""The environments that programs run in. Each is made by hand, outside the repository:

python -m venv ENV
ENV/bin/pip install "torch==2.13.0" REQUIREMENTS        # an index with a build of torch for the CPU saves gigabytes
ENV/bin/pip install --no-deps "torch===2.13.0" "triton==3.7.1"
"""

from __future__ import annotations

from benchmarks.programs.program import Environment

# Their releases, or their absence, decide which kernels and which code a program of transformers runs.
_TRANSFORMERS = ("torch", "triton", "transformers", "accelerate", "peft", "bitsandbytes", "liger-kernel", "flash-attn")

HF5 = Environment(
    "hf5",
    (
        *("transformers==5.23.0", "accelerate==1.15.0", "peft==0.21.2", "bitsandbytes==0.50.2", "trl==1.16.0"),
        *("datasets", "lightning", "deepspeed==0.18.2", "ninja"),
    ),
    (*_TRANSFORMERS, "trl", "deepspeed", "lightning"),
)
HF5_DEEPSPEED = Environment(  # the releases of DeepSpeed that memcalc replays begin with 0.19
    "hf5-deepspeed",
    (*HF5.requirements[:5], "datasets", "deepspeed==0.19.8"),
    HF5.packages,
)
HF5_TRL_114 = Environment("hf5-trl-1.14", (*HF5.requirements[:4], "trl==1.14.0", "datasets"), HF5.packages)
HF457 = Environment(
    "hf457",
    ("transformers==4.57.6", "accelerate==1.12.0", "peft==0.18.0", "bitsandbytes==0.49.0", "datasets"),
    _TRANSFORMERS,
)
HF448 = Environment(
    "hf448", ("transformers==4.48.3", "accelerate==1.3.0", "peft==0.14.0", "bitsandbytes", "datasets<4"), _TRANSFORMERS
)
LITGPT_05 = Environment(
    "litgpt",
    ("litgpt==0.5.13", "litdata", "bitsandbytes==0.50.2"),
    ("torch", "triton", "litgpt", "lightning", "bitsandbytes"),
)
TITAN = Environment("titan", ("torchtitan==0.2.2",), ("torch", "triton", "torchtitan", "torchao"))
TITAN_FLOAT8 = Environment("titan-float8", (*TITAN.requirements, "torchao==0.18.0"), TITAN.packages)
TUNE = Environment(
    "tune", ("torchtune==0.6.1", "torchao==0.13.0"), ("torch", "triton", "torchtune", "torchao", "bitsandbytes")
)
# torchtune 0.6.1 wants the class of torchao's settings that torchao 0.13 renamed.
TUNE_QUANTIZED = Environment("tune-qat", ("torchtune==0.6.1", "torchao==0.12.0"), TUNE.packages)
FACTORY = Environment(
    "factory", ("llamafactory==0.9.5", "bitsandbytes==0.50.2"), (*_TRANSFORMERS, "llamafactory", "trl")
)
AXOLOTL = Environment("axolotl", ("axolotl==0.19.0",), (*_TRANSFORMERS, "axolotl", "trl"))
# Beside it, in a directory `checkouts` of the recorder's work: Megatron-LM at core_v0.16.1, with its helper built
# (`make` in megatron/core/datasets).
MEGATRON = Environment(
    "megatron",
    ("pybind11", "six", "numpy", "einops", "transformers==5.23.0"),
    ("torch", "triton", "transformer-engine"),
)
