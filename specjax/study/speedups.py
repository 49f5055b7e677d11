"""What drafting gains at no loss, in one sentence, and why where it gains nothing.

Axes: s samples, r repeats, c chunks of texts.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from specjax.drafting import Chain, Costs
from specjax.evaluation import Bootstrap
from specjax.evaluation.bootstrap import Interval
from specjax.runs.evaluation import shown
from specjax.study.measure import Scores, Times, over
from specjax.text.draft_length import RoundCost
from specjax.text.setting import Setting

_Name = TypeVar("_Name")
# Times of the same work whose quartiles differ by more than this were disturbed.
_STEADY = 1.15
# Speed-ups above the tokens of a pass by more than this cannot be.
_CLOSE = 1.05


def round_cost(costs: Costs, drafter: Chain, tokens: float) -> RoundCost:
    """Returns what a round of a pair costs, by times of the verifier alone and of G + 1 tokens."""
    c, r = (x / costs.alone[0] for x in (costs.draft[0], costs.verifier[0][-1]))
    return RoundCost(drafter.max_draft, drafter.draft_passes, c, r, tokens)


def speedup(times: Times, alone: Times, level: float = 0.95) -> Interval:
    """Returns the tokens per second of a setting over those of the verifier alone.

    Its interval is Student's, of the logarithm of the ratio of sums over chunks (linearised); of a
    single chunk it is infinite.

    Args:
      alone: of the verifier alone, in turns on the same chunks.
    """
    # Imported here because it takes long.
    from scipy.stats import t

    parts = np.stack(
        [alone.usual, times.tokens.mean(0), times.usual, alone.tokens.mean(0)]
    )  # [4, c]
    sums = parts.sum(axis=1)
    value = float(sums[0] * sums[1] / (sums[2] * sums[3]))
    count = parts.shape[1]
    if count < 2:
        return Interval(value, 0.0, math.inf, math.inf)
    shares = parts / sums[:, None]
    of_chunk = shares[0] + shares[1] - shares[2] - shares[3]  # sums to 0
    error = math.sqrt(count / (count - 1) * float(np.sum(of_chunk**2)))
    reach = math.exp(error * float(t.ppf(0.5 + 0.5 * level, count - 1)))
    return Interval(value, value / reach, value * reach, value * error)


def speedups(
    times: Mapping[_Name, tuple[Times, Times]], level: float = 0.95
) -> dict[_Name, Interval]:
    """Returns speed-ups whose intervals hold jointly (Bonferroni), because the best is named."""
    each = 1.0 - (1.0 - level) / max(1, len(times))
    return {name: speedup(*both, each) for name, both in times.items()}


def yields(times: Times, alone: Times) -> float:
    """Returns the tokens of a pass over those of the verifier alone.

    A pass that checks drafts takes at least as long as one without, so no speed-up is above it.
    """
    return times.per_pass / alone.per_pass


def possible(gains: Mapping[_Name, Interval], most: Mapping[_Name, float]) -> dict[_Name, Interval]:
    """Returns the speed-ups that are not above what the tokens of a pass allow, see `yields`."""
    limits = {name: _CLOSE * most.get(name, math.inf) for name in gains}
    return {name: gain for name, gain in gains.items() if not gain.value > limits[name]}


def best(gains: Mapping[_Name, Interval]) -> _Name | None:
    """Returns the fastest that is shown to gain, else that may gain, else at all."""
    surely = [name for name, gain in gains.items() if gain.low > 1.0]
    perhaps = [name for name, gain in gains.items() if gain.high >= 1.0]
    return max(surely or perhaps or gains, key=lambda name: gains[name].value, default=None)


def spread(times: Sequence[Times]) -> float:
    """Returns the upper over the lower quartile of the times of the same decoder and chunks.

    It is 1 on a quiet machine, or if nothing was done twice; samples are different texts.
    """
    turns = np.concatenate([one.seconds for one in times], axis=1)  # [s, r, c]
    low, high = np.percentile(turns / np.median(turns, axis=1, keepdims=True), (25, 75))
    return float(high / low)


def in_words(gain: Interval) -> str:
    """Returns a speed-up with its interval, such as "1.21x [1.15, 1.27]"."""
    return f"{gain.value:.3g}x [{gain.low:.3g}, {gain.high:.3g}]"


def conclusion(
    lossless: Mapping[str, Interval],
    *,
    where: str = "",
    most: Mapping[str, float] | None = None,
    cost: RoundCost | None = None,
    why: str = "",
    spread: float = 1.0,
) -> str:
    """Says which setting was fastest at no loss and by how much, or that drafting does not pay.

    Args:
      lossless: setting in words -> its speed-up over the verifier alone, see `speedups`.
      where: under which conditions, such as "at temperature 0".
      most: setting in words -> its tokens of a pass, see `yields`.
      cost: the costs of a round of the best setting, to say why drafting pays or not; None if
        unknown.
      why: what else to say where no gain is shown.
      spread: see `spread`.

    Returns:
      One sentence, with its reasons after it.
    """
    place, most = f" {where}" if where else "", most or {}
    can_be = possible(lossless, most)
    name = best(can_be or lossless)
    if name is None:
        return f"No lossless setting with drafts was measured{place}."
    gain, tokens = lossless[name], most.get(name, math.nan)
    parts = [
        f"Drafting does not pay here{place}: the best lossless setting, {name}, is not faster than "
        f"the verifier alone: {in_words(gain)}."
    ]
    if not can_be:
        parts = [
            f"No gain at no loss is shown{place}: the measured speed-up of {name}, "
            f"[{gain.low:.3g}, {gain.high:.3g}], is more than its tokens of a pass allow."
        ]
    elif gain.low > 1.0:
        parts = [
            f"Fastest at no loss{place}: {name}, {in_words(gain)} the speed of the verifier alone."
        ]
    elif gain.high >= 1.0:
        parts = [
            f"No gain at no loss is shown{place}: {name} has {in_words(gain)} the speed of the "
            "verifier alone, and an interval with 1 in it may be noise."
        ]
    if can_be and not math.isnan(tokens):
        time = tokens / gain.value
        parts.append(
            f"A round yields {tokens:.3g} times the tokens of a pass of the verifier alone, and "
            f"takes {f'{time:.3g} times' if time >= 1.0 else 'about'} as long."
        )
    if spread > _STEADY or len(can_be) < len(lossless):
        between = (
            f": the times of the same texts differ by a factor of {spread:.2g} between turns "
            "(quartiles)"
        )
        parts.append(
            f"Other work disturbed this measurement{between if spread > _STEADY else ''}. Repeat "
            "it on a quiet machine."
        )
    elif cost is not None and gain.low > cost.ideal:
        parts.append(
            f"The times of passes, which were measured before, allow only {cost.ideal:.3g}x: other "
            "work disturbed them. Repeat the measurement on a quiet machine."
        )
    elif cost is not None:
        parts.append(cost.described() if gain.low > 1.0 else cost.why())
    elif why and gain.low <= 1.0:
        parts.append(why)
    return " ".join(parts)


def recommend(
    scored: Mapping[Setting, Scores],
    times: Mapping[Setting, tuple[Times, Times]],
    quality: str | None,
    bootstrap: Bootstrap,
) -> tuple[Setting, str]:
    """The setting to decode with, and why: the fastest at no loss, or the verifier alone.

    The text also names a faster one of another distribution.

    Args:
      scored: the measured settings of one sampling, the verifier alone among them.
      times: those of each setting, and of the verifier alone in turns with it.
      quality: the name of the quality figure, or None.
    """
    alone = next(iter(scored)).verifier_alone
    drafts = [x for x in scored if not x.is_alone]
    lossless = {x: times[x] for x in drafts if x.is_lossless}
    gains = speedups(lossless, bootstrap.level)
    most = {x: yields(*times[x]) for x in drafts}
    text = conclusion(
        {x.described(): gain for x, gain in gains.items()},
        where=f"at temperature {alone.temperature:g}",
        most={x.described(): most[x] for x in gains},
        why="specjax bench says why.",
        spread=spread([of_verifier for _, of_verifier in times.values()]),
    )
    fastest = best(possible(gains, most))
    if fastest is None or gains[fastest].low <= 1.0:
        fastest = alone
    others = speedups({x: times[x] for x in drafts if x not in lossless}, bootstrap.level)
    faster = {x: gain for x, gain in possible(others, most).items() if gain.low > 1.0}
    if quality is not None:
        differences = {x: over(scored[x], scored[alone], quality, bootstrap) for x in faster}
        kept = {
            x: faster[x]
            for x, difference in differences.items()
            if difference["high"] is not None and difference["high"] >= 0.0
        }
        if (first := best(kept)) is not None:
            text += (
                f" Not lossless, but not shown to be worse: {first.described()}, "
                f"{in_words(kept[first])}, {quality} {shown(differences[first])} over the "
                "verifier's."
            )
    return fastest, text
