"""Drafters that fill a block together.

Axes: B rows, G longest block, V vocabulary.
"""

import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.checks import check_part, check_static
from specjax.decoding.guards import committed
from specjax.errors import UserError
from specjax.types import Array, Axes, Drafter, Params, Prompts, row_axes


class SeveralState(NamedTuple):
    """The state of several drafters between rounds.

    Attributes:
      drafters: their states, in their order.
      marks: the place of each drafter at the last commit; empty if drafters do not read drafts.
      note: `[B]` int32, information about the last block.
    """

    drafters: tuple[Any, ...]
    marks: tuple[Any, ...]
    note: Array  # [B]


class SeveralDrafters(Drafter):
    """Has several drafters, and decides which of them drafts. Parameters: a tuple of theirs.

    Attributes:
      parts: the drafters.
    """

    # Whether a drafter reads the drafts of earlier drafters as if they were committed. The commit
    # takes them back.
    _reads_drafts: ClassVar[bool] = False
    # Whether the drafters may draft trees.
    _takes_trees: ClassVar[bool] = False

    @property
    def parts(self) -> tuple[Drafter, ...]:
        """The drafters."""
        raise NotImplementedError

    def _check_parts(self, names: Sequence[str]) -> None:
        """Raises TypeError or ValueError unless all are drafters that fit together."""
        needed = ("prefill", "propose", "bonus", "commit", "draft_limits", "mark", "rewind")
        for name, drafter in zip(names, self.parts, strict=True):
            check_part(name, drafter, needed, "drafting.NeuralDrafter(...)")
            check_static(name, drafter)
            self._check_traits(drafter)
        sizes = [drafter.vocab_size for drafter in self.parts]
        if len(set(sizes)) > 1:
            raise UserError(f"{', '.join(names)} must have the same vocabulary, got sizes {sizes}")

    def _check_traits(self, drafter: Drafter) -> None:
        """Raises ValueError for a drafter whose blocks, or whose commits, cannot be combined."""
        where, traits = type(self).__name__, drafter.traits
        wrong = None
        if traits.drafts_trees and not self._takes_trees:
            wrong = f"drafts trees, but the blocks of {where} are chains"
        elif self._reads_drafts and traits.reads_verifier_hidden:
            wrong = f"reads the verifier's hidden states, but drafts in {where} have none"
        if wrong is not None:
            raise UserError(f"{type(drafter).__name__} {wrong}: use it without {where}")

    def _check_names(self, shared: Sequence[str]) -> None:
        """Raises ValueError if two models have the same name, unless it is in `shared`."""
        names = [name for drafter in self.parts for name in drafter.model_names]
        for name in names:
            if names.count(name) > 1 and name not in shared:
                raise UserError(
                    f"two drafters of {type(self).__name__} have the name {name!r}: give each its "
                    f"own name, or, if they are one model, shared=({name!r},)"
                )

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.parts[0].vocab_size

    @property
    def num_uniforms(self) -> int:
        """The sum over all drafters."""
        return sum(drafter.num_uniforms for drafter in self.parts)

    @property
    def has_confidence(self) -> bool:
        """Whether all drafters have a confidence."""
        return all(drafter.has_confidence for drafter in self.parts)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names of all drafters, without duplicates."""
        return tuple(dict.fromkeys(n for drafter in self.parts for n in drafter.model_names))

    @property
    def source_names(self) -> tuple[str, ...]:
        """The names of all drafters' parts, in their order."""
        return tuple(name for drafter in self.parts for name in drafter.source_names)

    def describe(self) -> Any:
        return {"drafters": [drafter.describe() for drafter in self.parts]}

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        each = [d.prompt_positions(input_lengths, prefix_lengths) for d in self.parts]
        return functools.reduce(np.maximum, each)  # an encoder-decoder returns a single number

    def prefill(self, params: Sequence[Params], prompts: Prompts, max_length: int) -> SeveralState:
        together = zip(self.parts, params, strict=True)
        states = tuple(drafter.prefill(own, prompts, max_length) for drafter, own in together)
        rows = prompts.inputs.shape[0]
        return SeveralState(states, self._kept(states), jnp.zeros((rows,), jnp.int32))

    def commit(
        self, state: SeveralState, tokens: Array, counts: Array, hidden: Array | None = None
    ) -> SeveralState:
        states = []
        for i, (drafter, own) in enumerate(zip(self.parts, state.drafters, strict=True)):
            now = drafter.rewind(own, state.marks[i]) if i and self._reads_drafts else own
            states.append(committed(drafter, now, own, tokens, counts, hidden))
        return state._replace(drafters=tuple(states), marks=self._kept(states))

    def mark(self, state: SeveralState) -> tuple[Any, ...]:
        return state.marks if self._reads_drafts else self._marks(state.drafters)

    def rewind(self, state: SeveralState, mark: tuple[Any, ...]) -> SeveralState:
        together = zip(self.parts, state.drafters, mark, strict=True)
        states = tuple(drafter.rewind(own, place) for drafter, own, place in together)
        return state._replace(drafters=states, marks=mark if self._reads_drafts else ())

    def state_axes(self, state: SeveralState) -> Axes:
        together = zip(self.parts, state.drafters, strict=True)
        axes = row_axes(state._replace(drafters=()))
        return axes._replace(drafters=tuple(drafter.state_axes(own) for drafter, own in together))

    def _kept(self, states: Sequence[Any]) -> tuple[Any, ...]:
        """`SeveralState.marks`: a mark can be as large as a state."""
        return self._marks(states) if self._reads_drafts else ()

    def _marks(self, states: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(d.mark(own) for d, own in zip(self.parts, states, strict=True))
