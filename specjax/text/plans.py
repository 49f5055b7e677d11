"""How drafts are made of the models that a decoder has: `Decoder(drafting=...)`.

Axes: V vocabulary.
"""

import abc
import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp

from specjax.checks import check_count, check_path
from specjax.drafting import (
    Bigram,
    LookupFirst,
    LookupFirstParams,
    MaxGram,
    NeuralDrafter,
    NeuralDrafterParams,
)
from specjax.text.models import BUILT_IN, TextModel
from specjax.types import Drafter, Params


@dataclasses.dataclass(frozen=True, eq=False)
class Ingredients:
    """What a plan makes a drafter of.

    Attributes:
      models: those that the decoder has, by name; `verifier` is among them.
      max_draft: G, the longest block.
      neural: a model's name -> the drafter that draws from it as the decoder's `stopping` says, and
        its parameters.
      place: puts parameters of the plan's own where the decoder computes.
    """

    models: Mapping[str, TextModel]
    max_draft: int
    neural: Callable[[str], tuple[NeuralDrafter, NeuralDrafterParams]]
    place: Callable[[Params], Params]


class Planned(NamedTuple):
    """What a plan has made.

    Attributes:
      drafter: the drafter.
      params: its parameters.
      own: those of them that are no model's, which a fingerprint of the decoder must have.
    """

    drafter: Drafter
    params: Params
    own: Params


class DraftPlan(abc.ABC):
    """Says how a drafter is made of the decoder's models.

    Attributes:
      models: the names of the models that draft; none by default.
    """

    @property
    def models(self) -> tuple[str, ...]:
        """See above."""
        return ()

    @abc.abstractmethod
    def make(self, given: Ingredients) -> Planned:
        """Makes the drafter.

        Raises:
          ValueError: if it cannot be made of these.
        """


@dataclasses.dataclass(frozen=True)
class Lookup(DraftPlan):
    """Copies drafts from the prompt and the text so far; see `drafting.MaxGram`.

    With `min_match` only where so many tokens of the text's ending have occurred before, and the
    pair's drafter drafts where they have not; see `drafting.LookupFirst`.

    Attributes:
      max_ngram: see `drafting.MaxGram`.
      min_ngram: likewise.
      latest: likewise.
      overlap: likewise.
      bigram: a table of successors, or the directory that `specjax train_bigram` has written, or
        "built-in" for the built-in pair's; it goes on where nothing can be copied. None for none.
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
        self._drafter(1, 1)  # its checks

    @property
    def models(self) -> tuple[str, ...]:
        """The drafter, where one is asked for."""
        return () if self.min_match is None else ("drafter",)

    def make(self, given: Ingredients) -> Planned:
        """See `DraftPlan`."""
        main = given.models["verifier"]
        vocab_size = main.model.vocab_size
        lookup = self._drafter(vocab_size, self.max_copy or given.max_draft)
        table: Params = ()
        if self.bigram is not None:
            bigram = self.bigram if isinstance(self.bigram, Bigram) else _load(self.bigram)
            words = main.tokenizer.fingerprint
            table = given.place(jnp.asarray(bigram.table(main.name, words, vocab_size)))
        if self.min_match is None:
            return Planned(lookup, table, table)
        neural, params = given.neural("drafter")
        both = LookupFirst(lookup, neural, self.min_match)
        return Planned(both, LookupFirstParams(table, params), (table, params.stopping))

    def _drafter(self, vocab_size: int, max_draft: int) -> MaxGram:
        return MaxGram(
            vocab_size, max_draft, self.max_ngram, self.min_ngram, self.latest, self.overlap
        )


def _load(path: str | os.PathLike[str]) -> Bigram:
    # Imported here to keep `import specjax` fast: Orbax alone takes as long as all else.
    from specjax.checkpoints import load_bigram

    return load_bigram(BUILT_IN / "bigram" if path == "built-in" else path)
