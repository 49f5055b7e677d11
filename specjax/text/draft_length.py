"""What a round costs and yields, and how long its drafts should be."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specjax.drafting import Costs
from specjax.theory import expected_tokens

# A cause is named if without it the passes would allow this speed-up.
_WORTH = 1.1
# The longest drafts to choose from where nothing else limits them.
LONGEST = 10


class RoundCost(NamedTuple):
    """What a round costs and yields, in verifier passes over one token.

    Attributes:
      max_draft: G.
      draft_passes: the drafter's passes for G tokens.
      c: t_draft / t_verifier(1), the time of a drafter's pass.
      r: t_verifier(G + 1) / t_verifier(1), the time of the pass that checks a draft.
      tokens: the tokens of a round over those of a pass of the verifier alone.
    """

    max_draft: int
    draft_passes: float
    c: float
    r: float
    tokens: float

    @property
    def passes(self) -> float:
        """The time of a round."""
        return self.draft_passes * self.c + self.r

    @property
    def ideal(self) -> float:
        """The speed-up of calls that take only the time of their passes."""
        return self.tokens / self.passes

    @property
    def acceptance(self) -> float:
        """The rate of acceptance that yields these tokens."""
        return acceptance_for(self.tokens, self.max_draft)

    @property
    def break_even(self) -> float:
        """The rate of acceptance at which a round yields what it costs; above 1: none does."""
        return acceptance_for(self.passes, self.max_draft)

    def described(self) -> str:
        """Says what a round costs and yields, and which acceptance would break even."""
        g, passes, c, r, tokens = self
        each = "the drafter's only pass" if passes < g else "a drafter's pass"
        text = (
            f"Drafting {g} tokens at c = {c:.2g} ({each}) and checking them at r = "
            f"{r:.2g} (a verifier's pass over {g + 1} tokens) takes {self.passes:.2g} passes of "
            f"the verifier over one token, and yields {tokens:.2g} tokens: an acceptance of "
            f"{self.acceptance:.2f}"
        )
        if self.break_even > 1.0:
            return f"{text}, and no acceptance breaks even."
        return f"{text}, and {self.break_even:.2f} breaks even."

    def why(self) -> str:
        """Says why drafting gains no more, and what would."""
        _, passes, c, r, tokens = self
        text = f"Why: {self.described()}"
        if self.ideal > _WORTH:
            return (
                f"{text} The passes allow {self.ideal:.2g}x; calls and prompts, or other work on "
                "this machine, take the rest: try longer texts, or a quiet machine."
            )
        if tokens / (passes * c + 1) > _WORTH:
            return (
                f"{text} With r near 1, as a larger verifier or a GPU or TPU has it, the passes "
                f"would allow {tokens / (passes * c + 1):.2g}x."
            )
        if tokens / r > _WORTH:
            return (
                f"{text} With a much cheaper drafter (c near 0) the passes would allow "
                f"{tokens / r:.2g}x."
            )
        return f"{text} A drafter that agrees more often would help: distil it from the verifier."


def acceptance_for(tokens: float, max_draft: int) -> float:
    """Returns the rate of acceptance at which drafts of G tokens yield this many tokens a round.

    It is above 1 if no rate does, and below 0 for less than a token.
    """
    if not 1.0 <= tokens <= max_draft + 1:
        return math.inf if tokens > 1.0 else -math.inf
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = 0.5 * (low + high)
        if expected_tokens(middle, max_draft) < tokens:
            low = middle
        else:
            high = middle
    return high


class DraftLength(NamedTuple):
    """A choice of G; 0: the verifier alone. `why` is a sentence."""

    max_draft: int
    why: str


def draft_length(rounds: Sequence[RoundCost]) -> DraftLength:
    """Chooses the length whose rounds are fastest, and of equals the shortest.

    It is 0 if no round is faster than the verifier alone.

    Args:
      rounds: of one pair, at least one, of different lengths above 0.
    """
    best, *others = sorted(rounds, key=lambda cost: (-cost.ideal, cost.max_draft))
    yields = (
        f"at an acceptance of {best.acceptance:.2f} it yields {best.tokens:.3g} tokens a round "
        f"for {best.passes:.3g} passes of the verifier, {best.ideal:.3g}x its speed alone"
    )
    if best.ideal <= 1.0:
        return DraftLength(0, f"G = 0: no draft pays; the best is G = {best.max_draft}: {yields}.")
    other = f"; G = {others[0].max_draft} would give {others[0].ideal:.3g}x" if others else ""
    return DraftLength(best.max_draft, f"G = {best.max_draft}: {yields}{other}.")


def round_costs(
    costs: Costs, rows: int, tokens: Mapping[int, float], *, catches_up: bool
) -> list[RoundCost]:
    """Returns what rounds of each length cost with measured passes.

    Args:
      costs: those of a pair.
      rows: B, within `costs.rows`.
      tokens: G -> the tokens of a round.
      catches_up: whether the drafter reads the last token of a draft that is accepted whole in the
        first pass of the next draft, not in a pass of its own.
    """
    costs = costs.at_widths([1, *(length + 1 for length in tokens)])
    alone, *checks = (np.interp(rows, costs.rows, times) for times in np.array(costs.verifier).T)
    c = float(np.interp(rows, costs.rows, costs.draft) / alone)
    rounds = []
    for (length, emitted), check in zip(tokens.items(), checks, strict=True):
        whole = min(max(acceptance_for(emitted, length), 0.0), 1.0) ** length
        passes = length if catches_up else length + whole
        rounds.append(RoundCost(length, passes, c, float(check / alone), emitted))
    return rounds


def expected_rounds(acceptance: float, longest: int) -> dict[int, float]:
    """Returns the tokens of rounds with drafts of 1 .. `longest` tokens, by their length."""
    return {length: expected_tokens(acceptance, length) for length in range(1, longest + 1)}
