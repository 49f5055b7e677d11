"""Stopping policies: they decide when a row's draft ends.

Axes: B rows, G longest block, O longest output, V vocabulary.
"""

import abc
import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from specjax.checks import check_part, check_static, one_number, whole_number
from specjax.drafting.estimates import (
    Estimate,
    HeadEstimate,
    JudgedDraft,
    OnlineEstimate,
    Rates,
    acceptance,
    add_round,
    ahead,
    begin_survival,
    chances,
    judge,
    no_rates,
    traced,
)
from specjax.errors import UserError
from specjax.rules.target import entropy
from specjax.types import DraftOutcome, Params, Stopping
from specjax.types.drafting import Drawn
from specjax.types.pytrees import where_rows


@dataclasses.dataclass(frozen=True)
class FixedLength(Stopping):
    """Never stops a draft before its longest length."""

    @property
    def is_fixed(self) -> bool:
        return True

    def step(self, params: Params, state: Any, drawn: Drawn) -> tuple[Array, Any]:
        return jnp.zeros(drawn.token.shape, bool), state


@dataclasses.dataclass(frozen=True)
class _Threshold(Stopping):
    """Ends a draft by a number of the drafter's softmax and a traced threshold."""

    threshold: float | None

    reads_confidence = True
    _high: ClassVar[float]

    def __post_init__(self) -> None:
        if self.threshold is not None:
            name = f"{type(self).__name__}: threshold"
            one_number(name, self.threshold, low=0.0, high=self._high)

    def bind(self, head: Any = None) -> tuple[Stopping, Params]:
        return dataclasses.replace(self, threshold=None), traced(self, "threshold")

    def step(self, params: Params, state: Any, drawn: Drawn) -> tuple[Array, Any]:
        return self._ends(drawn.confidences, _numbers(self, params)), state

    @abc.abstractmethod
    def _ends(self, confidences: Any, threshold: Array) -> Bool[Array, " B"]:
        """From `confidences [B, V]`."""


@dataclasses.dataclass(frozen=True)
class Confidence(_Threshold):
    """Ends a draft when the drafter's largest probability is below a threshold.

    Attributes:
      threshold: in [0, 1]; for max q, where q is the softmax at temperature 1.

    Source: `assistant_confidence_threshold` of transformers, which uses the drawn token's
    probability: the same at temperature 0.
    """

    threshold: float | None = 0.4

    _high: ClassVar[float] = 1.0

    def _ends(self, confidences: Any, threshold: Array) -> Array:
        return jnp.max(confidences, axis=-1) < threshold


@dataclasses.dataclass(frozen=True)
class Entropy(_Threshold):
    """Ends a draft when the square root of the drafter's entropy is above a threshold.

    Attributes:
      threshold: at least 0; for sqrt(H), H in nats of the softmax at temperature 1.

    Source: AdaEDL (arXiv 2410.18351), whose bound on the acceptance rate is 1 - sqrt(gamma H); SVIP
    (arXiv 2411.18462).
    """

    threshold: float | None = 1.0

    _high: ClassVar[float] = math.inf

    def _ends(self, confidences: Any, threshold: Array) -> Array:
        return jnp.sqrt(jax.vmap(entropy)(confidences)) > threshold


class EstimateParams(NamedTuple):
    """Attributes: the numbers of a policy that uses an estimate, and the estimate's."""

    policy: Any
    estimate: Params


class OnEstimate(Stopping):
    """A policy that uses an `estimate` of the chance that a token is accepted."""

    estimate: Estimate

    @property
    def reads_confidence(self) -> bool:
        return self.estimate.reads_confidence

    def _check_estimate(self) -> None:
        name = f"{type(self).__name__}: estimate"
        needed = ("feature", "log_odds", "recall", "as_chance", "lag")
        check_part(name, self.estimate, needed, "drafting.OnlineEstimate()")


