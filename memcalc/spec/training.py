"""The training, parallelism and hardware blocks: the step, its distribution, and the GPU."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from memcalc.spec.finetuning import LoraSpec, QloraSpec
from memcalc.spec.fp32_modules import Fp32Modules
from memcalc.spec.fsdp import FsdpSpec
from memcalc.spec.model import ConfigBlock, ModelSpec, Probability, Size
from memcalc.spec.optimizers import Average, Norm, Optimizer, OptimizerImplementation, OptimizerOptions
from memcalc.spec.programs import Framework, VersionsSpec
from memcalc.spec.recipes import Dtype
from memcalc.spec.recompute_plan import RecomputeLayers
from memcalc.spec.zero import ZeroSpec

WeightDtype = Literal["bf16", "fp16"]
Recipe = Literal["fp32", "fp32-main", "amp", "pure", "mixed-16", "mixed-18", "mixed-20"]
Implementation = Literal["plain", "huggingface", "megatron", "torchtitan"]
Attention = Literal["eager", "flash", "memory-efficient", "math"]
Loss = Literal["materialized", "chunked", "fused", "tiled", "vocab-parallel", "selective", "gathered"]
Divergence = Literal["forward", "reverse", "symmetric"]
PaddingMask = Literal["none", "boolean", "additive"]
TOKENWISE = ("chunked", "fused", "tiled")  # losses that read the LM head's weight, and never have all logits
LossShift = Literal["labels", "logits"]
LogitsUntil = Literal["step", "backward", "loss"]
NormDtype = Literal["input", "fp32"]
Windows = Literal["mask", "kernel"]
Kernels = Literal["torch", "liger"]

# Modelled families with modules that Liger's kernels replace (liger-kernel 0.8 transformers/monkey_patch.py).
LIGER_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
FakeQuantization = Literal["none", "int8-int4", "int8-int4-by-range"]
Fp8 = Literal["none", "delayed", "tensorwise", "mxfp8", "blockwise", "rowwise", "rowwise-gw-hp"]
Engine = Literal["ddp", "fsdp1", "fsdp2", "deepspeed", "megatron"]
ContextMethod = Literal["ring", "all-gather", "all-to-all"]
Offload = Literal["none", "optimizer", "parameters", "all"]
OffloadActivations = Literal["none", "pinned", "pageable"]
Schedule = Literal[
    "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe", "dualpipe-v"
]
TorchVersion = Literal["v2.6", "v2.7", "v2.8", "v2.9", "v2.10", "v2.11", "v2.12", "v2.13"]
PipelineSplit = Literal["layers", "layers-and-ends"]
PipelineTensors = Literal["none", "hidden-states", "with-shared-mask", "with-masks"]
RecomputeModule = Literal["core_attn", "moe_act", "mla_up_proj", "mlp", "moe", "shared_experts", "layernorm"]

# Every stage is evaluated; no published run has more than a few hundred.
Stages = Annotated[int, Field(gt=0, le=1024)]
BucketSize = Annotated[int, Field(gt=0, le=2**20)]  # MiB
# The valid settings depend on the PyTorch version; they are parsed by the estimate (estimation/estimate.py,
# refuse_settings).
AllocConf = Annotated[str, Field(max_length=1000)]
RecomputeWord = Annotated[str, Field(pattern=r"^(none|selective|full|every-[1-9][0-9]{0,5})$")]


class TrainingSpec(ConfigBlock):
    """One training step: sizes, precision, optimizer, and what autograd saves."""

    micro_batch_size: Size = Field(1, description="(b) sequences in one forward")
    sequence_length: Size = Field(description="(s) tokens; default: min(2048, max_position_embeddings)")
    pairs: bool = Field(
        False,
        description="each sample is two sequences, chosen and rejected, in one forward pass (preference training)",
    )
    reference_model: bool = Field(
        False, description="a frozen copy of the model in addition, in the dtype of its weights (preference training)"
    )
    scored_apart: bool = Field(
        False,
        description="loss gathered: whether chosen and rejected sequences are scored one after the other, each from "
        "their own logits (torchtune's recipe for whole models)",
    )
    reference_logits_until: Literal["loss", "step"] = Field(
        "loss",
        description="when the logits of the reference, or of the policy without its adapters, are released: loss: with "
        "their log-probabilities | step: when those of the next micro-batch exist (torchtune with adapters)",
    )
    teacher: ModelSpec | None = Field(
        None,
        description="frozen model with logits that the run's model learns (distillation): a preset, a config.json or a "
        "hub id, or a block like model; default: none",
    )
    teacher_dtype: Dtype | None = Field(
        None, description="dtype of the teacher's weights; default: that of the run's frozen weights, or of its model"
    )
    divergence: Divergence = Field(
        "forward",
        description="with a teacher: the Kullback-Leibler divergence of fp32 probabilities that is added to the loss: "
        "forward | reverse | symmetric (both)",
    )
    evaluation_batch_size: Size | None = Field(
        None, description="sequences of an evaluation's forward pass between steps; default: no evaluation"
    )
    evaluation_when: Literal["between", "before", "both"] = Field(
        "between",
        description="when an evaluation runs: between steps | before the first step, on two batches (a sanity check) | "
        "both (LitGPT)",
    )
    empty_cache_steps: Size | None = Field(
        None,
        description="torch.cuda.empty_cache() is called in each micro-batch of every n-th step, the first included "
        "(TrainingArguments' torch_empty_cache_steps); default: never",
    )
    empty_cache_when: Literal["before-backward", "after-backward"] = Field(
        "before-backward",
        description="when it is called: before-backward (transformers' Trainer) | after-backward (axolotl's DPO)",
    )
    evaluation_loss: Literal["training", "whole"] = Field(
        "training",
        description="an evaluation's loss: that of training | whole: of a shifted copy of all logits (LitGPT)",
    )
    completion_length: Size | None = Field(
        None,
        description="tokens of each sequence that the model generates itself before it trains on them (GRPO); default: "
        "none",
    )
    steps_per_generation: Size | None = Field(
        None, description="micro-batches per generation of completions; default: gradient_accumulation_steps"
    )
    gradient_accumulation_steps: Size = Field(1, description="micro-batches before each optimizer step")
    global_batch_size: Size | None = Field(None, description="b * accumulation * data_parallel, checked if given")
    dtype: Dtype = Field("bf16", description="compute dtype of forward and backward")
    autocast: bool | None = Field(
        None,
        description="whether forward and loss run under torch.autocast, as Trainer's bf16: true does for any dtype of "
        "the weights; default: with recipe amp",
    )
    recipe: Recipe = Field(
        "mixed-20",
        description="which copies of weights and gradients exist, and when: `memcalc estimate CONFIG --explain recipe`",
    )
    weight_dtype: WeightDtype | None = Field(
        None,
        description="dtype of 16-bit weights if autocast computes in another one, as with bf16: true for a model that "
        "is published in float16; default: dtype",
    )
    fp32_modules: Fp32Modules = Field(
        (),
        description="modules in fp32 while others are 16-bit, with recipe pure and autocast: embed_tokens, lm_head, "
        "norm (every norm), as in axolotl's full fine-tuning",
    )
    fp8: Fp8 = Field(
        "none",
        description="FP8 matmuls, by their scaling: Transformer Engine (implementation megatron), else torchao",
    )
    fp8_skip: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        ("lm_head", "mlp.router"), description="linear layers that torchao does not convert: parts of their names"
    )
    fp8_all_gather: bool = Field(False, description="FSDP2 gathers torchao's weights in FP8 (fp8: tensorwise)")
    fp8_params: bool = Field(False, description="Megatron-LM's --fp8-param-gather: FP8 weights without a 16-bit copy")
    fake_quantization: FakeQuantization = Field(
        "none",
        description="quantization-aware training: torchao rounds what linear layers multiply to few bits, in tensors "
        "of the same dtype: int8-int4 (8-bit inputs and 4-bit weights, torchtune) | int8-int4-by-range (the same with "
        "differentiable ranges of the weights, axolotl)",
    )
    fake_quantization_group: Size = Field(
        256, description="elements of a weight's row that share a scale of fake quantization"
    )
    implementation: Implementation = Field(
        "plain", description="implementation of the modules; with engine megatron by default its own"
    )
    optimizer: Optimizer = Field("adamw", description="optimizer; determines the state of each parameter")
    optimizer_implementation: OptimizerImplementation = Field(
        description="how the optimizer step runs, which determines its temporaries; default: foreach, else for-loop"
    )
    optimizer_options: OptimizerOptions = Field(
        OptimizerOptions(), description="further options that its state depends on"
    )
    optimizer_in_backward: bool = Field(
        False,
        description="the optimizer updates each parameter during backward, once its gradient is complete, and frees "
        "the gradient (torchtune's optimizer_in_bwd, register_post_accumulate_grad_hook)",
    )
    gradient_dtype: Dtype | None = Field(
        None, description="dtype in which gradients are summed; default: that of the recipe"
    )
    gradient_clipping: Norm | None = Field(None, description="global norm that gradients are clipped to")
    ema: Average = Field("none", description="a moving average of the weights: none | weights (their dtype) | fp32")
    zero_grad: Literal["set_to_none", "zero"] = Field("set_to_none", description="free gradients, or fill with zeros")
    zero_grad_before: Literal["forward", "backward"] = Field(
        "forward",
        description="phase before which gradients are freed; default: forward, but backward with framework lightning",
    )
    recompute: RecomputeWord | RecomputeLayers = Field(
        "none",
        description="layers that backward recomputes: none | selective | full | every-k (each k-th) | a list of them, "
        "where a nested list is one checkpoint segment",
    )
    reentrant_checkpoints: bool = Field(
        False,
        description="whether a recomputed layer runs a backward of its own (torch.utils.checkpoint, "
        "use_reentrant=True; with implementation huggingface), as TRL forces on adapters at ZeRO stage 3",
    )
    recompute_modules: Annotated[tuple[RecomputeModule, ...], Field(strict=False)] = Field(
        ("core_attn",), description="modules that selective recomputation recomputes, in Megatron-LM's syntax"
    )
    recompute_keep: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (), description="operators of recomputed layers that save their results (docs/guides/recompute.md)"
    )
    offload_activations: OffloadActivations = Field(
        "none", description="store saved activations in host memory (PyTorch's save_on_cpu): pinned or pageable"
    )
    compile: bool = Field(
        False,
        description="whether torch.compile compiles the model; eager execution is counted, which mostly holds more",
    )
    attention: Attention = Field(
        "flash",
        description="attention kernel; families of transformers without a fused one use eager. math is PyTorch's "
        "kernel for transformers' modules with grouped heads in fp32. With implementation megatron eager means "
        "Megatron-Core's own modules (--transformer-impl local)",
    )
    attention_windows: Windows = Field(
        "kernel",
        description="how a sliding window no longer than the sequence is applied: kernel (flash_attention_2) | mask, "
        "with which PyTorch's sdpa runs its memory-efficient kernel; default: mask with huggingface, else kernel",
    )
    padding_free: bool = Field(
        False, description="all sequences of a batch are one row of tokens (padding-free batches, TRL's packing)"
    )
    variable_lengths: bool = Field(
        False,
        description="whether batches have different lengths of at most sequence_length, as with dynamic padding, which "
        "pads each batch to its longest sequence",
    )
    labeled_tokens: Size | None = Field(
        None,
        description="with loss tiled: tokens of each sequence that have a label, on average; default: all but the last",
    )
    padding_mask: PaddingMask = Field(
        "none",
        description="mask of padded sequences, with which transformers' sdpa runs the memory-efficient kernel: "
        "none | boolean (each layer saves a numeric copy) | additive (numbers that all layers share; "
        "transformers before 4.53)",
    )
    dropout: Probability | None = Field(None, description="rate of all dropouts in a block; default: the model's")
    loss: Loss = Field(
        "materialized",
        description="how logits and loss are computed: whole, in chunks, fused, or sharded over the vocabulary; with "
        "implementation megatron fused is Transformer Engine's, on logits that it overwrites; selective is "
        "axolotl's kernel for the log-probabilities of labels, or TRL 1.14's with framework dpo, with pairs; gathered "
        "takes these from log_softmax of all logits (torchtune's preference training)",
    )
    loss_chunks: Annotated[int, Field(gt=0, le=1024)] = Field(
        8, description="number of chunks of the tokens in a chunked loss"
    )
    loss_recompute: bool = Field(
        True, description="chunked loss: whether chunks are checkpointed or save their logits (torchtune)"
    )
    chunked_head: bool = Field(
        True,
        description="chunked loss without recomputation: whether the LM head also runs on each chunk, or once on "
        "all tokens (LitGPT's full fine-tuning)",
    )
    repeat_kv: bool = Field(
        False,
        description="modules copy keys and values for every query head before the flash kernel (torchtune, LitGPT, "
        "torchtitan before 0.2.2; transformers' modules under axolotl with packed samples)",
    )
    heads_first: bool = Field(
        False,
        description="plain modules pass queries to the kernel head by head, so its output is copied token by token "
        "(LitGPT)",
    )
    norm_dtype: NormDtype = Field(
        "input",
        description="plain RMSNorms: input (one kernel in the dtype of the input) | fp32 (operators on an fp32 copy, "
        "cast back at the end; LitGPT, torchtune)",
    )
    loss_shift: LossShift = Field(
        "labels",
        description="what transformers' loss shifts by a token: labels | logits, of which it makes a copy in fp32 "
        "(transformers before 4.49); with huggingface",
    )
    loss_upcast: bool = Field(
        True,
        description="whether the loss makes an fp32 copy of the logits (`logits.float()`), or reads them directly "
        "(`F.cross_entropy(logits, ...)`); default: true, but false with framework loop",
    )
    logits_dtype: Literal["compute", "fp32"] = Field(
        "compute",
        description="dtype of the logits that the model returns: compute | fp32 (converted, as by Lightning Fabric)",
    )
    kernels: Kernels = Field(
        "torch",
        description="kernels of transformers' norms, RoPE and MLPs: torch | liger (for its loss set loss: fused)",
    )
    logits_until: LogitsUntil = Field(
        "backward",
        description="when the logits are released: backward: after it (`outputs = model(...)` in a function) | step: "
        "when the next forward has returned | "
        "loss (Hugging Face's Trainer, `del logits`); default: backward, but loss with megatron, torchtitan and "
        "framework lightning, and step with framework loop",
    )
    torch_version: TorchVersion = Field(
        "v2.13", description="PyTorch version: workspaces, FSDP2's buffers, fused norms"
    )
    alloc_conf: AllocConf = Field(
        "",
        description='settings of PyTorch\'s allocator, as PYTORCH_CUDA_ALLOC_CONF: "expandable_segments:True"',
    )
    finetune: Literal["full", "lora", "qlora"] = Field("full", description="which parameters train")
    vision_tower: Literal["trained", "frozen"] = Field(
        "trained",
        description="the vision tower of a vision-language model: trained (with LoRA it has adapters) | frozen",
    )
    framework: Framework | None = Field(
        None,
        description="program that runs the file; determines defaults of another framework's file "
        "(docs/reference/frameworks)",
    )
    versions: VersionsSpec | None = Field(None, description="versions of packages that affect memory")
    lora: LoraSpec | None = Field(None, description="adapters; with finetune lora or qlora")
    qlora: QloraSpec | None = Field(None, description="the 4-bit base; with finetune qlora")

    @property
    def autocasts(self) -> bool:
        """Whether forward and loss run under torch.autocast."""
        return self.recipe == "amp" if self.autocast is None else self.autocast

    @property
    def transformer_engine(self) -> bool:
        """Whether Megatron-Core's layers use Transformer Engine's modules instead of its own."""
        return self.implementation == "megatron" and self.attention != "eager"

    @property
    def sequences(self) -> int:
        """Rows of tokens in one forward pass."""
        return 1 if self.padding_free else self._all_sequences

    @property
    def row_length(self) -> int:
        """Tokens per row."""
        return self.sequence_length * (self._all_sequences if self.padding_free else 1)

    @property
    def _all_sequences(self) -> int:
        return self.micro_batch_size * (2 if self.pairs else 1)

    @property
    def torch(self) -> tuple[int, int]:
        """PyTorch's version as comparable numbers."""
        major, minor = self.torch_version.removeprefix("v").split(".")
        return int(major), int(minor)


