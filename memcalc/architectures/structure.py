"""Structure of a block's tape: options, not sizes. Tapes are compiled once per structure."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.architectures.options.attention import (
    AttentionOptions,
    LayerKVCache,
    MaskOptions,
    PositionOptions,
    ProjectionOptions,
    attention_of,
    full_attention_of,
    masks_of,
    position_of,
    projections_of,
)
from memcalc.architectures.options.ends import (
    EmbeddingOptions,
    HeadOptions,
    LossOptions,
    embedding_of,
    head_of,
    loss_of,
)
from memcalc.architectures.options.execution import (
    SavingOptions,
    ShardingOptions,
    dtypes_of,
    linears_of,
    saving_of,
    sharding_of,
)
from memcalc.architectures.options.layers import (
    ExpertOptions,
    MixerOptions,
    MlpOptions,
    NormOptions,
    ResidualOptions,
    experts_of,
    mixers_of,
    mlp_of,
    norm_of,
    residual_of,
)
from memcalc.layout.spec_cache import cached_by_spec
from memcalc.layout.stages import LayerModules
from memcalc.operators.base import Dtypes, LinearLayers, wider
from memcalc.spec.model_families.conversion import family_of
from memcalc.spec.spec import Spec
from memcalc.spec.training import LIGER_FAMILIES

SEVERAL = 2  # chunks of a loss


class BlockStructure(NamedTuple):
    """Options that decide which operators run, on tensors of which dtypes and axes."""

    implementation: str
    family: str  # of transformers' modules; "" for others
    liger: bool  # Liger's kernels replace transformers' norms, RoPE and MLPs
    batched: bool  # b > 1: heads split from a fused tensor are not contiguous
    norm: NormOptions
    residual: ResidualOptions
    attention: AttentionOptions
    full_attention: AttentionOptions | None  # of layers with the heads of `model.full_attention`
    projections: ProjectionOptions
    position: PositionOptions
    masks: MaskOptions
    mlp: MlpOptions
    experts: ExpertOptions
    mixers: MixerOptions
    embedding: EmbeddingOptions
    head: HeadOptions
    loss: LossOptions
    dtypes: Dtypes
    linears: LinearLayers
    sharding: ShardingOptions
    saving: SavingOptions
    layer: LayerModules = LayerModules()  # in which layers differ, for the structure of one of them
    cache: LayerKVCache | None = None  # the KV cache in generation

    def of_layers(self, modules: LayerModules) -> BlockStructure:
        """Return the structure of a layer with these modules."""
        attention = (self.full_attention if modules.full_heads else None) or self.attention
        if self.implementation == "huggingface":
            attention = attention.with_mask(masked=modules.masked)
        return self._replace(
            attention=attention,
            layer=modules._replace(detached=modules.detached or self.layer.detached),
        )

    def without_adapters(self) -> BlockStructure:
        """Return the structure with the adapters disabled; their frozen base, perhaps in 4 bits, stays."""
        adapters = self.linears.adapters
        base = None if adapters is None else adapters._replace(targets=(), saved=())
        return self._replace(linears=self.linears._replace(adapters=base))

    def as_read_by_head(self) -> BlockStructure:
        """Return the structure without options that the LM head does not depend on, so its tape is compiled once."""
        masks = self.masks._replace(padding="none", window_of_sequences=False)
        return self if masks == self.masks else self._replace(masks=masks)

    def as_read_by_others(self) -> BlockStructure:
        """Return the structure of other parts, which depend only on whether the loss has several chunks."""
        return self if self.loss.chunks <= SEVERAL else self._replace(loss=self.loss._replace(chunks=SEVERAL))

    @property
    def stream(self) -> str:
        """The dtype of hidden states between layers: that of the embedding's output and of what is added to it."""
        dtypes = self.dtypes
        if dtypes.autocast:
            return wider(dtypes.embedded, dtypes.compute)
        return dtypes.parameters if self.implementation == "huggingface" else dtypes.compute

    @property
    def keys(self) -> str:
        """The axis of keys and values: the tokens of this forward, or all tokens in the cache."""
        return "s" if self.cache is None else self.cache.keys

    @property
    def head_gradient_is_a_view(self) -> bool:
        """Whether the LM head's weight gradient is a view of one matmul, not a sum, nor a fused loss's tensor."""
        return self.loss.reads_all_logits and not self.linears.replaced


@cached_by_spec
def block_structure(spec: Spec) -> BlockStructure:
    """Return the structure of a run."""
    training, architecture = spec.training, spec.model.architecture or ""
    theirs = training.implementation == "huggingface"
    return BlockStructure(
        implementation=training.implementation,
        family=family_of(architecture) if theirs and architecture else "",
        liger=theirs and training.kernels == "liger" and architecture in LIGER_FAMILIES,
        batched=training.sequences > 1,
        norm=norm_of(spec),
        residual=residual_of(spec),
        attention=attention_of(spec),
        full_attention=full_attention_of(spec),
        projections=projections_of(spec),
        position=position_of(spec),
        masks=masks_of(spec),
        mlp=mlp_of(spec),
        experts=experts_of(spec),
        mixers=mixers_of(spec),
        embedding=embedding_of(spec),
        head=head_of(spec),
        loss=loss_of(spec),
        dtypes=dtypes_of(spec),
        linears=linears_of(spec),
        sharding=sharding_of(spec),
        saving=saving_of(spec),
        layer=LayerModules(detached=spec.inference is not None),
    )