@dataclasses.dataclass(frozen=True)
class Survival(OnEstimate):
    """Ends a draft when the chance that one of its tokens is rejected exceeds a threshold.

    Stops after token i if 1 - (product of the chances of acceptance so far) > threshold. A late
    estimate (the acceptance head's) has not judged token i itself yet; the token is kept.

    Attributes:
      estimate: of the chance that a token is accepted.
      threshold: h in [0, 1]; 1 never stops.

    Source: SpecDec++ (arXiv 2405.19715), Algorithm 1.
    """

    estimate: Estimate = HeadEstimate()  # noqa: RUF009  immutable
    threshold: float | None = 0.7

    def __post_init__(self) -> None:
        self._check_estimate()
        if self.threshold is not None:
            one_number("Survival: threshold", self.threshold, low=0.0, high=1.0)

    @property
    def reads_past(self) -> bool:
        return self.estimate.reads_past

    def bind(self, head: Any = None) -> tuple[Stopping, Params]:
        estimate, numbers = self.estimate.bind(head)
        bound = dataclasses.replace(self, estimate=estimate, threshold=None)
        return bound, EstimateParams(traced(self, "threshold"), numbers)

    def remember(self, params: Params, rows: int, longest: int) -> Any:
        return self.estimate.remember(_numbers(self, params).estimate, rows)

    def begin(
        self, params: Params, memory: Any, limits: Array, longest: int
    ) -> tuple[Array, JudgedDraft]:
        numbers = _numbers(self, params).estimate
        return limits, begin_survival(self.estimate, numbers, memory, limits.size, longest)

    def step(self, params: Params, state: JudgedDraft, drawn: Drawn) -> tuple[Array, JudgedDraft]:
        numbers = _numbers(self, params)
        state = judge(self.estimate, numbers.estimate, state, drawn)
        return 1.0 - state.survival > numbers.policy, state

    def learn(self, memory: Any, state: JudgedDraft, outcome: DraftOutcome) -> Any:
        return self.estimate.learn(memory, state.recalled, state.features, outcome)


class RoundsPast(NamedTuple):
    """The memory of a policy that compares tokens.

    Attributes:
      rates: the rows' rates of acceptance.
      estimate: the estimate's memory.
      policy: the policy's memory.
    """

    rates: Rates
    estimate: Any
    policy: Any = ()


class Weighing(NamedTuple):
    """Drafts whose next tokens are compared.

    Attributes:
      judged: by the estimate.
      lengths: the tokens drafted so far.
      chances: for the next tokens.
      policy: the values that the policy compares them with.
    """

    judged: JudgedDraft
    limits: Int32[Array, " B"]
    lengths: Int32[Array, " B"]
    going: Bool[Array, " B"]
    chances: Float32[Array, "B G"]
    policy: Any


class WeighsTokens(OnEstimate):
    """Compares the next tokens of all rows, before each token.

    The estimate judges the drawn tokens; the others are judged by their row's recent rate of
    acceptance. A row's decision reads other rows' drafts, which are independent of its own: so
    verification stays exact.
    """

    reads_past = True

    def remember(self, params: Params, rows: int, longest: int) -> RoundsPast:
        estimate = self.estimate.remember(_numbers(self, params).estimate, rows)
        return RoundsPast(no_rates(rows), estimate)

    def begin(
        self, params: Params, memory: RoundsPast, limits: Array, longest: int
    ) -> tuple[Array, Weighing]:
        numbers, rows = _numbers(self, params), limits.size
        state = Weighing(
            judged=begin_survival(self.estimate, numbers.estimate, memory.estimate, rows, longest),
            limits=limits,
            lengths=jnp.zeros((rows,), jnp.int32),
            going=limits > 0,
            chances=chances(acceptance(memory.rates), longest),
            policy=self._against(numbers.policy, memory, limits, longest),
        )
        worth = self._continuing(state, state.judged.survival)
        return jnp.where(worth, limits, 0), state._replace(going=worth)

    def step(self, params: Params, state: Weighing, drawn: Drawn) -> tuple[Array, Weighing]:
        judged = judge(self.estimate, _numbers(self, params).estimate, state.judged, drawn)
        lengths = state.lengths + state.going.astype(jnp.int32)
        going = state.going & (lengths < state.limits)
        state = state._replace(judged=judged, lengths=lengths, going=going)
        worth = self._continuing(state, ahead(self.estimate, judged, state.chances))
        return ~worth, state._replace(going=worth)

    def learn(self, memory: RoundsPast, state: Weighing, outcome: DraftOutcome) -> RoundsPast:
        judged = state.judged
        estimate = self.estimate.learn(memory.estimate, judged.recalled, judged.features, outcome)
        return memory._replace(rates=add_round(memory.rates, outcome), estimate=estimate)

    def _continuing(self, state: Weighing, survival: Array) -> Array:
        """The rows that continue, `[B]`; `survival [B]`: the chance that all drawn survive."""
        more = jnp.arange(1, state.chances.shape[1] + 1, dtype=jnp.int32)[None]
        open_ = state.going[:, None] & (state.lengths[:, None] + more <= state.limits[:, None])
        return self._continues(state, open_, survival[:, None] * state.chances)

    @abc.abstractmethod
    def _against(self, numbers: Any, memory: RoundsPast, limits: Array, longest: int) -> Any:
        """`Weighing.policy`; the first axis of its arrays is the batch."""

    @abc.abstractmethod
    def _continues(self, state: Weighing, open_: Array, chances: Array) -> Array:
        """The rows that continue, `[B]` bool."""


