"""One round: draft, score, rule, verify.

Axes: B rows, G longest block, V vocabulary, W tokens that the verifier reads.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.decoding import history as history_lib
from specjax.decoding.checks import check_names, check_nests, check_parts, check_rule
from specjax.decoding.outcome import (
    RoundInfo,
    RoundMark,
    RoundOutcome,
    RoundParams,
    RoundState,
    count_calls,
    emitted,
    report,
)
from specjax.decoding.returned import check_state, checked_block, checked_bonus, committed, planned
from specjax.decoding.scoring import Scored, check_widths, powers_of_two, score
from specjax.decoding.targets import block_targets, next_target
from specjax.platforms import row, rows_in_tiles
from specjax.sampling import num_uniforms
from specjax.types import (
    Array,
    Axes,
    DraftBlock,
    Drafter,
    LanguageModel,
    Params,
    Rule,
    Sampling,
    Verification,
    row_axes,
)
from specjax.verification import accept, draw_next


@dataclasses.dataclass(frozen=True)
class Round:
    """The parts of a round; static and hashable. Its parameters are `RoundParams`.

    Attributes:
      verifier: the large model.
      drafter: the drafter.
      verification: the algorithm.
      widths: how many tokens a pass of the verifier may read, increasing up to G + 1; each pass
        takes the least width that holds the longest draft of an active row. None: G + 1 alone where
        drafts have a fixed length, else powers of two. Each width is compiled.
      name: of the verifier, under which its passes are counted.
      nested: whether a round above reviews what this one emits. Then more may be committed than it
        emitted, and its verifier catches up on that: up to G + 1 tokens in the pass over the next
        block, for which a width of 2 G + 2 is added. Verification must leave no carry.

    Raises:
      TypeError: if a part is not what it must be.
      ValueError: if the vocabularies differ, the verification is not exact for the drafter, the
        widths do not end with G + 1, or two models have one name.
    """

    verifier: LanguageModel
    drafter: Drafter
    verification: Verification
    widths: tuple[int, ...] | None = None
    name: str = "verifier"
    nested: bool = False

    def __post_init__(self) -> None:
        check_parts(self.verifier, self.drafter, self.verification)
        check_names(self.model_names)
        if self.widths is not None:
            check_widths(self.widths, self.drafter.max_draft + 1)
        if self.nested:
            check_nests(self.verification)

    @property
    def num_uniforms(self) -> int:
        """How many uniforms a row's round takes."""
        return sum(self._uniforms)

    @property
    def _uniforms(self) -> tuple[int, int, int]:
        """For drafting, acceptance and the next token: never shared."""
        per_draw = num_uniforms(self.verifier.vocab_size)
        return self.drafter.num_uniforms, self.drafter.max_draft, per_draw

    @property
    def model_names(self) -> tuple[str, ...]:
        """The verifier's name, then those of the drafter's models."""
        return (self.name, *self.drafter.model_names)

    @property
    def nan_sources(self) -> tuple[str, ...]:
        """What may give NaN: the verifier, the drafter, the rule."""
        return (self.name, "drafter", "rule")

    @property
    def verifier_widths(self) -> tuple[int, ...]:
        """The widths that are compiled."""
        full = self.drafter.max_draft + 1
        usual = (full,) if self.drafter.traits.fixed_length else powers_of_two(full)
        widths = usual if self.widths is None else self.widths
        # A nested one may lag behind, by as many tokens as it reads otherwise.
        return (*widths, 2 * full) if self.nested else widths

    def check_rule(self, rule: Rule) -> None:
        """Raises if `rule` is no rule, or reads a confidence that the drafter does not have."""
        check_rule(rule, self.drafter, nested=self.nested)

    def prefill(
        self,
        params: RoundParams,
        inputs: Array,
        input_lengths: Array,
        max_length: int,
        prefix: Array | None = None,
        prefix_lengths: Array | None = None,
    ) -> RoundState:
        """Takes prompts in; arguments as in `LanguageModel.prefill`."""
        prompt = (inputs, input_lengths, max_length, prefix, prefix_lengths)
        longest = self.drafter.max_draft
        filled = self.verifier.prefill(params.verifier, *prompt)
        drafter = self.drafter.prefill(params.drafter, *prompt)
        check_state(self.drafter, drafter, inputs.shape[0])
        carry = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (inputs.shape[0], *x.shape)),
            self.verification.init_carry(longest),
        )
        history = history_lib.begin(filled, max_length, longest) if self.nested else None
        credit = jnp.zeros(filled.positions.shape, jnp.float32)
        own = (filled.tokens, filled.positions, filled.cache)
        return RoundState(*own, drafter, carry, credit, history)

    def __call__(
        self,
        params: RoundParams,
        sampling: Sampling,
        state: RoundState,
        uniforms: Array,
        active: Array,
        limits: Array,
        *,
        with_confidence: bool = False,
    ) -> tuple[RoundOutcome, RoundState, RoundInfo]:
        """Runs one round for all rows.

        Args:
          params: the parameters.
          sampling: fields `[B]`.
          state: the rows' state. Positions are not moved: see `commit`.
          uniforms: `[B, num_uniforms]` float32 in [0, 1), independent.
          active: `[B]` bool; what comes out for other rows is to be ignored.
          limits: `[B]` int32 in 0 .. G, the longest block of each row.
          with_confidence: whether the verifier's confidences are asked for (static).

        Returns:
          What is emitted, the state with caches filled, and what happened.
        """
        self.check_rule(params.rule)
        rule = jax.tree.map(lambda x: jnp.broadcast_to(x, active.shape), params.rule)
        ends = np.cumsum(self._uniforms)[:-1].tolist()
        for_draft, for_accept, for_next = jnp.split(uniforms, ends, axis=1)
        limits = jnp.where(active, limits, 0)
        state, behind = _caught_up(self.verifier, params.verifier, state, active)
        reads_bonus = rule.reads_draft or self.verification.has_carry
        drafts = planned(self.drafter, params.drafter, state.drafter, limits) > 0
        given = params.drafter, state.drafter, state.tokens, limits, for_draft, sampling
        asked = rule.reads_draft_confidence
        proposed = self.drafter.propose(
            *given, active if reads_bonus else drafts, with_confidence=asked
        )
        block, drafter = checked_block(self.drafter, proposed, limits, asked)
        read = functools.partial(
            score, self.verifier, params.verifier, state.cache, widths=self.verifier_widths,
            sampling=sampling, with_confidence=rule.reads_verifier_confidence or with_confidence,
        )  # fmt: skip
        scored, state = _scored(read, state, block, active)
        block = block._replace(probs=rows_in_tiles(block.probs))
        # The bonus row of the block is not filled in yet, and not read before it is.
        with jax.named_scope("rule"):
            targets, credits = block_targets(
                rule, state.credit, block.probs, scored.p, block.confidences, scored.p_conf
            )
        targets = rows_in_tiles(targets)
        with jax.named_scope("verification"):
            acceptance, accepted = jax.vmap(functools.partial(accept, self.verification))(
                for_accept, block.tokens, block.probs, targets, block.num_drafted, state.carry
            )
        whole = accepted == block.num_drafted
        before_bonus = state._replace(credit=_at(credits, block.num_drafted))
        with jax.named_scope("bonus"):
            bonus_target, credit, drafter, bonus_calls, took_bonus, bonus_nan = self._bonus(
                params._replace(rule=rule), sampling, before_bonus, drafter, block, scored,
                targets, active & whole,
            )  # fmt: skip
        judged = acceptance, block.probs, block.num_drafted
        with jax.named_scope("verification"):
            next_token = jax.vmap(draw_next)(for_next, *judged, accepted, bonus_target)
            next_carry = jax.vmap(self.verification.next_carry)
            carry = next_carry(*judged, state.carry, accepted, next_token)
        next_target = jnp.where(whole[:, None], bonus_target, jax.vmap(row)(targets, accepted))
        tokens = emitted(block.tokens, accepted, next_token)
        targets = _with_bonus(targets, bonus_target, block.num_drafted)
        outcome = RoundOutcome(tokens, accepted + 1, targets, scored.p_conf)
        info = report(block, scored.p, acceptance, outcome, next_target, bonus_nan)
        info = count_calls(info, {self.name: behind + 1, **block.calls}, bonus_calls, took_bonus)
        left = jnp.where(whole, credit, _at(credits, accepted + 1))
        state = state._replace(cache=scored.cache, drafter=drafter, carry=carry, credit=left)
        return outcome, state, info

    def commit(self, old: RoundState, new: RoundState, tokens: Array, counts: Array) -> RoundState:
        """Moves each row on by `counts` `[B]` tokens; a row with 0 stays as it was.

        Args:
          old: the state before the round.
          new: what the round returned.
          tokens: `[B, T]` int32, the outcome's.
          counts: `[B]` int32, how many of them are committed; fewer than the outcome's cut a block
            back (for verification without a carry and a rule without a budget). A nested round may
            be told more tokens, `[B, T]`, than it emitted; no other may.

        Returns:
          The state for the next round. Caches stay: what lies past a row's position is unseen.
        """
        moved = counts > 0
        last = jnp.take_along_axis(tokens, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
        history = new.history
        if history is not None:
            history = history_lib.commit(history, old.positions, tokens, counts)
        return RoundState(
            tokens=jnp.where(moved, last, old.tokens),
            positions=old.positions + counts,
            cache=new.cache,
            drafter=committed(self.drafter, new.drafter, old.drafter, tokens, counts),
            carry=_where_rows(moved, new.carry, old.carry),
            credit=jnp.where(moved, new.credit, old.credit),
            history=history,
        )

    def mark(self, state: RoundState) -> RoundMark:
        """Where the rows are; `rewind` moves them back there."""
        return RoundMark(state.tokens, state.positions, self.drafter.mark(state.drafter))

    def rewind(self, state: RoundState, mark: RoundMark) -> RoundState:
        """Takes back what was committed since `mark`.

        What was read stays in the caches for the `commit` that must follow. Only nested rounds can
        be moved back.
        """
        drafter = self.drafter.rewind(state.drafter, mark.drafter)
        return state._replace(tokens=mark.tokens, positions=mark.positions, drafter=drafter)

    def state_axes(self, state: RoundState) -> Axes:
        """The logical axis names of the state."""
        axes = row_axes(state._replace(cache=(), drafter=()))
        return axes._replace(
            cache=self.verifier.cache_axes(state.cache),
            drafter=self.drafter.state_axes(state.drafter),
        )

    def _bonus(
        self,
        params: RoundParams,
        sampling: Sampling,
        state: RoundState,
        drafter: Any,
        block: DraftBlock,
        scored: Scored,
        targets: Array,
        whole: Array,
    ) -> tuple[Array, Array, Any, dict[str, Array], Array, Array]:
        """The target at the bonus position `[B, V]`, the credit after it, the drafter's state.

        Then its passes; and, both `[B]` bool, which rows took them, and where they gave NaN. The
        drafter runs once more only where a whole block stands (`whole`): there alone it lacks the
        last token's entries, and there alone its distribution is read.
        """
        rule = params.rule
        reads = rule.reads_draft or self.verification.has_carry
        needed = whole if reads else whole & (block.num_drafted > 0)
        names = self.drafter.model_names
        none = {name: jnp.int32(0) for name in names}

        def skip(drafter: Any) -> tuple[Array, Array, Any, dict[str, Array], Array]:
            target = jax.vmap(row)(targets, block.num_drafted)
            return target, state.credit, drafter, none, needed & False

        if not reads and self.drafter.traits.catches_up:
            target, credit, drafter, calls, nan = skip(drafter)
            return target, credit, drafter, calls, nan, nan

        def run(drafter: Any) -> tuple[Array, Array, Any, dict[str, Array], Array]:
            asked = rule.reads_draft_confidence
            returned = self.drafter.bonus(
                params.drafter, drafter, state.tokens, block, sampling, with_confidence=asked
            )
            extra, drafter = checked_bonus(self.drafter, returned, drafter, whole.size, asked)
            at_bonus = lambda x: jax.vmap(row)(x, block.num_drafted)  # noqa: E731
            p, p_conf = jax.tree.map(at_bonus, (scored.p, scored.p_conf))
            read = extra.probs, p, extra.confidences, p_conf
            target, credit = next_target(rule, state.credit, *read)
            calls = {name: extra.calls[name] for name in names}
            return target, credit, drafter, calls, needed & reads & jnp.isnan(extra.probs[:, 0])

        target, credit, drafter, calls, nan = lax.cond(jnp.any(needed), run, skip, drafter)
        return target, credit, drafter, calls, needed, nan


def _with_bonus(targets: Array, bonus: Array, num_drafted: Array) -> Array:
    """`targets [B, G + 1, V]` with `bonus [B, V]` behind each row's block."""
    at_bonus = jnp.arange(targets.shape[1])[None] == num_drafted[:, None]
    return jnp.where(at_bonus[..., None], bonus[:, None], targets)


def _caught_up(
    verifier: LanguageModel, params: Params, state: RoundState, active: Array
) -> tuple[RoundState, Array]:
    """Lets the verifier of a nested round read what it lacks beyond a pass; counts the passes."""
    if state.history is None:
        return state, jnp.int32(0)
    # So many are read together with the draft.
    spare = state.history.drafted.shape[1] + 1
    cache, history, calls = history_lib.catch_up(
        verifier, params, state.cache, state.positions, state.history, active, spare
    )
    return state._replace(cache=cache, history=history), calls


def _scored(
    read: Callable[..., Scored], state: RoundState, block: DraftBlock, active: Array
) -> tuple[Scored, RoundState]:
    """The verifier's pass over the blocks; a nested one reads what it lacks in it, too.

    Args:
      read: `score`, but for what is read and where.
      state: the rows' state, no further behind than a pass reads.
      block: what was drafted.
      active: `[B]` bool.
    """
    drafted = jnp.where(active, block.num_drafted, 0)
    if state.history is None:
        tokens = jnp.concatenate([state.tokens[:, None], block.tokens], axis=1)
        return read(tokens, state.positions, jnp.max(drafted) + 1), state
    full = block.tokens.shape[1] + 1
    lacks = history_lib.unread(state.history, state.positions, block.tokens, 2 * full)
    longest = jnp.max(jnp.where(active, drafted + lacks.lags, 0)) + 1
    scored = read(lacks.tokens, lacks.starts, longest, skipped=lacks.lags, rows=full)
    history = history_lib.note_caught_up(state.history, state.positions, active)
    history = history_lib.note_block(history, state.positions, block.tokens, block.num_drafted + 1)
    return scored, state._replace(history=history)


def _where_rows(rows: Array, new: Any, old: Any) -> Any:
    """The arrays of `new` in the rows `[B]` that are true, those of `old` in the others."""

    def choose(x: Array, y: Array) -> Array:
        return jnp.where(rows.reshape((-1,) + (1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(choose, new, old)


def _at(x: Array, index: Array) -> Array:
    """`x[b, index[b]]`."""
    return jax.vmap(lambda row, i: lax.dynamic_index_in_dim(row, i, keepdims=False))(x, index)
