"""The convolutions of DFlash 2, over the tokens of a block.

Axes: see `head.py`; K taps, the token itself and those before it.

Source: the code of `vllm-project/speculators`, after `z-lab/dflash`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen.partitioning import param_with_axes
from jaxtyping import Array, Float

from specjax.models.config import DecoderOnlyConfig
from specjax.models.heads.head import HeadLayer
from specjax.models.layers import Dense


def convolve(kernel: Float[Array, "B T K E"], x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
    """The sum of tap k times the token k before, in a whole block."""
    taps, length = kernel.shape[2], x.shape[1]
    earlier = [jnp.pad(x, ((0, 0), (i, 0), (0, 0)))[:, :length] for i in range(taps)]
    return jnp.sum(kernel * jnp.stack(earlier, axis=2), axis=2)


class Convolution(nn.Module):
    """What a part of a layer reads, convolved, and the convolution of what it adds.

    Both kernels are a base and a change that depends on what is read, one for the lanes of a group.
    """

    config: DecoderOnlyConfig
    taps: int
    group: int

    @nn.compact
    def __call__(self, x: Float[Array, "B T E"]) -> tuple[Array, Callable[[Array], Array]]:
        config, (rows, length, width) = self.config, x.shape

        def identity(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
            return jnp.zeros(shape, dtype).at[:, 0].set(1.0)

        shape, axes = (2, self.taps, width), ("pair", "taps", "embed")
        base = param_with_axes("base_kernel", identity, shape, config.param_dtype, axes=axes)
        groups, dtypes = width // self.group, (config.dtype, config.param_dtype)
        sizes = 2 * self.taps * groups, ("embed", "embed"), *dtypes, nn.initializers.zeros
        change = Dense(*sizes, name="kernel_projection")(x)
        change = change.reshape(rows, length, 2, self.taps, groups)
        both = base.astype(x.dtype)[None, None] + jnp.repeat(change, self.group, axis=-1)
        return convolve(both[:, :, 0], x), functools.partial(convolve, both[:, :, 1])


class ConvolvedLayer(HeadLayer):
    """A layer with convolutions around attention and the feed-forward block."""

    taps: int = 1
    group: int = 1

    def setup(self) -> None:
        super().setup()
        sizes = self.config, self.taps, self.group
        self.attention_conv, self.mlp_conv = Convolution(*sizes), Convolution(*sizes)
