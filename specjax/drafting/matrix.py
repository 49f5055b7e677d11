"""Cascade Speculative Drafting: several models draft, and the larger ones review.

Source: Cascade Speculative Drafting (arXiv 2312.11462).
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specjax.checks import check_count, one_number
from specjax.decoding import MethodParams
from specjax.decoding.speculative import check_rule
from specjax.drafting.cascades import HorizontalCascade, VerticalCascade
from specjax.drafting.chain import Chain
from specjax.drafting.lookup import Lookup
from specjax.drafting.trees import CaterpillarDrafter
from specjax.errors import UserError
from specjax.models.quantised import form_of
from specjax.rules import Lossless, Lossy
from specjax.rules.target import check_is_rule, has_carry
from specjax.types import Drafter, Drafting, DraftModels, Params, Rule, Verification
from specjax.verification import Block


def lenience(value: float) -> Rule:
    """The rule that accepts x in an inner level with probability min(1, l p(x) / q(x)).

    It is `Lossy` at the strength 1 - 1 / l. At temperature 0 it changes nothing; `TokenV3` is its
    counterpart there.

    l must be at least 1; 1 changes nothing.

    Source: Leviathan et al. (arXiv 2211.17192), section A.5; arXiv 2312.11462, section 3.1.
    """
    exact = one_number("lenience", value, low=1.0, high=float(np.finfo(np.float32).max))
    return Lossless() if exact == 1.0 else Lossy(1.0 - 1.0 / exact)


@dataclasses.dataclass(frozen=True, eq=False)
class Cascade(Drafting):
    """Drafts with several models; the larger models review the drafts of the smaller models.

    There are n drafters d_1 .. d_n, and d_0 is the verifier. Row r of K (from 1) belongs to the
    reviewer d_{r-1}: K[r, i] is the number of tokens of d_i in the blocks that it reviews, larger
    drafters first. d_i writes them by reviewing blocks of row i + 1; or token by token, if it is
    the last drafter or that row has no tokens. So

        [[5, 3],     the verifier reviews blocks of 5 tokens or more of d_1, then 3 of d_2;
         [0, 2]]     d_1 writes its tokens by reviewing blocks of 2 tokens of d_2

    If d_i reviews, its last round may add more than K[r, i] tokens, and they stay, as in the
    paper's algorithm. A model with several places in K has a cache for each. The decoder's
    `stopping` and `min_draft` apply to every model that drafts token by token.

    Source: arXiv 2312.11462, the algorithm of section 3.4.

    Attributes:
      lengths: K, `[n, n]` whole numbers, upper triangular; n counts `models` and `last`.
      models: the drafters, largest first: each a name of the decoder's models, a directory (see
        `load_text_model`) or a `TextModel`. Models without a name are named level_1, level_2, ...
        by their places.
      last: a `Lookup` as the last drafter, or None.
      lenience: l >= 1; levels without their own rule accept a token with probability
        min(1, l p / q). It has no effect at temperature 0; see `drafting.lenience`.
      rules: the rules for reviews: one for all models, or one for each of `models`, with None for
        the lenience rule and for a model that reviews nothing.
      verification: the verification of all inner rounds.
      cumulative: the meaning of the counts in a row; see `HorizontalCascade`.
      width: the number of tokens that the verifier reads at each place for which a model drafts:
        the cascade's own, then the model's most probable others, without tokens after them. Drafts
        are then trees. None: only the cascade's own.
      dtype: the dtype of models loaded from directories; by default that of each checkpoint.
      weights: the `weights` of models loaded from directories; see `load_text_model`. Of a mapping
        such as `load_pair` takes, they have the entry "drafter".
    """

    lengths: Any
    models: Any = ("drafter",)
    last: Lookup | None = None
    lenience: float = 1.0
    rules: Any = None
    verification: Verification = Block()  # noqa: RUF009  immutable
    cumulative: bool = False
    width: int | None = None
    dtype: Any = None
    weights: str | Mapping[str, str | None] | None = None

    def __post_init__(self) -> None:
        models = self.models
        several = isinstance(models, tuple | list) and len(models) > 0
        if not several or not all(_is_model(model) for model in models):
            raise UserError(
                "models must be a tuple of names, directories or TextModels, the largest first, "
                f"got {models!r}"
            )
        if len(set(models)) < len(models) or "verifier" in models:
            raise UserError(f"models must be different drafters, got {models!r}")
        if not isinstance(self.last, Lookup | None):
            raise UserError(f"last must be Lookup(...) or None, got {self.last!r}")
        for name, default in (("copies", 1), ("min_match", None), ("max_copy", None)):
            if getattr(self.last, name, default) != default:
                raise UserError(
                    f"last must not set {name}, because K has the lengths, got {self.last!r}"
                )
        form_of(self.weights, "drafter")  # its checks
        if self.width is not None:
            check_count("width", self.width, "or None for no siblings", low=2)
        matrix = check_lengths(self.lengths, self._names)
        object.__setattr__(self, "lengths", tuple(map(tuple, matrix)))
        object.__setattr__(self, "models", tuple(models))
        lenience(self.lenience)  # its checks
        for i, rule in enumerate(self._rules):
            if rule is not None:
                name = "rules" if rule is self.rules else f"rules[{i}]"
                check_is_rule(name, rule)
                if has_carry(rule) or any(map(np.ndim, jax.tree.leaves(rule))):
                    raise UserError(f"{name} must have scalar strengths and no carry, got {rule!r}")
        if self.lenience != 1.0 and None not in self._rules:
            raise UserError("lenience must be left out: each level has its own rule in `rules`")

    @property
    def _names(self) -> list[str]:
        names = [os.fspath(x) if isinstance(x, str | os.PathLike) else x.name for x in self.models]
        return [*names, *(["last"] if self.last else [])]

    @property
    def _rules(self) -> tuple[Any, ...]:
        """The rule of each model, or None for the lenience rule."""
        if not isinstance(self.rules, tuple | list):
            return (self.rules,) * len(self.models)
        if len(self.rules) != len(self.models):
            raise UserError(
                f"rules must have {len(self.models)} entries, a rule or None for each model, got "
                f"{len(self.rules)}"
            )
        return tuple(self.rules)

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.models

    @property
    def left_out(self) -> Mapping[str, str]:
        return {"max_draft": "K has the lengths of a cascade's drafts"}

    @property
    def drafts_trees(self) -> bool:
        return self.width is not None

    def bind(self, models: DraftModels) -> tuple[Drafter, Params]:
        loading = {"dtype": self.dtype, "weights": form_of(self.weights, "drafter")}
        levels = [models.level(i, model, **loading) for i, model in enumerate(self.models)]
        usual = lenience(self.lenience)
        rules = [usual if rule is None else rule for rule in self._rules]
        unused = set(range(len(self.lengths)))

        def stage(i: int, count: int) -> tuple[Drafter, Params]:
            unused.discard(i)
            if i == len(levels):
                assert self.last is not None
                return dataclasses.replace(self.last, max_copy=count).bind(models)
            name, reviewer = levels[i]
            if i + 1 == len(self.lengths) or not any(self.lengths[i + 1]):
                return Chain(name, count).bind(models)
            below, params = row(i + 1)
            check_rule(rules[i], below, nested=True)
            drafter = VerticalCascade(
                below,
                name if reviewer is None else reviewer.model,
                max_draft=count + below.max_draft,
                min_draft=count,
                verification=self.verification,
                name=name,
            )
            prepared = () if reviewer is None else reviewer.prepared
            return drafter, MethodParams(prepared, params, models.place(rules[i]))

        def row(r: int) -> tuple[Drafter, Params]:
            counts = {i: count for i, count in enumerate(self.lengths[r]) if count}
            drafters, params = zip(*(stage(i, count) for i, count in counts.items()), strict=True)
            if len(counts) == 1:
                return drafters[0], params[0]
            return HorizontalCascade(drafters, tuple(counts.values()), self.cumulative), params

        drafter, params = row(0)
        if unused:
            name = [*(name for name, _ in levels), "last"][min(unused)]
            raise UserError(
                f"K={[list(row) for row in self.lengths]} has no tokens for {name} in any row that "
                "is used: leave out this drafter, or give it tokens"
            )
        if self.width is not None:
            drafter = CaterpillarDrafter(drafter, self.width)
        return drafter, params


def _is_model(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) or hasattr(value, "prepared")


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
