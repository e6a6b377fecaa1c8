"""Symbols of formulas and their values for one run: b, s, d, h, F, V, ... and one rank's shards of them ("F/t")."""

from __future__ import annotations

from functools import lru_cache

from memcalc.layout.adapters import adapters_of
from memcalc.layout.sequence_sharding import rank_with_most
from memcalc.layout.weight_layout import weight_layout
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.hardware.kernels import multiprocessors
from memcalc.spec.model import ModelSpec
from memcalc.spec.spec import Spec
from memcalc.workspaces import round_up

# TRL 1.16 trl/kernels/chunked_logprob.py, TOKEN_CHUNK_SIZE; trl/trainer/utils.py, _CHUNKED_LOGPROB_CHUNK_SIZE
TILE_ROWS, TILE_COLUMNS = 4096, 32768
# Inputs of linear layers, which fake quantization divides into groups; the hidden size of an MLP has two names.
GROUPED = ("d", "F", "4·d", "h·d_h")
LINEAR_CHUNK = 64  # tokens; transformers 5.23 models/qwen3_5/modeling_qwen3_5.py, torch_chunk_gated_delta_rule

PADDED_ROWS = 8  # of torchtitan's groups of rows

MEANINGS = {
    "b": "micro-batch",
    "b/2": "chosen or rejected sequences of a micro-batch",
    "s": "sequence length",
    "l": "layers",
    "d": "hidden size",
    "h": "query heads",
    "h_kv": "key/value heads",
    "d_h": "head size",
    "⌈d_h⌉₈": "head size, rounded up to a multiple of 8",
    "d_rot": "rotated dimensions of a head",
    "F": "intermediate size of the MLP",
    "V": "vocabulary",
    "n_l": "labels of a classification head",
    "S": "learned positions",
    "d_e": "embedding dimension",
    "E": "experts",
    "k": "experts per token",
    "F_e": "intermediate size of a routed expert",
    "F_s": "intermediate size of the shared expert",
    "R": "rows of one expert, b·s·k/E rounded up",
    "C": "copies of tokens that a rank sends to experts",
    "C+1": "copies of tokens that a rank sends to experts, and an empty row",
    "C_p": "copies of tokens with 8 more rows for each expert of the rank, rounded up to a multiple of 8",
    "r_q": "rank of the query latent",
    "r_kv": "rank of the key/value latent",
    "d_n": "size of a query/key head without RoPE",
    "d_r": "size of a query/key head with RoPE",
    "d_v": "dimension of a value head",
    "h_lk": "key heads of linear attention",
    "h_lv": "value heads of linear attention",
    "d_lk": "size of a key head of linear attention",
    "d_lv": "size of a value head of linear attention",
    "d_mix": "total size of queries, keys and values of linear attention",
    "d_hf": "head size of layers with full attention",
    "h_kvf": "key/value heads of layers with full attention",
    "w_c": "tokens that the convolution before linear attention spans",
    "h_m": "Mamba-2 heads",
    "d_hm": "size of a Mamba-2 head",
    "g_m": "groups of Mamba-2 heads",
    "n_m": "size of the Mamba-2 state of a feature",
    "d_m": "total size of all Mamba-2 heads",
    "d_m/g_m": "total size of the Mamba-2 heads of one group",
    "d_conv": "channels of the convolution before Mamba-2",
    "d_in": "outputs of Mamba-2's input projection",
    "Q": "tokens of a Mamba-2 chunk",
    "s_Q": "Mamba-2 chunks in a sequence",
    "d_l": "latent size of routed experts",
    "⌈s⌉₆₄": "sequence length, rounded up to a multiple of 64",
    "s_64": "chunks of 64 tokens in a sequence",
    "t": "tensor-parallel ranks",
    "t_e": "ranks that shard each expert",
    "e": "expert-parallel ranks",
    "c": "context-parallel ranks",
    "c_i": "index of a context-parallel rank",
    "r": "rank of an adapter",
    "r_qkv": "rank of a joint adapter for q, k and v",
    "d_qkv": "outputs of a joint adapter for q, k and v",
    "n_0": "tokens of a prompt",
    "n_c": "capacity of a layer's cache, in tokens",
    "n_b": "capacity of a layer's cache before the forward, in tokens",
    "n_p": "tokens of a sequence in whole blocks of a paged cache",
    "n_w": "tokens of a sliding window in whole blocks of a paged cache",
    "T/n": "tokens of a chunk of the loss, b·s/n rounded up",
    "T'": "tokens of the last chunk, the remainder",
    "T_f": "rows of logits of a fused loss, 2^k >= b·s/(V/d)",
    "T_s": "tokens with a label: all except the last of each sequence, b·(s-1), generated completions, or as given",
    "T_t": "rows of a tile of logits, at most 4,096",
    "V_t": "columns of a tile of logits, 32,768",
    "V_w": "rows of the LM head's weight for a tile, at most V_t",
    "T_p": "rows of the tile of logits before, T_t if there are several; otherwise 0",
    "V_p": "rows of the LM head's weight for the tile before or after, at most V_t; 0 without one",
}


