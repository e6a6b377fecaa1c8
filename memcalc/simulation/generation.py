"""Requests of a generation, in order: the loaded model, the prompts, their forward pass, and one for each new token.

A dynamic cache grows by one token per forward pass, and each layer's keys and values move to a larger block. How much
memory that fragments depends on every pass before, so all of them are replayed, unless there are very many.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from memcalc.architectures.huggingface.catalogue import WITH_CACHE
from memcalc.generation.forward_peak import ForwardBlocks, GenerationBlock, LayerKind
from memcalc.generation.forwards import Forward, LayerCache, layer_cache, played_forwards
from memcalc.layout.stages import stages_of
from memcalc.ledger.component import Component
from memcalc.programs.program import Activity, SharedTable, StorageEvent
from memcalc.simulation.construction.initial_tensors import InitialTensor
from memcalc.simulation.construction.model import loaded_model
from memcalc.spec.inference import InferenceSpec
from memcalc.spec.model_families.conversion import attends_eagerly
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec
from memcalc.states.persistent import workspace
from memcalc.states.state_options import state_options
from memcalc.stream.requests import RecordedRequests, Requests

TOKEN_BYTES = DTYPE_BYTES["int64"]


def unsupported_generation_reason(spec: Spec) -> str:
    """Return why the order of a generation's requests is not modelled; "" if it is."""
    inference = spec.inference
    assert inference is not None
    reasons = {
        "generation over several GPUs": spec.parallelism.ranks > 1,
        "a paged cache": inference.cache == "paged",
        "generation with modules other than those of transformers": spec.training.implementation != "huggingface",
        "kernels of flash-attn in a family without sdpa": spec.training.attention != "eager"
        and attends_eagerly(spec.model.architecture, spec.training.implementation),
        "4-bit weights of Conv1D": inference.quantization != "none" and spec.model.architecture == "gpt2",
        f"the KV cache of {spec.model.architecture or 'a model of no family'}": spec.model.architecture
        not in WITH_CACHE,
    }
    found = next((reason for reason, holds in reasons.items() if holds), "")
    return found and f"the order of requests is not known with {found}"


class _RecordedLayer(NamedTuple):
    """The recorded requests of one layer's forward, for layers of the same type.

    Args:
        requests: the requests.
        given: storage of the layer's input.
        caches: storages of its KV cache before this pass.
        output: storage of its output.
        live: storages that are live after it, and their indices in the program.
        before: what the layer before returned besides its output, which is freed when this one returns.
        handed: what this layer returned.
    """

    requests: RecordedRequests
    given: int
    caches: tuple[int, ...]
    output: int
    live: dict[int, int]
    before: tuple[int, ...]
    handed: tuple[int, ...]

    def again(
        self, requests: Requests, given: int, caches: Collection[int], before: Collection[int]
    ) -> tuple[int, dict[int, int], list[int]]:
        """Record another layer with its own input and caches; return its output, what is still live, and handed."""
        new = {self.given: given, **dict(zip(self.caches, caches, strict=True))}
        new |= zip(self.before, before, strict=True)
        requests.again(self.requests, new)
        for shared in self.live.values() - new.keys():
            requests.hold(shared)
        live = {at: new.get(storage, storage) for at, storage in self.live.items()}
        return new[self.output], live, [new[each] for each in self.handed]


