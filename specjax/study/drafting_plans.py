"""Drafting plans: a single model, copies from the text, cascades of these, and trees.

All but trees are lossless: outputs follow the verifier's distribution.
"""

import dataclasses
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from specjax.checks import check_path, one_number, whole_number
from specjax.errors import UserError
from specjax.study.clock import VERIFIER
from specjax.study.tree_walks import cannot_walk
from specjax.text import Cascade, Lookup, Tree
from specjax.text.setting import Setting
from specjax.verification import Block

# Numbers of tokens of a drafter in a row of K, at most max_draft.
_COUNTS = (1, 2, 3, 5, 8)
# The same for three levels.
_FEW_COUNTS = (2, 4)
_MATCHES = (2, 3, 5)


class Plan(NamedTuple):
    """How a setting drafts.

    Attributes:
      models: the drafters' names, largest first; empty if no model drafts.
      lengths: K; a single number for a single drafter.
      copies: the `Lookup` as the last drafter, or None.
      min_match: copy if that many tokens match, otherwise the model drafts; 0 if copies are a
        separate level.
      max_copy: the longest copy, with `min_match`.
      lenience: the lenience of the levels below the verifier.
      tree: whether the drafts are trees.
    """

    models: tuple[str, ...]
    lengths: tuple[tuple[int, ...], ...]
    copies: Lookup | None = None
    min_match: int = 0
    max_copy: int = 0
    lenience: float = 1.0
    tree: bool = False

    @classmethod
    def of(cls, setting: Setting) -> "Plan":
        """Returns the plan of a setting for which `cannot_plan` returns None."""
        plan, count = setting.made("drafting"), setting.max_draft or 0
        if isinstance(plan, Cascade):
            return cls(setting.drafters, plan.lengths, plan.last, lenience=plan.lenience)
        if isinstance(plan, Tree):
            return cls((setting.drafter,), ((plan.shape.size,),), tree=True)
        if not isinstance(plan, Lookup):
            return cls((setting.drafter,), ((count,),))
        copies = dataclasses.replace(plan, min_match=None, max_copy=None)
        if plan.min_match is None:
            return cls((), ((plan.max_copy or count,),), copies)
        most = plan.max_copy or count
        return cls((setting.drafter,), ((count,),), copies, plan.min_match, most)

    @property
    def is_single(self) -> bool:
        """Whether a single model drafts, without copies."""
        alone = len(self.models) == 1 and len(self.lengths) == 1
        return alone and not self.copies and not self.tree

    @property
    def kind(self) -> tuple[Any, ...]:
        """A key shared by plans that differ only in numbers."""
        filled = tuple(tuple(count > 0 for count in row) for row in self.lengths)
        return self.models, filled, self.copies, self.min_match > 0

    @property
    def longest(self) -> int:
        """The most tokens of a drafter in a block."""
        return max(self.max_copy, *map(max, self.lengths))

    @property
    def tables(self) -> set[tuple[str, str | None]]:
        """The (reviewer, drafter) pairs whose costs are needed; see `PassTimes`."""
        if not self.models:
            return {(VERIFIER, None)}
        found: set[tuple[str, str | None]] = {(VERIFIER, name) for name in self.models}
        return found if self.is_single else found | {(name, None) for name in self.models}

    def reviews(self, level: int) -> bool:
        """Whether the drafter at a level, from 0, reviews drafts of lower levels."""
        return level + 1 < len(self.lengths) and any(self.lengths[level + 1])

    def read_by(self) -> Iterator[str]:
        """The drafters that read the prompt, once for each of their places in K."""
        for level, name in enumerate(self.models):
            yield from (name for row in self.lengths if row[level])


def cannot_plan(setting: Setting) -> str | None:
    """Returns why a setting's plan cannot be estimated from texts, or None."""
    plan = setting.made("drafting")
    if isinstance(plan, Tree):
        return cannot_walk(plan, setting.made("verification"))
    if not isinstance(plan, Cascade | Lookup):
        return f"drafting={setting.drafting} is not a Cascade, a Lookup or a Tree"
    if plan.default_verification.walks_trees:
        return f"drafting={setting.drafting} drafts branches of several drafters"
    if not setting.is_lossless:
        return f"with drafting={setting.drafting} the rule must be Lossless"
    if setting.stopping is not None or setting.min_draft:
        return f"with drafting={setting.drafting} drafts must have a fixed length"
    if isinstance(plan, Cascade):
        if plan.rules is not None or plan.cumulative or plan.verification != Block():
            return "a Cascade may set only K, models, last and lenience"
        if not all(isinstance(model, str) for model in plan.models):
            return "the `models` of a Cascade must be names"
    return None


