"""The expected rounds of plans, from measured times of passes and acceptance rates.

The model: each token of a level is accepted independently, at the rate of its level and reviewer.
The lengths of copies are those along the texts. B rows share passes: a round of the batch takes the
time of its longest row.

Sources: Leviathan et al. (arXiv 2211.17192), Cascade Speculative Drafting (arXiv 2312.11462). For
one row and blocks of fixed lengths the results are the closed forms of `specjax.theory`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.decoding.scoring import powers_of_two
from specjax.study.clock import VERIFIER, Clock
from specjax.study.drafting_plans import Plan
from specjax.study.known_rates import Copies, KnownRates, Law, law_of
from specjax.text import Tree

_ENOUGH = 1e-9


class PlanRound(NamedTuple):
    """The expected values of a round.

    Attributes:
      tokens: emitted tokens of a row.
      drafted: tokens that the verifier reviews.
      seconds: the time of the batch's round.
    """

    tokens: float
    drafted: float
    seconds: float


class Stage(NamedTuple):
    """A drafter's part of a block.

    Attributes:
      lengths: `[n]` probabilities of 0, 1, ... tokens.
      stands: `[n - 1]` the probability that each token is accepted, if those before it are.
    """

    lengths: np.ndarray
    stands: np.ndarray

    @classmethod
    def fixed(cls, count: int, rate: float) -> "Stage":
        """Returns a stage of a fixed number of tokens with the same rate."""
        return cls(np.eye(count + 1)[count], np.full(count, rate))


class _Block(NamedTuple):
    """A block before its review.

    Attributes:
      lengths: `[n]` probabilities of 0, 1, ... tokens.
      accepted: `[n]` probabilities of 0, 1, ... accepted tokens.
      fixed: whether the length is fixed.
      seconds: the time of drafting.
    """

    lengths: np.ndarray
    accepted: np.ndarray
    fixed: bool
    seconds: float


def plan_round(plan: Plan, known: KnownRates, clock: Clock) -> PlanRound:
    """Returns the expected tokens and time of a round.

    Args:
      plan: the plan.
      known: the acceptance rates.
      clock: the times of passes.
    """
    if plan.copies and len(plan.lengths) == 1:
        return _copies_first(plan, known, clock)
    theory = _Theory(plan, known, clock)
    block = theory.block(0)
    seconds = block.seconds + theory.review(0, block)
    if plan.is_single:
        # After a fully accepted block the drafter reads its last token in an extra pass.
        seconds += clock.draft(plan.models[0], clock.last_token(float(block.accepted[-1])))
    tokens = known.emitted / _rounds(block.accepted, known.text_lengths)
    return PlanRound(tokens, _mean(block.lengths), seconds)


def tree_seconds(tree: Tree, drafter: str, whole: float, clock: Clock) -> float:
    """Returns the time of a batch's round with trees of a fixed shape.

    Args:
      tree: the trees.
      drafter: the drafter's name.
      whole: the probability that a leaf is accepted.
      clock: the times of passes.
    """
    # The first pass reads the committed tokens, as does a pass after a leaf; each other the nodes
    # of a level that have children.
    levels = tree.shape.levels
    first = clock.draft(drafter) + clock.wider(drafter, len(levels))
    inner = [len(level.counts) for level in levels[1:]]
    others = [clock.draft(drafter) + clock.wider(drafter, count - 1) for count in inner]
    drafting = first * (1.0 + clock.any(whole)) + sum(others)
    return drafting + clock.review(VERIFIER, tree.shape.size + 1, drafter)


class _Theory:
    """The computation for a plan; levels and rows of K count from 0."""

    def __init__(self, plan: Plan, known: KnownRates, clock: Clock):
        self._plan, self._known, self._clock = plan, known, clock

    def block(self, r: int) -> _Block:
        """The block of row r of K."""
        plan = self._plan
        stages: list[Stage] = []
        ends: list[tuple[int, int]] = []
        seconds, fixed, at = 0.0, True, 0
        for level, count in enumerate(plan.lengths[r]):
            if not count:
                continue
            stage, spent = self._stage(r, level, count)
            stages.append(stage)
            seconds, at = seconds + spent, at + count
            drafts_alone = level < len(plan.models) and not plan.reviews(level)
            fixed = fixed and drafts_alone
            if drafts_alone:
                ends.append((level, at))
        lengths, accepted = review(stages)
        if not plan.is_single:
            seconds += self._catching_up(r, ends, accepted)
        return _Block(lengths, accepted, fixed, seconds)

    def review(self, r: int, block: _Block) -> float:
        """The time of the reviewer's pass over a block of row r and one more token."""
        longest = len(block.lengths)
        widths = (longest,) if block.fixed else powers_of_two(longest)
        if r:
            return self._clock.longest_review(self._plan.models[r - 1], widths, block.lengths)
        first = self._plan.models[0]
        return self._clock.longest_review(VERIFIER, widths, block.lengths, first)

    def _stage(self, r: int, level: int, count: int) -> tuple[Stage, float]:
        plan, clock = self._plan, self._clock
        reviewer = plan.models[r - 1] if r else VERIFIER
        lenient = plan.lenience if r else 1.0
        if level == len(plan.models):
            assert plan.copies is not None
            stands = self._known.rates[reviewer, plan.copies, lenient]
            return _copied(self._known.copies[plan.copies], stands, count), 0.0
        name = plan.models[level]
        rate = float(self._known.rates[reviewer, law_of(plan, level), lenient])
        if not plan.reviews(level):
            return Stage.fixed(count, rate), clock.draft(name, count)
        inner = self.block(level + 1)
        lengths, rounds = filled(inner.accepted, count)
        spent = clock.most(rounds) * (inner.seconds + self.review(level + 1, inner))
        return Stage(lengths, np.full(len(lengths) - 1, rate)), spent

    def _catching_up(self, r: int, ends: list[tuple[int, int]], accepted: np.ndarray) -> float:
        """The extra time of drafters that also read other drafters' tokens in their first pass."""
        clock, spent = self._clock, 0.0
        for level, end in ends:
            name, count = self._plan.models[level], self._plan.lengths[r][level]
            # Later drafters lack the tokens of this block, the first the tokens accepted before.
            lags = 1.0 if end > count else clock.any(float(accepted[end:].sum()))
            spent += lags * clock.wider(name, count)
        return spent


