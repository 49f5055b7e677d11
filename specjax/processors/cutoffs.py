"""Cut-offs: processors that leave out improbable tokens after temperature, top-k and top-p.

In greedy rows they change nothing.

Axes: B rows, V vocabulary.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from specjax.processors.common import check_strength, column, without
from specjax.sampling.distributions import descending_bits, in_top_p
from specjax.types import Params, Processor, traced_dataclass


def _keep(logits: Float32[Array, "B V"], tokens: Bool[Array, "B V"]) -> Float32[Array, "B V"]:
    """The logits of these and of the most probable tokens, else -inf."""
    return without(logits, ~(tokens | (logits == jnp.max(logits, axis=1, keepdims=True))))


@traced_dataclass
class MinP(Processor):
    """Keeps tokens with at least `min_p` times the largest probability.

    Source: Nguyen et al. 2024 (arXiv 2407.01082); `MinPLogitsWarper` of transformers.

    Attributes:
      min_p: in [0, 1]; a number, or `[B]`.
    """

    min_p: Array | float

    order: ClassVar[int] = 100
    forbids: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_strength(self, "min_p", low=0.0, high=1.0)

    def process(self, params: Params, state: Any, logits: Array) -> Array:
        probs = jax.nn.softmax(logits, axis=1)
        least = column(self.min_p, logits) * jnp.max(probs, axis=1, keepdims=True)
        return _keep(logits, probs >= least)


@traced_dataclass
class TypicalP(Processor):
    """Keeps the tokens whose surprise is nearest to the entropy, with the probability `typical_p`.

    Source: Meister et al. 2022 (arXiv 2202.00666); `TypicalLogitsWarper` of transformers. All ties
    at the edge stay.

    Attributes:
      typical_p: in (0, 1]; a number, or `[B]`.
    """

    typical_p: Array | float

    order: ClassVar[int] = 101
    forbids: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_strength(self, "typical_p", low=0.0, high=1.0, open_low=True)

    def process(self, params: Params, state: Any, logits: Array) -> Array:
        probs, surprise = jax.nn.softmax(logits, axis=1), -jax.nn.log_softmax(logits, axis=1)
        far = jnp.abs(surprise - _entropy(probs, surprise))
        mass = column(self.typical_p, logits)[:, 0]
        inside = jax.vmap(in_top_p)(probs, descending_bits(-far), mass) & (probs > 0.0)
        return without(logits, ~inside)


@traced_dataclass
class EpsilonCutoff(Processor):
    """Keeps tokens of at least this probability.

    Source: Hewitt et al. 2022 (arXiv 2210.15191); `EpsilonLogitsWarper` of transformers.

    Attributes:
      epsilon: in [0, 1); a number, or `[B]`.
    """

    epsilon: Array | float

    order: ClassVar[int] = 102
    forbids: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_strength(self, "epsilon", low=0.0, high=1.0, open_high=True)

    def process(self, params: Params, state: Any, logits: Array) -> Array:
        return _keep(logits, jax.nn.softmax(logits, axis=1) >= column(self.epsilon, logits))


@traced_dataclass
class EtaCutoff(EpsilonCutoff):
    """Keeps tokens of at least the probability min(epsilon, sqrt(epsilon) exp(-entropy)).

    Its field is that of `EpsilonCutoff`.

    Source: Hewitt et al. 2022 (arXiv 2210.15191); `EtaLogitsWarper` of transformers.
    """

    order: ClassVar[int] = 103

    def process(self, params: Params, state: Any, logits: Array) -> Array:
        probs, surprise = jax.nn.softmax(logits, axis=1), -jax.nn.log_softmax(logits, axis=1)
        epsilon = column(self.epsilon, logits)
        lower = jnp.sqrt(epsilon) * jnp.exp(-_entropy(probs, surprise))
        return _keep(logits, probs >= jnp.minimum(epsilon, lower))


def _entropy(probs: Float32[Array, "B V"], surprise: Float32[Array, "B V"]) -> Array:
    """`[B, 1]`, in nats."""
    return jnp.sum(jnp.where(probs > 0.0, probs * surprise, 0.0), axis=1, keepdims=True)
