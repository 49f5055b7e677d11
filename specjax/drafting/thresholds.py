"""Stopping policies that compare a signal of the drafter with a threshold.

Axes: B rows, G longest block, V vocabulary.
"""

import abc
import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from specjax.checks import check_part, one_number
from specjax.drafting.estimates import Estimate, HeadEstimate, given
from specjax.rules.quantities import entropy
from specjax.types import Array, DraftOutcome, Params, Stopping


@dataclasses.dataclass(frozen=True)
class _Threshold(Stopping):
    """Ends a draft by one number of the drafter's softmax and a threshold, which is traced."""

    threshold: float | None

    reads_confidence = True
    _high: ClassVar[float]

    def __post_init__(self) -> None:
        if self.threshold is not None:
            name = f"{type(self).__name__}: threshold"
            one_number(name, self.threshold, low=0.0, high=self._high)

    def bind(self, head: Any = None) -> tuple[Stopping, Params]:
        """The threshold is traced."""
        return dataclasses.replace(self, threshold=None), given(self, "threshold")

    def step(
        self,
        params: Params,
        state: Any,
        token: Array,
        probs: Array,
        confidences: Array | None,
        hidden: Array,
        index: Array,
    ) -> tuple[Array, Any]:
        """See `Stopping`."""
        assert confidences is not None
        return self._ends(confidences, _numbers(self, params)), state

    @abc.abstractmethod
    def _ends(self, confidences: Array, threshold: Array) -> Array:
        """`[B]` bool, of `confidences [B, V]`."""


@dataclasses.dataclass(frozen=True)
class Confidence(_Threshold):
    """Ends a draft where the drafter's largest probability is below a threshold.

    Attributes:
      threshold: in [0, 1]; of max q, q being the softmax at temperature 1.

    Source: `assistant_confidence_threshold` of transformers, which looks at the drawn token's
    probability: the same at temperature 0.
    """

    threshold: float | None = 0.4

    _high: ClassVar[float] = 1.0

    def _ends(self, confidences: Array, threshold: Array) -> Array:
        return jnp.max(confidences, axis=-1) < threshold


@dataclasses.dataclass(frozen=True)
class Entropy(_Threshold):
    """Ends a draft where the root of the drafter's entropy is above a threshold.

    Attributes:
      threshold: at least 0; of sqrt(H), H in nats of the softmax at temperature 1.

    Source: AdaEDL (arXiv 2410.18351), whose bound on the acceptance rate is 1 - sqrt(gamma H); SVIP
    (arXiv 2411.18462).
    """

    threshold: float | None = 1.0

    _high: ClassVar[float] = math.inf

    def _ends(self, confidences: Array, threshold: Array) -> Array:
        return jnp.sqrt(jax.vmap(entropy)(confidences)) > threshold


class OnEstimate(Stopping):
    """A policy that stands on an `estimate` of the chance that a token is accepted."""

    estimate: Estimate

    @property
    def reads_confidence(self) -> bool:
        """Where the estimate does."""
        return self.estimate.reads_confidence

    def _check_estimate(self) -> None:
        """Raises TypeError unless it is an estimate."""
        name = f"{type(self).__name__}: estimate"
        needed = ("feature", "log_odds", "recall", "as_chance", "lag")
        check_part(name, self.estimate, needed, "drafting.OnlineEstimate()")

    def _numbers(self, params: Params) -> Any:
        return _numbers(self, params)


class SurvivalParams(NamedTuple):
    """Attributes: the threshold, and the estimate's parameters."""

    threshold: Any
    estimate: Params


class SurvivalState(NamedTuple):
    """A draft under an estimate.

    Attributes:
      survival: `[B]` float32, the chance that all tokens judged so far are accepted.
      recalled: what the estimate knows of earlier rounds.
      features: `[B, G]` float32, what it has seen; `[B, 0]` if it learns nothing.
      carry: what the estimate carries from token to token.
    """

    survival: Array  # [B]
    recalled: Any
    features: Array  # [B, G]
    carry: Any


@dataclasses.dataclass(frozen=True)
class Survival(OnEstimate):
    """Ends a draft where a token of it is rejected with more than a given chance.

    Stops after token i if 1 - (product of the chances of acceptance so far) > threshold. An
    estimate that comes late (the acceptance head's) has then not judged token i itself, which is
    kept.

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
        """Where the estimate does."""
        return self.estimate.reads_past

    def bind(self, head: Any = None) -> tuple[Stopping, Params]:
        """The threshold and the estimate's numbers are traced."""
        estimate, numbers = self.estimate.bind(head)
        bound = dataclasses.replace(self, estimate=estimate, threshold=None)
        return bound, SurvivalParams(given(self, "threshold"), numbers)

    def remember(self, params: Params, rows: int, longest: int) -> Any:
        """The estimate's memory."""
        return self.estimate.remember(self._numbers(params).estimate, rows)

    def begin(
        self, params: Params, memory: Any, limits: Array, longest: int
    ) -> tuple[Array, SurvivalState]:
        """All survive."""
        own = self._numbers(params).estimate
        return limits, begin_survival(self.estimate, own, memory, limits.size, longest)

    def step(
        self,
        params: Params,
        state: SurvivalState,
        token: Array,
        probs: Array,
        confidences: Array | None,
        hidden: Array,
        index: Array,
    ) -> tuple[Array, SurvivalState]:
        """See `Stopping`."""
        numbers = self._numbers(params)
        state = judge(self.estimate, numbers.estimate, state, token, confidences, hidden, index)
        return 1.0 - state.survival > numbers.threshold, state

    def learn(self, memory: Any, state: SurvivalState, outcome: DraftOutcome) -> Any:
        """The estimate learns."""
        return self.estimate.learn(memory, state.recalled, state.features, outcome)


def begin_survival(
    estimate: Estimate, params: Params, memory: Any, rows: int, longest: int
) -> SurvivalState:
    """A draft before its first token."""
    return SurvivalState(
        survival=jnp.ones((rows,), jnp.float32),
        recalled=estimate.recall(params, memory),
        features=jnp.zeros((rows, longest if estimate.reads_past else 0), jnp.float32),
        carry=estimate.begin(rows),
    )


def judge(
    estimate: Estimate,
    params: Params,
    state: SurvivalState,
    token: Array,
    confidences: Array | None,
    hidden: Array,
    index: Array,
) -> SurvivalState:
    """Lets an estimate judge the token that the step shows; arguments as of `Stopping.step`."""
    feature, carry = estimate.feature(params, state.carry, token, confidences, hidden)
    chance = jax.nn.sigmoid(estimate.log_odds(params, state.recalled, feature))
    # At the first token a late estimate would judge one that is no draft.
    chance = jnp.where(index >= estimate.lag, chance, 1.0)
    features = state.features
    if features.shape[1]:
        features = jax.lax.dynamic_update_index_in_dim(features, feature, index, axis=1)
    return state._replace(survival=state.survival * chance, features=features, carry=carry)


def ahead(estimate: Estimate, judged: SurvivalState, chances: Array) -> Array:
    """The chance `[B]` that all drawn tokens stand, those too that a late estimate has not judged.

    `chances` is `[B, G]`: of the next 1 .. G tokens of a row, by its recent rate.
    """
    if not estimate.lag:
        return judged.survival
    return judged.survival * chances[:, estimate.lag - 1]


def _numbers(policy: Stopping, params: Params) -> Any:
    """The traced numbers; the policy's own where it was not bound."""
    return policy.bind()[1] if isinstance(params, tuple) and not params else params
