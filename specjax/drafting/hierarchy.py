"""Cascades of drafters described by a matrix: vertical cascades over horizontal ones."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from specjax.drafting.horizontal import HorizontalCascade
from specjax.drafting.neural import NeuralDrafter, NeuralDrafterParams
from specjax.drafting.vertical import VerticalCascade, VerticalCascadeParams
from specjax.errors import UserError
from specjax.rules import Lossless
from specjax.types import Drafter, LanguageModel, Params, Rule, Verification
from specjax.verification import Block


def cascade(
    lengths: Any,
    models: Mapping[str, LanguageModel],
    last: Drafter | None = None,
    *,
    verification: Verification = Block(),  # noqa: B008  immutable
    cumulative: bool = False,
    neural: Callable[[str, int], NeuralDrafter] | None = None,
) -> Drafter:
    """The drafter of Cascade Speculative Drafting for a matrix K of draft lengths.

    There are n drafters d_1 .. d_n, and d_0 is the verifier. Row r of K (from 1) belongs to the
    reviewer d_{r-1}: K[r, i] is the number of tokens of d_i in the blocks that it reviews, larger
    drafters first. d_i writes them by reviewing blocks of row i + 1; or token by token, if it is
    the last drafter or that row has no tokens. So

        [[5, 3],     the verifier reviews blocks of 5 tokens or more of d_1, then 3 of d_2;
         [0, 2]]     d_1 writes its tokens by reviewing blocks of 2 tokens of d_2

    If d_i reviews, its last round may add more than K[r, i] tokens, and they stay, as in the
    paper's algorithm. A model with several places in K has a cache for each.

    Source: arXiv 2312.11462, the algorithm of section 3.4.

    Args:
      lengths: K, `[n, n]` whole numbers, upper triangular.
      models: d_1, d_2, ... by name, largest first.
      last: d_n if it is not a model but a drafter of statistics: a frozen dataclass with a field
        `max_draft`, of any value.
      verification: of all inner rounds.
      cumulative: the meaning of counts in a row; see `HorizontalCascade`.
      neural: (a model's name, a number of tokens) -> the drafter that draws so many tokens from a
        model that does not review, under that name; by default it always drafts all of them.

    Returns:
      A drafter; `cascade_params` makes its parameters.
    """
    matrix = check_lengths(lengths, [*models, *(["last"] if last is not None else [])])
    named = list(models.items())

    def unreviewed(i: int, count: int) -> Drafter:
        if i < len(named):
            name, model = named[i]
            drawn = None if neural is None else neural(name, count)
            return NeuralDrafter(model, count, name=name) if drawn is None else drawn
        assert dataclasses.is_dataclass(last), f"last must be a dataclass, got {last!r}"
        changed: Any = dataclasses.replace(last, max_draft=count)
        return changed

    def stage(i: int, count: int) -> Drafter:
        if i + 1 == len(matrix) or not any(matrix[i + 1]):
            return unreviewed(i, count)
        name, model = named[i]
        below = row(i + 1)
        return VerticalCascade(
            below,
            model,
            max_draft=count + below.max_draft,
            min_draft=count,
            verification=verification,
            name=name,
        )

    def row(r: int) -> Drafter:
        places = [(i, count) for i, count in enumerate(matrix[r]) if count]
        stages = tuple(stage(i, count) for i, count in places)
        if len(stages) == 1:
            return stages[0]
        counts = tuple(count for _, count in places)
        return HorizontalCascade(stages, counts, cumulative, tuple(models))

    return row(0)


def cascade_params(
    drafter: Drafter,
    models: Mapping[str, Params],
    last: Params = (),
    rules: Rule | Mapping[str, Rule] = Lossless(),  # noqa: B008  immutable
    stopping: Mapping[str, Params] = MappingProxyType({}),
) -> Params:
    """The parameters of a nested drafter, from those of its models.

    Args:
      drafter: from `cascade`, or any nesting of vertical and horizontal cascades of neural drafters
        and others.
      models: the models' parameters by the names in the drafter.
      last: the parameters of every drafter that is not neural.
      rules: for the reviews of the middle models: a rule for all, or rules by the reviewer's name,
        with `Lossless` for the others. `lenience` makes a rule.
      stopping: the parameters of the models' stopping policies by their names; default ().
    """
    reviewers: set[str] = set()
    draws: set[str] = set()

    def params(part: Drafter) -> Params:
        if isinstance(part, HorizontalCascade):
            return tuple(params(each) for each in part.drafters)
        if isinstance(part, VerticalCascade):
            reviewers.add(part.name)
            rule = rules.get(part.name, Lossless()) if isinstance(rules, Mapping) else rules
            return VerticalCascadeParams(_named(models, part.name), params(part.drafter), rule)
        if isinstance(part, NeuralDrafter):
            draws.add(part.name)
            return NeuralDrafterParams(_named(models, part.name), stopping.get(part.name, ()))
        return last

    nested = params(drafter)
    by_name = rules if isinstance(rules, Mapping) else {}
    for what, entries, names in (("rules", by_name, reviewers), ("stopping", stopping, draws)):
        if unknown := sorted(set(entries) - names):
            raise UserError(
                f"{what} has an entry {unknown[0]!r}, but its names are "
                f"{', '.join(sorted(names)) or 'none'}: correct it, or leave it out"
            )
    return nested


def _named(models: Mapping[str, Params], name: str) -> Params:
    if name not in models:
        raise UserError(f"models must have an entry {name!r}, got {', '.join(models)}")
    return models[name]


def check_lengths(lengths: Any, names: Sequence[str]) -> list[list[int]]:
    """K of the drafters with these names, as lists of ints."""
    try:
        matrix = np.asarray(lengths)
    except ValueError:
        raise UserError(f"K must have rows of equal length, got {lengths!r}") from None
    size = len(names)
    if matrix.shape != (size, size):
        raise UserError(
            f"K must have a row and a column for each of the {size} drafters ({', '.join(names)}), "
            f"got shape {matrix.shape}"
        )
    if matrix.dtype.kind not in "iu" or (matrix < 0).any():
        raise UserError(f"K must hold whole numbers of at least 0, got {matrix.tolist()}")
    below = np.argwhere(np.tril(matrix, -1))
    if below.size:
        row, column = below[0]
        raise UserError(
            f"K must be upper triangular, got {matrix[row, column]} in row {row + 1}, column "
            f"{column + 1}: row r has the tokens of drafters r, r + 1, ...; put 0 before them"
        )
    if not matrix[0].any():
        raise UserError("K must have tokens in its first row, which the verifier reviews: got 0s")
    return matrix.tolist()
