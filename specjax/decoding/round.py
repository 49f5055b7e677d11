"""One round: draft, score, rule, verify.

Axes: B rows, G longest block, V vocabulary, W tokens that the verifier reads.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.checks import check_part
from specjax.sampling import confidence, distribution, num_uniforms
from specjax.types import (
    Acceptance,
    Array,
    Axes,
    Cache,
    DraftBlock,
    Drafter,
    LanguageModel,
    Params,
    Rule,
    Sampling,
    Verification,
    row_axes,
)
from specjax.verification import (
    accept,
    block_acceptance_probs,
    draw_next,
    token_acceptance_probs,
)


class RoundParams(NamedTuple):
    """What a round reads besides its state.

    Attributes:
      verifier: the verifier's parameters.
      drafter: the drafter's; a neural drafter's are `drafting.NeuralDrafterParams`.
      rule: the rule, its strengths scalar or `[B]`.
    """

    verifier: Params
    drafter: Params
    rule: Rule


class RoundState(NamedTuple):
    """What one round leaves to the next, per row.

    Attributes:
      tokens: `[B]` int32, the last committed token; not in the verifier's cache yet.
      positions: `[B]` int32, where it belongs there.
      cache: the verifier's.
      drafter: the drafter's state.
      carry: the verification's carry.
    """

    tokens: Array  # [B]
    positions: Array  # [B]
    cache: Cache
    drafter: Any
    carry: Any


class RoundInfo(NamedTuple):
    """What happened in one round, per row.

    Attributes:
      drafted: `[B]` int32.
      accepted: `[B]` int32.
      calls: model's name -> int32 scalar, its passes; each serves the whole batch.
      token_sum: `[B]` float32, sum_i prod_{j <= i} min(1, pi_j / q_j) on this draft.
      block_sum: `[B]` float32, sum_i P_i on the same draft; never less.
      log_p: `[B, G + 1]` float32, natural logarithms of the emitted tokens' p (-inf possible).
      log_target: `[B, G + 1]` float32, of their pi.
      nan_in: `[B]` int32, the index into `Round.nan_sources` of what gave NaN; -1 for nothing.
    """

    drafted: Array  # [B]
    accepted: Array  # [B]
    calls: dict[str, Array]
    token_sum: Array  # [B]
    block_sum: Array  # [B]
    log_p: Array  # [B, G + 1]
    log_target: Array  # [B, G + 1]
    nan_in: Array  # [B]


class RoundOutcome(NamedTuple):
    """What a round emits.

    Attributes:
      tokens: `[B, G + 1]` int32: the accepted tokens, then one more; the rest is padding.
      counts: `[B]` int32, how many of them are real (at least 1).
      probs: `[B, G + 1, V]` float32, the target distribution that each of them follows. So a block
        that a round has emitted can be the draft of a round above, with `probs` as its q.
    """

    tokens: Array  # [B, G + 1]
    counts: Array  # [B]
    probs: Array  # [B, G + 1, V]


class _Scored(NamedTuple):
    """What the verifier says of a block."""

    p: Array  # [B, G + 1, V]
    p_conf: Array | None  # [B, G + 1, V]
    cache: Cache


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

    Raises:
      TypeError: if a part is not what it must be.
      ValueError: if the vocabularies differ, the verification is not exact for the drafter, or the
        widths do not end with G + 1.
    """

    verifier: LanguageModel
    drafter: Drafter
    verification: Verification
    widths: tuple[int, ...] | None = None
    name: str = "verifier"

    def __post_init__(self) -> None:
        check_part("drafter", self.drafter, ("propose", "bonus", "commit"), "NeuralDrafter(...)")
        check_part(
            "verification",
            self.verification,
            ("acceptance", "has_carry", "keeps_last_pass"),
            "verification.Block()",
        )
        if self.verifier.vocab_size != self.drafter.vocab_size:
            raise ValueError(
                f"the drafter's vocabulary has {self.drafter.vocab_size} tokens, the verifier's "
                f"{self.verifier.vocab_size}: they must be one"
            )
        traits = self.drafter.traits
        self.verification.check(self.drafter.max_draft, traits)
        if self.verification.has_carry and not traits.fixed_length:
            # Its carry-overs would need each earlier block's stopping state; see `still_drafting`.
            raise ValueError(
                f"{type(self.verification).__name__} needs drafts of a fixed length here: use "
                "Block or Token verification with adaptive stopping"
            )
        full = self.drafter.max_draft + 1
        widths = self.widths
        if widths is not None and (
            not isinstance(widths, tuple)
            or list(widths) != sorted({*widths, full})
            or widths[0] < 1
            or widths[-1] != full
        ):
            raise ValueError(
                f"widths must be a tuple that increases from at least 1 to G + 1 = {full}, got "
                f"{widths}"
            )

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
        if self.widths is not None:
            return self.widths
        if self.drafter.traits.fixed_length:
            return (full,)
        return (*(1 << i for i in range((full - 1).bit_length())), full)

    def check_rule(self, rule: Rule) -> None:
        """Raises if `rule` is no rule, or reads a confidence that the drafter does not have."""
        check_part(
            "rule",
            rule,
            ("reads_draft", "reads_draft_confidence", "reads_verifier_confidence"),
            "rules.OPT(alpha=0.2)",
        )
        if any(leaf is rule for leaf in jax.tree.leaves(rule)):
            raise TypeError(
                f"rule must be a pytree, got {type(rule).__name__}: decorate the class with "
                "specjax.types.traced_dataclass"
            )
        if rule.reads_draft_confidence and not self.drafter.has_confidence:
            raise ValueError(
                f"{type(rule).__name__} reads the drafter's confidence, but "
                f"{type(self.drafter).__name__} has none: choose another rule"
            )

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
        filled = self.verifier.prefill(params.verifier, *prompt)
        drafter = self.drafter.prefill(params.drafter, *prompt)
        carry = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (inputs.shape[0], *x.shape)),
            self.verification.init_carry(self.drafter.max_draft),
        )
        return RoundState(filled.tokens, filled.positions, filled.cache, drafter, carry)

    def __call__(
        self,
        params: RoundParams,
        sampling: Sampling,
        state: RoundState,
        uniforms: Array,
        active: Array,
        limits: Array,
    ) -> tuple[RoundOutcome, RoundState, RoundInfo]:
        """Runs one round for all rows.

        Args:
          params: the parameters.
          sampling: fields `[B]`.
          state: the rows' state. Positions are not moved: see `commit`.
          uniforms: `[B, num_uniforms]` float32 in [0, 1), independent.
          active: `[B]` bool; what comes out for other rows is to be ignored.
          limits: `[B]` int32 in 0 .. G, the longest block of each row.

        Returns:
          What is emitted, the state with caches filled, and what happened.
        """
        self.check_rule(params.rule)
        rule = jax.tree.map(lambda x: jnp.broadcast_to(x, active.shape), params.rule)
        ends = np.cumsum(self._uniforms)[:-1].tolist()
        for_draft, for_accept, for_next = jnp.split(uniforms, ends, axis=1)
        limits = jnp.where(active, limits, 0)
        block, drafter = self.drafter.propose(
            params.drafter,
            state.drafter,
            state.tokens,
            limits,
            for_draft,
            sampling,
            active if self._reads_bonus(rule) else limits > 0,
            with_confidence=rule.reads_draft_confidence,
        )
        scored = self._score(params, rule, sampling, state, block, active)
        # The bonus row of the block is not filled in yet, and not read before it is.
        targets = jax.vmap(lambda rule, *rows: jax.vmap(rule)(*rows))(
            rule, block.probs, scored.p, block.confidences, scored.p_conf
        )
        acceptance, accepted = jax.vmap(functools.partial(accept, self.verification))(
            for_accept, block.tokens, block.probs, targets, block.num_drafted, state.carry
        )
        bonus_target, drafter, bonus_calls = self._bonus(
            params._replace(rule=rule), sampling, state, drafter, block, scored, targets,
            active & (accepted == block.num_drafted),
        )  # fmt: skip
        next_token = jax.vmap(draw_next)(
            for_next, acceptance, block.probs, block.num_drafted, accepted, bonus_target
        )
        carry = jax.vmap(self.verification.next_carry)(
            acceptance, block.probs, block.num_drafted, state.carry, accepted, next_token
        )
        at_bonus = jnp.arange(targets.shape[1])[None] == block.num_drafted[:, None]
        targets = jnp.where(at_bonus[..., None], bonus_target[:, None], targets)
        outcome = RoundOutcome(_emitted(block.tokens, accepted, next_token), accepted + 1, targets)
        calls = {name: block.calls[name] + bonus_calls[name] for name in self.drafter.model_names}
        info = _report(block, scored.p, acceptance, outcome)
        info = info._replace(calls={self.name: jnp.int32(1), **calls})
        state = state._replace(cache=scored.cache, drafter=drafter, carry=carry)
        return outcome, state, info

    def commit(self, old: RoundState, new: RoundState, tokens: Array, counts: Array) -> RoundState:
        """Moves each row on by `counts` `[B]` tokens; a row with 0 stays as it was.

        Args:
          old: the state before the round.
          new: the state that the round returned.
          tokens: `[B, G + 1]` int32, the outcome's.
          counts: `[B]` int32, how many of them are committed; fewer than the outcome's cut a block
            back (for verification without a carry).

        Returns:
          The state for the next round. Caches are taken as they are: what was written past a
          row's position is overwritten before it can be seen.
        """
        moved = counts > 0
        last = jnp.take_along_axis(tokens, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]

        def keep(a, b):
            return jax.tree.map(
                lambda x, y: jnp.where(moved.reshape((-1,) + (1,) * (y.ndim - 1)), y, x), a, b
            )

        return RoundState(
            tokens=jnp.where(moved, last, old.tokens),
            positions=old.positions + counts,
            cache=new.cache,
            drafter=self.drafter.commit(new.drafter, tokens, counts),
            carry=keep(old.carry, new.carry),
        )

    def state_axes(self, state: RoundState) -> Axes:
        """The logical axis names of the state."""
        axes = row_axes(state._replace(cache=(), drafter=()))
        return axes._replace(
            cache=self.verifier.cache_axes(state.cache),
            drafter=self.drafter.state_axes(state.drafter),
        )

    def _reads_bonus(self, rule: Rule) -> bool:
        """Whether the drafter's distribution at the bonus position is read."""
        return rule.reads_draft or self.verification.has_carry

    def _score(
        self,
        params: RoundParams,
        rule: Rule,
        sampling: Sampling,
        state: RoundState,
        block: DraftBlock,
        active: Array,
    ) -> _Scored:
        """Lets the verifier read the blocks, in the least width that holds them."""
        read = jnp.concatenate([state.tokens[:, None], block.tokens], axis=1)
        score = functools.partial(self.verifier.score, params.verifier, state.cache)
        widths = self.verifier_widths
        full = score(read, state.positions) if len(widths) == 1 else None
        if full is None:
            like = jax.eval_shape(score, read, state.positions)

            def branch(width: int, read: Array, positions: Array) -> Any:
                # Padded to one shape: what lies past the width is masked, or overwritten unseen.
                return jax.tree.map(_pad_to, score(read[:, :width], positions), like)

            longest = jnp.max(jnp.where(active, block.num_drafted, 0)) + 1
            index = jnp.searchsorted(jnp.asarray(widths, jnp.int32), longest)
            branches = [functools.partial(branch, width) for width in widths]
            full = lax.switch(index, branches, read, state.positions)
        logits, _, updates = full
        # Outside of the switch, whose branches would copy the cache.
        cache = self.verifier.write(state.cache, updates, state.positions)
        p = jax.vmap(jax.vmap(distribution, in_axes=(0, None)))(logits, sampling)
        reads = rule.reads_verifier_confidence
        return _Scored(p, jax.vmap(jax.vmap(confidence))(logits) if reads else None, cache)

    def _bonus(
        self,
        params: RoundParams,
        sampling: Sampling,
        state: RoundState,
        drafter: Any,
        block: DraftBlock,
        scored: _Scored,
        targets: Array,
        whole: Array,
    ) -> tuple[Array, Any, dict[str, Array]]:
        """The target at the bonus position `[B, V]`, the drafter's state, and its passes.

        The drafter runs once more only where a whole block stands (`whole`): there alone it lacks
        the last token's entries, and there alone its distribution is read.
        """
        rule = params.rule
        needed = whole if self._reads_bonus(rule) else whole & (block.num_drafted > 0)
        names = self.drafter.model_names

        def run(drafter: Any) -> tuple[Array, Any, dict[str, Array]]:
            extra, drafter = self.drafter.bonus(
                params.drafter,
                drafter,
                state.tokens,
                block,
                sampling,
                with_confidence=rule.reads_draft_confidence,
            )
            p = _at(scored.p, block.num_drafted)
            p_conf = None if scored.p_conf is None else _at(scored.p_conf, block.num_drafted)
            target = jax.vmap(_call)(rule, extra.probs, p, extra.confidences, p_conf)
            return target, drafter, {name: extra.calls[name] for name in names}

        def skip(drafter: Any) -> tuple[Array, Any, dict[str, Array]]:
            target = _at(targets, block.num_drafted)
            return target, drafter, {name: jnp.int32(0) for name in names}

        return lax.cond(jnp.any(needed), run, skip, drafter)


