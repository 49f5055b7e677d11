"""How attention knows positions: rotation of queries and keys, and T5's relative position biases.

Axes: B rows, H heads, T queries, S keys, D head width.

Sources: Su et al. 2021 (rotation), Raffel et al. 2020 (biases).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen.partitioning import param_with_axes
from jaxtyping import Array, Float, Float32, Int32

from specjax.errors import UserError

# A bias that hides a key: far below any logit but finite, so that adding a bias gives no NaN.
MASKED = -1e30


def check_length(most: int | None, length: int) -> None:
    """Raises UserError for a cache or text that is longer than `Style.most_positions`."""
    if most is not None and length > most:
        raise UserError(
            f"the model's factors for short texts are for at most {most:,} positions, got a cache "
            f"or text of {length:,}: give shorter prompts or fewer new tokens, or load it with a "
            "`config` whose rope_scaling has long=True"
        )


def rope_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """The angle in radians per position of each pair of dimensions: `[D // 2]` float32."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.float32(1.0) / np.float32(theta) ** exponents


class Rope(NamedTuple):
    """The cosines and sines of the rotary angles of a block's positions."""

    cos: Float32[Array, "B T 1 pairs"]
    sin: Float32[Array, "B T 1 pairs"]


def rope_angles(positions: Int32[Array, "B T"], frequencies: Any, scale: float = 1.0) -> Rope:
    """The rotary angles at positions; see `rope_frequencies`, and `Style.rope_scale`."""
    angles = positions.astype(jnp.float32)[:, :, None]
    angles *= np.asarray(frequencies, np.float32)[None, None, :]
    parts = (jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None])
    return Rope(*parts) if scale == 1.0 else Rope(*(part * scale for part in parts))


def rotate(x: Float[Array, "B T heads D"], rope: Rope) -> Float[Array, "B T heads D"]:
    """Rotates queries or keys; of the first 2n dimensions, for n pairs, i is paired with i + n."""
    width = 2 * rope.cos.shape[-1]
    if width < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :width], rope), x[..., width:]], axis=-1)
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = rope.cos.astype(x.dtype), rope.sin.astype(x.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def buckets(
    distances: np.ndarray, *, bidirectional: bool, num_buckets: int, max_distance: int
) -> np.ndarray:
    """Sorts distances, query minus key, into buckets: one for each small one, then logarithmic.

    Small are those below a quarter of `num_buckets`. Half of the buckets are for keys after the
    query; if not bidirectional, these keys share bucket 0, and small is below a half. From
    `max_distance` on, all distances share the last bucket.

    Source: `t5x/examples/t5/layers.py`, `RelativePositionBiases`.
    """
    offset = np.zeros_like(distances)
    if bidirectional:
        num_buckets //= 2
        offset = (distances < 0) * num_buckets
        distances = np.abs(distances)
    distances = np.maximum(distances, 0)
    exact = num_buckets // 2
    # float32 and the epsilon matter at the border of a bucket; both are as in T5X.
    ratio = distances.astype(np.float32) / np.float32(exact) + np.finfo(np.float32).eps
    large = exact + (np.log(ratio) / np.log(max_distance / exact) * (num_buckets - exact)).astype(
        np.int32
    )
    return (
        offset + np.where(distances < exact, distances, np.minimum(large, num_buckets - 1))
    ).astype(np.int32)


class RelativePositionBias(nn.Module):
    """A learnt bias per head and bucket of relative positions; see `buckets`."""

    num_heads: int
    num_buckets: int
    max_distance: int
    bidirectional: bool  # in the encoder
    param_dtype: Any

    def setup(self) -> None:
        self.rel_embedding = param_with_axes(
            "rel_embedding",
            nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
            (self.num_heads, self.num_buckets),
            self.param_dtype,
            axes=("heads", "relpos_buckets"),
        )

    def block(self, length: int) -> Float32[Array, "1 H 1 T T"]:
        """The biases of a block that attends to itself."""
        # A Toeplitz matrix from 2T - 1 biases by reshaping. The gradient of a gather would be a
        # scatter of T * T elements.
        line = self._of_distances(np.arange(length - 1, -length, -1))
        line = jnp.pad(line, ((0, 0), (0, 1)))
        rows = jnp.tile(line, (1, length))[:, : length * (2 * length - 1)]
        matrix = rows.reshape(-1, length, 2 * length - 1)[:, :, length - 1 :]
        return matrix[None, :, None]

    def between(
        self, queries: Int32[Array, "B T"], keys: Int32[Array, "_ S"]
    ) -> Float32[Array, "B H 1 T S"]:
        """The biases between positions, in a decoder; arbitrary for keys after the query."""
        table = self._of_distances(np.arange(self.max_distance + 1))
        distances = jnp.clip(queries[:, :, None] - keys[:, None], 0, self.max_distance)
        return jnp.moveaxis(jnp.take(table, distances, axis=1, mode="clip"), 0, 1)[:, :, None]

    def _of_distances(self, distances: np.ndarray) -> Float32[Array, "H n"]:
        index = buckets(
            distances,
            bidirectional=self.bidirectional,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
        )
        # A product with a constant instead of a gather: its gradient is a product too.
        one_hot = (np.arange(self.num_buckets)[:, None] == index[None, :]).astype(np.float32)
        return jnp.dot(
            self.rel_embedding.astype(jnp.float32), one_hot, precision=jax.lax.Precision.HIGHEST
        )
