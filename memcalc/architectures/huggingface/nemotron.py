"""Nemotron: LayerNorm with a weight around 1, relu squared, and RoPE on a part of each head."""

from __future__ import annotations

from memcalc.architectures.huggingface.llama import Llama
from memcalc.programs.tape import Tensor


class Nemotron(Llama):
    """NemotronDecoderLayer."""

    always_joins = True

    def norm(self, x: Tensor, module: str, width: str) -> Tensor:
        """NemotronLayerNorm1P: autocast is off inside, and its input is cast to autocast's dtype."""
        ops = self.ops
        given, before = x, ops.autocast
        if before:
            x = ops.cast(x, ops.compute, f"{module} input in {ops.compute}")
        ops.autocast = False
        y = ops.layer_norm(x, module, width)
        ops.autocast = before
        ops.also_save(y, f"{module}.weight + 1", (width,), ops.compute if before else ops.parameters)
        self.tape.still_referenced(given)
        return y
