"""Estimates of whether a drafted token will be accepted, for stopping policies.

An estimate judges drawn tokens; tokens that are not drawn yet are judged by the row's recent rate
of acceptance.

Axes: B rows, G longest block, V vocabulary, D drafter's width.
"""

import abc
import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from specjax.acceptance_head import NUM_FEATURES, HeadConfig, apply_head, drawn_features
from specjax.checks import check_flag, one_number
from specjax.errors import UserError
from specjax.types import DraftOutcome, Params
from specjax.types.drafting import Drawn

# Log-odds beyond which max q carries no more information (0.998), and their usual size.
_SURE = 6.0
_USUAL = 3.0
# The weight of the round before relative to the present round: about ten tokens.
KEPT = 0.9
# The start of each row: high, because a draft that is not tried teaches nothing.
_START, _WEIGHT = 0.85, 2.0


class Estimate(abc.ABC):
    """Estimates the chance that a drafted token is accepted; static and hashable.

    Attributes:
      lag: the number of tokens by which an estimate is late: 0 if it judges the token just drawn, 1
        if the token before.
      reads_confidence: whether it reads the confidence distribution.
      reads_past: whether it learns from earlier rounds.
    """

    lag: ClassVar[int] = 0
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


class Line(NamedTuple):
    """The coefficients of a logistic regression on one feature.

    Attributes:
      slope: float32.
      offset: float32.
    """

    slope: Any
    offset: Any


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
        numbers = Line(traced(self, "slope"), traced(self, "offset"))
        return dataclasses.replace(self, slope=None, offset=None), numbers

    def feature(self, params: Params, carry: Any, drawn: Drawn) -> tuple[Array, Any]:
        return confidence_log_odds(drawn.confidences), carry

    def log_odds(self, params: Params, recalled: Any, feature: Array) -> Array:
        line = params if isinstance(params, Line) else self.bind()[1]
        return line.slope * feature + line.offset


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

    Attributes:
      precision: for slope, both, offset.
      pull: the precision times the mean.
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

        def added(x: Array) -> Array:
            return jnp.sum(x, axis=1)

        precision = [added(weight * features**2), added(weight * features), added(weight)]
        return Posterior(
            memory.precision + jnp.stack(precision, axis=1),
            memory.pull + jnp.stack([added(pull * features), added(pull)], axis=1),
        )


def confidence_log_odds(confidences: Array) -> Array:
    """logit(max q) of `confidences [B, V]`, clipped to the informative range: `[B]` float32."""
    largest = jnp.max(confidences, axis=-1)
    return jnp.clip(jnp.log(largest) - jnp.log1p(-largest), -_SURE, _SURE)


def traced(part: Any, name: str) -> Float32[Array, ""]:
    """A number of a policy or an estimate as a parameter; `bind` leaves None in its place."""
    value = getattr(part, name)
    if value is None:
        raise UserError(
            f"{type(part).__name__}: {name} is None: give a number, or pass the parameters that "
            "bind() returned"
        )
    return jnp.float32(value)


class JudgedDraft(NamedTuple):
    """A draft, judged token by token by an estimate.

    Attributes:
      survival: the chance that all tokens judged so far are accepted.
      recalled: the estimate's memory of earlier rounds.
      features: of the tokens so far; `[B, 0]` if it learns nothing.
      carry: the values that the estimate carries from token to token.
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


def ahead(estimate: Estimate, judged: JudgedDraft, chances: Array) -> Array:
    """The chance `[B]` that all drawn tokens are accepted, with those not yet judged.

    `chances` is `[B, G]`: for the next 1 .. G tokens of a row, by its recent rate.
    """
    if not estimate.lag:
        return judged.survival
    return judged.survival * chances[:, estimate.lag - 1]


class Rates(NamedTuple):
    """Sums over earlier rounds; older rounds count less.

    Attributes:
      accepted: accepted drafted tokens.
      judged: judged drafted tokens.
    """

    accepted: Float32[Array, " B"]
    judged: Float32[Array, " B"]


def no_rates(rows: int) -> Rates:
    """The rates of rows that have drafted nothing."""
    zeros = jnp.zeros((rows,), jnp.float32)
    return Rates(zeros, zeros)


def acceptance(rates: Rates) -> Array:
    """The chance that a drafted token is accepted, `[B]` float32 in (0, 1).

    It returns to its initial value while nothing is drafted, so that a row tries again.
    """
    return (rates.accepted + _WEIGHT * _START) / (rates.judged + _WEIGHT)


def add_round(rates: Rates, outcome: DraftOutcome) -> Rates:
    """The sums after another round."""
    stood = outcome.agreed.astype(jnp.float32)
    judged = stood + outcome.rejected.astype(jnp.float32)
    return Rates(KEPT * rates.accepted + stood, KEPT * rates.judged + judged)


def chances(rate: Array, longest: int) -> Array:
    """The chance that the next 1, 2, .. G tokens are all accepted: `[B, G]` float32."""
    place = jnp.arange(1, longest + 1, dtype=jnp.float32)
    return rate[:, None] ** place[None]
