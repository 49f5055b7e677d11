"""Stopping policies: they decide when a row's draft ends.

Some use an estimate of whether a drafted token will be accepted. It judges drawn tokens; tokens
that are not drawn yet are judged by the row's recent rate of acceptance.

Axes: B rows, G longest block, N = G + 1 widths, V vocabulary, D drafter's width,
R measured batch sizes, W measured widths.
"""

import abc
import dataclasses
import json
import math
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from specjax.acceptance_head import NUM_FEATURES, HeadConfig, apply_head, drawn_features, log_odds
from specjax.checks import (
    PathLike,
    check_flag,
    check_part,
    check_path,
    check_static,
    one_number,
    short_repr,
    whole_fields,
)
from specjax.errors import UserError, shorten
from specjax.rules.target import entropy
from specjax.types import DraftOutcome, Drawn, Params, Stopping
from specjax.types.pytrees import where_rows

# Log-odds beyond which max q carries no more information (0.998), and their usual size.
_SURE = 6.0
_USUAL = 3.0
# The weight of the round before relative to the present round: about ten tokens.
KEPT = 0.9
# The start of each row: high, because a draft that is not tried teaches nothing.
_START, _WEIGHT = 0.85, 2.0
# The format of the files that `Costs.to_dict` makes.
FORMAT = 2
_HOW = (
    "measure it with specjax bench --costs FILE, --rows up to your batch size and --drafts up to "
    "your longest draft"
)


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
        return dataclasses.replace(self, threshold=None), as_param(self, "threshold")

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


class Estimate(abc.ABC):
    """Estimates the chance that a drafted token is accepted; static and hashable.

    Attributes:
      lag: the number of tokens by which an estimate is late: 0 if it judges the token just drawn, 1
        if the token before.
      reads_confidence: whether it reads the confidence distribution.
      reads_past: whether it learns from earlier rounds.
      reads_odds: whether it needs a model that `gives_odds`.
    """

    lag: ClassVar[int] = 0
    reads_odds: ClassVar[bool] = False
    reads_confidence: ClassVar[bool] = False
    reads_past: ClassVar[bool] = False

    def bind(self, head: Any = None) -> "tuple[Estimate, Params]":
        return self, ()

    def as_chance(self) -> "Estimate":
        """The same estimate as plain chances, without training weights; by default itself."""
        return self

    def remember(self, params: Params, rows: int) -> Any:
        return ()

    def recall(self, params: Params, memory: Any) -> Any:
        """The part of the memory that a draft uses; fixed before its first token."""
        return ()

    def begin(self, rows: int) -> Any:
        """The values that it carries from step to step; the leading axis is the batch."""
        return ()

    @abc.abstractmethod
    def feature(self, params: Params, carry: Any, drawn: Drawn) -> tuple[Array, Any]:
        """The feature of the token just drawn, `[B]` float32, and the carry for the next step."""

    def log_odds(self, params: Params, recalled: Any, feature: Array) -> Array:
        """The log-odds of acceptance, `[B]` float32; by default the feature itself."""
        return feature

    def learn(self, memory: Any, recalled: Any, features: Array, outcome: DraftOutcome) -> Any:
        """The memory after a round; `features` is `[B, G]`. See `Stopping.learn`."""
        return memory


@dataclasses.dataclass(frozen=True)
class ConfidenceEstimate(Estimate):
    """A fixed logistic regression on logit(max q), q being the drafter's softmax.

    Attributes:
      slope: of the log-odds; with 1 and offset 0, the estimate is max q itself.
      offset: of the log-odds.
    """

    slope: float | None = 1.0
    offset: float | None = 0.0

    reads_confidence: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("slope", "offset"):
            if getattr(self, name) is not None:
                one_number(f"ConfidenceEstimate: {name}", getattr(self, name))

    def bind(self, head: Any = None) -> tuple[Estimate, Params]:
        numbers = as_param(self, "slope"), as_param(self, "offset")
        return dataclasses.replace(self, slope=None, offset=None), numbers

    def feature(self, params: Params, carry: Any, drawn: Drawn) -> tuple[Array, Any]:
        return confidence_log_odds(drawn.confidences), carry

    def log_odds(self, params: Params, recalled: Any, feature: Array) -> Array:
        slope, offset = _numbers(self, params)
        return slope * feature + offset


