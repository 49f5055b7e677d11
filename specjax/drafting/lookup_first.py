"""Max-Gram where a long ending matches, another drafter where none does.

Axes: B rows, G longest block, V vocabulary.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from specjax.checks import check_count, check_part, check_static
from specjax.drafting.max_gram import MaxGram, MaxGramState
from specjax.types import (
    Array,
    Axes,
    Bonus,
    DraftBlock,
    Drafter,
    DraftTraits,
    Params,
    Sampling,
    row_axes,
)


class LookupFirstParams(NamedTuple):
    """Attributes: the bigram table of the lookup, or (); and the other drafter's parameters."""

    lookup: Params
    drafter: Params


class LookupFirstState(NamedTuple):
    """Both drafters between rounds.

    Attributes:
      lookup: the lookup's state.
      drafter: the other drafter's.
      drafting: `[B]` bool, the rows for which the other one drafted in this round.
    """

    lookup: MaxGramState
    drafter: Any
    drafting: Array  # [B]


@dataclasses.dataclass(frozen=True)
class LookupFirst(Drafter):
    """Each round, each row: copies where `min_match` tokens match, else lets a drafter draft.

    That is decided by what was committed, before anything is drafted: so decoding is exact. The
    drafter makes no pass for the rows that copy: it lags there, and catches up. Its parameters:
    `LookupFirstParams`.

    A rule that reads the drafter's confidence is refused, for what is copied has none. G is the
    longer one of the two.

    Attributes:
      lookup: copies from the text so far.
      drafter: any other drafter, such as a `NeuralDrafter`.
      min_match: how many tokens of the text's ending must have occurred before.

    Raises:
      TypeError: if `lookup` is no `MaxGram`, or `drafter` no drafter.
      ValueError: if the vocabularies differ, or the lookup never tells a match of `min_match`.
    """

    lookup: MaxGram
    drafter: Drafter
    min_match: int = 3

    def __post_init__(self) -> None:
        if not isinstance(self.lookup, MaxGram):
            raise TypeError(f"lookup must be a MaxGram, got {self.lookup!r}")
        needed = ("prefill", "propose", "bonus", "commit", "draft_limits", "mark", "rewind")
        check_part("drafter", self.drafter, needed, "NeuralDrafter(...)")
        check_static("drafter", self.drafter)
        if self.lookup.vocab_size != self.drafter.vocab_size:
            raise ValueError(
                f"lookup has {self.lookup.vocab_size} tokens in its vocabulary, drafter "
                f"{self.drafter.vocab_size}: they must be one"
            )
        check_count("min_match", self.min_match, "give a number of tokens")
        low, high = self.lookup.min_ngram, self.lookup.max_ngram
        if self.min_match < low or (high is not None and self.min_match > high):
            raise ValueError(
                f"min_match must be at least the lookup's min_ngram = {low} and at most its "
                f"max_ngram = {high}, got {self.min_match}"
            )

    @property
    def max_draft(self) -> int:
        """The longer one's."""
        return max(self.lookup.max_draft, self.drafter.max_draft)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.lookup.vocab_size

    @property
    def num_uniforms(self) -> int:
        """The other drafter's: what is copied takes none."""
        return self.drafter.num_uniforms

    @property
    def traits(self) -> DraftTraits:
        """The rows share passes: whether one is made depends on all of them."""
        own = self.drafter.traits
        return DraftTraits(
            prefix_only=False, random_stops=own.random_stops, catches_up=own.catches_up
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        """The other drafter's."""
        return self.drafter.model_names

    def describe(self) -> Any:
        """See `Drafter`."""
        described = {"lookup": self.lookup.describe(), "drafter": self.drafter.describe()}
        return {**described, "min_match": self.min_match}

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        """See `Drafter`."""
        return self.drafter.prompt_positions(input_lengths, prefix_lengths)

    def prefill(
        self,
        params: LookupFirstParams,
        inputs: Array,
        input_lengths: Array,
        max_length: int,
        prefix: Array | None = None,
        prefix_lengths: Array | None = None,
    ) -> LookupFirstState:
        """See `Drafter`."""
        prompt = (inputs, input_lengths, max_length, prefix, prefix_lengths)
        return LookupFirstState(
            lookup=self.lookup.prefill(params.lookup, *prompt),
            drafter=self.drafter.prefill(params.drafter, *prompt),
            drafting=jnp.zeros((inputs.shape[0],), bool),
        )

    def draft_limits(
        self, params: LookupFirstParams, state: LookupFirstState, limits: Array
    ) -> Array:
        """What the drafter of each row is to draft at most."""
        copies = self.copies(state)
        own = jnp.where(copies, 0, jnp.minimum(limits, self.drafter.max_draft))
        asked = self.drafter.draft_limits(params.drafter, state.drafter, own)
        return jnp.where(copies, jnp.minimum(limits, self.lookup.max_draft), asked)

    def propose(
        self,
        params: LookupFirstParams,
        state: LookupFirstState,
        tokens: Array,
        limits: Array,
        uniforms: Array,
        sampling: Sampling,
        active: Array,
        *,
        with_confidence: bool,
    ) -> tuple[DraftBlock, LookupFirstState]:
        """See `Drafter`."""
        copies = self.copies(state)
        drafting = active & ~copies
        copied, lookup = self.lookup.propose(
            params.lookup, state.lookup, tokens, limits, uniforms, sampling, active & copies,
            with_confidence=False,
        )  # fmt: skip
        own = jnp.where(drafting, jnp.minimum(limits, self.drafter.max_draft), 0)
        drafted, drafter = self.drafter.propose(
            params.drafter, state.drafter, tokens, own, uniforms, sampling, drafting,
            with_confidence=False,
        )  # fmt: skip
        longest, count = self.max_draft, jnp.minimum(drafted.num_drafted, own)
        block = DraftBlock(
            tokens=jnp.where(
                copies[:, None], _wide(copied.tokens, longest), _wide(drafted.tokens, longest)
            ),
            probs=jnp.where(
                copies[:, None, None],
                _wide(copied.probs, longest + 1),
                _wide(drafted.probs, longest + 1),
            ),
            confidences=None,
            num_drafted=jnp.where(copies, copied.num_drafted, count),
            calls=drafted.calls,
        )
        return block, LookupFirstState(lookup, drafter, drafting)

    def bonus(
        self,
        params: LookupFirstParams,
        state: LookupFirstState,
        tokens: Array,
        block: DraftBlock,
        sampling: Sampling,
        *,
        with_confidence: bool,
    ) -> tuple[Bonus, LookupFirstState]:
        """See `Drafter`; no pass is made where all rows copied."""
        copied, lookup = self.lookup.bonus(
            params.lookup, state.lookup, tokens, block, sampling, with_confidence=False
        )
        # Rows that copied drafted nothing of the drafter's: it would read its cache for another's.
        own = jnp.where(state.drafting, block.num_drafted, 0)
        longest = self.drafter.max_draft
        mine = block._replace(
            tokens=block.tokens[:, :longest], probs=block.probs[:, : longest + 1], num_drafted=own
        )

        def read(drafter: Any) -> tuple[Bonus, Any]:
            return self.drafter.bonus(
                params.drafter, drafter, tokens, mine, sampling, with_confidence=False
            )

        def leave(drafter: Any) -> tuple[Bonus, Any]:
            calls = {name: jnp.int32(0) for name in self.model_names}
            return Bonus(jnp.zeros_like(copied.probs), None, calls), drafter

        extra, drafter = lax.cond(jnp.any(state.drafting), read, leave, state.drafter)
        probs = jnp.where(state.drafting[:, None], extra.probs, copied.probs)
        return Bonus(probs, None, extra.calls), state._replace(lookup=lookup, drafter=drafter)

    def commit(self, state: LookupFirstState, tokens: Array, counts: Array) -> LookupFirstState:
        """See `Drafter`."""
        return state._replace(
            lookup=self.lookup.commit(state.lookup, tokens, counts),
            drafter=self.drafter.commit(state.drafter, tokens, counts),
        )

    def mark(self, state: LookupFirstState) -> tuple[Any, Any]:
        """See `Drafter`: where the two of them are."""
        return self.lookup.mark(state.lookup), self.drafter.mark(state.drafter)

    def rewind(self, state: LookupFirstState, mark: tuple[Any, Any]) -> LookupFirstState:
        """See `Drafter`."""
        lookup, drafter = mark
        return state._replace(
            lookup=self.lookup.rewind(state.lookup, lookup),
            drafter=self.drafter.rewind(state.drafter, drafter),
        )

    def copies(self, state: LookupFirstState) -> Array:
        """The rows that copy in the next round, `[B]` bool."""
        return self.lookup.matched(state.lookup) >= self.min_match

    def state_axes(self, state: LookupFirstState) -> Axes:
        """See `Drafter`."""
        axes = row_axes(state._replace(drafter=()))
        return axes._replace(drafter=self.drafter.state_axes(state.drafter))


def _wide(block: Array, width: int) -> Array:
    """The same `[B, n, ...]` with more places, up to `width` of them."""
    missing = width - block.shape[1]
    return jnp.pad(block, ((0, 0), (0, missing), *((0, 0),) * (block.ndim - 2)))
