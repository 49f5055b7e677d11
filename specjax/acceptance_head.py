"""The acceptance head: how likely the verifier accepts a drafted token (SpecDec++).

The network has residual blocks on a drafter's hidden state, and a logit.

Source: SpecDec++ (arXiv 2405.19715), section 3.2 and 4.1; the features are ours. Axes: D width,
V vocabulary, F features.
"""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Float32, Int32, Key

from specjax.checks import check_flag, one_number, whole_fields
from specjax.errors import UserError
from specjax.types import Params

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
    """

    width: int
    blocks: int = 3
    shared: bool = False
    confidences: bool = False

    def __post_init__(self) -> None:
        whole_fields(self, "HeadConfig: ", width=1, blocks=0)
        if self.blocks > _MOST_BLOCKS:
            raise UserError(
                f"HeadConfig: blocks must be a whole number in [0, {_MOST_BLOCKS}], got "
                f"{self.blocks}"
            )
        for name in ("shared", "confidences"):
            check_flag(f"HeadConfig: {name}", getattr(self, name))


class AcceptanceHead(nn.Module):
    """`blocks` times x + SiLU(W x + b), then a linear layer to the logit of acceptance."""

    config: HeadConfig

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array | np.ndarray, "*B D"],
        features: Float[Array | np.ndarray, "*B F"] | None = None,
    ) -> Float32[Array, "*B"]:
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


def confidence_features(top: Array, entropy: Array, drawn: Array) -> Float32[Array, "*B F"]:
    """The inputs of a head with `confidences` besides the hidden state, of about unit scale.

    All three come from the drafter's softmax at temperature 1 that the token was drawn from: the
    distribution before the token, not after it.

    Args:
      top: the largest probability, an array of any shape or a number; so are the others.
      entropy: in nats.
      drawn: the probability of the token itself.
    """
    return jnp.stack([log_odds(top) / 3.0, entropy - 1.0, log_odds(drawn) / 3.0], axis=-1)


def log_odds(p: Array) -> Array:
    """log(p / (1 - p)) of probabilities; finite at 0 and 1."""
    p = jnp.clip(p, _LEAST, 1.0 - _LEAST)
    return jnp.log(p) - jnp.log1p(-p)


def drawn_features(
    confidences: Float32[Array, " V"], token: Int32[Array, ""]
) -> Float32[Array, " F"]:
    """`confidence_features` of a token and the distribution that it was drawn from."""
    return confidence_features(*drawn_confidences(confidences, token))


def drawn_confidences(
    confidences: Float32[Array, " V"], token: Int32[Array, ""]
) -> tuple[Float32[Array, ""], Float32[Array, ""], Float32[Array, ""]]:
    """The arguments of `confidence_features`; arguments as for `drawn_features`."""
    # entr(0) = 0.
    entropy = jnp.sum(jax.scipy.special.entr(confidences))
    return jnp.max(confidences), entropy, confidences[token]


def init_head(config: HeadConfig, key: Key[Array, ""]) -> Params:
    """Initial parameters: `block_0`, `block_1`, ... (or `block`) and `out`; the key is consumed."""
    hidden, features = (jnp.zeros((size,), jnp.float32) for size in (config.width, NUM_FEATURES))
    return AcceptanceHead(config).init(key, hidden, features)["params"]


def apply_head(
    config: HeadConfig,
    params: Params,
    hidden: Float[Array | np.ndarray, "*B D"],
    features: Float[Array | np.ndarray, "*B F"] | None = None,
) -> Float32[Array, "*B"]:
    """The chance that tokens are accepted, as log-odds; their sigmoid is (3.1) of SpecDec++.

    `hidden` is the drafter's last state of each token; `features` are its `confidence_features`,
    read if `config.confidences`.
    """
    log_odds_of_acceptance: Any = AcceptanceHead(config).apply({"params": params}, hidden, features)
    return log_odds_of_acceptance


@dataclasses.dataclass(frozen=True, eq=False)
class Head:
    """An acceptance head as it is saved and loaded.

    Attributes:
      config: its sizes.
      params: its parameters, float32.
      drafter_fingerprint: `TextModel.weights_fingerprint` of the drafter whose hidden states it
        reads.
      rejection_weight: w_rej / w_acc of its loss, above 0; 1 for a head whose output is a chance.
      notes: JSON values about its training.
    """

    config: HeadConfig
    params: Params = dataclasses.field(repr=False)
    drafter_fingerprint: str
    rejection_weight: float = 1.0
    notes: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: types.MappingProxyType({}), repr=False
    )

    def __post_init__(self) -> None:
        if not isinstance(self.drafter_fingerprint, str) or not self.drafter_fingerprint:
            raise UserError(
                "Head: drafter_fingerprint must be TextModel.weights_fingerprint, got "
                f"{self.drafter_fingerprint!r}"
            )
        weight = one_number("Head: rejection_weight", self.rejection_weight, low=0, open_low=True)
        object.__setattr__(self, "rejection_weight", weight)
        expected = jax.eval_shape(lambda: init_head(self.config, jax.random.key(0)))
        actual = jax.tree.map(lambda x: (np.shape(x), np.dtype(x.dtype)), self.params)
        if actual != jax.tree.map(lambda x: (x.shape, np.dtype(x.dtype)), expected):
            raise UserError(
                f"Head: params must be the float32 parameters of {self.config}: use init_head, or "
                "the configuration that they were trained with"
            )

    def check_drafter(self, name: str, width: int, fingerprint: str | None) -> None:
        """Raises UserError unless a drafter is the one that the head was trained for.

        `width` is that of its hidden states. Its weights are not compared if `fingerprint` is None.
        """
        remedy = (
            "train a head for this drafter (specjax train head), or load the drafter without it "
            "(head=False)"
        )
        if self.config.width != width:
            raise UserError(
                f"{name}: its acceptance head has width {self.config.width}, but the model's "
                f"hidden states have {width}: {remedy}"
            )
        if fingerprint not in (None, self.drafter_fingerprint):
            raise UserError(
                f"{name}: its acceptance head was trained for weights {self.drafter_fingerprint}, "
                f"but the model has {fingerprint}: {remedy}"
            )