class HeadNumbers(NamedTuple):
    """Attributes: the head's parameters, and the number added to its log-odds (float32)."""

    head: Params
    shift: Any


@dataclasses.dataclass(frozen=True)
class HeadEstimate(Estimate):
    """The acceptance head of SpecDec++: a network on the drafter's last hidden state.

    Attributes:
      config: the network; by default that of the drafter's head.
      weighted: whether it returns the head's output unchanged, as SpecDec++ does: a loss that
        counts rejected tokens w times learns P / (P + w (1 - P)) for a chance P. False: P itself.

    Source: SpecDec++ (arXiv 2405.19715), section 3.
    """

    config: HeadConfig | None = None
    weighted: bool = True

    lag: ClassVar[int] = 1

    def bind(self, head: Any = None) -> tuple[Estimate, Params]:
        if head is None:
            raise UserError(
                "the drafter has no acceptance head: train one with `specjax train head`, or use "
                "another estimate (drafting.OnlineEstimate(), drafting.ConfidenceEstimate())"
            )
        shift = 0.0 if self.weighted else math.log(head.rejection_weight)
        bound = dataclasses.replace(self, config=head.config)
        return bound, HeadNumbers(head.params, jnp.float32(shift))

    def as_chance(self) -> Estimate:
        return dataclasses.replace(self, weighted=False)

    @property
    def reads_confidence(self) -> bool:  # type: ignore[override]
        return self.config is not None and self.config.confidences

    def begin(self, rows: int) -> Any:
        return jnp.zeros((rows, NUM_FEATURES), jnp.float32) if self.reads_confidence else ()

    def feature(self, params: Params, carry: Any, drawn: Drawn) -> tuple[Array, Any]:
        assert self.config is not None, "HeadEstimate: bind it, or give config and params"
        # Both belong to the token before: its hidden state is known only now.
        features = carry if self.reads_confidence else None
        log_odds = apply_head(self.config, params.head, drawn.hidden, features) + params.shift
        if not self.reads_confidence:
            return log_odds, carry
        return log_odds, jax.vmap(drawn_features)(drawn.confidences, drawn.token)


class Posterior(NamedTuple):
    """A row's evidence for a logistic regression: a Gaussian in natural parameters.

    The precision is that of the slope, of both and of the offset; the pull is it times the mean.
    """

    precision: Float32[Array, "B 3"]
    pull: Float32[Array, "B 2"]


@dataclasses.dataclass(frozen=True)
class OnlineEstimate(Estimate):
    """A logistic regression on logit(max q) that learns from accepted and rejected tokens.

    It starts from max q itself and takes a step of Newton's method per round (a Gaussian
    approximation of the posterior), so that there is no learning rate to tune. It learns from
    finished rounds, never from the draft that it judges.

    Attributes:
      shared: one regression for all rows of the batch, instead of one per row.
      prior: the weight of the initial estimate, in tokens; above 0.

    Source: the idea of an online estimate is that of vLLM's dynamic draft lengths; the update is
    the extended Kalman filter of logistic regression (Spiegelhalter and Lauritzen 1990).
    """

    shared: bool = False
    prior: float = 8.0

    reads_confidence: ClassVar[bool] = True
    reads_past: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_flag("OnlineEstimate: shared", self.shared)
        prior = one_number("OnlineEstimate: prior", self.prior, low=0.0, open_low=True)
        object.__setattr__(self, "prior", prior)

    def remember(self, params: Params, rows: int) -> Posterior:
        return Posterior(jnp.zeros((rows, 3), jnp.float32), jnp.zeros((rows, 2), jnp.float32))

    def recall(self, params: Params, memory: Posterior) -> Array:
        if self.shared:
            # Every row gets the sum over all rows.
            memory = jax.tree.map(
                lambda x: jnp.broadcast_to(jnp.sum(x, axis=0, keepdims=True), x.shape), memory
            )
        # A token of p = 1/2 weighs 1/4. The prior's mean is (1, 0).
        on_offset = 0.25 * self.prior
        on_slope = on_offset * _USUAL**2
        a = memory.precision[:, 0] + on_slope
        b = memory.precision[:, 1]
        c = memory.precision[:, 2] + on_offset
        first, second = memory.pull[:, 0] + on_slope, memory.pull[:, 1]
        determinant = a * c - b * b
        return jnp.stack(
            [(c * first - b * second) / determinant, (a * second - b * first) / determinant], axis=1
        )

    def feature(self, params: Params, carry: Any, drawn: Drawn) -> tuple[Array, Any]:
        return confidence_log_odds(drawn.confidences), carry

    def log_odds(self, params: Params, recalled: Array, feature: Array) -> Array:
        return recalled[:, 0] * feature + recalled[:, 1]

    def learn(
        self, memory: Posterior, recalled: Array, features: Array, outcome: DraftOutcome
    ) -> Posterior:
        place = jnp.arange(features.shape[1], dtype=jnp.int32)[None]
        stood = place < outcome.agreed[:, None]
        fell = outcome.rejected[:, None] & (place == outcome.agreed[:, None])
        # A row keeps drawing until all drafts end, and its model may give NaN past its own end.
        features = jnp.where(stood | fell, features, 0.0)
        judged = (stood | fell).astype(jnp.float32)
        seen = recalled[:, :1] * features + recalled[:, 1:]
        chance = jax.nn.sigmoid(seen)
        weight = judged * chance * (1.0 - chance)
        pull = weight * seen + judged * (stood.astype(jnp.float32) - chance)
        precision = [x.sum(axis=1) for x in (weight * features**2, weight * features, weight)]
        pulls = [x.sum(axis=1) for x in (pull * features, pull)]
        return Posterior(
            memory.precision + jnp.stack(precision, axis=1),
            memory.pull + jnp.stack(pulls, axis=1),
        )


