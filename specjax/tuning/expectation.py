"""The expected time of every hierarchy, from passes and acceptance rates that were measured once.

A token of a level is taken to be accepted independently of the others, at the rate of that level
and of the one that reviews it. Lengths of copies follow those of a look along the texts. B rows
share passes: a round of the batch takes as long as its longest row asks for.

Sources: Leviathan et al. (arXiv 2211.17192), Cascade Speculative Drafting (arXiv 2312.11462); see
`specjax.theory`, whose closed forms these computations give for one row and blocks of fixed
lengths.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from specjax.decoding.scoring import powers_of_two
from specjax.tuning.hierarchies import Hierarchy
from specjax.tuning.screening import Copies, Law, Screening

_ENOUGH = 1e-9


class Expected(NamedTuple):
    """What a hierarchy is expected to take.

    Attributes:
      tokens: that a row's round emits.
      seconds: of a round of the batch.
      speedup: over the verifier alone, with the time that the prompts take.
    """

    tokens: float
    seconds: float
    speedup: float


class _Stage(NamedTuple):
    """What one drafter adds to a block.

    Attributes:
      lengths: `[n]` probabilities of 0, 1, ... tokens.
      stands: `[n - 1]` how likely each is accepted where those before it are.
    """

    lengths: np.ndarray
    stands: np.ndarray


class _Block(NamedTuple):
    """A block before its review.

    Attributes:
      lengths: `[n]` probabilities of 0, 1, ... tokens.
      accepted: `[n]` likewise of how many are accepted.
      fixed: whether all have one length.
      seconds: what drafting took.
    """

    lengths: np.ndarray
    accepted: np.ndarray
    fixed: bool
    seconds: float


def expect(hierarchy: Hierarchy, screening: Screening) -> Expected:
    """The expected tokens and time of a round.

    Args:
      hierarchy: what decodes.
      screening: what was measured.

    Returns:
      The expectation.
    """
    alone = screening.alone[0]
    if not hierarchy.lengths:
        return Expected(1.0, alone, 1.0)
    if hierarchy.copies and len(hierarchy.lengths) == 1:
        tokens, seconds = _copies_first(hierarchy, screening)
    else:
        theory = _Theory(hierarchy, screening)
        block = theory.block(0, 0)
        tokens = screening.emitted / _rounds(block.accepted, screening.text_lengths)
        seconds = block.seconds + theory.review(0, block)
        if hierarchy.is_single:
            # After a whole block the drafter reads its last token in a pass of its own.
            whole = float(block.accepted[-1])
            seconds += screening.alone[hierarchy.models[0]] * screening.any(whole)
    length = screening.emitted / len(screening.text_lengths)
    before = screening.start() + alone * length
    after = screening.start(list(_read_by(hierarchy))) + seconds * length / tokens
    return Expected(tokens, seconds, before / after)


def _read_by(hierarchy: Hierarchy) -> Iterator[int]:
    """The drafters that read the prompt, each once for each of its places in K with a cache."""
    for level, place in enumerate(hierarchy.models):
        yield from (place for row in hierarchy.lengths if row[level])


class _Theory:
    """One hierarchy beside what was measured. Places count from the verifier, levels from 0."""

    def __init__(self, hierarchy: Hierarchy, screening: Screening):
        self._hierarchy = hierarchy
        self._screening = screening

    def block(self, r: int, reviewer: int) -> _Block:
        """What row r of K, from 0, gives the reviewer at a place."""
        stages: list[_Stage] = []
        ends: list[tuple[int, int]] = []
        seconds, fixed, at = 0.0, True, 0
        for level, count in enumerate(self._hierarchy.lengths[r]):
            if not count:
                continue
            stage, spent = self._stage(level, count, reviewer)
            stages.append(stage)
            seconds, at = seconds + spent, at + count
            drafts_alone = level < len(self._hierarchy.models) and not self._hierarchy.reviews(
                level
            )
            fixed = fixed and drafts_alone
            if drafts_alone:
                ends.append((level, at))
        lengths, accepted = review(stages)
        if not self._hierarchy.is_single:
            seconds += self._catching_up(r, ends, accepted)
        return _Block(lengths, accepted, fixed, seconds)

    def review(self, place: int, block: _Block) -> float:
        """The time of a model's pass over a block and one token more."""
        longest = len(block.lengths)
        widths = (longest,) if block.fixed else powers_of_two(longest)
        return self._screening.longest_review(place, widths, block.lengths)

    def _stage(self, level: int, count: int, reviewer: int) -> tuple[_Stage, float]:
        hierarchy, screening = self._hierarchy, self._screening
        lenient = hierarchy.lenience if reviewer else 1.0  # the verifier never is
        if level == len(hierarchy.models):
            assert hierarchy.copies is not None
            copies = screening.copies[hierarchy.copies]
            return _copied(copies, reviewer, count, lenient), 0.0
        place = hierarchy.models[level]
        law = self._law(level)
        rate = screening.rate(reviewer, law, lenient)
        if not hierarchy.reviews(level):
            lengths = np.zeros(count + 1)
            lengths[count] = 1.0
            return _Stage(lengths, np.full(count, rate)), count * screening.alone[place]
        inner = self.block(level + 1, place)
        lengths, rounds = filled(inner.accepted, count)
        spent = screening.most(rounds) * (inner.seconds + self.review(place, inner))
        return _Stage(lengths, np.full(len(lengths) - 1, rate)), spent

    def _law(self, level: int) -> Law:
        """The law of the tokens of a level."""
        hierarchy = self._hierarchy
        place = hierarchy.models[level]
        if hierarchy.lenience == 1.0 or not hierarchy.reviews(level):
            return Law(place)
        # Of several drafters below it the one that adds most.
        row = hierarchy.lengths[level + 1]
        most = max(range(len(row)), key=lambda i: row[i])
        below = hierarchy.copies if most == len(hierarchy.models) else hierarchy.models[most]
        return Law(place, below, hierarchy.lenience)

    def _catching_up(self, r: int, ends: list[tuple[int, int]], accepted: np.ndarray) -> float:
        """What drafters read besides: what others wrote, with the first token of their draft."""
        screening, spent = self._screening, 0.0
        for level, end in ends:
            place, count = self._hierarchy.models[level], self._hierarchy.lengths[r][level]
            # The second in a block lacks what the first has written, the first what stood.
            lags = 1.0 if end > count else screening.any(float(accepted[end:].sum()))
            wide = screening.review(place, count + 1) - screening.alone[place]
            spent += lags * max(wide, 0.0)
        return spent