@dataclasses.dataclass(frozen=True)
class Budget(WeighsTokens):
    """Drafts the tokens of all rows that are most probably accepted, up to a number per round.

    A row continues while its next token is among the best that the number allows. So drafts shorten
    as the batch grows, and end at 0 if B reaches the number.

    Attributes:
      tokens: the number of tokens that the verifier reads in a round, in all rows that may draft,
        with their last committed tokens; at least 1. Rows whose draft limit is 0, and tokens that
        `min_draft` forces, come on top.
      estimate: of the chance that a drawn token is accepted.
    """

    tokens: int | None
    estimate: Estimate = OnlineEstimate()  # noqa: RUF009  immutable

    def __post_init__(self) -> None:
        if self.tokens is not None:
            tokens = whole_number("Budget: tokens", self.tokens, low=1)
            object.__setattr__(self, "tokens", tokens)
        self._check_estimate()

    def bind(self, head: Any = None) -> tuple[Stopping, Params]:
        estimate, numbers = self.estimate.as_chance().bind(head)
        traced(self, "tokens")  # checks it
        bound = dataclasses.replace(self, tokens=None, estimate=estimate)
        return bound, EstimateParams(jnp.int32(self.tokens), numbers)

    def _against(
        self, numbers: Array, memory: RoundsPast, limits: Array, longest: int
    ) -> Int32[Array, " B"]:
        """The tokens that may be drafted in all rows together (equal entries)."""
        budget = numbers - jnp.sum(limits > 0, dtype=jnp.int32)
        return jnp.broadcast_to(budget, limits.shape)

    def _continues(self, state: Weighing, open_: Array, chances: Array) -> Array:
        worth = jnp.where(open_, chances, -1.0)
        # Each row's chances fall from left to right, and ties are taken in that order: so the
        # chosen tokens of a row are its next tokens.
        order = jnp.argsort(-worth.reshape(-1), stable=True)
        left = state.policy[0] - jnp.sum(state.lengths)
        places = jnp.arange(order.size, dtype=jnp.int32)
        rank = jnp.zeros(order.shape, jnp.int32).at[order].set(places)
        return (rank.reshape(worth.shape)[:, 0] < left) & open_[:, 0]


def _numbers(policy: Stopping, params: Params) -> Any:
    """The traced numbers; the policy's own if it was not bound."""
    return policy.bind()[1] if isinstance(params, tuple) and not params else params


def check_policy(policy: Any) -> None:
    """Raises UserError unless `policy` is a stopping policy, and hashable."""
    needed = ("bind", "remember", "begin", "step", "learn")
    check_part("stopping", policy, needed, "drafting.FixedLength()")
    check_static("stopping", policy)


def check_own_params(policy: Stopping, params: Params, head: Any = None) -> None:
    """Raises UserError if one of specjax's policies, which has its numbers, gets parameters."""
    is_ours = type(policy).__module__.startswith("specjax.drafting")
    if not is_ours or (isinstance(params, tuple) and not params):
        return
    try:
        policy.bind(head)
    except UserError:  # bind() has moved its numbers to the parameters
        return
    raise UserError(
        f"stopping=WithParams({type(policy).__name__}(...), params) must have no params, because "
        f"this policy needs none: write stopping={policy!r}"
    )