def confidence_log_odds(confidences: Array) -> Array:
    """logit(max q) of `confidences [B, V]`, clipped to the informative range: `[B]` float32."""
    return jnp.clip(log_odds(jnp.max(confidences, axis=-1)), -_SURE, _SURE)


def as_param(part: Any, name: str) -> Float32[Array, ""]:
    """A number of a policy or an estimate as a parameter; `bind` leaves None in its place."""
    value = getattr(part, name)
    if value is None:
        raise UserError(
            f"{type(part).__name__}: {name} is None: give a number, or pass the parameters that "
            "bind() returned"
        )
    return jnp.float32(value)


class JudgedDraft(NamedTuple):
    """A draft, judged token by token by an estimate: the chance that all tokens survive so far.

    Attributes:
      recalled: the estimate's memory of earlier rounds.
      features: of the tokens so far; `[B, 0]` if it learns nothing.
    """

    survival: Float32[Array, " B"]
    recalled: Any
    features: Float32[Array, "B G"]
    carry: Any


def begin_survival(
    estimate: Estimate, params: Params, memory: Any, rows: int, longest: int
) -> JudgedDraft:
    """A draft before its first token."""
    return JudgedDraft(
        survival=jnp.ones((rows,), jnp.float32),
        recalled=estimate.recall(params, memory),
        features=jnp.zeros((rows, longest if estimate.reads_past else 0), jnp.float32),
        carry=estimate.begin(rows),
    )


def judge(estimate: Estimate, params: Params, state: JudgedDraft, drawn: Drawn) -> JudgedDraft:
    """Lets an estimate judge the token of a step."""
    feature, carry = estimate.feature(params, state.carry, drawn)
    chance = jax.nn.sigmoid(estimate.log_odds(params, state.recalled, feature))
    # At the first token, a late estimate would judge a token that is not a draft.
    chance = jnp.where(drawn.place >= estimate.lag, chance, 1.0)
    features = state.features
    if features.shape[1]:
        features = jax.lax.dynamic_update_index_in_dim(features, feature, drawn.place, axis=1)
    return state._replace(survival=state.survival * chance, features=features, carry=carry)


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

    estimate: Estimate = HeadEstimate()
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
        return bound, EstimateParams(as_param(self, "threshold"), numbers)

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
    """The memory of a policy that compares tokens, its own and its estimate's among it.

    Attributes:
      accepted: drafted tokens that were accepted; older rounds count less.
      judged: likewise those that were judged.
    """

    accepted: Float32[Array, " B"]
    judged: Float32[Array, " B"]
    estimate: Any
    policy: Any = ()

    def chances(self, longest: int) -> Float32[Array, "B G"]:
        """The chance that the next 1, 2, .. G tokens are all accepted.

        It returns to its initial value while nothing is drafted, so that a row tries again.
        """
        rate = (self.accepted + _WEIGHT * _START) / (self.judged + _WEIGHT)
        place = jnp.arange(1, longest + 1, dtype=jnp.float32)
        return rate[:, None] ** place[None]


