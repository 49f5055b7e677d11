"""The network of an acceptance head: residual blocks on a drafter's hidden state, and one logit.

Source: SpecDec++ (arXiv 2405.19715), section 3.2 and 4.1. Axes: D width.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from specjax.checks import whole_number
from specjax.types import Array, Params

_MOST_BLOCKS = 4


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """The sizes of an acceptance head.

    Attributes:
      width: D, the width of the drafter's hidden states.
      blocks: residual blocks, 0 .. 4; with 0 the head is linear.
      shared: whether one matrix W serves all blocks, as in the published code.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: for a value outside its range.
    """

    width: int
    blocks: int = 3
    shared: bool = False

    def __post_init__(self) -> None:
        for name, low in (("width", 1), ("blocks", 0)):
            value = whole_number(f"HeadConfig: {name}", getattr(self, name), low=low)
            object.__setattr__(self, name, value)
        if self.blocks > _MOST_BLOCKS:
            raise ValueError(
                f"HeadConfig: blocks must be a whole number in [0, {_MOST_BLOCKS}], got "
                f"{self.blocks}"
            )
        if not isinstance(self.shared, bool):
            raise TypeError(f"HeadConfig: shared must be True or False, got {self.shared!r}")


class AcceptanceHead(nn.Module):
    """`blocks` times x + SiLU(W x + b), then a linear layer to the logit of acceptance.

    Attributes:
      config: the sizes.
    """

    config: HeadConfig

    @nn.compact
    def __call__(self, hidden: Array) -> Array:
        """Hidden states `[..., D]` of any float dtype -> log-odds `[...]` float32."""
        config = self.config
        if hidden.ndim < 1 or hidden.shape[-1] != config.width:
            raise ValueError(
                f"hidden must be [..., {config.width}], the width of the head, got shape "
                f"{list(hidden.shape)}: use the drafter that the head was trained for"
            )
        x = hidden.astype(jnp.float32)
        names = ["block"] if config.shared else [f"block_{i}" for i in range(config.blocks)]
        layers = [nn.Dense(config.width, name=name) for name in names[: config.blocks]]
        for i in range(config.blocks):
            x = x + jax.nn.silu(layers[0 if config.shared else i](x))
        # From zero: an untrained head says one half everywhere.
        return nn.Dense(1, kernel_init=nn.initializers.zeros, name="out")(x)[..., 0]


def init_head(config: HeadConfig, key: Array) -> Params:
    """Parameters to start from.

    Args:
      config: the sizes.
      key: a PRNG key; consumed.

    Returns:
      A nested dict of float32 arrays: `block_0`, `block_1`, ... (or `block`) and `out`, each with
      `kernel` and `bias`.
    """
    return AcceptanceHead(config).init(key, jnp.zeros((config.width,), jnp.float32))["params"]


def apply_head(config: HeadConfig, params: Params, hidden: Array) -> Array:
    """How likely tokens will be accepted, as log-odds.

    Args:
      config: the sizes.
      params: the parameters, float32.
      hidden: `[..., D]` of any float dtype, the drafter's last hidden state of each token.

    Returns:
      `[...]` float32; their sigmoid is the probability of SpecDec++ (3.1).

    Raises:
      ValueError: (at trace time) if D is not the width of the head.
    """
    log_odds: Any = AcceptanceHead(config).apply({"params": params}, hidden)
    return log_odds
