"""What a trace gives: the events, the same step through PyTorch's allocator, and the result that all verbs share."""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.allocator import Failure, History, history
from memcalc.allocator.pytorch.versions import DEFAULT_VERSION
from memcalc.events.event import Event
from memcalc.events.timeline import Timeline, timeline
from memcalc.ledger.result import Confidence, Outside, RankResult, Result
from memcalc.ledger.textbook import textbook
from memcalc.progress import Progress, silent
from memcalc.recorder.ledger import traced_ledger
from memcalc.spec.cards import Card, find_card
from memcalc.spec.spec import Spec

# What is tried, in this order, for a run that dies with the settings that were asked for.
REMEDIES = ("expandable_segments:True", "max_split_size_mb:512", "max_split_size_mb:128", "max_split_size_mb:32")


@dataclass(frozen=True, slots=True)
class Recording:
    """A run of the step that was recorded.

    Args:
        device: as the JSON names it: "fake:cuda".
        events: what happened.
        parameters: of the model.
        trainable: those of them that are trained.
        buffers: elements of the model's buffers.
        readbacks: how often the host asked for a value that does not exist.
        allocated_bytes: the most that a real allocator handed out, where there was one.
        reserved_bytes: the most that it held.
        has_allocator: whether the device's memory goes through PyTorch's caching allocator.
        died: PyTorch's message, where the run died on the card; these events are then of one without bounds.
    """

    device: str
    events: tuple[Event, ...]
    parameters: int
    trainable: int
    buffers: int
    readbacks: int = 0
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    has_allocator: bool = True
    died: str | None = None


@dataclass(frozen=True)
class Trace:
    """A traced run.

    Args:
        recording: what was recorded.
        timeline: the events, added up.
        replay: the events through PyTorch's allocator; None where the device has none.
        result: the ledger and the verdict, as of all verbs.
        failure: where the run dies on the card, with PyTorch's message; None if it fits or no card was named.
        remedy: PYTORCH_CUDA_ALLOC_CONF with which a run that dies would fit; None if there is none, or no need.
    """

    recording: Recording
    timeline: Timeline
    replay: History | None
    result: Result
    failure: Failure | None
    remedy: str | None

    @property
    def events(self) -> tuple[Event, ...]:
        """What happened, in order."""
        return self.recording.events


def make_trace(
    spec: Spec,
    recording: Recording,
    alloc_conf: str = "",
    version: str = DEFAULT_VERSION,
    progress: Progress = silent,
) -> Trace:
    """Adds a recording up, replays it, and judges it by the card of the spec.

    Args:
        spec: the run.
        recording: of it.
        alloc_conf: as PYTORCH_CUDA_ALLOC_CONF.
        version: the release of PyTorch whose allocator it goes through.
        progress: told how far the replay is.

    Raises:
        InputError: settings that PyTorch refuses.
    """
    line = timeline(recording.events)
    replay = history(recording.events, alloc_conf, version, progress=progress) if recording.has_allocator else None
    ledger = traced_ledger(line, None if replay is None else replay.allocated)
    card = None if spec.hardware.gpu is None else find_card(spec.hardware.gpu)
    reserved = _reserved(recording, replay)
    failure: Failure | None = None
    remedy: str | None = None
    if card is not None and reserved is not None and reserved > _room(card):
        # The allocator gives cached memory back before it fails, so the run may fit all the same.
        tight = history(recording.events, alloc_conf, version, card.usable_bytes, used=card.context_bytes)
        failure = tight.result.failure
        if failure is not None and recording.died is not None:
            failure = Failure(failure.event, recording.died)
        if failure is None:
            reserved = tight.result.peak_reserved
        else:
            remedy = _remedy(recording, alloc_conf, version, card)
    allocated = ledger.peak_bytes
    context = 0 if card is None else card.context_bytes
    rank = RankResult(
        {"pipeline_stage": 0},
        ledger,
        reserved,
        None if card is None or reserved is None else reserved + context,
        Outside(0 if reserved is None else reserved - allocated, context, 0),
    )
    result = Result(
        source="trace",
        device=recording.device,
        spec=spec,
        parameters=recording.parameters,
        trainable_parameters=recording.trainable,
        buffer_elements=recording.buffers,
        textbook=textbook(spec),
        ranks=(rank,),
        confidence=_confidence(recording, replay),
        card=card,
        not_modelled=_not_modelled(recording),
        notes=_notes(recording, failure, remedy, line),
    )
    return Trace(recording, line, replay, result, failure, remedy)


def _room(card: Card) -> int:
    return card.usable_bytes - card.context_bytes


def _reserved(recording: Recording, replay: History | None) -> int | None:
    if recording.reserved_bytes is not None:
        return recording.reserved_bytes
    return None if replay is None else replay.result.peak_reserved


def _confidence(recording: Recording, replay: History | None) -> Confidence:
    if recording.reserved_bytes is not None:
        return "allocator"
    return "replay" if replay is not None else "measured"


def _remedy(recording: Recording, alloc_conf: str, version: str, card: Card) -> str | None:
    for remedy in REMEDIES:
        settings = f"{alloc_conf},{remedy}" if alloc_conf else remedy
        key = remedy.partition(":")[0]
        if key in alloc_conf:
            continue
        found = history(recording.events, settings, version, card.usable_bytes, used=card.context_bytes)
        if found.result.failure is None:
            return settings
    return None


def _not_modelled(recording: Recording) -> tuple[str, ...]:
    missing = ["device memory of the context and loaded kernels is a stated default"]
    if recording.device == "fake:cuda":
        missing.append("scratch of sorting by rows, of top-k over long rows and of cuDNN, inside operators")
    missing.append("values do not exist: what depends on them (routing of experts) may go another way on a real device")
    return tuple(missing)


def _notes(recording: Recording, failure: Failure | None, remedy: str | None, line: Timeline) -> tuple[str, ...]:
    found = []
    if recording.readbacks:
        times = "once" if recording.readbacks == 1 else f"{recording.readbacks} times"
        found.append(f"The run read values back from the device {times}; it was told zero.")
    if failure is not None:
        event = line.events[failure.event]
        where = f" of {event.module}" if event.module else ""
        found.append(f"It dies in {event.phase}, at {event.operator}{where} ({event.line}): {failure.message}")
        if remedy is not None:
            found.append(f"It would fit with PYTORCH_CUDA_ALLOC_CONF={remedy}.")
    return tuple(found)