class Weighing(NamedTuple):
    """Drafts of some lengths so far, the chances of their next tokens, and the policy's values."""

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
        none = jnp.zeros((rows,), jnp.float32)
        return RoundsPast(none, none, estimate)

    def begin(
        self, params: Params, memory: RoundsPast, limits: Array, longest: int
    ) -> tuple[Array, Weighing]:
        numbers, rows = _numbers(self, params), limits.size
        state = Weighing(
            judged=begin_survival(self.estimate, numbers.estimate, memory.estimate, rows, longest),
            limits=limits,
            lengths=jnp.zeros((rows,), jnp.int32),
            going=limits > 0,
            chances=memory.chances(longest),
            policy=self._against(numbers.policy, memory, limits, longest),
        )
        worth = self._continuing(state, state.judged.survival)
        return jnp.where(worth, limits, 0), state._replace(going=worth)

    def step(self, params: Params, state: Weighing, drawn: Drawn) -> tuple[Array, Weighing]:
        judged = judge(self.estimate, _numbers(self, params).estimate, state.judged, drawn)
        lengths = state.lengths + state.going.astype(jnp.int32)
        going = state.going & (lengths < state.limits)
        state = state._replace(judged=judged, lengths=lengths, going=going)
        survival, lag = judged.survival, self.estimate.lag
        if lag:  # tokens that a late estimate has not judged yet
            survival = survival * state.chances[:, lag - 1]
        worth = self._continuing(state, survival)
        return ~worth, state._replace(going=worth)

    def learn(self, memory: RoundsPast, state: Weighing, outcome: DraftOutcome) -> RoundsPast:
        judged = state.judged
        estimate = self.estimate.learn(memory.estimate, judged.recalled, judged.features, outcome)
        stood, fell = (x.astype(jnp.float32) for x in (outcome.agreed, outcome.rejected))
        accepted, seen = KEPT * memory.accepted + stood, KEPT * memory.judged + (stood + fell)
        return memory._replace(accepted=accepted, judged=seen, estimate=estimate)

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
    estimate: Estimate = OnlineEstimate()

    def __post_init__(self) -> None:
        if self.tokens is not None:
            whole_fields(self, "Budget: ", tokens=1)
        self._check_estimate()

    def bind(self, head: Any = None) -> tuple[Stopping, Params]:
        estimate, numbers = self.estimate.as_chance().bind(head)
        as_param(self, "tokens")  # checks it
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


