"""Drafters of several levels: `Decoder(drafting=Cascade(...))`."""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from specjax.checks import check_count
from specjax.decoding.guards import check_rule
from specjax.drafting import (
    CaterpillarDrafter,
    HorizontalCascade,
    LookupDrafter,
    VerticalCascade,
    cascade,
    cascade_params,
    lenience,
)
from specjax.drafting.hierarchy import check_lengths
from specjax.errors import UserError
from specjax.models.int8 import form_of
from specjax.rules import Budgeted
from specjax.rules.target import check_is_rule
from specjax.text.directories import load_text_model, real_path
from specjax.text.drafts import DraftPlan, Ingredients, Lookup, Planned
from specjax.text.text_models import Models, TextModel
from specjax.types import Drafter, Params, Rule, Verification
from specjax.verification import Block, Traversal


@dataclasses.dataclass(frozen=True, eq=False)
class Cascade(DraftPlan):
    """Drafts with several models; the larger models review the drafts of the smaller models.

    Row r of K has the number of tokens of each drafter in the blocks that the reviewer of drafter r
    reviews: the verifier in the first row, drafter r - 1 in the others; see `drafting.cascade`. The
    decoder's `stopping` and `min_draft` apply to every model that drafts token by token.

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
      cumulative: the meaning of the counts in a row; see `drafting.HorizontalCascade`.
      width: the number of tokens that the verifier reads at each place for which a model drafts:
        the cascade's own, then the model's most probable others, without tokens after them. Drafts
        are then trees; see `drafting.CaterpillarDrafter`. None: only the cascade's own.
      dtype: the dtype of models loaded from directories; by default that of each checkpoint.
      weights: the `weights` of models loaded from directories; see `load_text_model`. Of a mapping
        such as `load_pair` takes, they have the entry "drafter".

    Raises:
      TypeError: a part has a wrong type.
      ValueError: K has a wrong size or is not upper triangular, or `lenience` is below 1 or has no
        effect.
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
        if not isinstance(models, tuple | list) or not models:
            raise UserError(
                "models must be a tuple of names, directories or TextModels, the largest first, "
                f"got {models!r}"
            )
        for i, model in enumerate(models):
            if not isinstance(model, str | os.PathLike | TextModel):
                raise UserError(
                    f"models[{i}] must be the name of a model, a directory or a TextModel, got "
                    f"{model!r}"
                )
        _check_last(self.last)
        lenience(self.lenience)  # its checks
        form_of(self.weights, "drafter")
        if self.width is not None:
            check_count("width", self.width, "or None for no siblings", low=2)
        names = [_shown(model) for model in models]
        matrix = check_lengths(self.lengths, [*names, *(["last"] if self.last else [])])
        object.__setattr__(self, "lengths", tuple(map(tuple, matrix)))
        object.__setattr__(self, "models", tuple(models))
        self._check_rules()

    @property
    def left_out(self) -> Mapping[str, str]:
        """Only `max_draft`."""
        return {"max_draft": "K has the lengths of a cascade's drafts"}

    @property
    def default_verification(self) -> Verification:
        """Traversal verification of trees, else that of the inner rounds."""
        return self.verification if self.width is None else Traversal()

    def make(self, given: Ingredients) -> Planned:
        levels = self._levels(given)
        stopping: dict[str, Params] = {}

        def neural(name: str, count: int) -> Any:
            drafter, params = given.neural(levels[name], count)
            stopping[name] = params.stopping
            return dataclasses.replace(drafter, name=name)

        vocab_size = given.models["verifier"].model.vocab_size
        last = None if self.last is None else self.last.copier(vocab_size, 1)
        table = () if self.last is None else self.last.table(given)
        drafter = cascade(
            self.lengths,
            {name: level.model for name, level in levels.items()},
            last,
            verification=self.verification,
            cumulative=self.cumulative,
            neural=neural,
        )
        rules = dict(zip(levels, self._rules(), strict=True))
        reviewers = self._check_used(drafter, rules)
        rules = given.place({name: rule for name, rule in rules.items() if name in reviewers})
        prepared = {name: level.prepared for name, level in levels.items()}
        return Planned(
            drafter if self.width is None else CaterpillarDrafter(drafter, self.width),
            cascade_params(drafter, prepared, table, rules, stopping),
            own=(table, stopping, rules),
            # A rule without strengths has no parameters to hash.
            described=", ".join(f"{name}: {type(rule).__name__}" for name, rule in rules.items()),
            models=levels,
        )

    def _levels(self, given: Ingredients) -> dict[str, TextModel]:
        """The models by name, loaded after all have been checked to be different."""
        main, named = given.models["verifier"], given.models
        places = {"verifier" if given.is_trial else _place(main): "the verifier"}
        found: dict[str, str | os.PathLike[str] | TextModel] = {}
        for i, model in enumerate(self.models):
            known = named.get(model) if isinstance(model, str) else None
            if given.is_trial:
                known = main
            elif (
                known is None
                and not isinstance(model, TextModel)
                and not os.path.isdir(real_path(model))
            ):
                raise UserError(
                    f"models[{i}]={os.fspath(model)!r} is neither a model of the decoder "
                    f"({', '.join(named)}) nor a directory: check the name or the path"
                )
            level, name = model if known is None else known, f"level_{i + 1}"
            place = model if given.is_trial else _place(level)
            if place in places:
                raise UserError(
                    f"models[{i}]={_shown(model)!r} is the same as {places[place]}: give different "
                    "models; K may use a model several times"
                )
            places[place] = f"models[{i}]"
            found[name if known is None else str(model)] = level
        levels: dict[str, Any] = {}
        for name, level in found.items():
            if given.is_trial:
                levels[name] = level
                continue
            if not isinstance(level, TextModel):
                form = form_of(self.weights, "drafter")
                level = load_text_model(level, dtype=self.dtype, mesh=main.mesh, weights=form)
            Models(**{name: level, "verifier": main})  # checks the vocabulary and the mesh
            levels[name] = level
        return levels

    def _rules(self) -> list[Rule]:
        """The rule of each model's reviews."""
        given = (
            self.rules if isinstance(self.rules, tuple | list) else [self.rules] * len(self.models)
        )
        lenient = lenience(self.lenience)
        return [lenient if rule is None else rule for rule in given]

    def _check_rules(self) -> None:
        several = isinstance(self.rules, tuple | list)
        if several and len(self.rules) != len(self.models):
            raise UserError(
                f"rules must have {len(self.models)} entries, a rule or None for each model, got "
                f"{len(self.rules)}"
            )
        each = self.rules if several else (self.rules,)
        for i, rule in enumerate(each):
            if rule is None:
                continue
            name = f"rules[{i}]" if several else "rules"
            check_is_rule(name, rule)
            if isinstance(rule, Budgeted):
                raise UserError(
                    f"{name} must not be Budgeted, got {rule!r}: give the budget to the verifier, "
                    "with rule=rules.Budgeted(...)"
                )
            if any(np.ndim(strength) for strength in jax.tree.leaves(rule)):
                raise UserError(f"{name} must have scalar strengths, got {rule!r}")
        if self.lenience != 1.0 and None not in each:
            raise UserError("lenience must be left out: each level has its own rule in `rules`")

    def _check_used(self, drafter: Drafter, rules: Mapping[str, Rule]) -> set[str]:
        """Checks that all parts are used, and that each rule has its inputs."""
        parts = list(_parts(drafter))
        used = {name: name in drafter.model_names for name in rules}
        used |= {
            "last": self.last is None or any(isinstance(part, LookupDrafter) for part in parts)
        }
        for name, has_tokens in used.items():
            if not has_tokens:
                raise UserError(
                    f"K={[list(row) for row in self.lengths]} has no tokens for {name} in any row "
                    "that is used: leave out this drafter, or give it tokens"
                )
        reviewers = [part for part in parts if isinstance(part, VerticalCascade)]
        for reviewer in reviewers:
            check_rule(rules[reviewer.name], reviewer.drafter)
        names = {reviewer.name for reviewer in reviewers}
        several = isinstance(self.rules, tuple | list)
        for i, name in enumerate(rules):
            if several and self.rules[i] is not None and name not in names:
                raise UserError(
                    f"rules[{i}] must be None: {name} reviews nothing with "
                    f"K={[list(row) for row in self.lengths]}"
                )
        if not names and (self.lenience != 1.0 or (self.rules is not None and not several)):
            name = "rules" if self.rules is not None else "lenience"
            raise UserError(f"{name} must be left out: no level of K reviews another level")
        return names


def _parts(drafter: Drafter) -> Iterator[Drafter]:
    """A drafter and all drafters in it."""
    yield drafter
    below: tuple[Drafter, ...] = ()
    if isinstance(drafter, HorizontalCascade):
        below = drafter.drafters
    elif isinstance(drafter, VerticalCascade):
        below = (drafter.drafter,)
    for part in below:
        yield from _parts(part)


def _check_last(last: Any) -> None:
    if last is None:
        return
    if not isinstance(last, Lookup):
        raise UserError(f"last must be Lookup(...) or None, got {last!r}")
    if last.copies > 1:
        raise UserError(f"last must not set copies, because a cascade has one chain, got {last!r}")
    for name in ("min_match", "max_copy"):
        if getattr(last, name) is not None:
            raise UserError(f"last must not set {name}, because K has the lengths, got {last!r}")


def _shown(model: Any) -> str:
    return model.name if isinstance(model, TextModel) else os.fspath(model)


def _place(model: str | os.PathLike[str] | TextModel) -> Any:
    """A key that is equal for equal models."""
    path = model.name if isinstance(model, TextModel) else model
    return os.path.realpath(path) if os.path.exists(path) else id(model)