def review(stages: Sequence[Stage]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distributions of a block's length and of its number of accepted tokens.

    Args:
      stages: the parts of the block, in order.

    Returns:
      Two arrays of probabilities of 0, 1, ... tokens, of the same size.
    """
    size = 1 + sum(len(stage.stands) for stage in stages)
    whole, lengths, stopped = np.zeros(size), np.zeros(size), np.zeros(size)
    whole[0] = lengths[0] = 1.0
    for stage in stages:
        survival = np.concatenate([[1.0], np.cumprod(stage.stands)])
        longer = np.cumsum(stage.lengths[::-1])[::-1]  # P(at least 0, 1, ... tokens)
        falls = survival[:-1] * (1.0 - stage.stands) * longer[1:]
        if len(falls):
            stopped += np.convolve(whole, falls)[:size]
        whole = np.convolve(whole, stage.lengths * survival)[:size]
        lengths = np.convolve(lengths, stage.lengths)[:size]
    return lengths, stopped + whole


def filled(accepted: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distributions of a block that rounds fill to `count` tokens, and of their number.

    Args:
      accepted: probabilities of 0, 1, ... accepted tokens in a round, which adds one more token.
      count: the number of tokens at which the rounds end.

    Returns:
      Probabilities of 0, 1, ... tokens, and of 0, 1, ... rounds.
    """
    added = np.concatenate([[0.0], accepted])
    lengths, rounds = np.zeros(count + len(added)), [0.0]
    going = np.zeros(count)
    going[0] = 1.0
    for _ in range(count):
        after = np.convolve(going, added)
        ended = after[count:]
        lengths[count : count + len(ended)] += ended
        rounds.append(float(ended.sum()))
        going = after[:count]
    return np.trim_zeros(lengths, "b"), np.asarray(rounds)


def _copied(copies: Copies, stands: Any, count: int) -> Stage:
    """The stage of up to `count` copied tokens, averaged over the positions of the texts."""
    drafted = np.minimum(copies.drafted, count)
    lengths = np.bincount(drafted, minlength=count + 1) / len(drafted)
    return Stage(lengths, np.asarray(stands)[:count])


def _copies_first(plan: Plan, known: KnownRates, clock: Clock) -> PlanRound:
    """A round with copies where they match, and otherwise with the model, if there is one."""
    assert plan.copies is not None
    copies, count = known.copies[plan.copies], plan.lengths[0][0]
    longest = plan.max_copy or count
    stage, name = Stage.fixed(0, 0.0), None
    if plan.models:
        name = plan.models[0]
        stage = Stage.fixed(count, float(known.rates[VERIFIER, Law(name), 1.0]))
    _, accepted = review([stage])
    visits = _visits(copies, plan.min_match, longest, accepted)
    copied = np.where(copies.matched >= plan.min_match, visits, 0.0)
    rounds = float(visits.sum())
    drafts = 1.0 - float(copied.sum()) / rounds
    full = max(longest, count)
    law = np.bincount(np.minimum(copies.drafted, longest), copied, full + 1) / rounds
    law[len(stage.lengths) - 1] += drafts
    seconds = clock.longest_review(VERIFIER, powers_of_two(full + 1), law, name)
    if name is not None:
        whole = clock.last_token(drafts * float(accepted[-1]))
        seconds += clock.draft(name, count * clock.any(drafts) + whole)
        # After copies the drafter also reads the copied tokens.
        seconds += clock.wider(name, count) * clock.any(drafts * (1.0 - drafts))
    return PlanRound(known.emitted / rounds, _mean(law), seconds)


def _visits(copies: Copies, least: int, longest: int, accepted: np.ndarray) -> np.ndarray:
    """The expected number of rounds that begin at each position of the texts."""
    visits = np.zeros(len(copies.drafted))
    stands = np.minimum(copies.on_text, longest)
    copied = copies.matched >= least
    for begin, end in zip(copies.offsets[:-1], copies.offsets[1:], strict=True):
        here = np.zeros(end - begin + len(accepted) + longest + 1)
        here[0] = 1.0
        for t in range(end - begin):
            weight = here[t]
            if weight < _ENOUGH:
                continue
            if copied[begin + t]:
                here[t + stands[begin + t] + 1] += weight
            else:
                here[t + 1 : t + 1 + len(accepted)] += weight * accepted
        visits[begin:end] = here[: end - begin]
    return visits


def _rounds(accepted: np.ndarray, lengths: np.ndarray) -> float:
    """The expected number of rounds over all texts; the end of a text may cut the last round."""
    longest = int(lengths.max())
    needed = np.zeros(longest + 1)
    for left in range(1, longest + 1):
        emitted = np.arange(1, len(accepted) + 1)
        needed[left] = 1.0 + float(accepted @ needed[np.maximum(left - emitted, 0)])
    return float(needed[lengths].sum())


def _mean(law: np.ndarray) -> float:
    return float(law @ np.arange(len(law)))
