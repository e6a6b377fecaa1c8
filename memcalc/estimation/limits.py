"""Placeholder until the branch of limits is merged."""

from memcalc.spec.limits import Limit
from memcalc.spec.spec import Spec


def limits_of(spec: Spec) -> tuple[Limit, ...]:
    from memcalc.estimation.estimate import not_modelled
    from memcalc.estimation.generation.sizing import omissions

    found = omissions(spec) if spec.inference is not None else not_modelled(spec)
    from memcalc.spec.cards import find_card
    from memcalc.spec.kernels import card_omissions

    card = None if spec.hardware.gpu is None else find_card(spec.hardware.gpu)
    found = (*card_omissions(card), *found)
    return (*spec.limits, *(Limit(what, False) for what in found))
