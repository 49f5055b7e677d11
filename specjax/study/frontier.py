"""The frontier of acceptance: the most that any rule can accept at a divergence from the verifier.

At each position a target pi accepts sum min(pi, q) of the drafted tokens, and is KL(pi || p) from
the verifier. Of the means of both over positions, `KLPrice` gives the frontier: no rule accepts
more at the same nats per token. It is estimated from the same texts as the settings.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from specjax.rules import KLPrice
from specjax.study.demand import NATS, Demand
from specjax.study.expect import Expected, sampling_key
from specjax.text.setting import Setting

PRICES = (0.0, 0.1, 0.3, 0.6, 1.0, 1.5, 2.5, 4.0, 8.0, 20.0)


def frontier_of(settings: Iterable[Setting]) -> list[Setting]:
    """Returns settings on the frontier, for each sampling and drafter with a lossy setting.

    At temperature 0 no divergence is finite, so there is no frontier.
    """
    found: dict[tuple[object, str], Setting] = {}
    for setting in settings:
        if _is_chain(setting) and not setting.is_lossless and setting.temperature > 0.0:
            found.setdefault((sampling_key(setting), setting.drafter), setting)
    return [
        dataclasses.replace(setting, rule=f"{KLPrice.__name__}({price})")
        for setting in found.values()
        for price in PRICES
    ]


def with_balls(settings: Sequence[Setting], demand: Demand | None) -> list[Setting]:
    """Adds `KLBall`s with the bound of a demand on nats per token, beside each lossless setting.

    Of the rules that certainly meet it, these accept most. At temperature 0 they are lossless.
    """
    found = dict.fromkeys(settings)
    bounds = [clause.bound for clause in demand.clauses if clause.figure == NATS] if demand else []
    for setting in settings if bounds and min(bounds) > 0.0 else ():
        if _is_chain(setting) and setting.is_lossless and setting.temperature > 0.0:
            found[dataclasses.replace(setting, rule=f"KLBall({min(bounds)})")] = None
    return list(found)


def drawn_points(estimates: Mapping[Setting, Expected]) -> list[Expected]:
    """Returns the estimates of a figure: one for each rule, sampling and drafter of chains."""
    found: dict[tuple[object, str, str], Expected] = {}
    for setting, estimate in estimates.items():
        if _is_chain(setting):
            found.setdefault((sampling_key(setting), setting.drafter, setting.rule), estimate)
    return list(found.values())


def _is_chain(setting: Setting) -> bool:
    return setting.method is None and setting.drafting is None
