"""How drafts are made of the models that a decoder has: `Decoder(drafting=...)`.

Axes: V vocabulary.
"""

import abc
import dataclasses
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.checks import check_count, check_path
from specjax.drafting import Bigram, LookupDrafter, LookupFirst, NeuralDrafter, NeuralDrafterParams
from specjax.text.bigram_files import load_bigram
from specjax.text.directories import built_in_table, real_path
from specjax.text.options import Own
from specjax.text.text_models import TextModel
from specjax.types import Drafter, Params


@dataclasses.dataclass(frozen=True, eq=False)
class Ingredients:
    """What a plan makes a drafter of.

    Attributes:
      models: those that the decoder has, by name; `verifier` is among them.
      max_draft: G, the longest block.
      neural: (a model or the name of one, the longest draft or None for `max_draft`) -> the drafter
        that draws from it as the decoder's `stopping` says, and its parameters.
      place: puts parameters of the plan's own where the decoder computes.
    """

    models: Mapping[str, TextModel]
    max_draft: int
    neural: Callable[..., tuple[NeuralDrafter, NeuralDrafterParams]]
    place: Callable[[Params], Params]


class Planned(NamedTuple):
    """What a plan has made.

    Attributes:
      drafter: the drafter.
      params: its parameters.
      own: those of them that are no model's, which a fingerprint of the decoder must have.
      described: what a fingerprint must have besides.
      models: those that the plan has brought, by name.
    """

    drafter: Drafter
    params: Params
    own: Params
    described: str = ""
    models: Mapping[str, TextModel] = MappingProxyType({})


class DraftPlan(abc.ABC):
    """Says how a drafter is made of the decoder's models.

    Attributes:
      needs: the names of the decoder's models that it drafts with; none by default.
      left_out: those options of a decoder that must not be given with it, and why.
    """

    @property
    def needs(self) -> tuple[str, ...]:
        """See above."""
        return ()

    @property
    def left_out(self) -> Mapping[str, str]:
        """See above."""
        return {}

    @property
    def weighs_costs(self) -> bool:
        """Whether `drafting.CostAware` may end the drafts, which weighs one model's passes."""
        return self.needs == ("drafter",)

    def longest(self, max_draft: int) -> int:
        """G of the drafter that `make` makes, where the decoder's `max_draft` is so many."""
        return max_draft

    @abc.abstractmethod
    def make(self, given: Ingredients) -> Planned:
        """Makes the drafter.

        Raises:
          ValueError: if it cannot be made of these.
        """


class ModelDrafts(DraftPlan):
    """The model called drafter drafts, token by token: what a `Decoder` does by itself."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The drafter."""
        return ("drafter",)

    def make(self, given: Ingredients) -> Planned:
        """See `DraftPlan`."""
        drafter, params = given.neural("drafter")
        return Planned(drafter, params, params.stopping)


@dataclasses.dataclass(frozen=True, eq=False)
class OwnDrafts(DraftPlan):
    """A drafter of the user's own drafts."""

    own: Own

    @property
    def left_out(self) -> Mapping[str, str]:
        """What it has of its own."""
        why = "the drafter of drafting=Own(...) has its own"
        return dict.fromkeys(("max_draft", "min_draft", "stopping"), why)

    def make(self, given: Ingredients) -> Planned:
        """See `DraftPlan`."""
        return Planned(self.own.part, given.place(self.own.params), self.own.params)


@dataclasses.dataclass(frozen=True)
class Lookup(DraftPlan):
    """Copies drafts from the prompt and the text so far; see `drafting.LookupDrafter`.

    With `min_match` only where so many tokens of the text's ending have occurred before, and the
    pair's drafter drafts where they have not; see `drafting.LookupFirst`.

    Attributes:
      max_ngram: see `drafting.LookupDrafter`.
      min_ngram: likewise.
      latest: likewise.
      overlap: likewise.
      bigram: a table of successors, of longer contexts too, or the directory that
        `specjax train bigram` has written, or "built-in" for that of the built-in pair whose models
        decode; it goes on where nothing can be copied. None for none.
      min_match: at least 1; None where no model drafts.
      max_copy: the longest copied block; `max_draft` by default.

    Raises:
      TypeError: if `bigram` is neither.
      ValueError: if a number is out of range.
    """

    max_ngram: int | None = None
    min_ngram: int = 1
    latest: bool = False
    overlap: bool = False
    bigram: Bigram | str | os.PathLike[str] | None = None
    min_match: int | None = None
    max_copy: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.bigram, Bigram | None):
            check_path(self.bigram, "bigram=")
        for name in ("min_match", "max_copy"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), "give a number of tokens, or None")
        self.copier(1, 1)  # its checks

    @property
    def needs(self) -> tuple[str, ...]:
        """The drafter, where one is asked for."""
        return () if self.min_match is None else ("drafter",)

    @property
    def left_out(self) -> Mapping[str, str]:
        """What a drafter that is no model has no use for."""
        if self.needs:
            return {}
        why = f"with drafting={self!r} no model drafts"
        return dict.fromkeys(("min_draft", "stopping"), why)

    def longest(self, max_draft: int) -> int:
        """See `DraftPlan`."""
        copied = self.max_copy or max_draft
        return max(copied, max_draft) if self.needs else copied

    def make(self, given: Ingredients) -> Planned:
        """See `DraftPlan`."""
        vocab_size = given.models["verifier"].model.vocab_size
        lookup = self.copier(vocab_size, self.max_copy or given.max_draft)
        table = self.table(given)
        if self.min_match is None:
            return Planned(lookup, table, table)
        neural, params = given.neural("drafter")
        both = LookupFirst(lookup, neural, self.min_match)
        return Planned(both, (table, params), (table, params.stopping))

    def copier(self, vocab_size: int, max_draft: int) -> LookupDrafter:
        """What copies, for blocks of `max_draft` tokens."""
        return LookupDrafter(
            vocab_size, max_draft, self.max_ngram, self.min_ngram, self.latest, self.overlap
        )

    def table(self, given: Ingredients) -> Params:
        """The parameters of what copies: the bigram table, or () for none.

        Raises:
          ValueError: if it is one of another vocabulary.
        """
        if self.bigram is None:
            return ()
        main = given.models["verifier"]
        bigram = self.bigram if isinstance(self.bigram, Bigram) else _load(self.bigram, main.name)
        words, vocab_size = main.tokenizer.fingerprint, main.model.vocab_size
        start = getattr(getattr(main.model, "config", None), "decoder_start_token", None)
        table = bigram.table(main.name, words, vocab_size, start)
        return given.place(jax.tree.map(jnp.asarray, table))


def _load(path: str | os.PathLike[str], model: str) -> Bigram:
    # Imported here to keep `import specjax` fast: Orbax alone takes as long as all else.
    return load_bigram(built_in_table(model) if path == "built-in" else real_path(path))
