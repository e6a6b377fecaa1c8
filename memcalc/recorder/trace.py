"""What `memcalc trace` gives for a spec: the recorded run, judged, and the result that all verbs share."""

from __future__ import annotations

from dataclasses import dataclass, fields

from memcalc.allocator.pytorch.versions import DEFAULT_VERSION
from memcalc.ledger.result import Confidence, Outside, RankResult, Result
from memcalc.ledger.textbook import generation_textbook, textbook
from memcalc.progress import Progress, silent
from memcalc.recorder.judged import Judged, judge
from memcalc.recorder.ledger import host_ledger
from memcalc.recorder.recording import Recording
from memcalc.spec.cards import find_card
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
    rank = RankResult(
        {"pipeline_stage": 0},
        judged.ledger,
        reserved,
        None if card is None or reserved is None else reserved + context,
        Outside(0 if reserved is None else reserved - judged.ledger.peak_bytes, context, 0),
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
        not_modelled=judged.not_modelled,
        notes=judged.notes,
    )
    return Trace(**{field.name: getattr(judged, field.name) for field in fields(judged)}, result=result)


def _confidence(recording: Recording, judged: Judged) -> Confidence:
    if recording.reserved_bytes is not None:
        return "allocator"
    return "replay" if judged.replay is not None else "measured"
