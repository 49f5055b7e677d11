"""The vertical cascade: a middle model reviews drafts of a level below, to make its own draft.

Axes: B rows, G longest block, K longest block of the level below, R inner rounds, V vocabulary.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.checks import check_count, check_part, one_number
from specjax.decoding import MethodParams, Round
from specjax.decoding.guards import check_model
from specjax.decoding.outcome import RoundMark, RoundState
from specjax.decoding.token_sources import inner_sources
from specjax.drafting.blocks import append_block, empty_block
from specjax.errors import UserError
from specjax.processing import advance, with_processing
from specjax.rules import Lossless, Lossy
from specjax.types import (
    Array,
    Axes,
    Bonus,
    DraftBlock,
    Drafter,
    DraftTraits,
    LanguageModel,
    Params,
    Processing,
    Prompts,
    Rule,
    Sampling,
    Verification,
    row_axes,
)
from specjax.verification import Block


class VerticalCascadeParams(NamedTuple):
    """The parameters of a vertical cascade.

    Attributes:
      reviewer: the middle model's parameters.
      drafter: the parameters of the level below.
      rule: the middle model's rule, its strengths scalar or `[B]`.
    """

    reviewer: Params
    drafter: Params
    rule: Rule = Lossless()


class VerticalCascadeState(NamedTuple):
    """The state of a vertical cascade between rounds.

    Attributes:
      round: the inner round's state; after `propose` it has moved on by the block.
      mark: the places of the rows at the last commit.
      active: `[B]` bool, the rows that drafted last or may need a bonus.
    """

    round: RoundState
    mark: RoundMark
    active: Array


class _Collecting(NamedTuple):
    """The state of the loop over inner rounds."""

    step: Array
    block: DraftBlock
    round: RoundState
    processing: Processing | None


@dataclasses.dataclass(frozen=True)
class VerticalCascade(Drafter):
    """Drafts with its own rounds. Its parameters: `VerticalCascadeParams`.

    The level below drafts, and the middle model reviews under its own rule, until there are enough
    tokens. They follow the inner target pi = T(q, p), for q of the level below and p of the middle
    model. The block reports pi as its tokens' distribution: so the level above is exact, whatever
    the rule. The middle model's p is not that distribution, unless the rule is `Lossless`.

    An inner round never drafts more than fits into the block, so no reviewed token is lost. Whether
    another round follows depends only on earlier tokens.

    Source: Cascade Speculative Drafting (arXiv 2312.11462), section 3.1.

    Attributes:
      drafter: the level below: any drafter, even a cascade.
      reviewer: the middle model.
      max_draft: G >= 1.
      min_draft: rounds follow until a block has this many tokens, 1 .. G; None for G. A row whose
        limit is below G needs fewer by the difference. Extra tokens of the last round stay.
      rounds: the most inner rounds; None for no limit.
      verification: of the inner rounds; without a carry (not GreedyBlock).
      widths: the widths of the middle model's passes; see `decoding.Round`.
      name: the middle model's passes are counted under it.

    Raises:
      TypeError: if a part is of a wrong type.
      ValueError: if a number is out of range, the vocabularies differ, the verification is not
        exact here, or two models share a name.
    """

    drafter: Drafter
    reviewer: LanguageModel
    max_draft: int
    min_draft: int | None = None
    rounds: int | None = None
    verification: Verification = Block()  # noqa: RUF009  immutable
    widths: tuple[int, ...] | None = None
    name: str = "reviewer"

    def __post_init__(self) -> None:
        check_count("max_draft", self.max_draft, "give the length of a block")
        if self.min_draft is not None:
            check_count("min_draft", self.min_draft, "leave it out for max_draft")
            if self.min_draft > self.max_draft:
                raise UserError(
                    f"min_draft must be at most max_draft = {self.max_draft}, got {self.min_draft}"
                )
        if self.rounds is not None:
            check_count("rounds", self.rounds, "leave it out for no limit")
        needed = ("draft_limits", "propose", "bonus", "commit", "mark", "rewind")
        check_part("drafter", self.drafter, needed, "drafting.NeuralDrafter(...)")
        check_model("reviewer", self.reviewer)
        if self.drafter.vocab_size != self.reviewer.vocab_size:
            raise UserError(
                f"levels of a cascade must share one vocabulary, got {self.reviewer.vocab_size} "
                f"tokens for {self.name!r} and {self.drafter.vocab_size} for the "
                f"{type(self.drafter).__name__} below it"
            )
        self._round  # noqa: B018  runs its checks

    @property
    def _round(self) -> Round:
        return Round(
            self.reviewer, self.drafter, self.verification, self.widths, self.name, nested=True
        )

    @property
    def _most_rounds(self) -> int:
        """R: each inner round adds at least one token."""
        return min(self.max_draft if self.rounds is None else self.rounds, self._enough)

    @property
    def _enough(self) -> int:
        return self.max_draft if self.min_draft is None else self.min_draft

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.reviewer.vocab_size

    @property
    def num_uniforms(self) -> int:
        """The sum over R rounds."""
        return self._most_rounds * self._round.num_uniforms

    @property
    def has_confidence(self) -> bool:
        """True: the middle model's."""
        return True

    @property
    def traits(self) -> DraftTraits:
        """Where a block ends may depend on the randomness of a round."""
        fixed = self._enough == self.max_draft and self.rounds is None
        return DraftTraits(
            prefix_only=self.drafter.traits.prefix_only,
            random_stops=not fixed,
            fixed_length=fixed,
            independent_rows=False,
            catches_up=True,
            processes=self.drafter.traits.processes,
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        """The middle model's name, then those below."""
        return self._round.model_names

    @property
    def source_names(self) -> tuple[str, ...]:
        """The middle model's name, for its own tokens; then the parts below."""
        return (self.name, *self.drafter.source_names)

    def describe(self) -> Any:
        return {
            "name": self.name,
            "reviewer": self.reviewer.describe(),
            "drafter": self.drafter.describe(),
            "max_draft": self.max_draft,
            "min_draft": self._enough,
            "rounds": self.rounds,
            "verification": repr(self.verification),
            "widths": list(self._round.verifier_widths),
        }

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        levels = (self.reviewer, self.drafter)
        first, second = (x.prompt_positions(input_lengths, prefix_lengths) for x in levels)
        return np.maximum(first, second)

    def prefill(
        self, params: VerticalCascadeParams, prompts: Prompts, max_length: int
    ) -> VerticalCascadeState:
        inner = self._round
        state = inner.prefill(MethodParams(*params), prompts, max_length)
        nobody = jnp.zeros(state.positions.shape, bool)
        return VerticalCascadeState(state, inner.mark(state), nobody)

    def propose(
        self,
        params: VerticalCascadeParams,
        state: VerticalCascadeState,
        tokens: Array,
        limits: Array,
        uniforms: Array,
        sampling: Sampling,
        active: Array,
        *,
        with_confidence: bool,
        with_sources: bool = False,
    ) -> tuple[DraftBlock, VerticalCascadeState]:
        inner, most = self._round, self._most_rounds
        limits = jnp.where(active, limits, 0)
        # At least one token if any is allowed.
        spare = self.max_draft - self._enough
        enough = jnp.maximum(limits - spare, jnp.minimum(limits, 1))
        uniforms = uniforms.reshape(tokens.size, most, inner.num_uniforms)

        def step(carry: _Collecting) -> _Collecting:
            drafted = carry.block.num_drafted
            going, room = drafted < enough, limits - drafted
            drawn_so = with_processing(sampling, carry.processing)
            outcome, after, seen = inner(
                MethodParams(*params),
                drawn_so,
                carry.round,
                lax.dynamic_index_in_dim(uniforms, carry.step, axis=1, keepdims=False),
                going,
                # The round adds a token of its own.
                jnp.clip(room - 1, 0, self.drafter.max_draft),
                with_confidence=with_confidence,
                with_sources=with_sources,
            )
            counts = jnp.where(going, outcome.counts, 0)
            # NaN here must be NaN in the level above.
            bad = (seen.nan_in >= 0)[:, None, None]
            probs = jnp.where(bad, jnp.nan, outcome.probs)
            part = DraftBlock(outcome.tokens, probs, outcome.confidences, counts, {})
            if outcome.sources is not None:
                part = part._replace(sources=inner_sources(outcome.sources))
            block = append_block(carry.block, part)
            calls = {name: carry.block.calls[name] + seen.calls[name] for name in seen.calls}
            after = inner.commit(carry.round, after, outcome.tokens, counts)
            processing = advance(drawn_so, outcome.tokens, counts).processing
            block = block._replace(calls=calls)
            return _Collecting(carry.step + 1, block, after, processing)

        def unfinished(carry: _Collecting) -> Array:
            return (carry.step < most) & jnp.any(carry.block.num_drafted < enough)

        sizes = tokens.size, self.max_draft, self.vocab_size
        block = empty_block(*sizes, with_confidence, with_sources)
        block = block._replace(calls=dict.fromkeys(self.model_names, jnp.int32(0)))
        first = _Collecting(jnp.int32(0), block, state.round, sampling.processing)
        done = lax.while_loop(unfinished, step, first)
        return done.block, state._replace(round=done.round, active=active)

    def bonus(
        self,
        params: VerticalCascadeParams,
        state: VerticalCascadeState,
        tokens: Array,
        block: DraftBlock,
        sampling: Sampling,
        *,
        with_confidence: bool,
    ) -> tuple[Bonus, VerticalCascadeState]:
        """The inner target after the block, from a round that drafts nothing."""
        inner = self._round
        outcome, after, seen = inner(
            MethodParams(*params),
            sampling,
            state.round,
            jnp.zeros((tokens.size, inner.num_uniforms), jnp.float32),
            state.active,
            jnp.zeros(tokens.shape, jnp.int32),
            with_confidence=with_confidence,
        )
        probs = jnp.where((seen.nan_in >= 0)[:, None], jnp.nan, outcome.probs[:, 0])
        confidences = outcome.confidences
        reported = confidences[:, 0] if with_confidence and confidences is not None else None
        return Bonus(probs, reported, seen.calls), state._replace(round=after)

    def commit(
        self, state: VerticalCascadeState, tokens: Array, counts: Array, hidden: Array | None = None
    ) -> VerticalCascadeState:
        inner = self._round
        back = inner.rewind(state.round, state.mark)
        now = inner.commit(back, back, tokens, counts)
        return state._replace(round=now, mark=inner.mark(now))

    def mark(self, state: VerticalCascadeState) -> RoundMark:
        return state.mark

    def rewind(self, state: VerticalCascadeState, mark: RoundMark) -> VerticalCascadeState:
        return state._replace(round=self._round.rewind(state.round, mark), mark=mark)

    def state_axes(self, state: VerticalCascadeState) -> Axes:
        return VerticalCascadeState(
            self._round.state_axes(state.round), row_axes(state.mark), row_axes(state.active)
        )


def lenience(value: float) -> Rule:
    """The rule that accepts x in an inner level with probability min(1, l p(x) / q(x)).

    It is `Lossy` at the strength 1 - 1 / l. At temperature 0 it changes nothing; `TokenV3` is its
    counterpart there.

    Source: Leviathan et al. (arXiv 2211.17192), section A.5; arXiv 2312.11462, section 3.1.

    Args:
      value: l >= 1; 1 for none.

    Raises:
      TypeError: if it is not a number.
      ValueError: if it is below 1 or not finite.
    """
    exact = one_number("lenience", value, low=1.0, high=float(np.finfo(np.float32).max))
    return Lossless() if exact == 1.0 else Lossy(1.0 - 1.0 / exact)