def review(stages: Sequence[_Stage]) -> tuple[np.ndarray, np.ndarray]:
    """The laws of a block's length and of how many of its tokens are accepted.

    Args:
      stages: what adds to the block, in order.

    Returns:
      Probabilities of 0, 1, ... tokens, both of one size.
    """
    size = 1 + sum(len(stage.stands) for stage in stages)
    whole, lengths, stopped = np.zeros(size), np.zeros(size), np.zeros(size)
    whole[0] = lengths[0] = 1.0
    for stage in stages:
        survival = np.concatenate([[1.0], np.cumprod(stage.stands)])
        longer = np.cumsum(stage.lengths[::-1])[::-1]  # P(the stage has so many, or more)
        falls = survival[:-1] * (1.0 - stage.stands) * longer[1:]
        if len(falls):
            stopped += np.convolve(whole, falls)[:size]
        whole = np.convolve(whole, stage.lengths * survival)[:size]
        lengths = np.convolve(lengths, stage.lengths)[:size]
    return lengths, stopped + whole


def filled(accepted: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The laws of a block that rounds fill until it has `count` tokens, and of their number.

    Args:
      accepted: how many drafted tokens stand in a round; each round adds one token more.
      count: how many are enough.

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


def _copied(copies: Copies, reviewer: int, count: int, lenience: float) -> _Stage:
    """Up to `count` copied tokens, at any position of the texts."""
    drafted = np.minimum(copies.drafted, count)
    lengths = np.bincount(drafted, minlength=count + 1) / len(drafted)
    return _Stage(lengths, copies.stands(reviewer, count, lenience))


def _copies_first(hierarchy: Hierarchy, screening: Screening) -> tuple[float, float]:
    """The tokens and the time of a round with copies where they match, and a model elsewhere."""
    copies = screening.copies[hierarchy.copies or ""]
    count = hierarchy.lengths[0][0]
    longest = hierarchy.max_copy or count
    stage, least, place = _Stage(np.ones(1), np.ones(0)), 0, 0
    if hierarchy.models:
        place, least = hierarchy.models[0], hierarchy.min_match
        lengths = np.zeros(count + 1)
        lengths[count] = 1.0
        stage = _Stage(lengths, np.full(count, screening.rate(0, Law(place))))
    _, accepted = review([stage])
    visits = _visits(copies, least, longest, accepted)
    copied = np.where(copies.matched >= least, visits, 0.0)
    rounds = float(visits.sum())
    drafts = 1.0 - float(copied.sum()) / rounds
    full = max(longest, count)
    law = np.bincount(np.minimum(copies.drafted, longest), copied, full + 1) / rounds
    law[len(stage.lengths) - 1] += drafts
    seconds = screening.longest_review(0, powers_of_two(full + 1), law)
    if place:
        one = screening.alone[place]
        whole = screening.any(drafts * float(accepted[-1]))
        seconds += count * one * screening.any(drafts) + whole * one
        # After a copy it reads what was copied.
        wide = max(screening.review(place, count + 1) - one, 0.0)
        seconds += wide * screening.any(drafts * (1.0 - drafts))
    return screening.emitted / rounds, seconds


def _visits(copies: Copies, least: int, longest: int, accepted: np.ndarray) -> np.ndarray:
    """How often a round begins at each position of the texts, along the texts."""
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
    """Over all texts, how many rounds are expected; those at the end may be cut short."""
    longest = int(lengths.max())
    needed = np.zeros(longest + 1)
    for left in range(1, longest + 1):
        emitted = np.arange(1, len(accepted) + 1)
        needed[left] = 1.0 + float(accepted @ needed[np.maximum(left - emitted, 0)])
    return float(needed[lengths].sum())