def _report(
    block: DraftBlock, p: Array, acceptance: Acceptance, outcome: RoundOutcome
) -> RoundInfo:
    """What happened, but for the passes."""
    accepted = outcome.counts - 1
    log_p, log_target = (_log_at(x, outcome.tokens) for x in (p, outcome.probs))
    position = jnp.arange(p.shape[1])[None]
    # Any NaN among the logits makes all probabilities NaN.
    bad = (
        jnp.isnan(p[..., 0]) & (position <= block.num_drafted[:, None]),
        jnp.isnan(block.probs[..., 0]) & (position < block.num_drafted[:, None]),
        jnp.isnan(log_target) & (position < outcome.counts[:, None]),
    )
    in_verifier, in_drafter, in_rule = (x.any(axis=1) for x in bad)
    nan_in = jnp.where(in_verifier, 0, jnp.where(in_drafter, 1, jnp.where(in_rule, 2, -1)))
    return RoundInfo(
        drafted=block.num_drafted,
        accepted=accepted,
        calls={},
        token_sum=_sum_of_products(block, acceptance.targets),
        block_sum=jax.vmap(block_acceptance_probs)(
            block.tokens, block.probs, acceptance.targets, block.num_drafted
        ).sum(axis=1),
        log_p=log_p,
        log_target=log_target,
        nan_in=nan_in,
    )


def _call(rule: Rule, q: Array, p: Array, q_conf: Array | None, p_conf: Array | None) -> Array:
    return rule(q, p, q_conf, p_conf)


def _pad_to(x: Array, like: Any) -> Array:
    """Pads every axis at its end."""
    return jnp.pad(x, [(0, after - now) for now, after in zip(x.shape, like.shape, strict=True)])


def _at(x: Array, index: Array) -> Array:
    """`x[b, index[b]]`."""
    return jax.vmap(lambda row, i: lax.dynamic_index_in_dim(row, i, keepdims=False))(x, index)


def _emitted(tokens: Array, accepted: Array, next_token: Array) -> Array:
    index = jnp.arange(tokens.shape[1] + 1)[None]
    padded = jnp.pad(tokens, ((0, 0), (0, 1)))
    return jnp.where(index == accepted[:, None], next_token[:, None], padded)


def _log_at(probs: Array, tokens: Array) -> Array:
    return jnp.log(jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0])


def _sum_of_products(block: DraftBlock, targets: Array) -> Array:
    ratios = jax.vmap(token_acceptance_probs)(block.tokens, block.probs, targets, block.num_drafted)
    return jnp.cumprod(ratios, axis=1).sum(axis=1)