@dataclasses.dataclass(frozen=True, repr=False)
class Costs:
    """The seconds of a pass of a pair's models, by batch size and width; hashable.

    They choose the length of drafts too if they say how often drafted tokens are accepted.

    Attributes:
      rows: the measured batch sizes, increasing.
      widths: the tokens per row of a verifier's pass, increasing.
      draft: for each of `rows`, the seconds of a pass of the drafter, with the loop's work for a
        drafted token.
      verifier: for each of `rows` and each of `widths`, the seconds of a pass of the verifier, with
        the loop's work of a round; above width 1 also with the pass of a draft head that drafts a
        block at once, whose `draft` is 0.
      machine: the machine of the measurement.
      pair: `Pair.fingerprint`; "" for none.
      temperatures: those of `acceptance`, increasing; () if it was not measured.
      acceptance: for each of `temperatures`, the rate at which drafted tokens are accepted under
        `Lossless`.
      alone: for each of `rows`, the seconds of a step of the verifier alone, to which the choice
        of a length compares rounds; (): those of `verifier` at width 1.
    """

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    draft: tuple[float, ...]
    verifier: tuple[tuple[float, ...], ...]
    machine: str = ""
    pair: str = ""
    temperatures: tuple[float, ...] = ()
    acceptance: tuple[float, ...] = ()
    alone: tuple[float, ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """The costs in JSON values, of which other names are ignored."""
        names = [field.name for field in dataclasses.fields(cls) if field.name in values]
        return cls(**{name: _tuples(values[name]) for name in names})

    def __post_init__(self) -> None:
        for name, what in self._wrong():
            raise UserError(f"{name} must be {what}, got {getattr(self, name)!r}")

    def _wrong(self) -> Iterator[tuple[str, str]]:
        """The fields that are wrong, and what they must be."""
        for name in ("rows", "widths"):
            sizes = getattr(self, name)
            whole = isinstance(sizes, tuple) and all(
                type(size) is int and 1 <= size < 2**31 for size in sizes
            )
            if not whole or not sizes or list(sizes) != sorted(set(sizes)):
                yield name, "a tuple of whole numbers that increases from at least 1"
        count, width = len(self.rows), len(self.widths)
        for_each = f"a tuple of {count} seconds{{}}, one for each of rows"
        if not _are_times(self.draft, count):
            yield "draft", for_each.format("")
        is_tuple = isinstance(self.verifier, tuple) and len(self.verifier) == count
        if not is_tuple or not all(_are_times(row, width, least=1e-30) for row in self.verifier):
            yield "verifier", f"a tuple of {count} tuples of {width} seconds above 0"
        if self.alone != () and not _are_times(self.alone, count, least=1e-30):
            yield "alone", f"() or {for_each.format(' above 0')}"
        for name in ("machine", "pair"):
            if not isinstance(getattr(self, name), str):
                yield name, "a string"
        rising: Any = self.temperatures
        if not _are_times(rising) or list(rising) != sorted(set(rising)):
            yield "temperatures", "a tuple that increases from 0"
        rates = _are_times(self.acceptance, len(rising))
        if not rates or max(self.acceptance, default=0.0) > 1.0:
            yield (
                "acceptance",
                f"a tuple of {len(rising)} rates in [0, 1], one for each temperature",
            )

    def __repr__(self) -> str:
        times = f"{zlib.crc32(repr((self.draft, self.verifier)).encode()):08x}"
        return (
            f"Costs(rows={self.rows}, widths={self.widths}, pair={self.pair!r}, "
            f"machine={self.machine!r}, times of CRC {times})"
        )

    def at_widths(self, widths: Sequence[int]) -> "Costs":
        """The same costs for other widths of the verifier's passes: those that a loop compiles.

        Times between measured widths are interpolated; beyond the last width they grow as between
        the last two.
        """
        measured = np.asarray(self.widths, np.float64)

        def seconds(times: tuple[float, ...]) -> tuple[float, ...]:
            slope = times[-1] / measured[-1]
            if len(times) > 1:
                slope = max(0.0, (times[-1] - times[-2]) / (measured[-1] - measured[-2]))
            beyond = np.maximum(np.asarray(widths) - measured[-1], 0.0)
            return tuple((np.interp(widths, measured, times) + slope * beyond).tolist())

        verifier = tuple(map(seconds, self.verifier))
        return dataclasses.replace(self, widths=tuple(widths), verifier=verifier)

    def to_dict(self) -> dict[str, Any]:
        """The costs as JSON values, as `read_costs` reads them from a file."""
        values = dataclasses.asdict(self)
        verifier = [list(times) for times in self.verifier]
        lists = {n: list(x) for n, x in values.items() if isinstance(x, tuple)}
        return {"format": FORMAT, **values, **lists, "verifier": verifier}


def read_costs(path: PathLike) -> Costs:
    """Reads a file that `specjax bench --costs` wrote.

    A `Decoder` checks that the costs belong to its pair and this machine.

    Raises:
      OSError: the file cannot be read.
      UserError: it is not a valid file of costs.
    """
    check_path(path)
    place = Path(path)
    try:
        values = json.loads(place.read_bytes())
    except OSError as error:
        reason = error.strerror or str(error)
        raise type(error)(shorten(f"{place} cannot be read ({reason}): {_HOW}")) from None
    except (ValueError, RecursionError):
        raise UserError(f"{place} is not a JSON file: {_HOW}") from None
    if not isinstance(values, dict) or "format" not in values:
        raise UserError(f"{place} is not a file of costs: {_HOW}")
    if values["format"] != FORMAT:
        raise UserError(
            f"{place} has the format {values['format']!r}, but this version reads {FORMAT}: {_HOW}"
        )
    names = [field.name for field in dataclasses.fields(Costs)]
    missing = [name for name in names if name not in values]
    if missing:
        raise UserError(f"{place} lacks {missing[0]!r}: {_HOW}")
    try:
        return Costs.of(values)
    except UserError as error:
        raise UserError(f"{place}: {error}: {_HOW}") from None


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _are_times(times: Any, count: int | None = None, least: float = 0.0) -> bool:
    numbers = isinstance(times, tuple) and all(type(time) in (int, float) for time in times)
    # A whole number may be too large for a float.
    return (
        numbers
        and count in (None, len(times))
        and all(least <= time <= sys.float_info.max for time in times)
    )


class CostTable(NamedTuple):
    """The measured times of `Costs`."""

    rows: Float32[Array, " R"]
    widths: Float32[Array, " W"]
    draft: Float32[Array, " R"]
    verifier: Float32[Array, "R W"]


class Spent(NamedTuple):
    """Seconds of earlier rounds by the cost model, and the row's tokens; older ones count less."""

    seconds: Float32[Array, " B"]
    tokens: Float32[Array, " B"]


class Prices(NamedTuple):
    """The seconds to which tokens are compared: per token at the present rate, and of passes.

    All rows have the same; the verifier's passes are over 1 .. G + 1 tokens.
    """

    per_token: Float32[Array, " B"]
    draft: Float32[Array, " B"]
    verifier: Float32[Array, "B N"]


@dataclasses.dataclass(frozen=True)
class CostAware(WeighsTokens):
    """Ends all drafts when the next tokens are expected to cost more time than they save.

    m more tokens cost m passes of the drafter and a wider pass of the verifier. They save the time
    that the accepted ones would take at the present rate: the time of recent rounds over their
    tokens. Drafts continue while any m is worth its cost. The chance that a token not drawn yet is
    accepted is the row's recent rate. Since passes are padded to their widest row, all rows
    continue or end together.

    Attributes:
      costs: measured times (see `specjax bench --costs`); None: a `Decoder` measures them.
      estimate: of the chance that a drawn token is accepted.

    Source: SpecDec++ (arXiv 2405.19715), sections 3.1 and 4.2; the rate of a renewal process.
    """

    costs: Costs | None = None
    estimate: Estimate = OnlineEstimate()

    def __post_init__(self) -> None:
        if self.costs is not None:
            needed = ("rows", "widths", "draft", "verifier")
            check_part("CostAware: costs", self.costs, needed, "drafting.read_costs(FILE)")
        self._check_estimate()

    def bind(self, head: Any = None) -> tuple[Stopping, Params]:
        if self.costs is None:
            raise UserError(
                "CostAware has no costs: give drafting.read_costs(FILE) (see `specjax bench "
                "--costs`), or let a Decoder measure them"
            )
        estimate, numbers = self.estimate.as_chance().bind(head)
        fields = (getattr(self.costs, name) for name in CostTable._fields)
        table = CostTable(*(jnp.asarray(field, jnp.float32) for field in fields))
        bound = dataclasses.replace(self, costs=None, estimate=estimate)
        return bound, EstimateParams(table, numbers)

    def remember(self, params: Params, rows: int, longest: int) -> RoundsPast:
        zeros = jnp.zeros((rows,), jnp.float32)
        return super().remember(params, rows, longest)._replace(policy=Spent(zeros, zeros))

    def learn(self, memory: RoundsPast, state: Weighing, outcome: DraftOutcome) -> RoundsPast:
        longest = jnp.max(outcome.drafted)
        whole = (outcome.drafted > 0) & (outcome.agreed == outcome.drafted)
        passes = longest + jnp.any(whole).astype(jnp.int32) if outcome.lags else longest
        prices, spent = state.policy, memory.policy
        seconds = passes.astype(jnp.float32) * prices.draft + prices.verifier[:, longest]
        tokens = 1.0 + outcome.agreed.astype(jnp.float32)
        spent = Spent(KEPT * spent.seconds + seconds, KEPT * spent.tokens + tokens)
        return super().learn(memory, state, outcome)._replace(policy=spent)

    def _against(
        self, numbers: CostTable, memory: RoundsPast, limits: Array, longest: int
    ) -> Prices:
        rows, spent = limits.size, memory.policy
        draft = jnp.interp(jnp.float32(rows), numbers.rows, numbers.draft)
        # A pass takes the smallest width that holds it, one of those that `Costs.at_widths` was
        # asked for; times between batch sizes are interpolated.
        by_width = jax.vmap(lambda y: jnp.interp(jnp.float32(rows), numbers.rows, y), in_axes=1)(
            numbers.verifier
        )
        place = jnp.searchsorted(numbers.widths, jnp.arange(1, longest + 2, dtype=jnp.float32))
        verifier = by_width[jnp.minimum(place, numbers.widths.size - 1)]
        going = limits > 0
        # A row without earlier rounds counts as if it had decoded one token without a draft.
        fresh = spent.tokens == 0.0
        seconds = jnp.where(going, jnp.where(fresh, verifier[0], spent.seconds), 0.0)
        tokens = jnp.where(going, jnp.where(fresh, 1.0, spent.tokens), 0.0)
        # A round serves all rows that continue: its tokens are those of a row times their number.
        count = jnp.maximum(jnp.sum(going, dtype=jnp.float32), 1.0)
        per_token = jnp.sum(seconds) / jnp.maximum(jnp.sum(tokens), 1.0) / count
        return Prices(
            per_token=jnp.broadcast_to(per_token, (rows,)),
            draft=jnp.broadcast_to(draft, (rows,)),
            verifier=jnp.broadcast_to(verifier[None], (rows, longest + 1)),
        )

    def _continues(self, state: Weighing, open_: Array, chances: Array) -> Array:
        """Whether any number of further tokens saves more time than it costs; all rows together."""
        prices, longest = state.policy, chances.shape[1]
        more = jnp.arange(1, longest + 1, dtype=jnp.int32)
        each = jnp.where(open_, chances, 0.0)
        saved = prices.per_token[0] * jnp.cumsum(jnp.sum(each, axis=0))
        # Rows that continue have the longest drafts.
        drafted, verifier = jnp.max(state.lengths), prices.verifier[0]
        wider = verifier[jnp.minimum(drafted + more, longest)] - verifier[drafted]
        worth = saved > more.astype(jnp.float32) * prices.draft[0] + wider
        return state.going & jnp.any(worth & jnp.any(open_, axis=0))


def _numbers(part: Any, params: Params) -> Any:
    """The traced numbers of a policy or an estimate; its own if it was not bound."""
    return part.bind()[1] if isinstance(params, tuple) and not params else params


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


def check_needs_no_params(policy: Stopping, vocab_size: int, width: int) -> None:
    """Raises UserError if a user's policy that got no parameters reads them; traces a step."""
    rows, longest = 2, 1

    def step(limits: Array, drawn: Drawn) -> Any:
        memory = policy.remember((), rows, longest) if policy.reads_past else ()
        return policy.step((), policy.begin((), memory, limits, longest)[1], drawn)

    shape: Any = jax.ShapeDtypeStruct
    whole, place = (shape(axes, jnp.int32) for axes in ((rows,), ()))
    probs, hidden = (shape((rows, n), jnp.float32) for n in (vocab_size, width))
    seen = probs if policy.reads_confidence else None
    try:
        jax.eval_shape(step, whole, Drawn(whole, probs, seen, hidden, place))
    except (TypeError, LookupError, AttributeError) as error:  # of () where it expects arrays
        name = type(policy).__name__
        raise UserError(
            f"stopping={short_repr(policy)} has no params, and {name} fails without: "
            f"{' '.join(str(error).split())[:200]}: give the arrays that its methods read as "
            f"`params`, stopping=WithParams({name}(...), params)"
        ) from error


# In place of the length of a last draft whose outcome was already reported.
NOTHING_TO_LEARN = -1


class PolicyPast(NamedTuple):
    """A policy's memory of earlier rounds, and its state at the end of the last drafts.

    `drafted` is their number of tokens, or `NOTHING_TO_LEARN`.
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
    *,
    lags: bool,
) -> PolicyPast | tuple[()]:
    """The memory after the first `counts` of `tokens` are committed; `drafted`: the last drafts.

    A row without committed tokens learns nothing. For `lags` see `DraftOutcome`.
    """
    if not isinstance(past, PolicyPast):
        return past
    width = min(tokens.shape[1], drafted.shape[1])
    judged = jnp.minimum(counts, past.drafted)
    agrees = tokens[:, :width] == drafted[:, :width]
    agrees &= jnp.arange(width, dtype=jnp.int32)[None] < judged[:, None]
    agreed = jnp.cumprod(agrees.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    outcome = DraftOutcome(past.drafted, agreed, agreed < judged, lags)
    memory = policy.learn(past.memory, past.state, outcome)
    learns = (counts > 0) & (past.drafted != NOTHING_TO_LEARN)
    return past._replace(memory=where_rows(learns, memory, past.memory))
