"""A chain whose tokens have siblings: the other tokens that its drafter thinks probable.

Axes: B rows, G nodes without the root, C longest chain, N nodes of a block, V vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specjax.checks import check_count
from specjax.decoding import drafter_calls
from specjax.decoding.guards import check_drafter
from specjax.decoding.history import put_at
from specjax.decoding.outcome import drafted_sources, last_token
from specjax.drafting.horizontal import HorizontalCascade
from specjax.drafting.vertical import VerticalCascade
from specjax.errors import UserError
from specjax.types import (
    Array,
    Axes,
    Bonus,
    ChildLaw,
    DraftBlock,
    Drafter,
    DraftInputs,
    DraftTraits,
    Params,
    Prompts,
)


@dataclasses.dataclass(frozen=True)
class CaterpillarDrafter(Drafter):
    """Adds siblings to the tokens of a drafter of chains. Parameters and state: the drafter's.

    A token with a confidence distribution gets as siblings the most probable other tokens there; of
    a vertical cascade, these are the middle model's. Siblings have no children. Tokens without a
    confidence, as copied ones, get none. The chain is verified with its own distributions, and
    siblings follow from the text, so that decoding is exact at any temperature. A row's limit
    leaves out siblings, the last first, before it shortens the chain.

    After an accepted sibling, a rule that reads the drafter gets q from a pass that the drafter
    makes after it.

    Source: Cascade Speculative Drafting (arXiv 2312.11462), section 5.2, with tree attention; at
    temperature 0.

    Attributes:
      drafter: drafts chains, and reports a confidence for some of its tokens.
      width: the number of tokens at such a place, the drafter's own token included; at least 2.
    """

    drafter: Drafter
    width: int

    def __post_init__(self) -> None:
        check_drafter("drafter", self.drafter)
        check_count("width", self.width, "use the drafter itself for no siblings", low=2)
        if self.width > self.vocab_size:
            raise UserError(
                f"width must be at most the number of tokens, {self.vocab_size}, got {self.width}"
            )
        kind, traits = type(self.drafter).__name__, self.drafter.traits
        wrong = None
        if traits.drafts_trees:
            wrong = "drafts trees"
        elif traits.reads_verifier_hidden:
            wrong = "reads the verifier's hidden states"
        elif not _with_confidence(self.drafter):
            wrong = "has no confidence, by which siblings are chosen"
        if wrong is not None:
            raise UserError(f"{kind} {wrong}: use it without CaterpillarDrafter")

    @property
    def vocab_size(self) -> int:
        return self.drafter.vocab_size

    @property
    def max_draft(self) -> int:
        wide = min(_with_confidence(self.drafter), self.drafter.max_draft)
        return self.drafter.max_draft + (self.width - 1) * wide

    @property
    def num_uniforms(self) -> int:
        return self.drafter.num_uniforms

    @property
    def has_confidence(self) -> bool:
        return self.drafter.has_confidence

    @property
    def traits(self) -> DraftTraits:
        # The drafter's; it reads an accepted sibling in its next pass.
        return self.drafter.traits._replace(
            drafts_trees=True, catches_up=True, independent_rows=False
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.drafter.model_names

    @property
    def source_names(self) -> tuple[str, ...]:
        return self.drafter.source_names

    def describe(self) -> Any:
        return {"drafter": self.drafter.describe(), "width": self.width}

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        return self.drafter.prompt_positions(input_lengths, prefix_lengths)

    def prefill(self, params: Params, prompts: Prompts, max_length: int) -> Any:
        return self.drafter.prefill(params, prompts, max_length)

    def draft_limits(self, params: Params, state: Any, limits: Array) -> Array:
        chain = self.drafter.draft_limits(params, state, self._chain_limits(limits))
        return jnp.where(chain > 0, limits, 0)

    def propose(
        self,
        params: Params,
        state: Any,
        inputs: DraftInputs,
        *,
        with_confidence: bool,
        with_sources: bool = False,
    ) -> tuple[DraftBlock, Any]:
        limits = self._chain_limits(inputs.limits)
        chain, state = self.drafter.propose(
            params,
            state,
            inputs._replace(limits=limits),
            with_confidence=True,
            **drafter_calls.sources_option(self.drafter, with_sources),
        )
        chain = chain._replace(num_drafted=jnp.minimum(chain.num_drafted, limits))
        block = self._widened(chain, with_sources)
        return block if with_confidence else block._replace(confidences=None), state

    def bonus(
        self,
        params: Params,
        state: Any,
        inputs: DraftInputs,
        block: DraftBlock,
        *,
        with_confidence: bool,
    ) -> tuple[Bonus, Any]:
        drafter, rows = self.drafter, inputs.tokens.size
        # As if the path were committed, after which the drafter drafts nothing.
        moved = drafter_calls.commit(drafter, state, block.tokens, block.num_drafted)
        last = last_token(block.tokens, block.num_drafted, inputs.tokens)
        none = jnp.zeros((rows,), jnp.int32)
        inputs = DraftInputs(
            tokens=last,
            limits=none,
            uniforms=jnp.zeros((rows, drafter.num_uniforms), jnp.float32),
            sampling=inputs.sampling,
            active=none == 0,
        )
        empty, moved = drafter.propose(params, moved, inputs, with_confidence=with_confidence)
        empty = empty._replace(num_drafted=none)
        extra, _ = drafter_calls.bonus(
            drafter, params, moved, inputs, empty, with_confidence=with_confidence
        )
        calls = {name: passes + empty.calls[name] for name, passes in extra.calls.items()}
        return extra._replace(calls=calls), state

    def commit(self, state: Any, tokens: Array, counts: Array, hidden: Array | None = None) -> Any:
        return self.drafter.commit(state, tokens, counts)

    def mark(self, state: Any) -> Any:
        return self.drafter.mark(state)

    def rewind(self, state: Any, mark: Any) -> Any:
        return self.drafter.rewind(state, mark)

    def state_axes(self, state: Any) -> Axes:
        return self.drafter.state_axes(state)

    def _chain_limits(self, limits: Array) -> Array:
        return jnp.minimum(limits, self.drafter.max_draft)

    def _widened(self, chain: DraftBlock, with_sources: bool) -> DraftBlock:
        """The chain, then the siblings, place by place."""
        confidences, longest = chain.confidences, self.drafter.max_draft
        assert confidences is not None
        rows, more = chain.num_drafted.size, self.width - 1
        place = jnp.arange(longest, dtype=jnp.int32)[None]
        here = confidences[:, :longest]
        wide = (place < chain.num_drafted[:, None]) & (jnp.max(here, axis=2) > 0.0)
        others = jax.vmap(jax.vmap(lambda x, token: x.at[token].set(-1.0)))(here, chain.tokens)
        siblings = lax.top_k(others, more)[1]
        # Where each place's siblings begin.
        before = jnp.cumsum(wide, axis=1, dtype=jnp.int32) - wide.astype(jnp.int32)
        starts = chain.num_drafted[:, None] + more * before
        at = starts[..., None] + jnp.arange(more, dtype=jnp.int32)[None, None]
        at = jnp.where(wide[..., None], at, self.max_draft).reshape(rows, -1)
        first = jnp.zeros_like(chain.num_drafted)
        kept = place < chain.num_drafted[:, None]

        def whole(of_chain: Array, of_siblings: Array) -> Array:
            empty = jnp.zeros((rows, self.max_draft), jnp.int32)
            with_chain = put_at(empty, jnp.broadcast_to(of_chain, kept.shape), first, kept)
            flat = jnp.broadcast_to(of_siblings, siblings.shape).reshape(rows, -1)
            put = lambda row, where, new: row.at[where].set(new, mode="drop")  # noqa: E731
            return jax.vmap(put)(with_chain, at, flat)

        missing = self.max_draft - longest
        pad = lambda x: jnp.pad(x, ((0, 0), (0, missing), (0, 0)))  # noqa: E731
        sources = None
        if with_sources:
            drafted = drafted_sources(chain)
            chosen = jnp.asarray(_choosers(self.drafter), jnp.int32)[drafted]
            sources = whole(drafted, chosen[..., None])
        return chain._replace(
            tokens=whole(chain.tokens, siblings),
            probs=pad(chain.probs),
            confidences=pad(confidences),
            num_drafted=chain.num_drafted + more * jnp.sum(wide, axis=1, dtype=jnp.int32),
            parents=whole(place, place[..., None]),
            laws=whole(jnp.int32(ChildLaw.DRAWN), jnp.int32(ChildLaw.TOP)),
            sources=sources,
        )


def _with_confidence(drafter: Drafter) -> int:
    """The most tokens of a block that have a confidence."""
    if isinstance(drafter, HorizontalCascade):
        return sum(_with_confidence(part) for part in drafter.drafters)
    return drafter.max_draft if drafter.has_confidence else 0


def _choosers(drafter: Drafter) -> list[int]:
    """For the source of each token, the source of the model whose confidence it has."""
    if isinstance(drafter, VerticalCascade):
        return [0] * len(drafter.source_names)
    if isinstance(drafter, HorizontalCascade):
        choosers: list[int] = []
        for part in drafter.drafters:
            start = len(choosers)
            choosers += [start + i for i in _choosers(part)]
        return choosers
    return list(range(len(drafter.source_names)))