@lru_cache(maxsize=256)
def model_values(model: ModelSpec, tensor_parallel: int) -> dict[str, int]:
    """Return the values that depend only on the model and tensor parallelism; `symbol_values` adds the batch."""
    values = {
        "l": model.num_layers,
        "d": model.hidden_size,
        "h": model.num_attention_heads,
        "h_kv": model.num_key_value_heads,
        "d_h": model.head_dim,
        "⌈d_h⌉₈": round_up(model.head_dim, 8),
        "d_h/2": -(-model.head_dim // 2),
        "0": 0,
        "d_rot": model.rotary_dim,
        "d_rot/2": model.rotary_dim // 2,
        "d_h-d_rot": model.head_dim - model.rotary_dim,
        "F": model.intermediate_size,
        "4·d": 4 * model.hidden_size,
        "3·d": 3 * model.hidden_size,
        "3·d_h": 3 * model.head_dim,
        "V": model.vocab_size,
        "n_l": model.num_labels,
        "S": model.max_position_embeddings,
        "d_e": model.embedding_size,
        "h·d_h": model.query_size,
        "2·h·d_h": 2 * model.query_size,
        "2·d_h": 2 * model.head_dim,
        "h_kv·d_h": model.key_value_size,
        "(h+2·h_kv)·d_h": model.query_size + 2 * model.key_value_size,
        "2·4·d": 2 * 4 * model.hidden_size,
        "2·F": 2 * model.intermediate_size,
        "t": tensor_parallel,
        "1": 1,
        "3": 3,  # time, height and width
        "2": 2,
        "4": 4,
        "8": 8,
    }
    if model.position_embedding_offset:
        values[f"S+{model.position_embedding_offset}"] = model.max_position_embeddings + model.position_embedding_offset
    if model.moe is not None:
        values |= {
            "E": model.moe.num_experts,
            "k": model.moe.num_experts_per_token,
            "F_e": model.moe.expert_intermediate_size,
            "2·F_e": 2 * model.moe.expert_intermediate_size,
            "F_s": model.moe.shared_expert_intermediate_size,
            "2·F_s": 2 * model.moe.shared_expert_intermediate_size,
            "d_l": model.moe.latent_size,
        }
    if model.mla is not None:
        mla, heads = model.mla, model.num_attention_heads
        values |= {
            "r_q": mla.q_lora_rank,
            "r_kv": mla.kv_lora_rank,
            "d_n": mla.qk_nope_head_dim,
            "d_r": mla.qk_rope_head_dim,
            "d_r/2": mla.qk_rope_head_dim // 2,
            "d_v": mla.v_head_dim,
            "d_n+d_r": mla.qk_nope_head_dim + mla.qk_rope_head_dim,
            "d_n+d_v": mla.qk_nope_head_dim + mla.v_head_dim,
            "r_kv+d_r": mla.kv_lora_rank + mla.qk_rope_head_dim,
            "h·(d_n+d_r)": heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim),
            "h·(d_n+d_v)": heads * (mla.qk_nope_head_dim + mla.v_head_dim),
            "h·d_v": heads * mla.v_head_dim,
        }
    if model.linear_attention is not None:
        linear = model.linear_attention
        mixed = 2 * linear.key_size + linear.value_size
        values |= {
            "h_lk": linear.num_key_heads,
            "h_lv": linear.num_value_heads,
            "2·h_lv": 2 * linear.num_value_heads,
            "d_lk": linear.key_head_dim,
            "d_lv": linear.value_head_dim,
            "h_lk·d_lk": linear.key_size,
            "h_lv·d_lv": linear.value_size,
            "d_mix": mixed,
            "d_mix+h_lv·d_lv": mixed + linear.value_size,
            "w_c": linear.conv_kernel,
            "64": LINEAR_CHUNK,
        }
    if model.full_attention is not None:
        full, heads = model.full_attention, model.num_attention_heads
        values |= {
            "d_hf": full.head_dim,
            "d_hf/2": -(-full.head_dim // 2),
            "h_kvf": full.num_key_value_heads,
            "h·d_hf": heads * full.head_dim,
            "h_kvf·d_hf": full.num_key_value_heads * full.head_dim,
        }
    if model.mamba is not None:
        mamba = model.mamba
        values |= {
            "h_m": mamba.num_heads,
            "d_hm": mamba.head_dim,
            "g_m": mamba.num_groups,
            "n_m": mamba.state_size,
            "d_m": mamba.inner_size,
            "d_m/g_m": mamba.inner_size // mamba.num_groups,
            "d_conv": mamba.conv_size,
            "d_in": mamba.inner_size + mamba.conv_size + mamba.num_heads,
            "w_c": mamba.conv_kernel,
            "Q": mamba.chunk_size,
        }
    if tensor_parallel > 1:
        values |= {
            f"{axis}/t": -(-value // tensor_parallel) for axis, value in values.items() if axis not in ("t", "1")
        }
        # A rank has whole heads, at least one: with more ranks than key/value heads, heads are replicated.
        heads, kv_heads = values["h/t"], values["h_kv/t"]
        values["h_kv·d_h/t"] = kv_heads * model.head_dim
        values["(h+2·h_kv)·d_h/t"] = (heads + 2 * kv_heads) * model.head_dim
    return values


def symbol_values(spec: Spec, gpu: GpuSpec | None) -> dict[str, int]:
    """Return every symbol of one run, and the GPU's `sms`, `threads` and `major` for workspace rules."""
    b, s = spec.training.sequences, spec.training.row_length
    parallelism = spec.parallelism
    model = weight_layout(spec.model, spec.training.implementation, parallelism.tensor_parallel)
    values = dict(model_values(model, parallelism.tensor_parallel))
    values["b"] = b
    values["b/2"] = -(-b // 2)
    values["s"] = s
    values["s+1"] = s + 1
    values["s-1"] = s - 1
    values["⌈s⌉₆₄"] = round_up(s, LINEAR_CHUNK)
    values["s_64"] = -(-s // LINEAR_CHUNK)
    values["s_64-1"] = values["s_64"] - 1
    if spec.model.linear_attention is not None:
        values["s+w_c-1"] = s + spec.model.linear_attention.conv_kernel - 1
    if spec.model.mamba is not None:
        values["s+w_c-1"] = s + spec.model.mamba.conv_kernel - 1
        values["s_Q"] = -(-s // spec.model.mamba.chunk_size)
        values["s_Q+1"] = values["s_Q"] + 1
    values["s/t"] = -(-s // parallelism.tensor_parallel)
    values["c"] = parallelism.context_parallel
    values["c_i"] = rank_with_most(values["c"])
    values["s/c"] = -(-s // parallelism.context_parallel)
    values["c·(s/c)"] = values["c"] * values["s/c"]
    values["s/(c·t)"] = -(-values["s/c"] // parallelism.tensor_parallel)
    if spec.model.moe is not None:
        values |= _expert_values(spec, values)
    if spec.training.fake_quantization != "none":
        group = spec.training.fake_quantization_group
        values |= {f"{axis}/g": values[axis] // group for axis in GROUPED if axis in values}
    if spec.training.lora is not None:
        values["r"] = spec.training.lora.rank
        values |= _joined_values(spec)
    chunks = spec.training.loss_chunks
    values["T/n"] = -(-b * s // chunks)
    values["T'"] = max(b * s - (chunks - 1) * values["T/n"], 0)
    # Liger's rows of logits: as many as take no more memory than the hidden state, rounded up to a power of two.
    share = -(-values["V"] // values["d_e"])
    values["T_f"] = min(1 << (-(-b * s // share) - 1).bit_length(), b * s)
    # TRL 1.16 trl/trainer/grpo_trainer.py, _get_per_token_logps_and_entropies: prompts have no labels.
    labeled = spec.training.labeled_tokens or spec.training.completion_length or s - 1
    values["T_s"] = b * min(s - 1, labeled)
    values["T_t"] = min(values["T_s"], TILE_ROWS)
    values["V_t"] = TILE_COLUMNS
    values["V_w"] = min(values["V"], TILE_COLUMNS)
    values["T_p"] = values["T_t"] if values["T_s"] > TILE_ROWS else 0
    values["V_p"] = min(values["V"] - TILE_COLUMNS, TILE_COLUMNS)
    if values["V_p"] <= 0:  # one tile for all columns
        values["V_p"] = values["V_w"] if values["T_p"] else 0
    values["sms"], values["threads"], values["major"] = multiprocessors(gpu)
    return values


def _joined_values(spec: Spec) -> dict[str, int]:
    """The symbols of one adapter for q, k and v."""
    from memcalc.layout.peft_parameters import joined_sizes  # imported here because of a cycle

    adapters = adapters_of(spec)
    if adapters is None or not adapters.joined:
        return {}
    ranks, outputs = joined_sizes(adapters, spec.model)
    return {"r_qkv": ranks, "d_qkv": outputs}


def _expert_values(spec: Spec, values: dict[str, int]) -> dict[str, int]:
    """Return the symbols of experts on one of e ranks, with balanced routing.

    The e ranks exchange token copies, so each expert sees the tokens of all e ranks, and each rank holds 1/e of the
    experts. With sequence parallelism every tensor-parallel rank brings separate tokens, and the t_e ranks of an expert
    see all of them.
    """
    parallelism = spec.parallelism
    e, width_ranks = parallelism.expert_parallel, parallelism.expert_width_ranks
    tokens = spec.training.sequences * values["s/c"]
    if spec.training.implementation == "megatron" and parallelism.sequence_parallel:
        tokens = -(-tokens * width_ranks // parallelism.tensor_parallel)
    return {
        "e": e,
        "t_e": width_ranks,
        "E/e": -(-values["E"] // e),
        "F_e/t_e": -(-values["F_e"] // width_ranks),
        "2·F_e/t_e": 2 * -(-values["F_e"] // width_ranks),
        "R": -(-tokens * values["k"] * e // values["E"]),
        **_copies(spec, values, tokens),
        "2·E+1": 2 * values["E"] + 1,
    }


def _copies(spec: Spec, values: dict[str, int], tokens: int) -> dict[str, int]:
    """Return the symbols of torchtitan's token copies on one rank.

    Expert parallelism that uses tensor-parallel ranks, too, splits the tokens among them (torchtitan 0.2.2
    distributed/expert_parallel.py, ReordererSequenceParallel). Groups of rows are padded to multiples of 8
    (models/moe/utils.py, TOKEN_GROUP_ALIGN_SIZE_M).
    """
    parallelism = spec.parallelism
    copies = tokens * values["k"]
    if parallelism.expert_parallel > 1 and parallelism.expert_width_ranks == 1:
        copies //= parallelism.tensor_parallel
    experts = -(-values["E"] // parallelism.expert_parallel)
    return {"C": copies, "C+1": copies + 1, "C_p": (-(-copies // PADDED_ROWS) + experts) * PADDED_ROWS}