class GenerateLoop:
    """What transformers' `generate` keeps between its forward passes.

    transformers 5.23 generation/utils.py: the model gets a copy of the tokens and their positions, without a mask if
    no token is padding; `_sample` references the tokens so far, the positions of the next pass, and the scores of the
    last token until those of the next one exist.
    """

    def __init__(self, inference: InferenceSpec, requests: Requests) -> None:
        self.sequences, self.prompt, self.requests = inference.batch_size, inference.prompt_length, requests
        self.tokens = self.positions = self.first_positions = self.scores = -1
        self.given: list[int] = []  # what the model gets in a pass

    def take(self, tokens: int, size: int = TOKEN_BYTES) -> int:
        """Allocate a matrix with so many elements of each sequence."""
        return self.requests.take(size * self.sequences * tokens, 0, Component.INPUTS)

    def drop(self, *storages: int) -> None:
        """Free storages, of which -1 is none."""
        self.requests.drop(each for each in storages if each >= 0)

    def prepare(self) -> None:
        """Record the mask and the positions of the prompt, and the copy of its tokens."""
        mask = self.take(self.prompt)
        counted = self.take(self.prompt)
        before = self.take(self.prompt)
        self.drop(counted)
        padding = self.take(self.prompt, 1)
        self.first_positions = self.take(self.prompt)
        self.drop(padding, before, mask)
        self.given = [self.take(self.prompt)]

    def mask(self, caches: Collection[LayerCache], tokens: int) -> None:
        """Record the masks that a model with a static cache gets, each expanded to all sequences and then copied.

        generation/utils.py, prepare_inputs_for_generation: a mask of each type of layer, made contiguous.
        """
        keys = [tokens if cache.usage.keys == "s" else cache.after for cache in caches if cache.usage.masked]
        single = [self.requests.take(tokens * each, 0, Component.INPUTS) for each in keys]
        if self.sequences > 1:
            self.given += [self.take(tokens * each, 1) for each in keys]
            self.drop(*single)
        else:
            self.given += single

    def returned(self, forward: Forward) -> None:
        """The model has returned: extend the positions by the next one."""
        self.drop(*self.given)
        self.given = []
        old, self.positions = self.positions, self.take(forward.after + 1)
        self.drop(old)

    def keep(self, scores: int) -> None:
        """Reference the scores, instead of those of the token before."""
        self.requests.hold(scores)
        self.drop(self.scores)
        self.scores = scores

    def extend(self, forward: Forward) -> None:
        """Append the selected tokens, and slice what the model gets next."""
        old, self.tokens = self.tokens, self.take(forward.after + 1)
        self.drop(old)
        self.given = [self.take(1), self.take(1)]

    def live(self) -> list[int]:
        """Return the storages that stay."""
        return [
            each for each in (self.tokens, self.positions, self.first_positions, self.scores, *self.given) if each >= 0
        ]