def plans(
    drafters: Sequence[str] = ("drafter",),
    *,
    max_draft: int = 10,
    leniences: Sequence[float] = (1.0, 2.0, 4.0),
    levels: int = 2,
    bigram: str | os.PathLike[str] | None = None,
) -> list[Setting]:
    """Returns settings with different ways to draft, for `Grid.plans`.

    Args:
      drafters: names of models, the largest first.
      max_draft: G, the most tokens that a drafter adds to a block.
      leniences: the leniences of reviewing drafters, at least 1 each; without effect at temperature
        0.
      levels: the most drafters of a cascade, copies included: 1, 2 or 3.
      bigram: the directory of a bigram table for copies, "built-in", or None.

    Returns:
      Lossless settings, each once.

    Raises:
      TypeError: a value has a wrong type.
      ValueError: a value is out of range.
    """
    if isinstance(drafters, str) or not isinstance(drafters, Sequence):
        example = f"({drafters!r},)" if isinstance(drafters, str) else "('drafter',)"
        raise UserError(f"plans.drafters must be a tuple such as {example}, got {drafters!r}")
    max_draft = whole_number("max_draft", max_draft, low=1)
    if whole_number("levels", levels, low=1) > 3:
        raise UserError(f"levels must be 1, 2 or 3, got {levels}")
    if isinstance(leniences, str) or not isinstance(leniences, Sequence) or not leniences:
        raise UserError(f"leniences must be a tuple such as (1.0, 2.0), got {leniences!r}")
    several = sorted({one_number("leniences", x, low=1.0, open_high=True) for x in leniences})
    copies = ["Lookup()"]
    if bigram is not None:
        check_path(bigram, "bigram=")
        copies.append(f"Lookup(bigram={os.fspath(bigram)!r})")
    found = [*_simple(drafters, copies, max_draft)]
    for size in range(2, levels + 1):
        grid = _COUNTS if size == 2 else _FEW_COUNTS
        matrices = list(_matrices(size, sorted({min(count, max_draft) for count in grid})))
        for last, matrix in itertools.product((None, *copies), matrices):
            for models in itertools.combinations(drafters, size - (last is not None)):
                # Lenience needs a drafter that reviews.
                for lenient in several if any(map(any, matrix[1:])) else (1.0,):
                    text = f"Cascade({matrix}, {models}, {last}, {lenient})"
                    found.append(Setting(drafting=text))
    return found


def _simple(drafters: Sequence[str], copies: Sequence[str], max_draft: int) -> Iterator[Setting]:
    """A drafter, copies only, and copies with a drafter."""
    longest = sorted({max(1, max_draft // 2), max_draft})
    for count in range(1, max_draft + 1):
        yield from (Setting(drafter=name, max_draft=count) for name in drafters)
        yield from (Setting(drafting=text, max_draft=count) for text in copies)
        # No bigram table: it would only make copies longer.
        for name, least, most in itertools.product(drafters, _MATCHES, longest):
            text = f"Lookup(min_match={least}, max_copy={most})"
            yield Setting(drafter=name, max_draft=count, drafting=text)


def _matrices(size: int, counts: Sequence[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every K in which all drafters are used, and the first in the first row."""
    rows = [
        [((0,) * r + row) for row in itertools.product((0, *counts), repeat=size - r)]
        for r in range(size)
    ]
    for matrix in itertools.product(*rows):
        if matrix[0][0] and _all_used(matrix):
            yield matrix


def _all_used(matrix: tuple[tuple[int, ...], ...]) -> bool:
    """Whether each drafter has tokens in a used row, and each row with tokens is used."""
    used = {i for i, count in enumerate(matrix[0]) if count}
    for r in range(1, len(matrix)):
        if any(matrix[r]):
            if r - 1 not in used:
                return False
            used |= {i for i, count in enumerate(matrix[r]) if count}
    return len(used) == len(matrix)
