"""PyTorch operators that blocks are written in: what each allocates, saves for backward, and allocates in backward.

An operator saves what its gradient formulas name in torch 2.13's tools/autograd/derivatives.yaml; hidden buffers follow
the rules of `workspaces`. Under autocast, operators cast their inputs as in the lists of torch/csrc's autocast_mode.h:
matmuls to the autocast dtype; norms, softmax and losses to fp32.
"""

from __future__ import annotations

from memcalc.estimation.operators.attention import Attention
from memcalc.estimation.operators.biased import Biased
from memcalc.estimation.operators.collectives import Collectives
from memcalc.estimation.operators.fp32_parameters import Fp32Parameters
from memcalc.estimation.operators.grouped import Grouped
from memcalc.estimation.operators.liger import LigerKernels
from memcalc.estimation.operators.linear_attention import LinearAttention
from memcalc.estimation.operators.loss_parallel import LossParallel
from memcalc.estimation.operators.norms import Norms
from memcalc.estimation.operators.parts import Parts
from memcalc.estimation.operators.routing import Routing
from memcalc.estimation.operators.scores import Scores
from memcalc.estimation.operators.tokenwise import TokenwiseLoss
from memcalc.estimation.operators.wide_weights import WideWeights


class Operators(
    Fp32Parameters,
    TokenwiseLoss,
    Norms,
    WideWeights,
    Attention,
    Grouped,
    Collectives,
    LossParallel,
    LigerKernels,
    Routing,
    Parts,
    Scores,
    Biased,
    LinearAttention,
):
    """A tape with all operators of a module's forward."""