class GenerationRequests:
    """Recorder of a generation's requests.

    Args:
        spec: the run; `unsupported_generation_reason(spec)` must be empty.
        requests: where they are recorded.
    """

    def __init__(self, spec: Spec, requests: Requests) -> None:
        assert spec.inference is not None
        self.spec, self.inference, self.requests = spec, spec.inference, requests
        self.card = spec.gpu
        self.has_workspace = False  # cuBLAS workspace, allocated by the first matmul
        self.caches: dict[int, list[int]] = {}  # storages of the KV cache, by layer
        self.shared: dict[SharedTable, int] = {}  # tensors that the embedding block creates for all layers
        self.next_tokens = -1  # storage of the tokens that the last forward pass selected
        self.loop = None if spec.inference.program == "loop" else GenerateLoop(spec.inference, requests)

    def record(self) -> Requests:
        """Record all phases."""
        self.requests.begin("model")
        stage = stages_of(self.spec)[0]
        for built in loaded_model(self.spec, stage, state_options(self.spec)):
            for made in built.tensors:
                self._load(made)
        self.requests.begin("input")
        self._forwards()
        return self.requests

    def _load(self, made: InitialTensor) -> None:
        """Record the allocation of a weight or a buffer, or of what loading allocates and frees."""
        if made.several:
            self.requests.play(made.several, made.component)
        elif made.stays:
            self.requests.take(made.size, 0, made.component)
        else:
            self.requests.drop((self.requests.take(made.size, 0, made.component),))

    def _forwards(self) -> list[int]:
        """Record the prompts and all forward passes; return the storages that stay, but those of the KV cache."""
        prompts = TOKEN_BYTES * self.inference.batch_size * self.inference.prompt_length
        given = self.requests.take(prompts, 0, Component.INPUTS)
        before = -1  # tokens that the pass before selected, referenced until the next ones are
        if self.loop is not None:
            self.loop.prepare()
        for forward in self._passes():
            self._begin(forward)
            if self.loop is not None and self.inference.cache == "static":
                kinds = {*map(self.spec.model.has_window, range(self.spec.model.num_layers))}
                caches = [layer_cache(self.spec, forward, windowed=windowed) for windowed in sorted(kinds)]
                self.loop.mask(caches, forward.tokens)
            self._forward(forward)
            if before >= 0:
                self.requests.drop((before,))
            before = self.next_tokens
        return [given, before, *(() if self.loop is None else self.loop.live())]

    def _passes(self) -> Iterator[Forward]:
        """The forward passes to record."""
        return played_forwards(self.inference, self.spec.model.num_layers)

    def _begin(self, forward: Forward) -> None:
        """Begin the phase of a forward pass."""
        self.requests.begin(forward.phase)

    def _forward(self, forward: Forward) -> None:
        """Record the model's forward pass and the selection of the next tokens."""
        blocks = ForwardBlocks(self.spec, self.card, forward)
        opening = blocks.block("embedding", "embedding")
        hidden, live, handed = self._block(opening, -1, (), kept=blocks.named(opening.program))
        tables = ((opening.program.storages[at].table, storage) for at, storage in live.items())
        self.shared = {table: storage for table, storage in tables if table is not None}
        left = [live]
        kinds: dict[LayerKind, GenerationBlock] = {}
        recorded: dict[LayerKind, _RecordedLayer] = {}
        for layer in range(self.spec.model.num_layers):
            kind = blocks.kind(layer)
            caches = self.caches.get(layer, ())
            if kind in recorded:
                hidden, live, handed = recorded[kind].again(self.requests, hidden, caches, handed)
            else:
                if kind not in kinds:
                    kinds[kind] = blocks.layer(kind, several=False)
                mark, given, before = self.requests.mark(), hidden, tuple(handed)
                hidden, live, handed = self._block(kinds[kind], given, caches)
                self.requests.drop(before)
                if layer:  # the input of the first one is the embedding's, which others may reference
                    requests = self.requests.since(mark)
                    recorded[kind] = _RecordedLayer(
                        requests, given, tuple(caches), hidden, dict(live), before, tuple(handed)
                    )
            self.caches[layer] = [live.pop(at) for at in kinds[kind].written]
            left.append(live)
        left.append(dict(enumerate(handed)))
        self._head(blocks.block("head", "head"), hidden, left, forward)

    def _block(
        self,
        block: GenerationBlock,
        given: int,
        caches: Collection[int],
        kept: Collection[int] = (),
    ) -> tuple[int, dict[int, int], list[int]]:
        """Record a block's forward; return its output, the storages still live, and what the next layer frees.

        Args:
            block: the block.
            given: storage of its input, which it takes over; -1: none.
            caches: the layer's KV cache before this pass.
            kept: further storages that a variable references.
        """
        program, requests = block.program, self.requests
        live = dict(zip(block.found, caches, strict=True))
        output, handed = -1, []
        for event in program.forward:
            at, when = event.storage, event.operator.when
            if event.sign > 0 and when is Activity.START:
                if at not in live:
                    live[at], given = self._started(block, at, given)
            elif event.sign > 0:
                live[at] = self._take(block, event)
            elif when is Activity.END:
                output = live.pop(at)
                if at in kept:
                    live[at] = output
                    requests.hold(output)
            elif at in program.handed:
                handed.append(live.pop(at))
            else:
                requests.drop((live.pop(at),))
        return output, live, handed

    def _head(self, block: GenerationBlock, given: int, left: list[dict[int, int]], forward: Forward) -> None:
        """Record the LM head, and the selection of the next tokens.

        Args:
            block: the head.
            given: storage of its input, which it takes over.
            left: what the blocks before left live, until the model returns: between the final norm and the LM head.
            forward: the forward pass.
        """
        requests, live = self.requests, dict[int, int]()
        made = [
            event for event in block.program.forward if event.sign > 0 and event.operator.when is not Activity.START
        ]
        for event in block.program.forward:
            at, when = event.storage, event.operator.when
            if event.sign < 0:
                requests.drop((live.pop(at),))
                continue
            if when is Activity.START:
                if at not in live:
                    live[at], given = self._started(block, at, given)
                continue
            if event.operator.multiplies:
                for each in left:
                    requests.drop(each.values())
                left = []
            if event is made[-1] and self.loop is not None:
                self.loop.returned(forward)
            live[at] = self._take(block, event)
            if event is made[-1]:  # the scores in fp32
                if self.loop is not None:
                    self.loop.keep(live[at])
                self._select()
                if self.loop is not None:
                    self.loop.extend(forward)
        requests.drop(live.values())

    def _select(self) -> None:
        """Select the next token of each sequence."""
        self.next_tokens = self.requests.take(TOKEN_BYTES * self.inference.batch_size, 0, Component.INPUTS)

    def _started(self, block: GenerationBlock, at: int, given: int) -> tuple[int, int]:
        """Return a storage that is live when the block starts, and the input if it is not taken over yet."""
        table = block.program.storages[at].table
        if table in self.shared:
            assert table is not None
            self.requests.hold(self.shared[table])
            return self.shared[table], given
        if given >= 0:
            return given, -1
        return self.requests.take(block.sized.exact[at], 0, Component.TEMPORARIES), -1

    def _take(self, block: GenerationBlock, event: StorageEvent) -> int:
        """Record the allocation of an event, and cuBLAS's workspace after the result of the first matmul."""
        component = block.program.storages[event.storage].component or Component.TEMPORARIES
        script = block.sized.scripts.get(event.storage)
        if script is None:
            made = self.requests.take(block.sized.exact[event.storage], 0, component)
        else:
            made = self.requests.play(script, component)
        if not self.has_workspace and event.operator.multiplies and event.storage == event.operator.output:
            self.has_workspace = True
            self.requests.take(workspace("forward", self.spec, self.card, 0).each, 0, Component.LIBRARY_WORKSPACE)
        return made
