"""What a drafter is, and what decides when its draft ends.

Axes: B rows, G longest block, V vocabulary, D drafter's width.
"""

from typing import Any, Protocol

from specjax.sampling import Sampling
from specjax.types import Array, DraftBlock, DraftTraits, Params


class Drafter(Protocol):
    """Proposes blocks of tokens; static and hashable, arrays in `params` and the state."""

    @property
    def max_draft(self) -> int:
        """G, the longest block."""

    @property
    def vocab_size(self) -> int:
        """V."""

    @property
    def num_uniforms(self) -> int:
        """How many uniforms a row's block takes."""

    @property
    def has_confidence(self) -> bool:
        """Whether there is a confidence distribution (a statistical drafter has none)."""

    @property
    def traits(self) -> DraftTraits:
        """What verification algorithms may have to know."""

    def prefill(
        self,
        params: Params,
        inputs: Array,
        input_lengths: Array,
        max_length: int,
        prefix: Array | None = None,
        prefix_lengths: Array | None = None,
    ) -> Any:
        """Takes prompts in (see `LanguageModel.prefill`); returns the drafter's state."""

    def propose(
        self,
        params: Params,
        state: Any,
        tokens: Array,
        uniforms: Array,
        sampling: Sampling,
        active: Array,
        *,
        with_confidence: bool,
    ) -> tuple[DraftBlock, Any]:
        """Drafts one block for each row.

        Args:
          params: the drafter's parameters.
          state: its state.
          tokens: `[B]` int32, each row's last committed token.
          uniforms: `[B, num_uniforms]` float32 in [0, 1), independent.
          sampling: fields `[B]`; the block's probabilities are what tokens are drawn from.
          active: `[B]` bool; other rows need no block, and no pass is made for them alone.
          with_confidence: whether the rule reads confidences (static).

        Returns:
          The block and the new state.
        """

    def bonus(
        self,
        params: Params,
        state: Any,
        tokens: Array,
        block: DraftBlock,
        sampling: Sampling,
        *,
        with_confidence: bool,
    ) -> tuple[Array, Array | None, Any]:
        """Reads each row's last drafted token.

        Args:
          params: the drafter's parameters.
          state: its state after `propose`.
          tokens: `[B]` int32, each row's last committed token, as given to `propose`.
          block: what `propose` returned.
          sampling: fields `[B]`.
          with_confidence: whether the rule reads confidences (static).

        Returns:
          The distribution `[B, V]` after the whole block, its confidence `[B, V]` or None, and the
          state, which then lacks nothing if the whole block is accepted.
        """

    def commit(self, state: Any, num_committed: Array) -> Any:
        """Moves each row on by `num_committed` `[B]` int32 tokens; the rest is rolled back."""


class Stopping(Protocol):
    """Decides when a row's draft ends; static and hashable, arrays in `params` and the state.

    The decision after token i may look at the tokens up to i and what was known with them, never
    at a later one: then verification stays exact.
    """

    @property
    def is_random(self) -> bool:
        """Whether it uses randomness of its own."""

    @property
    def is_fixed(self) -> bool:
        """Whether it never stops a draft before its longest length."""

    def init(self, rows: int) -> Any:
        """The state before a draft's first token."""

    def step(
        self, params: Params, state: Any, token: Array, probs: Array, hidden: Array, index: Array
    ) -> tuple[Array, Any]:
        """Whether each row's draft ends with the token just drawn.

        Args:
          params: the policy's own parameters.
          state: its state.
          token: `[B]` int32, the token just drawn.
          probs: `[B, V]` float32, what it was drawn from.
          hidden: `[B, D]`, the drafter's last hidden state of the token before it.
          index: int32 scalar, how many tokens were drafted before it.

        Returns:
          `[B]` bool, and the new state.
        """
