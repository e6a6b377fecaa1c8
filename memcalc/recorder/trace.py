"""What `memcalc trace` gives for a spec: the recorded run, judged, and the result that all verbs share."""

from __future__ import annotations

from dataclasses import dataclass, fields

from memcalc.allocator.pytorch.versions import DEFAULT_VERSION
from memcalc.ledger.result import Confidence, DeviceMemory, Outside, RankResult, Result, known
from memcalc.ledger.textbook import generation_textbook, textbook
from memcalc.ledger.verdict import observed
from memcalc.progress import Progress, silent
from memcalc.recorder.judged import Judged, judge
from memcalc.recorder.ledger import host_ledger
from memcalc.recorder.recording import Recording
from memcalc.spec.cards import find_card
from memcalc.spec.limits import Limit
from memcalc.spec.spec import Spec


@dataclass(frozen=True)
class Trace(Judged):
    """A traced run of a spec.

    Args:
        result: the ledger and the verdict, as of all verbs.
    """

    result: Result


def make_trace(
    spec: Spec,
    recording: Recording,
    alloc_conf: str = "",
    version: str = DEFAULT_VERSION,
    progress: Progress = silent,
) -> Trace:
    """Judges the recording of a spec's run by the spec's card.

    Args:
        spec: the run.
        recording: of it.
        alloc_conf: as PYTORCH_CUDA_ALLOC_CONF.
        version: the release of PyTorch whose allocator it goes through.
        progress: told how far the replay is.

    Raises:
        InputError: settings that PyTorch refuses.
    """
    card = None if spec.hardware.gpu is None else find_card(spec.hardware.gpu)
    judged = judge(recording, card, alloc_conf, version, progress)
    reserved, context = judged.reserved_bytes, 0 if card is None else card.context_bytes
    on_device = None if card is None or reserved is None else reserved + context
    outside = Outside(0 if reserved is None else reserved - judged.ledger.peak_bytes, context, 0)
    limits = (*spec.limits, *(Limit(what, holds_memory=False) for what in judged.not_modelled))
    judgement = None
    if card is not None and on_device is not None:
        judgement = observed(judged.failure is None, on_device, card.usable_bytes, limits)
    rank = RankResult(
        {"pipeline_stage": 0},
        judged.ledger,
        known(DeviceMemory(reserved, on_device, outside)),
        host_ledger(recording.host_events),
    )
    result = Result(
        source="trace",
        device=recording.device,
        spec=spec,
        parameters=recording.parameters,
        trainable_parameters=recording.trainable,
        buffer_elements=recording.buffers,
        textbook=textbook(spec) if spec.inference is None else generation_textbook(spec),
        ranks=(rank,),
        confidence=_confidence(recording, judged),
        card=card,
        limits=limits,
        notes=judged.notes,
        judgement=judgement,
    )
    return Trace(**{field.name: getattr(judged, field.name) for field in fields(judged)}, result=result)


def _confidence(recording: Recording, judged: Judged) -> Confidence:
    if recording.reserved_bytes is not None:
        return "allocator"
    return "replay" if judged.replay is not None else "measured"
