"""Gated delta networks: layers whose memory is a state instead of entries by position.

Axes: B rows, T tokens of a block, E model width, R positions, K key heads of width D, H = K N value
heads of width V, W positions that a convolution sees, C channels.

A state has read the first tokens of a row, and cannot forget the last of them. So it stays behind,
and a layer keeps what up to R later tokens write: a smaller position is then all that a rollback
needs, as for keys and values. A token turns a state S `[D, V]` into e^g S + k w^T, with its key k,
its log decay g, and its correction w, which depends on S. So n tokens turn S into

    e^(g_1 + .. + g_n) S + sum_i e^(g_{i+1} + .. + g_n) k_i w_i^T

Sources: Yang et al. 2025 (arXiv 2412.06464); `transformers/models/qwen3_5`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.partitioning import param_with_axes
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from specjax.compilation import product_precision
from specjax.models.config import DeltaSizes, ModelConfig
from specjax.models.layers import Dense, RMSNorm
from specjax.models.weights import normal_init
from specjax.platforms import by_platform

# The tokens of a block that are computed together.
_CHUNK = 64
# So many rows are solved without a loop.
_FEW = 8


class DeltaMemory(NamedTuple):
    """What a layer keeps of each row; what lies after the last token is arbitrary.

    Attributes:
      state: after the tokens before `RecurrentMemory.starts`.
      inputs: of the convolutions of queries, keys and values, from W - 1 tokens before these.
      keys: of the tokens from `starts` on; likewise the others.
      writes: the corrections w.
      decays: the log decays g.
    """

    state: Float32[Array, "B K N D V"]
    inputs: tuple[Float[Array, "B _ C"], Float[Array, "B _ C"], Float[Array, "B _ values"]]
    keys: Float32[Array, "B R K D"]
    writes: Float32[Array, "B R K N V"]
    decays: Float32[Array, "B R K N"]


class RecurrentMemory(NamedTuple):
    """The memories of a network's recurrent layers.

    Attributes:
      starts: the number of tokens that the states have read.
    """

    layers: tuple[DeltaMemory, ...]
    starts: Int32[Array, " B"]


class DeltaPast(NamedTuple):
    """A layer's memory of earlier tokens.

    Attributes:
      offsets: the number of tokens between the state and the block.
      moves: the number of tokens that the state reads, so that the block can be kept.
    """

    memory: DeltaMemory
    offsets: Int32[Array, " B"]
    moves: Int32[Array, " B"]


def empty_memory(
    deltas: tuple[DeltaSizes, ...], rows: int, rollback: int, dtype: Any
) -> RecurrentMemory:
    """The memory of rows that have read nothing, and that may go back by R = `rollback`."""

    def layer(size: DeltaSizes) -> DeltaMemory:
        heads, groups = size.key_heads, size.value_heads // size.key_heads
        keys, values = heads * size.key_dim, size.value_heads * size.value_dim
        kept = size.window - 1 + rollback
        return DeltaMemory(
            state=jnp.zeros((rows, heads, groups, size.key_dim, size.value_dim), jnp.float32),
            inputs=(
                jnp.zeros((rows, kept, keys), dtype),
                jnp.zeros((rows, kept, keys), dtype),
                jnp.zeros((rows, kept, values), dtype),
            ),
            keys=jnp.zeros((rows, rollback, heads, size.key_dim), jnp.float32),
            writes=jnp.zeros((rows, rollback, heads, groups, size.value_dim), jnp.float32),
            decays=jnp.zeros((rows, rollback, heads, groups), jnp.float32),
        )

    layers = tuple(layer(size) for size in deltas)
    return RecurrentMemory(layers, jnp.zeros(rows, jnp.int32))


def continue_memory(
    memory: RecurrentMemory, positions: Int32[Array, " B"], counts: Int32[Array, " B"] | int
) -> tuple[tuple[DeltaPast, ...], RecurrentMemory]:
    """The pasts of blocks of `counts` tokens, and the memory after them, still without layers.

    The output of a row that went back too far is NaN.
    """
    rollback = memory.layers[0].keys.shape[1]
    after = jnp.maximum(memory.starts, positions + counts - rollback)
    places = positions - memory.starts, after - memory.starts
    return tuple(DeltaPast(x, *places) for x in memory.layers), RecurrentMemory((), after)


def logical_axes(memory: Any) -> Any:
    """The memory with a tuple of axis names in place of each array."""
    heads = ("batch", "length", "delta_heads")
    layer = memory.layers[0]._replace(
        state=("batch", "delta_heads", None, None, None),
        inputs=tuple(("batch", "length", f"joined_delta_{x}") for x in ("keys", "keys", "values")),
        keys=(*heads, None),
        writes=(*heads, None, None),
        decays=(*heads, None),
    )
    return memory._replace(layers=(layer,) * len(memory.layers), starts=("batch",))


class Convolution(nn.Module):
    """The causal convolution of each channel by itself, then SiLU; reads W - 1 earlier tokens."""

    window: int
    axis: str
    param_dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B _ C"]) -> Float32[Array, "B T C"]:
        init, axes = nn.initializers.normal(self.window**-0.5), (self.axis, "window", "window")
        shape = (x.shape[-1], 1, self.window)
        kernel = param_with_axes("kernel", init, shape, self.param_dtype, axes=axes)
        x, kernel = x.astype(jnp.float32), kernel.astype(jnp.float32)
        length = x.shape[1] - self.window + 1
        y = jnp.zeros((x.shape[0], length, x.shape[2]), jnp.float32)
        for i in range(self.window):
            y += x[:, i : i + length] * kernel[None, None, :, 0, i]
        return nn.silu(y)


class GatedDeltaNet(nn.Module):
    """The gated delta rule, in place of attention."""

    config: ModelConfig
    sizes: DeltaSizes

    def setup(self) -> None:
        config, sizes = self.config, self.sizes
        dtypes = (config.dtype, config.param_dtype)
        dense = functools.partial(
            Dense, dtype=config.dtype, param_dtype=config.param_dtype, kernel_init=normal_init
        )
        convolution = functools.partial(Convolution, sizes.window, param_dtype=config.param_dtype)
        width = sizes.key_heads * sizes.key_dim
        axis = "joined_delta_keys"
        self.query, self.query_conv = dense(width, ("embed", axis)), convolution(axis)
        self.key, self.key_conv = dense(width, ("embed", axis)), convolution(axis)
        width = sizes.value_heads * sizes.value_dim
        axis = "joined_delta_values"
        self.value, self.value_conv = dense(width, ("embed", axis)), convolution(axis)
        self.gate = dense(width, ("embed", axis))
        self.out = dense(config.embed_dim, (axis, "embed"))
        width, axis = sizes.value_heads, "joined_delta_heads"
        self.beta, self.decay = dense(width, ("embed", axis)), dense(width, ("embed", axis))
        ones = nn.initializers.ones
        of_heads = ((width,), config.param_dtype)
        self.log_rate = param_with_axes("log_rate", _log_rates, *of_heads, axes=(axis,))
        self.rate_bias = param_with_axes("rate_bias", ones, *of_heads, axes=(axis,))
        self.norm = RMSNorm(config.norm_eps, *dtypes, axis="kv")

    def __call__(
        self, x: Float[Array, "B T E"], past: DeltaPast
    ) -> tuple[Float[Array, "B T E"], DeltaMemory]:
        sizes, (memory, offsets, moves) = self.sizes, past
        earlier, rollback = sizes.window - 1, memory.keys.shape[1]

        # Other tokens would see what is not finite; the output of the token itself is NaN.
        broken = jnp.zeros(x.shape[:2], bool)

        def finite(x: Array) -> Array:
            nonlocal broken
            broken |= ~jnp.all(jnp.isfinite(x), axis=2)
            return jnp.where(jnp.isfinite(x), x, 0)

        def convolved(kept: Array, dense: Dense, convolution: Convolution) -> tuple[Array, Array]:
            channels = _put(kept, finite(dense(x)), offsets + earlier)
            y = convolution(_cut(channels, offsets, earlier + x.shape[1]))
            y = y.reshape(*x.shape[:2], sizes.key_heads, -1)
            return y, _cut(channels, moves, earlier + rollback)

        of_queries, of_keys, of_values = memory.inputs
        queries, of_queries = convolved(of_queries, self.query, self.query_conv)
        keys, of_keys = convolved(of_keys, self.key, self.key_conv)
        values, of_values = convolved(of_values, self.value, self.value_conv)
        queries, keys = _unit(queries) * sizes.key_dim**-0.5, _unit(keys)
        values = values.reshape(*values.shape[:3], -1, sizes.value_dim)
        betas = nn.sigmoid(finite(self.beta(x).astype(jnp.float32)))
        rates = self.decay(x).astype(jnp.float32) + self.rate_bias.astype(jnp.float32)[None, None]
        log_rate = self.log_rate.astype(jnp.float32)[None, None]
        decays = -jnp.exp(log_rate) * nn.softplus(finite(rates))
        betas, decays = betas.reshape(values.shape[:4]), decays.reshape(values.shape[:4])
        state = advance(memory.state, memory.keys, memory.writes, memory.decays, offsets)
        y, writes = delta_rule(state, queries, keys, values, betas, decays)

        keys = _put(memory.keys, keys, offsets)
        writes = _put(memory.writes, writes, offsets)
        decays = _put(memory.decays, decays, offsets)
        after = DeltaMemory(
            advance(memory.state, keys, writes, decays, moves),
            (of_queries, of_keys, of_values),
            _cut(keys, moves, rollback),
            _cut(writes, moves, rollback),
            _cut(decays, moves, rollback),
        )
        broken |= (offsets < 0)[:, None]
        y = jnp.where(broken[:, :, None, None, None], jnp.nan, y)
        gate = nn.silu(self.gate(x).astype(jnp.float32)).reshape(y.shape)
        y = (self.norm(y.astype(x.dtype)).astype(jnp.float32) * gate).astype(x.dtype)
        return self.out(y.reshape(*x.shape[:2], -1)), after


def delta_rule(
    state: Float32[Array, "B K N D V"],
    queries: Float32[Array, "B T K D"],
    keys: Float32[Array, "B T K D"],
    values: Float32[Array, "B T K N V"],
    betas: Float32[Array, "B T K N"],
    decays: Float32[Array, "B T K N"],
) -> tuple[Float32[Array, "B T K N V"], Float32[Array, "B T K N V"]]:
    """What the tokens read from the state, each after its own correction; and the corrections.

    A token's correction is beta (v - e^g S^T k).
    """
    length = values.shape[1]
    chunk = min(length, _CHUNK)
    count = -(-length // chunk)

    def cut(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, count * chunk - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], count, chunk, *x.shape[2:]), 1, 0)

    def joined(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]

    chunks = tuple(map(cut, (queries, keys, values, betas, decays)))
    _, (read, writes) = lax.scan(_chunk, state, chunks)
    return joined(read), joined(writes)


def _chunk(state: Array, inputs: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
    queries, keys, values, betas, decays = inputs
    length = values.shape[1]
    passed = jnp.cumsum(decays, axis=1)
    since = jnp.moveaxis(passed[:, :, None] - passed[:, None], (1, 2), (3, 4))
    age = lax.broadcasted_iota(jnp.int32, since.shape, 3)
    age -= lax.broadcasted_iota(jnp.int32, since.shape, 4)
    since = jnp.exp(jnp.where(age >= 0, since, -jnp.inf))
    before = jnp.exp(passed)[..., None]
    # Each correction depends on those before: (1 + A) w = beta (v - e^g S^T k).
    overlaps = _einsum("bikd,bjkd->bkij", keys, keys)[:, :, None] * since
    overlaps *= jnp.moveaxis(betas, 1, 3)[..., None]
    wanted = betas[..., None] * (values - before * _einsum("bikd,bkndv->biknv", keys, state))
    writes = by_platform(overlaps, jnp.moveaxis(wanted, 1, 3), cpu=_solve_by_rows, default=_solve)
    weights = _einsum("bikd,bjkd->bkij", queries, keys)[:, :, None] * since
    read = before * _einsum("bikd,bkndv->biknv", queries, state)
    read += _einsum("bknij,bknjv->biknv", weights, writes)
    writes = jnp.moveaxis(writes, 3, 1)
    whole = jnp.full(values.shape[:1], length, jnp.int32)
    return advance(state, keys, writes, decays, whole), (read, writes)


# x of (1 + A) x = b; of A what lies below the diagonal.
def _solve(a: Float32[Array, "B K N T T"], b: Float32[Array, "B K N T V"]) -> Array:
    return lax.linalg.triangular_solve(a, b, left_side=True, lower=True, unit_diagonal=True)


# JAX's solver on CPUs waits for threads of the pool in which it runs. Two solves at once, as of two
# models in a program, then wait for each other for ever (jaxlib 0.10.2).
def _solve_by_rows(a: Float32[Array, "B K N T T"], b: Float32[Array, "B K N T V"]) -> Array:
    a, length = jnp.tril(a, -1), b.shape[-2]

    def solved(a: Array, b: Array) -> Array:
        def row(i: Array, x: Array) -> Array:
            known = _einsum("bknj,bknjv->bknv", lax.dynamic_index_in_dim(a, i, 3, False), x)
            here = lax.dynamic_index_in_dim(b, i, 3, keepdims=False)
            return lax.dynamic_update_index_in_dim(x, here - known, i, 3)

        return lax.fori_loop(0, length, row, jnp.zeros_like(b), unroll=length <= _FEW)

    def transposed(b: Array) -> Array:
        flipped = jnp.flip(jnp.swapaxes(a, -1, -2), (-1, -2))
        return jnp.flip(solved(flipped, jnp.flip(b, -2)), -2)

    return lax.custom_linear_solve(
        lambda x: x + _einsum("bknij,bknjv->bkniv", a, x),
        b,
        lambda _, b: solved(a, b),
        lambda _, b: transposed(b),
    )


def advance(
    state: Float32[Array, "B K N D V"],
    keys: Float32[Array, "B n K D"],
    writes: Float32[Array, "B n K N V"],
    decays: Float32[Array, "B n K N"],
    counts: Int32[Array, " B"],
) -> Float32[Array, "B K N D V"]:
    """The state after the first `counts` tokens."""
    read = jnp.arange(keys.shape[1], dtype=jnp.int32)[None] < counts[:, None]
    read = read[:, :, None, None]
    passed = jnp.cumsum(jnp.where(read, decays, 0), axis=1)
    whole = passed[:, -1:] if keys.shape[1] else jnp.zeros_like(decays, shape=(1, 1, 1, 1))
    left = jnp.exp(whole - passed)[..., None]
    # Not a product with zero: later entries may be infinite.
    writes = jnp.where(read[..., None], left * writes, 0)
    keys = jnp.where(read, keys, 0)
    whole = jnp.moveaxis(jnp.exp(whole), 1, 3)[..., None]
    return whole * state + _einsum("btkd,btknv->bkndv", keys, writes)


def _log_rates(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 0.01, 16.0)).astype(dtype)


def _unit(x: Float32[Array, "B T K D"]) -> Float32[Array, "B T K D"]:
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def _einsum(equation: str, *arrays: Array) -> Array:
    return jnp.einsum(equation, *arrays, precision=product_precision(jnp.float32))


# Makes room for a block and puts it after `offsets [B]` entries.
def _put(entries: Array, block: Array, offsets: Array) -> Array:
    room = [(0, 0), (0, block.shape[1])] + [(0, 0)] * (entries.ndim - 2)
    put = lambda row, new, at: lax.dynamic_update_slice_in_dim(row, new, at, 0)  # noqa: E731
    return jax.vmap(put)(jnp.pad(entries, room), block.astype(entries.dtype), offsets)


def _cut(entries: Array, starts: Array, length: int) -> Array:
    cut = lambda row, at: lax.dynamic_slice_in_dim(row, at, length, 0)  # noqa: E731
    return jax.vmap(cut)(entries, starts)
