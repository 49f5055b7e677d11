"""What drafting gains at no loss, in one sentence, and why where it gains nothing.

Axes: s samples, r repeats, c chunks of texts.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from specjax.drafting import NeuralDrafter
from specjax.evaluation import Bootstrap, Interval
from specjax.runs.evaluation import shown
from specjax.study.measure import Scores, Times, over
from specjax.text.draft_length import RoundCost
from specjax.text.passes import PassTimes
from specjax.text.setting import Setting

_Name = TypeVar("_Name")
# Times of the same work whose quartiles differ by more than this were disturbed.
_STEADY = 1.15


def round_cost(times: PassTimes, drafter: NeuralDrafter, tokens: float) -> RoundCost:
    """Returns what a round of a pair costs, by times of passes of the one width G + 1."""
    table, passes = times.tables["verifier", "drafter"], drafter.draft_passes
    c, r = table.draft[0] / times.step, table.verifier[0][-1] / times.step
    return RoundCost(drafter.max_draft, passes, c, r, tokens)


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
    cost: RoundCost | None = None,
    spread: float = 1.0,
) -> str:
    """Says which setting was fastest at no loss and by how much, or that drafting does not pay.

    Args:
      lossless: setting in words -> its speed-up over the verifier alone, see `speedups`.
      where: under which conditions, such as "at temperature 0".
      cost: the costs of a round, to say why drafting does not pay; None if unknown.
      spread: see `spread`.

    Returns:
      One sentence, with its reasons after it.
    """
    place = f" {where}" if where else ""
    name = best(lossless)
    if name is None:
        return f"No lossless setting with drafts was measured{place}."
    gain = lossless[name]
    parts = [
        f"Drafting does not pay here{place}: the best lossless setting, {name}, is not faster than "
        f"the verifier alone: {in_words(gain)}."
    ]
    if gain.low > 1.0:
        parts = [
            f"Fastest at no loss{place}: {name}, {in_words(gain)} the speed of the verifier alone."
        ]
    elif gain.high >= 1.0:
        parts = [
            f"No gain at no loss is shown{place}: {name} has {in_words(gain)} the speed of the "
            "verifier alone, and an interval with 1 in it may be noise."
        ]
    if gain.low <= 1.0 and cost is not None and spread <= _STEADY:
        parts.append(cost.why())
    if spread > _STEADY:
        parts.append(
            "Other work disturbed this measurement: the times of the same texts differ by a factor "
            f"of {spread:.2g} between turns (quartiles). Repeat it on a quiet machine."
        )
    return " ".join(parts)


class Recommendation(NamedTuple):
    """What a comparison says of the settings of one sampling.

    Attributes:
      setting: the setting to decode with: the fastest at no loss, or the verifier alone.
      text: the reasons, see `conclusion`.
    """

    setting: Setting
    text: str


def recommend(
    scored: Mapping[Setting, Scores],
    times: Mapping[Setting, tuple[Times, Times]],
    quality: str | None,
    bootstrap: Bootstrap,
) -> Recommendation:
    """Recommends a setting at no loss, and names a faster one of another distribution.

    Args:
      scored: the measured settings of one sampling, the verifier alone among them.
      times: those of each setting, and of the verifier alone in turns with it.
      quality: the name of the quality figure, or None.
    """
    alone = next(iter(scored)).verifier_alone
    drafts = [x for x in scored if not x.is_alone]
    lossless = {x: times[x] for x in drafts if x.is_lossless}
    gains = speedups(lossless, bootstrap.level)
    text = conclusion(
        {x.described(): gain for x, gain in gains.items()},
        where=f"at temperature {alone.temperature:g}",
        spread=spread([of_verifier for _, of_verifier in times.values()]),
    )
    fastest = best(gains)
    if fastest is None or gains[fastest].low <= 1.0:
        if fastest is not None:
            text += " specjax bench says why."
        fastest = alone
    others = speedups({x: times[x] for x in drafts if x not in lossless}, bootstrap.level)
    faster = {x: gain for x, gain in others.items() if gain.low > 1.0}
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
    return Recommendation(fastest, text)
