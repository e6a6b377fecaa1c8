"""Base class of transformers' families: embedding, LM head, attention kernels, and parts of layers."""

from __future__ import annotations

from memcalc.architectures.kv_cache import cached_attention, write_next_token
from memcalc.architectures.losses import write_loss
from memcalc.architectures.math_attention import math_attention
from memcalc.architectures.structure import BlockStructure
from memcalc.ledger.component import Component
from memcalc.operators import Operators
from memcalc.programs.program import SharedTable
from memcalc.programs.tape import Shape, Tape, Tensor


class Family:
    """Base class of the families.

    Args:
        c: the structure.
        tape: records the operators.
        experts: whether a layer has experts instead of a dense MLP.
    """

    rotates = True  # RoPE with the model's cos/sin cache, shared by all layers
    tables: tuple[str, ...] = ("cosines", "sines")
    wide_tables = False  # the cos/sin cache stays in fp32
    layers_take_positions = True  # position ids are arguments of the layers
    spreads_tables = False  # each layer repeats the cos/sin cache for pairs of adjacent features
    drops_between_tables = False  # embedding dropout comes after the masks and before the RoPE cache
    renames_embeddings = False  # inputs_embeds is rebound to the result of embedding dropout
    masks_windows = False  # a separate eager mask for layers with a sliding window
    window_mask: Shape = ("s", "s")
    mask_of_sequences: Shape = ("b", "s", "s")
    turns_windows = False  # a separate RoPE cache for layers with a sliding window
    positions_first = True  # the model makes position ids before the mask, if the position embedding is not learned
    mask_first = False  # the mask before learned positions
    names_returned = False  # the model's loop references all that a layer returns, attention weights included
    wide_probabilities = False  # attention probabilities are not cast after the softmax
    fp32_logits = False  # the model itself returns logits in fp32
    # Modules followed by a module without parameters, except activations: dropout of any probability, a container.
    silent_after: tuple[str, ...] = ()
    mlp_is_module = True  # whether a module contains the layers of the MLP
    transposes_experts = True  # whether the matmuls of routed experts read transposed views of their weights
    activation_is_module = True  # whether a module without parameters applies the activation

    def __init__(self, c: BlockStructure, tape: Tape, *, experts: bool = False) -> None:
        self.c, self.experts = c, experts
        self.citation = f"transformers 5.23 modeling_{c.family}.py"
        self.weights: tuple[Tensor, ...] = ()  # attention weights, returned where they exist
        self.tape = tape
        if c.saving.reentrant:
            tape.checkpoints.stops_early, tape.checkpoints.reentrant = False, True
        self.ops = Operators(self.tape, c.dtypes, c.linears)

    @classmethod
    def lacks_kernel(cls, c: BlockStructure) -> str:  # noqa: ARG003
        """Return why PyTorch has no kernel for this attention; empty if it has one."""
        return ""

    def entry(self) -> Tensor:
        """Return the layer's input."""
        c, shape = self.c, ("b", "s", "d")
        return self.tape.input(
            "layer input", shape, c.stream, self.citation, grad=not c.layer.detached, leaf=c.layer.reads_leaf
        )

    def embedding(self) -> Tensor:
        """Write token and position embeddings and the shared tables; return the first layer's input."""
        c, ops = self.c, self.ops
        x = self.token_embedding()
        if c.position.kind == "learned":
            ids = None if self.rows != ("s",) else self.position_ids()
            if self.mask_first:
                self.shared_tables()
            positions = self.positions(ids)
            # variables inputs_embeds and position_embeds
            self.tape.live.names.update((x.storage, positions.storage))
            x = ops.broadcast_add(x, positions, "embedding sum")
        elif not self.renames_embeddings:
            self.tape.live.names.add(x.storage)  # variable inputs_embeds
        if self.drops_between_tables:
            self.masks()
        elif c.position.kind != "learned" or not self.mask_first:
            self.shared_tables()
        x = ops.dropout(self.first_hidden(x), "embedding dropout", c.embedding.dropout)
        if self.drops_between_tables:
            self.write_rotary_tables()
        if self.renames_embeddings:
            self.tape.live.names.add(x.storage)
        return x

    @property
    def rows(self) -> Shape:
        """Axes of what has one row per position: of all sequences alike, or of each if the model gets position ids."""
        return ("b", "s") if self.c.cache is not None and self.c.cache.own_positions else ("s",)

    def position_ids(self) -> Tensor:
        """Return the position ids of a sequence."""
        counted = self.ops.table("positions so far", ("s",), "int64")
        return self.argument("embed_positions indices", ("s",), counted)

    def positions(self, ids: Tensor | None) -> Tensor:
        """Return position embeddings; without `ids`, the ids are created here."""
        table = (self.c.position.table, "d")
        if ids is None:
            return self.ops.embedding("embed_positions", table, self.rows, counts=True)
        rows = self.ops.embedding("embed_positions", table, ("s",), index=ids)
        self.name_positions(ids.storage)
        return rows

    def name_positions(self, indices: int) -> None:
        """Keep position_ids live until the model returns or, as an argument of recomputed layers, their backward."""
        self.name_argument(indices, stays=self.c.saving.checkpoints_layers and self.layers_take_positions)

    def name_mask(self, storage: int, readers: str) -> None:
        """Keep a mask live until the model returns, or until the backward of its last recomputed reader."""
        c = self.c
        stays = {
            "all": c.saving.checkpoints_layers,
            "windows": c.saving.recomputed_windows,
            "others": c.saving.recomputed_others,
        }[readers]
        self.name_argument(storage, stays=stays)
        if stays:
            self.tape.live.read_by[storage] = readers

    def name_argument(self, storage: int, *, stays: bool) -> None:
        """Keep an argument of layers live: until the model returns or, if it `stays`, until the layers' backward.

        Source: torch/utils/checkpoint.py: the recomputed function references its arguments.
        """
        (self.tape.live.held if stays else self.tape.live.names).add(storage)

    def first_hidden(self, x: Tensor) -> Tensor:
        """Return the first layer's input."""
        return x

    def token_embedding(self) -> Tensor:
        """Return the embedding of the tokens."""
        c, ops = self.c, self.ops
        width, view = "d_e" if c.embedding.separate_size else "d", c.head_gradient_is_a_view
        x = ops.embedding("embed_tokens", ("V", width), ("b", "s"), tied=c.embedding.tied, view=view)
        return (
            ops.linear(x, "project_in", ("d", "d_e"), ("b", "s", "d"), bias=False) if c.embedding.separate_size else x
        )

    def shared_tables(self) -> None:
        """Write masks and RoPE cos/sin caches, created once per forward and shared by all layers."""
        self.masks()
        self.write_rotary_tables()

    def masks(self) -> None:
        """Write the position ids, where they come first, and the masks."""
        c = self.c
        if self.positions_first and c.position.kind != "learned" and self.rows == ("s",):
            self.count_positions()
        if c.attention.kernel == "eager":
            both = self.masks_windows and c.masks.has_windows
            everywhere = c.masks.has_windows and not self.masks_windows
            mask = self.eager_mask(
                SharedTable("causal mask", False if both else None), "causal mask", windowed=everywhere
            )
            self.name_mask(mask.storage, "others" if self.masks_windows else "all")
            if both:
                mask = self.eager_mask(SharedTable("causal mask", windows=True), "mask of windows", windowed=True)
                self.name_mask(mask.storage, "windows")
        elif c.cache is not None and c.cache.masked and not c.cache.given_masks:
            mask = self.window_truth("mask") if c.masks.has_windows else self.causal_truth("mask")
            self.name_mask(mask.storage, "all")
        if c.masks.padding in ("boolean", "packed"):
            truth = self.packed_truth if c.masks.padding == "packed" else self.padding_truth
            self.name_mask(truth("padding mask").storage, "all")
        elif c.masks.padding == "additive":
            causal = self.causal_truth("padding mask, truth")
            mask = self.shared_table(
                "padding mask", self.mask_of_sequences, c.dtypes.embedded, causal, table=SharedTable("padding mask")
            )
            self.name_mask(mask.storage, "all")
        if c.masks.window:
            windows, table = c.masks.window_of_sequences, SharedTable("window mask", windows=True)
            mask = self.window_truth("window mask", self.window_mask, table, of_sequences=windows)
            self.name_mask(mask.storage, "windows")

    def write_rotary_tables(self) -> None:
        """Write the RoPE cos/sin cache of all layers, or one per layer type."""
        c = self.c
        if not self.rotates:
            return
        own = self.turns_windows and c.masks.has_windows  # whether layers with a sliding window have a separate cache
        kinds: tuple[bool | None, ...] = ((False, True) if c.masks.has_full_attention else (True,)) if own else (None,)
        for windows in kinds:
            for table in self.rotary_tables(windows=windows):
                # a checkpoint references them as arguments
                self.name_argument(table.storage, stays=c.saving.checkpoints_layers or self.reads_tables)

    def count_positions(self) -> None:
        """Write position_ids: torch.arange plus the length of the cache."""
        counted = self.ops.table("positions so far", ("s",), "int64")
        ids = self.shared_table("position ids", ("s",), "int64", counted)
        self.name_positions(ids.storage)

    def eager_mask(self, table: SharedTable, name: str, *, windowed: bool = False) -> Tensor:
        """Write an additive mask in the embeddings' dtype; adding it to scores saves nothing (masking_utils.py)."""
        c = self.c
        truth = self.window_truth(f"{name}, truth") if windowed else self.causal_truth(f"{name}, truth")
        return self.shared_table(name, self.mask, c.dtypes.embedded, truth, table=table)

    def _counted(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the indices of queries and of keys, each plus an offset."""
        found = []
        for of in ("queries", "keys"):
            axis = (self.c.keys if of == "keys" else "s",)
            counted = self.ops.table(f"{name}: {of} so far", axis, "int64")
            found.append(self.ops.table(f"{name}: {of}", axis, "int64", of=(counted,)))
        return found[0], found[1]

    def causal_truth(self, name: str) -> Tensor:
        """Return a mask that is true where a key is not after the query (masking_utils.py, causal_mask_function)."""
        return self.ops.table(name, ("s", self.c.keys), "bool", of=self._counted(name))

    def padding_truth(self, name: str) -> Tensor:
        """Return each sequence's mask, true where a key is not after the query and no padding (masking_utils.py)."""
        ops, square = self.ops, ("s", self.c.keys)
        counted = self._counted(name)
        causal = ops.table(f"{name}: not behind", square, "bool", of=counted)
        allowed = ops.table(f"{name}: not behind, and allowed", square, "bool", of=(causal,))
        tokens = ops.table(f"{name}: of tokens", ("b", self.c.keys), "bool", of=counted[1:])
        both = self.shared_table(
            name, self.mask_of_sequences, "bool", allowed, tokens, table=SharedTable("padding mask")
        )
        self.tape.still_referenced(*counted)
        return both

    def packed_truth(self, name: str) -> Tensor:
        """Return the mask of texts in one row, true where a key is in the query's text and not after the query.

        Source: transformers 5.23 masking_utils.py, packed_sequence_compatibility_function.
        """
        ops, square = self.ops, ("s", self.c.keys)
        counted = self._counted(name)
        alike = ops.table(f"{name}: in the same text", square, "bool", of=counted)
        allowed = ops.table(f"{name}: in the same text, and allowed", square, "bool", of=(alike,))
        causal = ops.table(f"{name}: not behind", square, "bool", of=counted)
        both = self.shared_table(
            name, self.mask_of_sequences, "bool", allowed, causal, table=SharedTable("padding mask")
        )
        self.tape.still_referenced(*counted)
        return both

    def window_truth(
        self, name: str, shape: Shape | None = None, table: SharedTable | None = None, *, of_sequences: bool = False
    ) -> Tensor:
        """Return a mask, true where a key is in the query's window and not after it (masking_utils.py, and_masks).

        Args:
            name: the mask's.
            shape: the mask's; None: queries by keys.
            table: what all layers share; None: the mask alone.
            of_sequences: also with the mask of each sequence's tokens (padding_mask_function).
        """
        ops, shape = self.ops, shape or ("s", self.c.keys)
        counted = self._counted(name)
        edge = ops.table(f"{name}: edge of the window", ("s",), "int64", of=counted[:1])
        inside = ops.table(f"{name}: in the window", shape, "bool", of=(edge, counted[1]))
        first = ops.table(f"{name}: in the window, and allowed", shape, "bool", of=(inside,))
        causal = ops.table(f"{name}: not behind", shape, "bool", of=counted)
        if of_sequences:
            both = ops.table(f"{name}: in the window, and not behind", shape, "bool", of=(first, causal))
            allowed = ops.table(f"{name}: in the window, not behind, and allowed", shape, "bool", of=(both,))
            tokens = ops.table(f"{name}: of tokens", ("b", self.c.keys), "bool", of=counted[1:])
            mask = self.shared_table(name, self.mask_of_sequences, "bool", allowed, tokens, table=table)
        else:
            mask = self.shared_table(name, shape, "bool", first, causal, table=table)
        self.tape.still_referenced(*counted)
        return mask

    def rotary_tables(self, *, windows: bool | None) -> list[Tensor]:
        """The model's rotary embedding: cos and sin of angles, times a factor, in the embeddings' dtype."""
        ops, width = self.ops, self.table_size(windows=windows)
        whole = (*self.rows, width)
        kind = " of windows" if windows else ""
        if len(self.tables) == 1:
            return [
                self.shared_table(f"{table}{kind}", whole, self.table_dtype, table=SharedTable(table, windows))
                for table in self.tables
            ]
        positions = ops.table(f"positions in fp32{kind}", self.rows, "fp32")
        if width.endswith("/2"):
            halves = angles = ops.table(f"angles{kind}", whole, "fp32", of=(positions,))
        else:
            halves = ops.table(f"angles of pairs{kind}", (*self.rows, f"{width}/2"), "fp32", of=(positions,))
            angles = ops.table(f"angles{kind}", whole, "fp32", of=(halves,))
        wide: list[Tensor] = []
        for table in self.tables:
            plain = ops.table(f"{table}{kind} before their factor", whole, "fp32", of=(angles,))
            if self.table_dtype == "fp32":
                wide.append(
                    self.shared_table(f"{table}{kind}", whole, "fp32", plain, table=SharedTable(table, windows))
                )
            else:
                wide.append(ops.table(f"{table}{kind} in fp32", whole, "fp32", of=(plain,)))
        if self.table_dtype != "fp32":
            found = [
                self.shared_table(f"{t}{kind}", whole, self.table_dtype, w, table=SharedTable(t, windows))
                for t, w in zip(self.tables, wide, strict=True)
            ]
        else:
            found = wide
        self.tape.still_referenced(halves, angles, *(w for w in wide if w not in found))
        return found

    @property
    def mask(self) -> Shape:
        """Axes of an additive mask."""
        return ("b", "s", self.c.keys)

    @property
    def reads_tables(self) -> bool:
        """Whether autograd saves the model's RoPE cache, which layers then read unchanged."""
        return not self.spreads_tables

    @property
    def rotated_size(self) -> str:
        """Axis of the rotary features of a head."""
        return "d_rot" if self.c.position.partial_rotary else self.head_size

    def table_size(self, *, windows: bool | None) -> str:  # noqa: ARG002
        """Axis of the RoPE cache of layers with a sliding window, without one, or all (None)."""
        return self.rotated_size

    @property
    def head_size(self) -> str:
        """Axis of the features of a head."""
        return "d_h"

    @property
    def table_dtype(self) -> str:
        """The dtype of the RoPE cache: by default that of the embeddings."""
        return "fp32" if self.wide_tables else self.c.dtypes.embedded

    def shared_table(
        self, name: str, shape: Shape, dtype: str, *of: Tensor, table: SharedTable | None = None
    ) -> Tensor:
        """Return a shared table that counts as a temporary; `table` defaults to one of its name."""
        return self.ops.table(name, shape, dtype, self.citation, Component.TEMPORARIES, of, table or SharedTable(name))

    def argument(self, name: str, shape: Shape, *of: Tensor) -> Tensor:
        """Return int64 positions or tokens that count as a temporary."""
        return self.ops.table(name, shape, "int64", self.citation, Component.TEMPORARIES, of)

    def head(self) -> None:
        """Write the final norm, the logits and the loss."""
        c, ops = self.c, self.ops
        given = self.tape.input("head input", ("b", "s", "d"), c.stream, self.citation)
        x, width = given, "d"
        if c.head.norm:
            x = self.norm(given, "norm", "d")
            self.tape.still_referenced(given)
        if c.embedding.separate_size:
            width = "d_e"
            x = ops.linear(x, "project_out", ("d_e", "d"), ("b", "s", "d_e"), bias=False)
        if c.cache is not None:
            write_next_token(ops, c, x, width, self.logits)
        else:
            with ops.as_stored("lm_head"):
                write_loss(ops, c, x, width, self.logits, fp32_logits=self.fp32_logits)
            if c.head.names_input:
                self.tape.still_referenced(x)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits that the model returns, from the LM head's output."""
        return x

    def soft_capped(self, x: Tensor, name: str) -> Tensor:
        """tanh(x / cap) * cap."""
        ops = self.ops
        smooth = ops.pointwise(ops.scale(x, f"{name} / cap"), f"tanh of {name}", saves="output")
        return ops.scale(smooth, f"{name}, capped")

    def norm(self, x: Tensor, module: str, width: str) -> Tensor:
        """The norm before layers and after the last one."""
        return (
            self.ops.layer_norm(x, module, width)
            if self.c.norm.kind == "layernorm"
            else self.rms_norm(x, module, width)
        )

    def rms_norm(self, x: Tensor, module: str, width: str) -> Tensor:
        """LlamaRMSNorm: in fp32, then weight * normed in the input's dtype."""
        if self.c.liger:
            return self.ops.liger_rms_norm(x, module, width)
        return self.ops.composite_rms_norm(x, module, width, named=True)

    def scaled_dot_product(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """integrations/sdpa_attention.py: flash attention takes grouped heads; for other kernels they are repeated.

        Flash attention's output has the strides of the queries; the next operator reads it by token. axolotl's function
        for packed samples repeats heads before flash attention, too, which gets copies by token.
        """
        c, ops = self.c, self.ops
        k, v = self.in_training_cache(k, v)
        if c.cache is not None:
            return cached_attention(ops, c, q, k, v, ("h", "h_kv", "d_h"), by_head=self.rotated_by_head)
        heads = ("b", "s", "h", self.head_size)
        if c.attention.rotation:
            core = ops.ring_attention(q, k, v, "h", "h_kv", self.head_size, c.attention.rotation)
            return ops.ring_output_by_token(core, "h", self.head_size)
        if c.attention.kernel == "flash" and not c.layer.masked:
            if c.attention.repeats_heads:
                k, v = (self.repeated(x, name, heads, views=False) for x, name in ((k, "k"), (v, "v")))
                return ops.flash_attention(q, k, v, "h", "h", self.head_size, "s")
            if c.attention.pads_heads:
                core = ops.padded_flash_attention(q, k, v, "h", "h_kv", "s", splits=not c.attention.dropout)
                return ops.copy(core, "attention output by token")
            core = ops.flash_attention(q, k, v, "h", "h_kv", self.head_size, "s", splits=not c.attention.dropout)
            return ops.copy(core, "attention output by token") if self.rotated_by_head else core
        if c.attention.kernel == "math":
            return math_attention(ops, c, q, k, v, self.head_size, by_head=self.rotated_by_head)
        if c.attention.grouped:
            views = (
                c.layer.masked or c.attention.large_heads
            )  # transformers repeats them, as a view of a single head; else PyTorch
            k, v = (self.repeated(x, name, heads, views=views) for x, name in ((k, "k"), (v, "v")))
        # An additive mask is shared, unless autocast casts it: it has the dtype of the embedding's output.
        shares = c.masks.padding == "additive" and not (c.dtypes.autocast and c.stream != c.dtypes.compute)
        return ops.efficient_attention(q, k, v, "h", self.head_size, "s", masked=c.layer.masked and not shares)

    def eager(self, q: Tensor, k: Tensor, v: Tensor, *, softmax_in_fp32: bool) -> Tensor:
        """eager_attention_forward of gpt2 and llama."""
        c, ops = self.c, self.ops
        k, v = self.in_training_cache(k, v)
        dtype = q.dtype if softmax_in_fp32 else v.dtype  # under autocast rotated queries are in fp32
        heads, keys = (("b", tokens, "h", self.head_size) for tokens in ("s", c.keys))
        scores_shape = ("b", "h", "s", c.keys)
        if c.attention.grouped:
            k, v = self.repeated(k, "k", keys), self.repeated(v, "v", keys)
        named = (k, v)
        # bmm needs each of these matrices contiguous
        copies = self.copies_keys and (not c.attention.grouped or c.attention.single_key_head)
        of_q = self.copies_queries and not self.rotated_by_head
        of_k = copies and (c.attention.grouped or not self.rotated_by_head)
        names = ("q by head" if of_q else "", "k by head" if of_k else "")
        scores = ops.scale(ops.matmul(q, k, "scores", scores_shape, names), "scaled scores")
        masked = scores = ops.shift(self.scores(scores), "masked scores", c.dtypes.embedded)
        wide = ops.softmax(scores, "attention probabilities", "fp32" if softmax_in_fp32 else "")
        probabilities = wide if self.wide_probabilities else ops.cast(wide, dtype, "probabilities in dtype")
        if softmax_in_fp32:
            self.tape.still_referenced(masked)  # variable attn_weights, until the probabilities are cast
        dropped = ops.dropout(probabilities, "attention probabilities dropout", c.attention.dropout)
        self.weights = (dropped,)
        names = ("", "v by head" if copies else "")
        core = ops.matmul(dropped, v, "attention output", (*heads[:-1], v.shape[-1]), names)
        by_token = self.by_token(core)
        if c.attention.grouped:
            self.tape.still_referenced(*named)  # variables key_states, value_states
        return by_token

    @property
    def copies_queries(self) -> bool:
        """Whether bmm gets copies of queries by head: of a single token they are contiguous."""
        return self.c.batched and not self.single_token

    @property
    def copies_keys(self) -> bool:
        """Whether bmm gets copies of keys and values by head: in a KV cache they are contiguous."""
        return self.c.batched and self.c.cache is None

    @property
    def single_token(self) -> bool:
        """Whether a forward of generation processes one token of each sequence."""
        return self.c.cache is not None and not self.c.cache.first

    @property
    def decodes_by_generate(self) -> bool:
        """Whether `generate` of transformers decodes a token."""
        return self.single_token and self.rows != ("s",)

    def by_token(self, core: Tensor) -> Tensor:
        """Return attention's output by token; that of a single token is so already."""
        return core if self.single_token else self.ops.copy(core, "attention output by token", reorders=self.c.batched)

    def in_training_cache(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values that attention reads; the model's output references them until the loss is there.

        torch.cat promotes values to the dtype of rotated keys.
        """
        c, ops = self.c, self.ops
        if c.saving.training_cache == "copies":
            k = ops.copy(k, "k in the cache")
            v = ops.copy(v, "v in the cache") if v.dtype == k.dtype else ops.cast(v, k.dtype, "v in the cache")
        if c.saving.training_cache != "none":
            self.tape.live.region.update((k.storage, v.storage))
        return k, v

    def repeated(self, x: Tensor, name: str, heads: Shape, *, views: bool = True) -> Tensor:
        """repeat_kv: keys or values per query head; optionally a view of a single shared head."""
        if views and self.c.attention.single_key_head:
            return self.ops.expanded(x, f"{name} for each head", heads)
        return self.ops.copy(x, f"{name} for each head", heads)

    def scores(self, x: Tensor) -> Tensor:
        """Return the scores to be masked, from scaled scores."""
        return x

    @property
    def rotated_by_head(self) -> bool:
        """Whether rotated queries and keys are contiguous by head, as matmuls read them."""
        return False

    def layer(self) -> Tensor:
        """Write a layer; return its output."""
        raise NotImplementedError  # each family implements it
