"""PyTorch operators of blocks, with the tensors that each allocates, saves for backward, and allocates in backward.

An operator saves what its gradient formulas name in torch 2.13's tools/autograd/derivatives.yaml; hidden buffers follow
the rules of `workspaces`. Under autocast, operators cast their inputs as in the lists of torch/csrc's autocast_mode.h:
matmuls to the autocast dtype; norms, softmax and losses to fp32.
"""

from __future__ import annotations

from memcalc.operators.attention import FusedAttention
from memcalc.operators.attention_scores import AttentionScores
from memcalc.operators.chunked_loss import ChunkedLoss
from memcalc.operators.collectives import Collectives
from memcalc.operators.divergence import DivergenceLoss
from memcalc.operators.fp32_parameters import Fp32NormWeight, Fp32Parameters
from memcalc.operators.fused_lora import FusedLora
from memcalc.operators.gpt_oss_ops import GptOssOps
from memcalc.operators.liger import LigerKernels
from memcalc.operators.linear_attention import LinearAttention
from memcalc.operators.loss_parallel import LossParallel
from memcalc.operators.megatron_local import MegatronLocal
from memcalc.operators.megatron_moe_ops import MegatronMoeOps
from memcalc.operators.norms import Norms
from memcalc.operators.ring_attention import RingAttention
from memcalc.operators.slice_assignment import SliceAssignment
from memcalc.operators.state_space import StateSpace
from memcalc.operators.token_permutation import TokenPermutation


class Operators(
    Fp32Parameters,
    FusedLora,
    ChunkedLoss,
    DivergenceLoss,
    Norms,
    Fp32NormWeight,
    FusedAttention,
    RingAttention,
    MegatronMoeOps,
    MegatronLocal,
    Collectives,
    LossParallel,
    LigerKernels,
    TokenPermutation,
    SliceAssignment,
    AttentionScores,
    GptOssOps,
    LinearAttention,
    StateSpace,
):
    """A tape with all operators of a module's forward."""
