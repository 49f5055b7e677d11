"""The network of an acceptance head: residual blocks on a drafter's hidden state, and a logit.

Source: SpecDec++ (arXiv 2405.19715), section 3.2 and 4.1; the features are ours. Axes: D width,
V vocabulary, F features.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from specjax.checks import check_flag, whole_number
from specjax.errors import UserError
from specjax.types import Array, Params

_MOST_BLOCKS = 4
NUM_FEATURES = 3
# The smallest distance from 1 that float32 keeps.
_LEAST = 1e-7


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """The sizes of an acceptance head.

    Attributes:
      width: D, the width of the drafter's hidden states.
      blocks: residual blocks, 0 .. 4; with 0 the head is linear.
      shared: whether all blocks share a matrix W, as in the published code.
      confidences: whether the head also reads the `confidence_features` of the drafter's
        distribution that the token was drawn from. A small drafter's hidden state after the token
        contains little of them.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: for a value outside its range.
    """

    width: int
    blocks: int = 3
    shared: bool = False
    confidences: bool = False

    def __post_init__(self) -> None:
        for name, low in (("width", 1), ("blocks", 0)):
            value = whole_number(f"HeadConfig: {name}", getattr(self, name), low=low)
            object.__setattr__(self, name, value)
        if self.blocks > _MOST_BLOCKS:
            raise UserError(
                f"HeadConfig: blocks must be a whole number in [0, {_MOST_BLOCKS}], got "
                f"{self.blocks}"
            )
        for name in ("shared", "confidences"):
            check_flag(f"HeadConfig: {name}", getattr(self, name))


class AcceptanceHead(nn.Module):
    """`blocks` times x + SiLU(W x + b), then a linear layer to the logit of acceptance.

    Attributes:
      config: the sizes.
    """

    config: HeadConfig

    @nn.compact
    def __call__(self, hidden: Array, features: Array | None = None) -> Array:
        config = self.config
        x = hidden.astype(jnp.float32)
        if config.confidences:
            assert features is not None
            x = jnp.concatenate([x, features.astype(jnp.float32)], axis=-1)
        names = ["block"] if config.shared else [f"block_{i}" for i in range(config.blocks)]
        layers = [nn.Dense(x.shape[-1], name=name) for name in names[: config.blocks]]
        for i in range(config.blocks):
            x = x + jax.nn.silu(layers[0 if config.shared else i](x))
        # From zero: an untrained head returns one half everywhere.
        return nn.Dense(1, kernel_init=nn.initializers.zeros, name="out")(x)[..., 0]


def confidence_features(top: Array, entropy: Array, drawn: Array) -> Array:
    """The inputs of a head with `confidences` besides the hidden state.

    All three come from the drafter's softmax at temperature 1 that the token was drawn from: the
    distribution before the token, not after it.

    Args:
      top: `[...]` float32, the largest probability.
      entropy: `[...]` float32, in nats.
      drawn: `[...]` float32, the probability of the token itself.

    Returns:
      `[..., F]` float32 of about unit scale.
    """
    return jnp.stack([log_odds(top) / 3.0, entropy - 1.0, log_odds(drawn) / 3.0], axis=-1)


def log_odds(p: Array) -> Array:
    """log(p / (1 - p)) of probabilities `[...]` float32; finite at 0 and 1."""
    p = jnp.clip(p, _LEAST, 1.0 - _LEAST)
    return jnp.log(p) - jnp.log1p(-p)


def drawn_features(confidences: Array, token: Array) -> Array:
    """`confidence_features` of a token and the distribution that it was drawn from.

    Args:
      confidences: `[V]` float32, the drafter's softmax at temperature 1.
      token: int32 scalar.

    Returns:
      `[F]` float32.
    """
    return confidence_features(*drawn_confidences(confidences, token))


def drawn_confidences(confidences: Array, token: Array) -> tuple[Array, Array, Array]:
    """The arguments of `confidence_features`; arguments as for `drawn_features`."""
    # entr(0) = 0.
    entropy = jnp.sum(jax.scipy.special.entr(confidences))
    return jnp.max(confidences), entropy, confidences[token]


def top_confidences(confidences: Array) -> tuple[Array, Array, Array]:
    """As `drawn_confidences` before a token is drawn: the second largest probability instead."""
    top, entropy, _ = drawn_confidences(confidences, jnp.int32(0))
    others = jnp.where(jnp.arange(confidences.size) == jnp.argmax(confidences), 0.0, confidences)
    return top, entropy, jnp.max(others)


def init_head(config: HeadConfig, key: Array) -> Params:
    """Initial parameters.

    Args:
      config: the sizes.
      key: a PRNG key; consumed.

    Returns:
      A nested dict of float32 arrays: `block_0`, `block_1`, ... (or `block`) and `out`, each with
      `kernel` and `bias`.
    """
    hidden, features = (jnp.zeros((size,), jnp.float32) for size in (config.width, NUM_FEATURES))
    return AcceptanceHead(config).init(key, hidden, features)["params"]


def apply_head(
    config: HeadConfig, params: Params, hidden: Array, features: Array | None = None
) -> Array:
    """The chance that tokens are accepted, as log-odds.

    Args:
      config: the sizes.
      params: the parameters, float32.
      hidden: `[..., D]` of any float dtype, the drafter's last hidden state of each token.
      features: `[..., F]`, the `confidence_features` of each token; read if `config.confidences`.

    Returns:
      `[...]` float32; their sigmoid is the probability of SpecDec++ (3.1).
    """
    found: Any = AcceptanceHead(config).apply({"params": params}, hidden, features)
    return found
