"""TRL's SFT and DPO on several GPUs with FSDP1 or FSDP2: `fsdp:` in the YAML that TRL's own programs read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.programs.environments import HF5
from benchmarks.programs.huggingface import ADAPTERS, CARDS, Batch, draw_batch
from benchmarks.programs.program import STEPS, Draw, Family, Program, Sized, written_yaml
from benchmarks.programs.ranks import ALONE, GPUS, fsdp, fsdp1, models_on
from benchmarks.programs.trl import FILE, fields_of

LOSSES: dict[str, tuple[Any, ...]] = {
    "sft": (None, None, "chunked_nll", "nll", None),
    "dpo": (None, ["ipo"], None, ["sigmoid"]),
}


def draw_program(
    draw: Draw,
    command: str,
    *,
    quantized: bool = False,
    block: Callable[[Draw], tuple[Mapping[str, Any], Mapping[str, str]]] = fsdp,
    storages: tuple[str | None, ...] = ("bfloat16", None, "bfloat16"),
) -> Program:
    """A program of 2 to 8 ranks."""
    words, _ = block(draw)
    adapters = "qlora" if quantized else draw.of("adapters", tuple(k if k != "qlora" else "full" for k in ADAPTERS))
    gpus = draw.of("gpus", GPUS)
    model = draw.of(f"model on {gpus} GPUs", models_on(gpus, large=quantized))
    batch = draw_batch(draw, model)
    if command == "dpo":
        batch = Batch(max(1, batch.size // 2), batch.length)
    data = "pairs" if command == "dpo" else draw.of("data", ("texts", "mixed", "texts"))
    fields = {
        "model_name_or_path": model.hub_id,
        "max_length": batch.length,
        "loss_type": draw.of("loss", LOSSES[command]),
        **fields_of(draw, batch, adapters),
        "optim": draw.of("optimizer", (None, "adamw_torch", None, "adamw_torch_fused")),
        **words,
        **({"bnb_4bit_quant_storage": draw.of("storage", storages)} if quantized else {}),
    }
    if words["fsdp_config"].get("activation_checkpointing"):  # both at once are an error
        fields |= {"gradient_checkpointing": False}
        fields.pop("gradient_checkpointing_kwargs", None)
    alone = gpus == ALONE
    launcher = "python" if alone else f"torchrun --nproc_per_node {gpus}"
    return Program(
        files={FILE: written_yaml(fields)},
        command=f"{launcher} -m trl.scripts.{command} --config {FILE}",
        card=draw.of("card", CARDS),
        gpus=gpus,
        sized=Sized(FILE, (f"data_parallel={gpus}",), command),
        models=(model.hub_id,),
        data=data,
        options={"random_weights": True, "steps": STEPS, **({"world_size": gpus} if alone else {})},
    )


FAMILIES = (
    Family("trl-sft-fsdp", HF5, partial(draw_program, command="sft")),
    Family("trl-dpo-fsdp", HF5, partial(draw_program, command="dpo")),
    Family("trl-qlora-fsdp", HF5, partial(draw_program, command="sft", quantized=True)),
    Family(
        "trl-qlora-fsdp1",
        HF5,
        partial(draw_program, command="sft", quantized=True, block=fsdp1, storages=("bfloat16",)),
    ),
)
