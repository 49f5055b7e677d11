"""Drafts that a language model draws, token by token.

Axes: B rows, G longest block, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from specjax import cpu_kernels
from specjax.checks import check_count, check_flag
from specjax.decoding import history as history_lib
from specjax.decoding.blocks import empty_block
from specjax.decoding.history import History, put_column
from specjax.decoding.method import check_eos_ids, check_model, check_rollback
from specjax.drafting.stopping import (
    NOTHING_TO_LEARN,
    FixedLength,
    PolicyPast,
    check_policy,
    first_past,
    learn,
)
from specjax.errors import UserError
from specjax.platforms import when
from specjax.processing import advance, distributions, draws, with_processing
from specjax.sampling.distributions import confidence
from specjax.sampling.draws import num_uniforms
from specjax.types import (
    Axes,
    Bonus,
    Cache,
    DraftBlock,
    Drafter,
    DraftInputs,
    DraftModels,
    DraftTraits,
    Drawn,
    Params,
    Processing,
    Prompts,
    row_axes,
)

# The longest drafts where nothing else is chosen.
USUAL_LENGTH = 5


def catches_up_on(platform: str) -> bool:
    """Whether a drafter should catch up: whether a pass over two tokens costs the same as over one.

    Then a pass waits for the weights; XLA's own products on CPUs take twice as long. The platform
    is named as by `jax.Device.platform`.
    """
    return platform != "cpu" or cpu_kernels.available()


class ChainParams(NamedTuple):
    """Attributes: the parameters of the small model and of the stopping policy."""

    model: Params
    stopping: Params = ()


class ChainState(NamedTuple):
    """The state of a chain between rounds.

    Attributes:
      cache: the model's.
      positions: the position of the last committed token.
      history: the tokens in the cache.
      past: the stopping policy's memory of earlier rounds; () if it has none.
    """

    cache: Cache
    positions: Int32[Array, " B"]
    history: History
    past: PolicyPast | tuple[()] = ()

    @property
    def cached(self) -> Array:
        return jnp.minimum(self.positions, self.history.read)


class _DraftLoop(NamedTuple):
    step: Array
    block: DraftBlock
    cache: Cache
    last: Array
    going: Array
    policy: Any
    processing: Processing | None


class ModelDrafter(Drafter):
    """What drafters of one language model share.

    Attributes:
      model: the language model, or its name until it is bound.
      name: its passes are counted under this name.
    """

    model: Any
    name: str

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size if self.is_bound else 0

    @property
    def path(self) -> int:
        """The length of the longest path of a draft."""
        return self.max_draft

    @property
    def is_bound(self) -> bool:
        return not isinstance(self.model, str)

    @property
    def has_confidence(self) -> bool:
        return True

    @property
    def model_names(self) -> tuple[str, ...]:
        return (self.name,) if self.is_bound else (self.model,)

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        return self.model.prompt_positions(input_lengths, prefix_lengths)

    def prefill(self, params: ChainParams, prompts: Prompts, max_length: int) -> ChainState:
        filled = self.model.prefill(params.model, prompts, max_length)
        history = history_lib.begin(filled, max_length, self.max_draft)
        return ChainState(filled.cache, filled.positions, history, self._past(params, prompts))

    def _past(self, params: ChainParams, prompts: Prompts) -> PolicyPast | tuple[()]:
        return ()

    def mark(self, state: ChainState) -> Array:
        return state.positions

    def rewind(self, state: ChainState, mark: Array) -> ChainState:
        return state._replace(positions=mark)

    def state_axes(self, state: ChainState) -> Axes:
        axes = row_axes(state._replace(cache=()))
        return axes._replace(cache=self.model.cache_axes(state.cache))


@dataclasses.dataclass(frozen=True)
class Chain(ModelDrafter):
    """A model draws up to `max_draft` tokens: how a `Decoder` drafts by default.

    A row that lags behind the committed tokens catches up in the first step of its next draft.

    Attributes:
      model: a name of the decoder's models, a draft head among them; or a language model.
      max_draft: G >= 1; None for the decoder's.
      stopping: the policy that ends drafts earlier; None for the decoder's, or for none.
      greedy: whether it drafts its most probable tokens at any temperature, for draft heads. Each
        is then certain: its distribution is one-hot.
      min_draft: no draft ends before this many tokens, whatever the policy decides; 0 .. G. A lower
        limit of a row has priority.
      name: its passes are counted under this name; by default the model's.
      catches_up: whether the last token of a draft that is accepted whole is read in the first step
        of the next draft, which then reads two tokens: worth it if two tokens take as long as one.
        Otherwise it takes its own pass, unless the rule needs that pass anyway.
      eos_ids: tokens that also end a draft, whatever the policy decides: later tokens are not part
        of the text. Drafts then differ in length (see `DraftTraits.fixed_length`).
    """

    model: Any = "drafter"
    max_draft: Any = None
    stopping: Any = None
    greedy: bool = False
    min_draft: int = 0
    name: Any = None
    eos_ids: tuple[int, ...] = ()
    catches_up: bool = False

    # Whether a row may lack committed tokens when a draft begins.
    _lags: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.is_bound:
            check_model("model", self.model)
        object.__setattr__(self, "eos_ids", tuple(self.eos_ids))
        check_flag("greedy", self.greedy)
        check_count("min_draft", self.min_draft, "give a whole number", low=0)
        if self.max_draft is not None or self.is_bound:
            remedy = "decode with the verifier alone to draft nothing"
            check_count("max_draft", self.max_draft, remedy)
            if self.min_draft > self.max_draft:
                raise UserError(
                    f"min_draft must be at most max_draft = {self.max_draft}, got "
                    f"{self.min_draft}: give a smaller min_draft or a larger max_draft"
                )
        if self.stopping is not None:
            check_policy(self.stopping)
        if not self.is_bound:
            return
        object.__setattr__(self, "name", self.name or "drafter")
        object.__setattr__(self, "stopping", self.stopping or FixedLength())
        if self.greedy and self._lags:
            raise UserError(f"greedy must be False: {self.name} is not a draft head")
        self.check_within(0)
        estimate = getattr(self.stopping, "estimate", None)
        if getattr(estimate, "reads_odds", False) and not self.model.gives_odds:
            raise UserError(
                f"stopping={self.stopping!r} needs a drafter with a confidence head, such as a "
                "DSpark"
            )
        check_eos_ids(self.eos_ids, self.vocab_size)

    @property
    def left_out(self) -> Mapping[str, str]:
        own = {"max_draft": self.max_draft, "stopping": self.stopping}
        own["min_draft"] = self.min_draft or None
        why = "drafting=Chain(...) sets its own"
        return {name: why for name, value in own.items() if value is not None}

    @property
    def weighs_costs(self) -> bool:
        return self.model == "drafter" and not self.left_out

    def bind(self, models: DraftModels) -> tuple[Drafter, Params]:
        small = models.model(self.model)
        stopping, params = models.policy(small, self.stopping)
        longest = self.max_draft or models.max_draft
        if longest is None:
            longest, most = USUAL_LENGTH, None if small is None else small.model.most_drafts
            if most is not None:
                # A rule that reads the drafter after a whole draft needs one more of its tokens.
                longest = min(longest, most - models.rule.reads_draft)
        chain = dataclasses.replace(
            self,
            max_draft=longest,
            stopping=stopping,
            name=self.name or self.model,
            # A level of a cascade may draft fewer tokens.
            min_draft=self.min_draft or min(models.min_draft, self.max_draft or models.min_draft),
            # A draft of fixed length continues after an end, so rows stay independent.
            eos_ids=self.eos_ids or (() if stopping.is_fixed else models.eos_ids),
        )
        chain, network = models.network(chain)
        return chain, ChainParams(network, params)

    def check_within(self, before: int) -> None:
        if self.is_bound:
            kind, longest = type(self).__name__, self.max_draft
            check_rollback(self.model, before + longest + 1, f"{kind} with max_draft={longest}")

    @property
    def num_uniforms(self) -> int:
        return self.max_draft * num_uniforms(self.vocab_size)

    @property
    def draft_passes(self) -> int:
        """The passes of the model for a draft of `max_draft` tokens."""
        return self.max_draft

    @property
    def traits(self) -> DraftTraits:
        stopping = self.stopping or FixedLength()
        fixed = stopping.is_fixed and not self.eos_ids
        return DraftTraits(
            prefix_only=not stopping.reads_past,
            fixed_length=fixed,
            independent_rows=fixed,
            catches_up=self.catches_up,
            processes=not self.is_bound or self.model.predicts_all,
        )

    def describe(self) -> Any:
        return {
            "name": self.name,
            "model": self.model.describe(),
            "max_draft": self.max_draft,
            "min_draft": self.min_draft,
            "stopping": repr(self.stopping),
            "eos_ids": self.eos_ids,
            "catches_up": self.catches_up,
        }

    def _past(self, params: ChainParams, prompts: Prompts) -> PolicyPast | tuple[()]:
        rows = prompts.inputs.shape[0]
        return first_past(self.stopping, params.stopping, rows, self.max_draft)

    def draft_limits(self, params: ChainParams, state: ChainState, limits: Array) -> Array:
        return self._begin(params, state, limits)[0]

    def propose(
        self, params: ChainParams, state: ChainState, inputs: DraftInputs
    ) -> tuple[DraftBlock, ChainState]:
        longest, vocab = self.max_draft, self.vocab_size
        rows, active = inputs.tokens.size, inputs.active
        limits, policy = self._begin(params, state, inputs.limits)
        uniforms = inputs.uniforms.reshape(rows, longest, num_uniforms(vocab))

        def choose(carry: _DraftLoop, logits: Array, hidden: Array) -> _DraftLoop:
            """Draws the next token of each row, and decides whether its draft continues."""
            uniform = lax.dynamic_index_in_dim(uniforms, carry.step, axis=1, keepdims=False)
            index, block = carry.step, carry.block
            confidences = block.confidences
            keep_confidence = confidences is not None or self.stopping.reads_confidence
            sampling = with_processing(inputs.sampling, carry.processing)
            with jax.named_scope("draw"):
                q, token = draws(logits, sampling, uniform)
            q_conf = _confidences(logits) if keep_confidence else None
            seen = Drawn(token, q, q_conf, hidden, index)
            stops, policy = self.stopping.step(params.stopping, carry.policy, seen)
            name, kind = type(self.stopping).__name__, (stops.shape, stops.dtype)
            assert kind == (token.shape, bool), f"{name}.step: stops are bool[B]"
            if confidences is not None:
                assert q_conf is not None
                confidences = put_column(confidences, q_conf, index)
            block = block._replace(
                tokens=put_column(block.tokens, token, index),
                probs=put_column(block.probs, q, index),
                confidences=confidences,
                num_drafted=block.num_drafted + carry.going.astype(jnp.int32),
            )
            stops &= index + 1 >= self.min_draft
            for eos in self.eos_ids:
                stops |= token == eos
            going = carry.going & ~stops & (index + 1 < limits)
            processing = advance(sampling, token[:, None], carry.going).processing
            return _DraftLoop(index + 1, block, carry.cache, token, going, policy, processing)

        def step(carry: _DraftLoop) -> _DraftLoop:
            at = starts + carry.step
            logits, hidden, cache = self._read(params, carry.cache, carry.last, at)
            return choose(carry._replace(cache=cache), logits, hidden)

        def late(before: tuple[_DraftLoop, History, Array]) -> tuple[_DraftLoop, History, Array]:
            start, history, _ = before
            with jax.named_scope("drafter_pass"):
                last = history_lib.read_last(
                    self.model, params.model, start.cache, state.positions, history, active,
                    2 if self.catches_up else longest + 1,
                )  # fmt: skip
            first = choose(start._replace(cache=last.cache), last.logits, last.hidden)
            return first, last.history, last.calls - 1  # the last is counted as the first step

        def unfinished(carry: _DraftLoop) -> Array:
            return (carry.step < longest) & jnp.any(carry.going)

        start = _DraftLoop(
            step=jnp.int32(0),
            block=empty_block(rows, longest, vocab, inputs.with_confidence),
            cache=state.cache,
            last=inputs.tokens,
            going=active & (limits > 0),
            policy=policy,
            processing=inputs.sampling.processing,
        )
        lags = jnp.any(active & (state.history.read < state.positions))
        if self.catches_up:
            # Even if no row lags: a single width, so that a row's rounding does not depend on
            # others.
            lags |= jnp.any(start.going)
        before = start, state.history, jnp.int32(0)
        start, history, extra = when(lags, late, before) if self._lags else before
        starts = self._within(state.positions, history)
        done = lax.while_loop(unfinished, step, start)
        block = done.block._replace(calls={self.name: done.step + extra})
        # Step i read the token before draft token i + 1.
        history = history_lib.note_block(history, state.positions, block.tokens, done.step)
        past = state.past
        if isinstance(past, PolicyPast):
            past = past._replace(state=done.policy, drafted=block.num_drafted)
        return block, state._replace(cache=done.cache, history=history, past=past)

    def bonus(
        self,
        params: ChainParams,
        state: ChainState,
        inputs: DraftInputs,
        block: DraftBlock,
    ) -> tuple[Bonus, ChainState]:
        drafted = jnp.concatenate([inputs.tokens[:, None], block.tokens], axis=1)
        last = jnp.take_along_axis(drafted, block.num_drafted[:, None], axis=1)[:, 0]
        at = state.positions + block.num_drafted
        place = self._within(at, state.history)
        logits, _, cache = self._read(params, state.cache, last, place)
        with jax.named_scope("distribution"):
            q = distributions(logits, inputs.sampling)
        q_conf = _confidences(logits) if inputs.with_confidence else None
        history = state.history
        read = jnp.where(history.read < at, history.read, jnp.maximum(history.read, at + 1))
        state = state._replace(cache=cache, history=history._replace(read=read))
        return Bonus(q, q_conf, {self.name: jnp.int32(1)}), state

    def commit(
        self, state: ChainState, tokens: Array, counts: Array, hidden: Array | None = None
    ) -> ChainState:
        drafted, lags = state.history.drafted, not self.traits.catches_up
        return state._replace(
            positions=state.positions + counts,
            history=history_lib.commit(state.history, state.positions, tokens, counts),
            past=learn(self.stopping, state.past, drafted, tokens, counts, lags=lags),
        )

    def rewind(self, state: ChainState, mark: Array) -> ChainState:
        past = state.past
        if isinstance(past, PolicyPast):
            # The level that reviewed its last draft has already reported the outcome.
            past = past._replace(drafted=jnp.full_like(past.drafted, NOTHING_TO_LEARN))
        return super().rewind(state, mark)._replace(past=past)

    def _begin(self, params: ChainParams, state: ChainState, limits: Array) -> tuple[Array, Any]:
        memory = state.past.memory if isinstance(state.past, PolicyPast) else ()
        chosen, policy = self.stopping.begin(params.stopping, memory, limits, self.max_draft)
        kind = chosen.shape, chosen.dtype
        name = type(self.stopping).__name__
        assert kind == (limits.shape, jnp.int32), f"{name}.begin: limits are int32[B]"
        return jnp.clip(chosen, jnp.minimum(self.min_draft, limits), limits), policy

    # Where rows read on: one that lags is not active, and may read anything anywhere. Beyond the
    # tokens that it lacks, a recurrent model would read these, too.
    def _within(self, positions: Array, history: History) -> Array:
        if self.model.most_rollback is None:
            return positions
        return jnp.minimum(positions, history.read)

    def _read(
        self, params: ChainParams, cache: Cache, tokens: Array, positions: Array
    ) -> tuple[Array, Array, Cache]:
        """The model's logits `[B, V]` and hidden states after one more token of each row."""
        with jax.named_scope("drafter_pass"):
            returned = self.model.extend(params.model, cache, tokens[:, None], positions)
        logits, hidden, cache = returned
        return logits[:, 0], hidden[:, 0], cache


def _confidences(logits: Array) -> Array:
    with jax.named_scope("distribution"):
        return jax.vmap(confidence)(logits)
