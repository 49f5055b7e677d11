"""Several copies of the text so far, as branches of a tree.

Axes: B rows, C tokens of context, K copies, V vocabulary.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from specjax.checks import check_count
from specjax.drafting.branches import united
from specjax.drafting.lookup import LookupDrafter, LookupState, Match, longest_matches
from specjax.errors import UserError
from specjax.types import (
    Array,
    Bonus,
    DraftBlock,
    Drafter,
    DraftTraits,
    Params,
    Prompts,
    Sampling,
)


@dataclasses.dataclass(frozen=True)
class LookupTreeDrafter(Drafter):
    """Proposes the tokens after several earlier occurrences of the context's ending.

    The occurrences are those with the longest equal endings, among them the order of the lookup;
    one whose tokens are equal to those of an earlier one is passed over. The first copy is what
    the lookup drafts, its table included. Copies with a common beginning share its nodes.

    Its parameters are those of the lookup. Tokens are chosen, not drawn. Rules that read the
    drafter are refused, because a node has no single draft distribution.

    Attributes:
      lookup: copies a single occurrence, up to `lookup.max_draft` tokens of each.
      copies: K >= 1, the most occurrences.

    Raises:
      TypeError: if `lookup` is not a `LookupDrafter`.
      ValueError: if `copies` is not a whole number of at least 1.
    """

    lookup: LookupDrafter
    copies: int

    def __post_init__(self) -> None:
        if not isinstance(self.lookup, LookupDrafter):
            raise UserError(f"lookup must be a LookupDrafter, got {self.lookup!r}")
        check_count("copies", self.copies, "give the number of copies")

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.lookup.vocab_size

    @property
    def max_draft(self) -> int:
        """G, the nodes of all copies."""
        return self.copies * self.lookup.max_draft

    @property
    def traits(self) -> DraftTraits:
        """The lookup's; blocks are trees."""
        return self.lookup.traits._replace(drafts_trees=True, has_distributions=False)

    @property
    def source_names(self) -> tuple[str, ...]:
        """The lookup's."""
        return self.lookup.source_names

    def describe(self) -> Any:
        return {"lookup": self.lookup.describe(), "copies": self.copies}

    def prefill(self, params: Params, prompts: Prompts, max_length: int) -> LookupState:
        return self._matched(self.lookup.prefill(params, prompts, max_length))

    def propose(
        self,
        params: Params,
        state: LookupState,
        tokens: Array,
        limits: Array,
        uniforms: Array,
        sampling: Sampling,
        active: Array,
        *,
        with_confidence: bool,
    ) -> tuple[DraftBlock, LookupState]:
        limits, chains = jnp.where(active, limits, 0), []
        for i in range(self.copies):
            one = state._replace(match=Match(*(x[:, i] for x in state.match)))
            copied, known = self.lookup.chain(params, one, tokens)
            if i:  # without a match only the first copy continues, by the table
                known = jnp.where(self.lookup.matched(one) > 0, known, 0)
            count = jnp.minimum(known, limits)
            chains.append(DraftBlock(copied[:, :-1], None, None, count, {}))
        return united(chains), state

    def bonus(
        self,
        params: Params,
        state: LookupState,
        tokens: Array,
        block: DraftBlock,
        sampling: Sampling,
        *,
        with_confidence: bool,
    ) -> tuple[Bonus, LookupState]:
        raise UserError("LookupTreeDrafter has no distribution after its block")

    def commit(
        self, state: LookupState, tokens: Array, counts: Array, hidden: Array | None = None
    ) -> LookupState:
        return self._matched(self.lookup.commit(state, tokens, counts))

    def mark(self, state: LookupState) -> tuple[Array, Match]:
        return self.lookup.mark(state)

    def rewind(self, state: LookupState, mark: tuple[Array, Match]) -> LookupState:
        return self.lookup.rewind(state, mark)

    def _matched(self, state: LookupState) -> LookupState:
        """With the matches of all copies, `[B, K]`, in the place of the lookup's own."""
        lookup = self.lookup
        found = longest_matches(
            state.context,
            state.lengths,
            self.copies,
            lookup.max_draft,
            most=lookup.max_ngram,
            latest=lookup.latest,
        )
        return state._replace(match=found)
