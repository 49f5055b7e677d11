"""Makes drafters from the models of a decoder: `Decoder(drafting=...)`.

Axes: V vocabulary.
"""

import abc
import dataclasses
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.checks import check_count, check_part, check_path
from specjax.drafting import (
    Bigram,
    LookupDrafter,
    LookupFirst,
    LookupTreeDrafter,
    NeuralDrafter,
    NeuralDrafterParams,
)
from specjax.errors import UserError
from specjax.text.bigram_files import load_bigram
from specjax.text.directories import built_in_table, real_path
from specjax.text.options import Own
from specjax.text.text_models import TextModel
from specjax.types import Drafter, Params, Verification
from specjax.verification import Block, Traversal

# The most nodes of a tree: each is a token that the verifier reads, and a slot of its cache.
MOST_NODES = 512


@dataclasses.dataclass(frozen=True, eq=False)
class Ingredients:
    """The inputs of a plan that makes a drafter.

    Attributes:
      models: the decoder's models by name, `verifier` among them.
      max_draft: G, the longest block.
      neural: (a model or its name, the longest draft or None for `max_draft`) -> the drafter of
        this model with the decoder's `stopping`, and its parameters.
      place: puts the plan's own parameters on the decoder's devices.
      is_trial: whether only the parts are checked: the models have no parameters and stand for any
        others, and no file may be read.
    """

    models: Mapping[str, TextModel]
    max_draft: int
    neural: Callable[..., tuple[NeuralDrafter, NeuralDrafterParams]]
    place: Callable[[Params], Params]
    is_trial: bool = False


class Planned(NamedTuple):
    """The result of a plan.

    Attributes:
      drafter: the drafter.
      params: its parameters.
      own: the parameters that belong to no model, for the decoder's fingerprint.
      described: a text for the fingerprint.
      models: the models that the plan has added, by name.
    """

    drafter: Drafter
    params: Params
    own: Params
    described: str = ""
    models: Mapping[str, TextModel] = MappingProxyType({})


class DraftPlan(abc.ABC):
    """Makes a drafter from the decoder's models.

    Attributes:
      needs: the names of the decoder's models that draft; empty by default.
      left_out: option of the decoder that must not be given -> why.
    """

    @property
    def needs(self) -> tuple[str, ...]:
        return ()

    @property
    def left_out(self) -> Mapping[str, str]:
        return {}

    @property
    def weighs_costs(self) -> bool:
        """Whether `drafting.CostAware` can be used, which needs a single drafter."""
        return self.needs == ("drafter",)

    @property
    def default_verification(self) -> Verification:
        """The verification of a decoder that gives none."""
        return Block()

    def longest(self, max_draft: int) -> int:
        """Returns G of the drafter, for the decoder's `max_draft`."""
        return max_draft

    @abc.abstractmethod
    def make(self, given: Ingredients) -> Planned:
        """Makes the drafter.

        Raises:
          ValueError: the drafter cannot be made.
        """


def check_is_plan(plan: Any) -> None:
    """Raises TypeError unless it is like a `DraftPlan`."""
    needed = ("needs", "left_out", "weighs_costs", "longest", "make")
    check_part("drafting", plan, needed, "specjax.Lookup()")


class ModelDrafts(DraftPlan):
    """The model named drafter drafts, token by token: the default of `Decoder`."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The drafter."""
        return ("drafter",)

    def make(self, given: Ingredients) -> Planned:
        drafter, params = given.neural("drafter")
        return Planned(drafter, params, params.stopping)


@dataclasses.dataclass(frozen=True, eq=False)
class OwnDrafts(DraftPlan):
    """The user's own drafter drafts."""

    own: Own

    @property
    def left_out(self) -> Mapping[str, str]:
        """The options that the drafter replaces."""
        why = "the drafter of drafting=Own(...) has its own"
        return dict.fromkeys(("max_draft", "min_draft", "stopping"), why)

    def make(self, given: Ingredients) -> Planned:
        return Planned(self.own.part, given.place(self.own.params), self.own.params)


