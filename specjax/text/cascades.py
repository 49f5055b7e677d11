"""Drafters of several levels of a decoder's models: `Decoder(drafting=Cascade(...))`."""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from specjax.decoding.guards import check_rule
from specjax.drafting import (
    HorizontalCascade,
    LookupDrafter,
    VerticalCascade,
    cascade,
    cascade_params,
    lenience,
)
from specjax.drafting.hierarchy import check_lengths
from specjax.rules import Budgeted
from specjax.rules.target import check_is_rule
from specjax.text.directories import load_text_model, real_path
from specjax.text.drafts import DraftPlan, Ingredients, Lookup, Planned
from specjax.text.text_models import Models, TextModel
from specjax.types import Drafter, Params, Rule, Verification
from specjax.verification import Block


@dataclasses.dataclass(frozen=True, eq=False)
class Cascade(DraftPlan):
    """Drafts with several models, the larger ones reviewing what smaller ones draft.

    Row r of K says how many tokens of each drafter there are in the blocks that the reviewer above
    drafter r reviews: the verifier in the first row, drafter r - 1 in the others; see
    `drafting.cascade`. The decoder's `stopping` and `min_draft` are those of every model where it
    drafts token by token.

    Attributes:
      lengths: K, `[n, n]` whole numbers, upper triangular; n counts `models` and `last`.
      models: the drafters, largest first: the name of one of the decoder's models, a directory (see
        `load_text_model`) or a `TextModel` each. Those without a name are called level_1, level_2,
        ... by their places.
      last: what copies, as the last drafter; None for none.
      lenience: l >= 1; at the levels without a rule of their own what stands below is accepted with
        probability min(1, l p / q). At temperature 0 it changes nothing; see `drafting.lenience`.
      rules: under which the models review: one for all, or one for each of `models`, with None
        where `lenience` says it, or where a model reviews nothing.
      verification: of all inner rounds.
      cumulative: how the counts in a row are meant; see `drafting.HorizontalCascade`.
      dtype: of the models that are loaded from directories; by default that of each checkpoint.

    Raises:
      TypeError: if a part is not what it must be.
      ValueError: if K is of another size or not upper triangular, or `lenience` is below 1 or of no
        use.
    """

    lengths: Any
    models: Any = ("drafter",)
    last: Lookup | None = None
    lenience: float = 1.0
    rules: Any = None
    verification: Verification = Block()  # noqa: RUF009  immutable
    cumulative: bool = False
    dtype: Any = None

    def __post_init__(self) -> None:
        models = self.models
        if not isinstance(models, tuple | list) or not models:
            raise TypeError(
                "models must be a tuple of names, directories or loaded models, the largest first, "
                f"got {models!r}"
            )
        for i, model in enumerate(models):
            if not isinstance(model, str | os.PathLike | TextModel):
                raise TypeError(
                    f"models[{i}] must be the name of one of the decoder's models, a directory or "
                    f"a TextModel, got {model!r}"
                )
        _check_last(self.last)
        lenience(self.lenience)  # its checks
        names = [_shown(model) for model in models]
        matrix = check_lengths(self.lengths, [*names, *(["last"] if self.last else [])])
        object.__setattr__(self, "lengths", tuple(map(tuple, matrix)))
        object.__setattr__(self, "models", tuple(models))
        self._check_rules()

    @property
    def left_out(self) -> Mapping[str, str]:
        """K says it."""
        return {"max_draft": "K says how long the drafts of a cascade are"}

    def make(self, given: Ingredients) -> Planned:
        """See `DraftPlan`."""
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
            drafter,
            cascade_params(drafter, prepared, table, rules, stopping),
            own=(table, stopping, rules),
            # Of a rule without strengths no parameters tell.
            described=", ".join(f"{name}: {type(rule).__name__}" for name, rule in rules.items()),
            models=levels,
        )

    def _levels(self, given: Ingredients) -> dict[str, TextModel]:
        """The models by their names; each is loaded after all have been told apart."""
        main, named = given.models["verifier"], given.models
        places = {_place(main): "the verifier, which reviews them all"}
        found: dict[str, str | os.PathLike[str] | TextModel] = {}
        for i, model in enumerate(self.models):
            known = named.get(model) if isinstance(model, str) else None
            if (
                known is None
                and not isinstance(model, TextModel)
                and not os.path.isdir(real_path(model))
            ):
                raise ValueError(
                    f"models[{i}]={os.fspath(model)!r} is neither one of the decoder's models "
                    f"({', '.join(named)}) nor a directory: check the name or the path"
                )
            level, name = model if known is None else known, f"level_{i + 1}"
            place = _place(level)
            if place in places:
                raise ValueError(
                    f"models[{i}]={_shown(model)!r} is the same as {places[place]}: each level "
                    "must be another model; in K a model may have several places"
                )
            places[place] = f"models[{i}]"
            found[name if known is None else str(model)] = level
        levels = {}
        for name, level in found.items():
            if not isinstance(level, TextModel):
                level = load_text_model(level, dtype=self.dtype, mesh=main.mesh)
            Models(**{name: level, "verifier": main})  # one vocabulary, one mesh
            levels[name] = level
        return levels

    def _rules(self) -> list[Rule]:
        """For each of `models`, under which rule it reviews."""
        given = (
            self.rules if isinstance(self.rules, tuple | list) else [self.rules] * len(self.models)
        )
        lenient = lenience(self.lenience)
        return [lenient if rule is None else rule for rule in given]

    def _check_rules(self) -> None:
        several = isinstance(self.rules, tuple | list)
        if several and len(self.rules) != len(self.models):
            raise ValueError(
                f"rules must have one for each of the {len(self.models)} models (None where it has "
                f"no rule of its own), got {len(self.rules)}"
            )
        each = self.rules if several else (self.rules,)
        for i, rule in enumerate(each):
            if rule is None:
                continue
            name = f"rules[{i}]" if several else "rules"
            check_is_rule(name, rule)
            if isinstance(rule, Budgeted):
                raise ValueError(
                    f"{name} must be without a budget, got {rule!r}: hold it where the verifier "
                    "reviews, with rule=rules.Budgeted(...)"
                )
            if any(np.ndim(strength) for strength in jax.tree.leaves(rule)):
                raise ValueError(f"{name} must have one number for each strength, got {rule!r}")
        if self.lenience != 1.0 and None not in each:
            raise ValueError("lenience= must be left out: rules= says how each level reviews")

    def _check_used(self, drafter: Drafter, rules: Mapping[str, Rule]) -> set[str]:
        """Makes sure that nothing was given in vain, and that each rule has what it reads.

        Returns:
          The names of the models that review.
        """
        parts = list(_parts(drafter))
        used = {name: name in drafter.model_names for name in rules}
        used |= {
            "last": self.last is None or any(isinstance(part, LookupDrafter) for part in parts)
        }
        for name, has_tokens in used.items():
            if not has_tokens:
                raise ValueError(
                    f"K={[list(row) for row in self.lengths]} gives {name} no tokens in any row "
                    "that is used: leave that drafter out, or give it some"
                )
        reviewers = [part for part in parts if isinstance(part, VerticalCascade)]
        for reviewer in reviewers:
            check_rule(rules[reviewer.name], reviewer.drafter)
        names = {reviewer.name for reviewer in reviewers}
        several = isinstance(self.rules, tuple | list)
        for i, name in enumerate(rules):
            if several and self.rules[i] is not None and name not in names:
                raise ValueError(
                    f"rules[{i}] must be None: by K={[list(row) for row in self.lengths]} {name} "
                    "reviews nothing"
                )
        if not names and (self.lenience != 1.0 or (self.rules is not None and not several)):
            name = "rules" if self.rules is not None else "lenience"
            raise ValueError(f"{name}= must be left out: by K no level reviews another")
        return names


def _parts(drafter: Drafter) -> Iterator[Drafter]:
    """A drafter and all those that it is made of."""
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
        raise TypeError(f"last must be Lookup(...) or None, got {last!r}")
    for name in ("min_match", "max_copy"):
        if getattr(last, name) is not None:
            raise ValueError(
                f"last must have no {name}: K says who drafts how many tokens, got {last!r}"
            )


def _shown(model: Any) -> str:
    return model.name if isinstance(model, TextModel) else os.fspath(model)


def _place(model: str | os.PathLike[str] | TextModel) -> Any:
    """What two levels have in common if they are one model."""
    path = model.name if isinstance(model, TextModel) else model
    return os.path.realpath(path) if os.path.exists(path) else id(model)
