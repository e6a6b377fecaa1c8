"""Published closed-form estimates for one unsharded GPU, to compare with the much more exact ledger.

The functions are plain arithmetic on the papers' symbols: l layers, d hidden size, h heads, V vocabulary,
b micro-batch, s sequence length, P parameters, N data-parallel ranks.
"""

from __future__ import annotations

from memcalc.ledger.result import Textbook
from memcalc.spec.recipes import DTYPE_BYTES, RECIPES
from memcalc.spec.spec import Spec


def parameters(l: int, d: int, V: int) -> int:  # noqa: E741, N803 -- the papers' symbols
    """l(12d² + 13d) + Vd: weights, biases and norms of GPT layers, and the embedding weight.

    Source: Korthikanti et al. (arXiv 2205.05198) and Narayanan et al. (arXiv 2104.04473) equation 2.
    """
    attention = 4 * d * d + 4 * d  # q, k, v and output projections, with biases
    mlp = 8 * d * d + 5 * d  # d -> 4d -> d, with biases of 4d and d
    norms = 4 * d  # two norms, each with a weight and a bias
    return l * (attention + mlp + norms) + V * d


def model_state_bytes(parameter_count: int, bytes_per_parameter: int) -> int:
    """20 bytes per parameter (MT-NLG, arXiv 2201.11990), 16 (ZeRO, arXiv 1910.02054) or 18 (Megatron-LM)."""
    return bytes_per_parameter * parameter_count


def activation_bytes(l: int, d: int, h: int, b: int, s: int) -> int:  # noqa: E741 -- the papers' symbols
    """l(34bsd + 5bs²h): activations that GPT layers save for backward in 16-bit precision with dropout.

    Source: Korthikanti et al. (arXiv 2205.05198) equation 1, which neglects norm statistics.
    """
    linear = 34 * b * s * d  # 11 attention, 19 MLP, 4 norms
    attention_maps = 5 * b * s * s * h  # softmax output 2, dropout mask 1, dropout output 2
    return l * (linear + attention_maps)


def tensor_parallel_layer_bytes(d: int, h: int, b: int, s: int, t: int, *, sequence: bool, selective: bool) -> int:
    """Activations of one layer under tensor (and sequence) parallelism over t ranks.

    With `selective`, the attention core is recomputed, so the attention matrix is not saved.
    Source: Korthikanti et al. (arXiv 2205.05198) table 2.
    """
    maps = 0 if selective else 5 * b * s * s * h // t
    if sequence:
        return 34 * b * s * d // t + maps
    return 10 * b * s * d + 24 * b * s * d // t + maps


def zero_model_state_bytes(P: int, N: int, stage: int, k: int = 12) -> int:  # noqa: N803 -- the paper's symbols
    """Model states per rank of mixed-precision Adam under ZeRO, with k bytes of optimizer state per parameter.

    Source: ZeRO (arXiv 1910.02054) figure 1: 2 bytes of weights, 2 of gradients, k = 12 of optimizer state.
    """
    weights = 2 * P // (N if stage >= 3 else 1)
    gradients = 2 * P // (N if stage >= 2 else 1)
    states = k * P // (N if stage >= 1 else 1)
    return weights + gradients + states


def deepspeed_gpu_bytes(P: int, N: int, stage: int, *, largest_layer: int = 0, offload: str = "none") -> int:  # noqa: N803 -- the paper's symbols
    """DeepSpeed's estimate of model states per GPU, which counts gradients in fp32.

    Args:
        P: parameters.
        N: GPUs.
        stage: 2 or 3.
        largest_layer: parameters of the largest layer, which stage 3 gathers.
        offload: "none", "optimizer" (to the host) or "all" (stage 3: parameters too).

    Source: DeepSpeed documentation, "Memory Requirements"; runtime/zero/stage_1_and_2.py and stage3.py, estimate_*.
    """
    if stage == 2:
        return 4 * P + 16 * P // N if offload == "none" else 2 * P
    shards = {"none": 18 * P // N, "optimizer": 2 * P // N, "all": 0}[offload]
    return 4 * largest_layer + shards


def deepspeed_host_bytes(
    P: int,  # noqa: N803 -- the paper's symbols
    gpus_per_node: int,
    stage: int,
    *,
    nodes: int = 1,
    largest_layer: int = 0,
    offload: str = "none",
) -> int:
    """DeepSpeed's estimate of host memory per node, with its factor of 1.5 for additional buffers.

    Without offload, each process holds the fp32 model (stage 2) or its largest layer (stage 3) in host memory at
    start-up.

    Source: as for `deepspeed_gpu_bytes`.
    """
    if stage == 2:
        each = 4 * gpus_per_node if offload == "none" else max(4 * gpus_per_node, 16)
        return P * each * 3 // 2
    if offload == "none":
        return largest_layer * 4 * gpus_per_node * 3 // 2
    each = {"optimizer": 16, "all": 18}[offload]
    return P * each * 3 // 2 // nodes


def kv_cache_bytes(l: int, h_kv: int, d_h: int, tokens: int, item_bytes: int = 2) -> int:  # noqa: E741 -- the papers' symbols
    """2·l·h_kv·d_h·bytes per token: one key and one value per KV head in every layer.

    Source: Shazeer (arXiv 1911.02150); Ainslie et al. (arXiv 2305.13245) for grouped heads.
    """
    key_and_value = 2
    return key_and_value * l * h_kv * d_h * tokens * item_bytes


def latent_cache_bytes(l: int, r_kv: int, d_r: int, tokens: int, item_bytes: int = 2) -> int:  # noqa: E741 -- the papers' symbols
    """l·(r_kv+d_r)·bytes per token: the latent that keys and values share, and the rotary part of the key.

    Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1.
    """
    return l * (r_kv + d_r) * tokens * item_bytes


def generation_textbook(spec: Spec) -> Textbook:
    """Return the closed forms of generation: weights in their dtype, and no activations (there is no backward)."""
    assert spec.inference is not None
    model, each = spec.model, DTYPE_BYTES[spec.inference.dtype]
    count = parameters(model.num_layers, model.hidden_size, model.vocab_size)
    return Textbook(count, model_state_bytes(count, each), activation_bytes=0, bytes_per_parameter=each)


def textbook(spec: Spec) -> Textbook:
    """Return the closed forms of a training run."""
    model, training = spec.model, spec.training
    count = parameters(model.num_layers, model.hidden_size, model.vocab_size)
    per_parameter = RECIPES[training.recipe].textbook_bytes
    return Textbook(
        parameters=count,
        model_state_bytes=model_state_bytes(count, per_parameter),
        activation_bytes=activation_bytes(
            model.num_layers,
            model.hidden_size,
            model.num_attention_heads,
            training.micro_batch_size,
            training.sequence_length,
        ),
        bytes_per_parameter=per_parameter,
    )