# In place of the length of a last draft whose outcome was already reported.
NOTHING_TO_LEARN = -1


class PolicyPast(NamedTuple):
    """The memory of a policy that learns from earlier rounds.

    Attributes:
      memory: the policy's memory.
      state: its state at the end of the last drafts.
      drafted: their number of tokens, or `NOTHING_TO_LEARN`.
    """

    memory: Any
    state: Any
    drafted: Int32[Array, " B"]


def first_past(policy: Stopping, params: Params, rows: int, longest: int) -> PolicyPast | tuple[()]:
    """The memory of rows that have drafted nothing; () for a policy without memory."""
    if not policy.reads_past:
        return ()
    memory = policy.remember(params, rows, longest)
    none = jnp.zeros((rows,), jnp.int32)
    return PolicyPast(memory, policy.begin(params, memory, none, longest)[1], none)


def learn(
    policy: Stopping,
    past: PolicyPast | tuple[()],
    drafted: Int32[Array, "B G"],
    tokens: Int32[Array, "B T"],
    counts: Int32[Array, " B"],
) -> PolicyPast | tuple[()]:
    """The memory after the first `counts` of `tokens` are committed; `drafted`: the last drafts.

    A row without committed tokens learns nothing.
    """
    if not isinstance(past, PolicyPast):
        return past
    width = min(tokens.shape[1], drafted.shape[1])
    judged = jnp.minimum(counts, past.drafted)
    agrees = tokens[:, :width] == drafted[:, :width]
    agrees &= jnp.arange(width, dtype=jnp.int32)[None] < judged[:, None]
    agreed = jnp.cumprod(agrees.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    outcome = DraftOutcome(past.drafted, agreed, agreed < judged)
    memory = policy.learn(past.memory, past.state, outcome)
    learns = (counts > 0) & (past.drafted != NOTHING_TO_LEARN)
    return past._replace(memory=where_rows(learns, memory, past.memory))


@dataclasses.dataclass(frozen=True)
class GreedyOracle(Stopping):
    """Ends each draft just before the verifier would reject it; only for temperature 0.

    It discards no drafted token, and no policy needs fewer passes of the verifier: so it bounds the
    gain of policies. It needs the verifier's greedy output in advance: its parameters are the
    `agreeing_runs`, `[B, N + 1]` int32, of the decoded rows, in their order; slots must not be
    refilled. Above temperature 0 it is not a bound: other tokens are drawn.

    Source: SpecDec++ (arXiv 2405.19715), Lemma 2.1.
    """

    reads_past = True

    def remember(self, params: Params, rows: int, longest: int) -> Array:
        return jnp.zeros((rows,), jnp.int32)

    def begin(
        self, params: Params, memory: Array, limits: Array, longest: int
    ) -> tuple[Array, Any]:
        place = jnp.minimum(memory, params.shape[1] - 1)
        runs = jnp.take_along_axis(params, place[:, None], axis=1)[:, 0]
        return jnp.minimum(limits, runs), ()

    def step(self, params: Params, state: Any, drawn: Drawn) -> tuple[Array, Any]:
        return jnp.zeros(drawn.token.shape, bool), state

    def learn(self, memory: Array, state: Any, outcome: DraftOutcome) -> Array:
        return memory + outcome.agreed + 1


def agreeing_runs(agrees: np.ndarray) -> np.ndarray:
    """The number of tokens from each place on that agree without a break: `[B, O + 1]` int32.

    `agrees [B, O]` tells whether the drafter's greedy token at each place of the verifier's greedy
    output, given that output before it, is the verifier's own.
    """
    agrees = np.asarray(agrees, bool)
    runs = np.zeros((agrees.shape[0], agrees.shape[1] + 1), np.int32)
    for i in range(agrees.shape[1] - 1, -1, -1):
        runs[:, i] = np.where(agrees[:, i], runs[:, i + 1] + 1, 0)
    return runs
