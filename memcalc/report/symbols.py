"""Formulas with numbers put in: "2·b·s·d" as "2 · 1 · 2048 · 12288"."""

from __future__ import annotations

import ast
import re
from fractions import Fraction
from typing import Any

from memcalc.spec.spec import Spec

_SYMBOL = re.compile(r"[A-Za-z]+(?:_[A-Za-z]+)?")
_POWERS = {"²": 2, "³": 3}


def symbol_values(spec: Spec) -> dict[str, int]:
    """What each symbol of the ledger's formulas stands for in this run."""
    model, training, parallelism = spec.model, spec.training, spec.parallelism
    values: dict[str, Any] = {
        "b": training.micro_batch_size,
        "s": training.sequence_length,
        "l": model.num_layers,
        "d": model.hidden_size,
        "h": model.num_attention_heads,
        "h_kv": model.num_key_value_heads,
        "d_h": model.head_dim,
        "F": model.intermediate_size,
        "V": model.vocab_size,
        "S": model.max_position_embeddings,
        "d_e": model.embedding_size,
        "N": parallelism.data_parallel,
        "t": parallelism.tensor_parallel,
        "p": parallelism.pipeline_parallel,
        "c": parallelism.context_parallel,
        "e": parallelism.expert_parallel,
    }
    if model.moe is not None:
        values |= {
            "E": model.moe.num_experts,
            "k": model.moe.num_experts_per_token,
            "F_e": model.moe.expert_intermediate_size,
            "F_s": model.moe.shared_expert_intermediate_size,
        }
    if model.mla is not None:
        values |= {
            "r_q": model.mla.q_lora_rank,
            "r_kv": model.mla.kv_lora_rank,
            "d_n": model.mla.qk_nope_head_dim,
            "d_r": model.mla.qk_rope_head_dim,
            "d_v": model.mla.v_head_dim,
        }
    return values


def with_numbers(formula: str, values: dict[str, int], expected: int) -> str | None:
    """The formula with numbers and its result; None if a symbol is unknown or the result is not `expected`.

    A formula that rounds, or that leaves out a detail, is better shown in symbols alone than with a wrong equation.
    """
    if any(symbol not in values for symbol in _SYMBOL.findall(formula)):
        return None
    numbers = _SYMBOL.sub(lambda match: str(values[match[0]]), formula)
    if _evaluate(numbers) != expected:
        return None
    return f"{_spaced(numbers)} = {expected:,}"


def _spaced(text: str) -> str:
    return re.sub(r"\s*([·+/-])\s*", r" \1 ", text)


def _evaluate(text: str) -> Fraction | None:
    """The value of sums, products and quotients of whole numbers; None for anything else."""
    plain = text.replace("·", "*")
    for sign, power in _POWERS.items():
        plain = plain.replace(sign, f"**{power}")
    try:
        return _value(ast.parse(plain, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left) - _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _value(left) / _value(right)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))) if power in _POWERS.values():
            return _value(left) ** power
        case _:
            raise ValueError(ast.dump(node))
