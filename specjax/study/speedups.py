"""What drafting gains at no loss, in one sentence, and why where it gains nothing.

Axes: s samples, r repeats, c chunks of texts.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specjax.evaluation import Interval
from specjax.study.measure import Times

# Times of the same work whose quartiles differ by more than this were disturbed.
_STEADY = 1.15
# A cause is named if without it the passes would allow this speed-up.
_WORTH = 1.1


class RoundCost(NamedTuple):
    """What a round costs and yields, in verifier passes over one token.

    Attributes:
      max_draft: G.
      c: t_draft / t_verifier(1), the time of a drafter's pass.
      r: t_verifier(G + 1) / t_verifier(1), the time of the pass that checks a draft.
      tokens: the tokens of a round over those of a pass of the verifier alone.
    """

    max_draft: int
    c: float
    r: float
    tokens: float

    @property
    def passes(self) -> float:
        """The time of a round."""
        return self.max_draft * self.c + self.r

    @property
    def ideal(self) -> float:
        """The speed-up of calls that take only the time of their passes."""
        return self.tokens / self.passes

    def why(self) -> str:
        """Says why drafting gains no more, and what would."""
        g, c, r, tokens = self
        text = (
            f"Why: drafting {g} tokens at c = {c:.2g} (a drafter's pass) and checking them at r = "
            f"{r:.2g} (a verifier's pass over {g + 1} tokens) takes {self.passes:.2g} passes of "
            f"the verifier over one token, and yields {tokens:.2g} tokens."
        )
        if self.ideal > _WORTH:
            return (
                f"{text} The passes allow {self.ideal:.2g}x; calls and prompts, or other work on "
                "this machine, take the rest: try longer texts, or a quiet machine."
            )
        if tokens / (g * c + 1) > _WORTH:
            return (
                f"{text} With r near 1, as a larger verifier or a GPU or TPU has it, the passes "
                f"would allow {tokens / (g * c + 1):.2g}x."
            )
        if tokens / r > _WORTH:
            return (
                f"{text} With a much cheaper drafter (c near 0) the passes would allow "
                f"{tokens / r:.2g}x."
            )
        return f"{text} A drafter that agrees more often would help: distil it from the verifier."


def speedup(times: Times, alone: Times, level: float = 0.95) -> Interval:
    """Returns the tokens per second of a setting over those of the verifier alone.

    Args:
      times: of the setting.
      alone: of the verifier alone, in turns on the same chunks.
      level: the confidence of the interval.

    Returns:
      The speed-up. Its interval is Student's, of the logarithm of the ratio of sums over chunks
      (linearised); of a single chunk it is infinite.
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


def spread(times: Sequence[Times]) -> float:
    """Returns the upper over the lower quartile of the times of the same work, per token.

    Args:
      times: of the same decoder on the same chunks, such as the verifier alone in several turns.

    Returns:
      1 on a quiet machine, or if nothing was done twice.
    """
    per_token = [one.seconds / np.maximum(one.tokens, 1)[:, None] for one in times]
    turns = np.concatenate([one.reshape(-1, one.shape[-1]) for one in per_token])
    low, high = np.percentile(turns / np.median(turns, axis=0), (25, 75))
    return float(high / low)


def in_words(found: Interval) -> str:
    """Returns a speed-up with its interval, such as "1.21x [1.15, 1.27]"."""
    return f"{found.value:.3g}x [{found.low:.3g}, {found.high:.3g}]"


def conclusion(
    lossless: Mapping[str, Interval],
    *,
    where: str = "",
    cost: RoundCost | None = None,
    spread: float = 1.0,
) -> str:
    """Says which setting was fastest at no loss and by how much, or that drafting does not pay.

    Args:
      lossless: setting in words -> its speed-up over the verifier alone. The intervals must hold
        jointly, because the best of them is named.
      where: under which conditions, such as "at temperature 0".
      cost: the costs of a round, to say why drafting does not pay; None if unknown.
      spread: see `spread`.

    Returns:
      One sentence, with its reasons after it.
    """
    place = f" {where}" if where else ""
    if not lossless:
        return f"No lossless setting with drafts was measured{place}."
    best = max(lossless, key=lambda name: lossless[name].value)
    gain = lossless[best]
    parts = [
        f"Drafting does not pay here{place}: the best lossless setting, {best}, is not faster than "
        f"the verifier alone: {in_words(gain)}."
    ]
    if gain.low > 1.0:
        parts = [
            f"Fastest at no loss{place}: {best}, {in_words(gain)} the speed of the verifier alone."
        ]
    elif gain.high >= 1.0:
        parts = [
            f"No gain at no loss is shown{place}: the best lossless setting, {best}, has "
            f"{in_words(gain)} the speed of the verifier alone, and an interval with 1 in it may "
            "be noise."
        ]
    if gain.low <= 1.0 and cost is not None:
        parts.append(cost.why())
    if spread > _STEADY:
        parts.append(
            f"Other work disturbed this measurement: the times of the same texts vary by "
            f"{spread - 1:.0%} (quartiles). Repeat it on a quiet machine."
        )
    return " ".join(parts)
