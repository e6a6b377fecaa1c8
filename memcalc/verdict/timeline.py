"""The memory curve behind a verdict: the run's requests, replayed as for the verdict."""

from __future__ import annotations

from memcalc.errors import InputError, OutOfMemory
from memcalc.estimation.outside import outside_bytes
from memcalc.events.course import Course
from memcalc.rehearsal.rehearsal import requests_of, why_not
from memcalc.spec.cards import find_card
from memcalc.spec.foreign import refuse_foreign
from memcalc.spec.spec import Spec
from memcalc.stream.course import course_of


def timeline_of(spec: Spec, device_bytes: int | None = None) -> Course:
    """Return the memory curve of three steps on the GPU of the run, after every request.

    On a GPU that the run fills, the allocator frees cached blocks; a run that does not fit is replayed without a limit.

    Args:
        spec: the run.
        device_bytes: the need that its replay has found, if known: then a GPU with less is not tried.

    Raises:
        InputError: the order of the run's requests is not modelled, or there are no formulas for its family.
    """
    refuse_foreign(spec)
    why = why_not(spec)
    if why:
        raise InputError(f"memory over the run cannot be shown: {why}.", "`memcalc trace` runs the step without a GPU.")
    card = None if spec.hardware.gpu is None else find_card(spec.hardware.gpu)
    capacity = None if card is None else card.usable_bytes
    room = None if card is None else card.usable_bytes - outside_bytes(spec, card)
    training, requests = spec.training, requests_of(spec)
    torch = training.torch_version.removeprefix("v")
    holds = card is None or device_bytes is None or device_bytes <= card.usable_bytes
    try:
        found = course_of(requests, training.alloc_conf, torch, room if holds else None, capacity)
    except OutOfMemory:
        found = course_of(requests, training.alloc_conf, torch, None, capacity)
    return Course(found.timeline, found.allocated, found.reserved, room)