class ParallelismSpec(ConfigBlock):
    """How the step is sharded over ranks."""

    engine: Engine = Field(
        description="library that shards; default: ddp, deepspeed (ZeRO 1, 2) or fsdp2 (ZeRO 3); in schedules other "
        "than 1f1b megatron (ZeRO 1) or fsdp2 (ZeRO 2)"
    )
    data_parallel: Size = Field(1, description="N: replicas, over which ZeRO shards")
    tensor_parallel: Size = Field(1, description="t: ranks that shard each linear layer")
    pipeline_parallel: Stages = Field(1, description="p: stages, each with a part of the layers")
    context_parallel: Size = Field(1, description="ranks that shard the sequence in all layers")
    expert_parallel: Size = Field(1, description="ranks that shard the experts")
    sequence_parallel: bool = Field(False, description="shard norms and residuals along the sequence over the t ranks")
    context_parallel_method: ContextMethod = Field(
        "ring",
        description="what ranks exchange: ring (keys and values, from rank to rank) | all-gather (keys and values of "
        "all ranks at once, the default of torchtitan and Accelerate) | all-to-all (heads)",
    )
    expert_tensor_parallel: Size | None = Field(None, description="ranks that shard each expert; default: t")
    schedule: Schedule = Field(
        "1f1b", description="pipeline schedule; determines the micro-batches in flight on each stage"
    )
    virtual_stages: Size = Field(1, description="v: chunks of layers in each stage of an interleaved schedule")
    pipeline_split: PipelineSplit = Field(
        "layers",
        description="what stages have equally many of: layers | layers-and-ends (embedding and LM head count as one "
        "layer each, as with DeepSpeed's type:transformer|embedding)",
    )
    pipeline_tensors: PipelineTensors | None = Field(
        None,
        description="with engine deepspeed: what its pipeline engine passes from module to module and keeps for each "
        "micro-batch: none (the engine does not run) | hidden-states | with-shared-mask (one attention mask for all "
        "sequences, GPT-NeoX) | with-masks (one for each); default: hidden-states with several stages",
    )
    data_parallel_replicate: Size = Field(
        1, description="HSDP: number of groups of ranks; each group shards separately"
    )
    zero_stage: Annotated[int, Field(ge=0, le=3)] = Field(
        0, description="what is sharded: 1: optimizer state, 2: gradients too, 3: weights too"
    )
    fsdp: FsdpSpec = Field(FsdpSpec(), description="mixed-precision policy, units and reductions of FSDP1 or FSDP2")
    zero_optimization: ZeroSpec = Field(ZeroSpec(), description="DeepSpeed's buffer sizes, and what its release copies")
    offload: Offload = Field(
        "none",
        description="in host memory: optimizer: master weights, gradients and states (ZeRO-Offload) | parameters: "
        "weights only "
        "(ZeRO-Infinity) | all: both (FSDP2's CPUOffloadPolicy)",
    )
    offload_pin_memory: bool = Field(
        False,
        description="whether offloaded tensors are in pinned memory; default: true under fsdp2, as in PyTorch's policy",
    )

    find_unused_parameters: bool = Field(
        False,
        description="DDP's argument: with it gradient buckets have 25 MiB from the start; otherwise one bucket has all "
        "gradients of the first backward; other engines ignore it",
    )

    bucket_cap_mb: BucketSize | None = Field(
        None,
        description="DDP's argument: MiB of a gradient bucket; default: 25, and 1 for the first one; other engines "
        "ignore it",
    )

    @property
    def reduces_once(self) -> bool:
        """Whether FSDP reduces gradients after the last micro-batch only, as PyTorch's pipeline schedules always do."""
        return self.fsdp.gradient_sync == "last" or (self.engine == "fsdp2" and self.pipeline_parallel > 1)

    @property
    def has_pipeline_engine(self) -> bool:
        """Whether DeepSpeed's pipeline engine runs the model, which programs also use with one stage.

        Its schedule is 1F1B.
        """
        chosen = self.pipeline_parallel > 1 if self.pipeline_tensors is None else self.pipeline_tensors != "none"
        return self.engine == "deepspeed" and self.schedule == "1f1b" and chosen

    @property
    def weights_on_host(self) -> bool:
        """Whether a rank's shards of the parameters are in host memory."""
        return self.offload in ("parameters", "all")

    @property
    def trains_alone(self) -> bool:
        """Whether one GPU trains without a sharding engine; DeepSpeed's stages run on one, too."""
        return self.ranks == 1 and not (self.engine == "deepspeed" and self.zero_stage)

    @property
    def ranks(self) -> int:
        """Ranks of the whole run; expert parallelism reuses them."""
        return self.data_parallel * self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def expert_width_ranks(self) -> int:
        """Ranks that split each expert."""
        return self.tensor_parallel if self.expert_tensor_parallel is None else self.expert_tensor_parallel

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO shards; includes context-parallel ranks, which share weights, and one HSDP group."""
        return self.data_parallel // self.data_parallel_replicate * self.context_parallel

    @property
    def expert_shards(self) -> int:
        """Ranks over which ZeRO shards experts, which have fewer copies:

        t·c·N ranks hold each in e parts of t_e slices.
        """
        copies = self.shards * self.tensor_parallel
        return max(copies // (self.expert_parallel * self.expert_width_ranks), 1)


class HardwareSpec(ConfigBlock):
    """The GPU of each rank."""

    gpu: str | None = Field(None, description="the name of a GPU; see `memcalc gpus`")
