"""Copied drafts if a long ending matches, another drafter otherwise.

Axes: B rows, G longest block, V vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from specjax.checks import check_count
from specjax.decoding.token_sources import drafted_sources, wanted_of
from specjax.decoding.tree import draft_probs
from specjax.drafting.lookup import LookupDrafter
from specjax.drafting.several import SeveralDrafters, SeveralState
from specjax.errors import UserError
from specjax.types import (
    Array,
    Bonus,
    DraftBlock,
    Drafter,
    DraftTraits,
    Params,
    Sampling,
)


@dataclasses.dataclass(frozen=True)
class LookupFirst(SeveralDrafters):
    """Copies in rows whose last `min_match` tokens match; another drafter drafts in the others.

    The choice depends only on committed tokens, so decoding is exact. The drafter makes no pass for
    rows that copy: it lags there, and catches up later. Its parameters: a tuple of the lookup's and
    the drafter's.

    Rules that read the drafter's confidence are not supported: copied tokens have none. G is the
    larger of the two.

    Attributes:
      lookup: copies from the text so far.
      drafter: any other drafter, such as a `NeuralDrafter`.
      min_match: the least number of last tokens that occurred before.

    Raises:
      TypeError: if `lookup` is not a `LookupDrafter`, or `drafter` not a drafter.
      ValueError: if the vocabularies differ, or the lookup cannot report `min_match`.
    """

    lookup: LookupDrafter
    drafter: Drafter
    min_match: int = 3

    def __post_init__(self) -> None:
        if not isinstance(self.lookup, LookupDrafter):
            raise UserError(f"lookup must be a LookupDrafter, got {self.lookup!r}")
        self._check_parts(("lookup", "drafter"))
        check_count("min_match", self.min_match, "give a number of tokens")
        low, high = self.lookup.min_ngram, self.lookup.max_ngram
        if self.min_match < low or (high is not None and self.min_match > high):
            raise UserError(
                f"min_match must be at least the lookup's min_ngram = {low} and at most its "
                f"max_ngram = {high}, got {self.min_match}"
            )

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return self.lookup, self.drafter

    @property
    def max_draft(self) -> int:
        """The larger of the two."""
        return max(self.lookup.max_draft, self.drafter.max_draft)

    @property
    def traits(self) -> DraftTraits:
        """Rows share passes: whether there is a pass depends on all rows."""
        own = self.drafter.traits
        return DraftTraits(
            prefix_only=False,
            random_stops=own.random_stops,
            catches_up=own.catches_up,
            reads_verifier_hidden=own.reads_verifier_hidden,
        )

    def describe(self) -> Any:
        return super().describe() | {"min_match": self.min_match}

    def draft_limits(self, params: Sequence[Params], state: SeveralState, limits: Array) -> Array:
        """The draft limits for the drafter."""
        copies = self.copies(state)
        own = jnp.where(copies, 0, jnp.minimum(limits, self.drafter.max_draft))
        wanted = self.drafter.draft_limits(params[1], state.drafters[1], own)
        return jnp.where(copies, jnp.minimum(limits, self.lookup.max_draft), wanted)

    def propose(
        self,
        params: Sequence[Params],
        state: SeveralState,
        tokens: Array,
        limits: Array,
        uniforms: Array,
        sampling: Sampling,
        active: Array,
        *,
        with_confidence: bool,
        with_sources: bool = False,
    ) -> tuple[DraftBlock, SeveralState]:
        copies = self.copies(state)
        drafting = active & ~copies
        copied, lookup = self.lookup.propose(
            params[0], state.drafters[0], tokens, limits, uniforms, sampling, active & copies,
            with_confidence=False,
        )  # fmt: skip
        own = jnp.where(drafting, jnp.minimum(limits, self.drafter.max_draft), 0)
        drafted, drafter = self.drafter.propose(
            params[1], state.drafters[1], tokens, own, uniforms, sampling, drafting,
            with_confidence=False, **wanted_of(self.drafter, with_sources),
        )  # fmt: skip
        longest, count = self.max_draft, jnp.minimum(drafted.num_drafted, own)
        block = DraftBlock(
            tokens=jnp.where(
                copies[:, None], _wide(copied.tokens, longest), _wide(drafted.tokens, longest)
            ),
            probs=jnp.where(
                copies[:, None, None],
                _wide(draft_probs(copied, self.vocab_size), longest + 1),
                _wide(draft_probs(drafted, self.vocab_size), longest + 1),
            ),
            confidences=None,
            num_drafted=jnp.where(copies, copied.num_drafted, count),
            calls=drafted.calls,
        )
        if with_sources:  # the lookup's is 0
            theirs = _wide(drafted_sources(drafted), longest) + 1
            block = block._replace(sources=jnp.where(copies[:, None], 0, theirs))
        return block, SeveralState((lookup, drafter), state.marks, drafting.astype(jnp.int32))

    def bonus(
        self,
        params: Sequence[Params],
        state: SeveralState,
        tokens: Array,
        block: DraftBlock,
        sampling: Sampling,
        *,
        with_confidence: bool,
    ) -> tuple[Bonus, SeveralState]:
        copied, lookup = self.lookup.bonus(
            params[0], state.drafters[0], tokens, block, sampling, with_confidence=False
        )
        # The drafter has drafted nothing in rows that copied: its cache has other tokens there.
        drafting = state.note > 0
        own = jnp.where(drafting, block.num_drafted, 0)
        longest = self.drafter.max_draft
        mine = block._replace(
            tokens=block.tokens[:, :longest], probs=block.probs[:, : longest + 1], num_drafted=own
        )

        def read(drafter: Any) -> tuple[Bonus, Any]:
            return self.drafter.bonus(
                params[1], drafter, tokens, mine, sampling, with_confidence=False
            )

        def leave(drafter: Any) -> tuple[Bonus, Any]:
            calls = {name: jnp.int32(0) for name in self.model_names}
            return Bonus(jnp.zeros_like(copied.probs), None, calls), drafter

        extra, drafter = lax.cond(jnp.any(drafting), read, leave, state.drafters[1])
        probs = jnp.where(drafting[:, None], extra.probs, copied.probs)
        return Bonus(probs, None, extra.calls), state._replace(drafters=(lookup, drafter))

    def copies(self, state: SeveralState) -> Array:
        """The rows that copy in the next round, `[B]` bool."""
        return self.lookup.matched(state.drafters[0]) >= self.min_match


def _wide(block: Array, width: int) -> Array:
    """`[B, n, ...]` padded to `width` places."""
    missing = width - block.shape[1]
    return jnp.pad(block, ((0, 0), (0, missing), *((0, 0),) * (block.ndim - 2)))
