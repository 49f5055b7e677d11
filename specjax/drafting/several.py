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
from specjax.types import Array, Axes, Drafter, Params, row_axes


class SeveralState(NamedTuple):
    """The state of several drafters between rounds.

    Attributes:
      drafters: their states, in their order.
      marks: the place of each drafter at the last commit.
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

    # Whether a drafter reads the drafts of earlier drafters as if they were committed.
    _tells: ClassVar[bool] = False

    @property
    def parts(self) -> tuple[Drafter, ...]:
        """The drafters."""
        raise NotImplementedError

    def _check_parts(self, names: Sequence[str]) -> None:
        """Raises TypeError or ValueError unless all are drafters with the same vocabulary."""
        needed = ("prefill", "propose", "bonus", "commit", "draft_limits", "mark", "rewind")
        for name, drafter in zip(names, self.parts, strict=True):
            check_part(name, drafter, needed, "drafting.NeuralDrafter(...)")
            check_static(name, drafter)
        sizes = [drafter.vocab_size for drafter in self.parts]
        if len(set(sizes)) > 1:
            raise ValueError(f"{', '.join(names)} must have the same vocabulary, got sizes {sizes}")

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

    def describe(self) -> Any:
        """See `Drafter`."""
        return {"drafters": [drafter.describe() for drafter in self.parts]}

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        """See `Drafter`."""
        each = [d.prompt_positions(input_lengths, prefix_lengths) for d in self.parts]
        return functools.reduce(np.maximum, each)  # an encoder-decoder returns a single number

    def prefill(
        self,
        params: Sequence[Params],
        inputs: Array,
        input_lengths: Array,
        max_length: int,
        prefix: Array | None = None,
        prefix_lengths: Array | None = None,
    ) -> SeveralState:
        """See `Drafter`."""
        prompt = (inputs, input_lengths, max_length, prefix, prefix_lengths)
        together = zip(self.parts, params, strict=True)
        states = tuple(drafter.prefill(own, *prompt) for drafter, own in together)
        return SeveralState(states, self._marks(states), jnp.zeros(inputs.shape[:1], jnp.int32))

    def commit(
        self, state: SeveralState, tokens: Array, counts: Array, hidden: Array | None = None
    ) -> SeveralState:
        """See `Drafter`; takes back the draft tokens that drafters have read."""
        states = []
        together = zip(self.parts, state.drafters, state.marks, strict=True)
        for i, (drafter, own, mark) in enumerate(together):
            now = drafter.rewind(own, mark) if i and self._tells else own
            states.append(committed(drafter, now, own, tokens, counts, hidden))
        return state._replace(drafters=tuple(states), marks=self._marks(states))

    def mark(self, state: SeveralState) -> tuple[Any, ...]:
        """See `Drafter`."""
        return state.marks

    def rewind(self, state: SeveralState, mark: tuple[Any, ...]) -> SeveralState:
        """See `Drafter`."""
        together = zip(self.parts, state.drafters, mark, strict=True)
        states = tuple(drafter.rewind(own, place) for drafter, own, place in together)
        return state._replace(drafters=states, marks=mark)

    def state_axes(self, state: SeveralState) -> Axes:
        """See `Drafter`."""
        together = zip(self.parts, state.drafters, strict=True)
        axes = row_axes(state._replace(drafters=()))
        return axes._replace(drafters=tuple(drafter.state_axes(own) for drafter, own in together))

    def _marks(self, states: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(d.mark(own) for d, own in zip(self.parts, states, strict=True))