@dataclasses.dataclass(frozen=True)
class Lookup(DraftPlan):
    """Copies drafts from the prompt and the text so far; see `drafting.LookupDrafter`.

    With `min_match` it copies only if that many tokens at the text's end have occurred before;
    otherwise the pair's drafter drafts; see `drafting.LookupFirst`.

    Attributes:
      max_ngram: see `drafting.LookupDrafter`.
      min_ngram: likewise.
      latest: likewise.
      overlap: likewise.
      bigram: a table of successors that drafts if nothing can be copied: a `Bigram`, a directory of
        `specjax train bigram`, "built-in" for the built-in pair's table, or None.
      min_match: at least 1; None: no model drafts.
      max_copy: the longest copied block; `max_draft` by default.
      copies: the number of earlier occurrences that are copied. With several, drafts are trees; see
        `drafting.LookupTreeDrafter`.

    Raises:
      TypeError: `bigram` has a wrong type.
      ValueError: a number is out of range, or several copies are given with `min_match`.
    """

    max_ngram: int | None = None
    min_ngram: int = 1
    latest: bool = False
    overlap: bool = False
    bigram: Bigram | str | os.PathLike[str] | None = None
    min_match: int | None = None
    max_copy: int | None = None
    copies: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.bigram, Bigram | None):
            check_path(self.bigram, "bigram=")
        for name in ("min_match", "max_copy"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), "give a number of tokens, or None")
        self.copier(1, 1)  # checks the other fields
        check_count("copies", self.copies, "give the number of copies")
        if self.copies > 1 and self.min_match is not None:
            raise UserError(
                f"min_match must be left out with copies={self.copies}: use Branches to draft with "
                "a model and with several copies"
            )

    @property
    def needs(self) -> tuple[str, ...]:
        """The drafter, with `min_match`."""
        return () if self.min_match is None else ("drafter",)

    @property
    def left_out(self) -> Mapping[str, str]:
        """The options of models, without `min_match`."""
        if self.needs:
            return {}
        why = f"drafting={self!r} has no drafter model"
        return dict.fromkeys(("min_draft", "stopping"), why)

    @property
    def default_verification(self) -> Verification:
        """Traversal verification of several copies."""
        return Block() if self.copies == 1 else Traversal()

    def longest(self, max_draft: int) -> int:
        copied = (self.max_copy or max_draft) * self.copies
        return max(copied, max_draft) if self.needs else copied

    def make(self, given: Ingredients) -> Planned:
        vocab_size = given.models["verifier"].model.vocab_size
        lookup = self.copier(vocab_size, self.max_copy or given.max_draft)
        table = self.table(given)
        if self.copies > 1:
            return Planned(LookupTreeDrafter(lookup, self.copies), table, table)
        if self.min_match is None:
            return Planned(lookup, table, table)
        neural, params = given.neural("drafter")
        both = LookupFirst(lookup, neural, self.min_match)
        return Planned(both, (table, params), (table, params.stopping))

    def copier(self, vocab_size: int, max_draft: int) -> LookupDrafter:
        """Returns the drafter that copies, for blocks of `max_draft` tokens."""
        return LookupDrafter(
            vocab_size, max_draft, self.max_ngram, self.min_ngram, self.latest, self.overlap
        )

    def table(self, given: Ingredients) -> Params:
        """Returns the parameters of `copier`: the bigram table, or ().

        Raises:
          ValueError: the table has another vocabulary.
        """
        if self.bigram is None or given.is_trial:
            return ()
        main = given.models["verifier"]
        bigram = self.bigram if isinstance(self.bigram, Bigram) else _load(self.bigram, main.name)
        words, vocab_size = main.tokenizer.fingerprint, main.model.vocab_size
        start = getattr(getattr(main.model, "config", None), "decoder_start_token", None)
        table = bigram.table(main.name, words, vocab_size, start)
        return given.place(jax.tree.map(jnp.asarray, table))


def _load(path: str | os.PathLike[str], model: str) -> Bigram:
    return load_bigram(built_in_table(model) if path == "built-in" else real_path(path))
