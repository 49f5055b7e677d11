"""A feed-forward block of experts, of which each token uses a few.

Axes: B rows, T tokens, X experts, k of them for each token, E model width, M width of an expert; R
rows of a product: one for each expert of each token, sorted by expert.

A product reads only the experts that its rows use, each of them once. On TPUs this is XLA's kernel
for `jax.lax.ragged_dot`; on CPUs XLA would multiply all rows with all experts, and it is a loop.
`python -m benchmarks.layouts` compares the forms.

Sources: Shazeer et al. 2017, Jiang et al. 2024 (Mixtral), Muennighoff et al. 2024 (OLMoE), Qwen
Team 2025; `transformers/models/mixtral`, `olmoe`, `qwen3_moe`, `qwen3_next`.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Float32, Int32

from specjax.compilation import product_precision
from specjax.models.config import Routing
from specjax.models.layers import MLP, activated
from specjax.models.weights import (
    StoredWeight,
    Weight,
    declare,
    float32_logits,
    truncated_init,
)
from specjax.platforms import by_platform, traced_partitioner

# XLA on TPUs has a kernel for a multiple of so many rows; others it multiplies with all experts.
_MULTIPLE = 8
# The loop on CPUs multiplies at least so many rows with an expert at once, if there are so many.
_TILE = 16
_INNER, _OUTER = ("experts", "embed", "mlp"), ("experts", "mlp", "embed")

stacked_init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=(0,))


class Experts(nn.Module):
    """The experts of a layer, each a block as in `layers.MLP`, and the router that chooses them.

    There may be one more, which all tokens use, with a gate of its own.
    """

    routing: Routing
    activations: tuple[str, ...]
    dtype: Any
    param_dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        count, width, size = self.routing.experts, x.shape[-1], self.routing.mlp_dim
        router = declare(self, "router", truncated_init, (width, count), ("embed", "routes"))
        stacks = [
            declare(self, f"wi_{i}", stacked_init, (count, width, size), _INNER)
            for i in range(len(self.activations))
        ]
        stacks.append(declare(self, "wo", stacked_init, (count, size, width), _OUTER))
        probabilities = jax.nn.softmax(float32_logits(x, router, 0), axis=-1)
        shares, chosen = jax.lax.top_k(probabilities, self.routing.per_token)
        if self.routing.renormalised:
            shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
        mix: Callable[..., Array] = functools.partial(_mixed, self.activations)
        if (part := traced_partitioner()) is not None:
            mix = _on_each_device(mix, part, x, stacks)
        y = mix(x.astype(self.dtype), shares, chosen, stacks)
        if self.routing.shared_dim is not None:
            gate = declare(self, "shared_gate", truncated_init, (width, 1), ("embed", "routes"))
            dtypes = self.dtype, self.param_dtype
            shared = MLP(self.routing.shared_dim, self.activations, *dtypes, name="shared")(x)
            y += nn.sigmoid(float32_logits(x, gate, 0)) * shared
        return y.astype(x.dtype)


# The function `mix` where a mesh splits the experts: each device adds what its own give. (The
# compiler would gather the experts of all devices.)
def _on_each_device(
    mix: Callable[..., Array], part: Any, x: Array, stacks: list[Weight]
) -> Callable[..., Array]:
    def specs(value: Any, names: Any) -> Any:
        return jax.tree.map(lambda sharding: sharding.spec, part.shardings(value, names))

    names = [_INNER] * (len(stacks) - 1) + [_OUTER]
    places = [
        specs(stack, stack.axes(axes) if isinstance(stack, StoredWeight) else axes)
        for stack, axes in zip(stacks, names, strict=True)
    ]
    rows = specs(x, ("batch", "length", "embed"))
    axis = jax.tree.leaves(places, is_leaf=lambda spec: isinstance(spec, jax.P))[0][0]
    if axis is None:
        return mix

    def own(x: Array, shares: Array, chosen: Array, stacks: list[Weight]) -> Array:
        first = jax.lax.axis_index(axis) * stacks[0].shape[0]
        return jax.lax.psum(mix(x, shares, chosen - first, stacks), axis)

    return jax.shard_map(
        own, mesh=part.mesh, in_specs=(rows, rows, rows, places), out_specs=rows, check_vma=False
    )


# What the experts in the stacks give, in shares; others may be chosen, too.
def _mixed(
    activations: tuple[str, ...],
    x: Float[Array, "B T E"],
    shares: Float32[Array, "B T k"],
    chosen: Int32[Array, "B T k"],
    stacks: list[Weight],
) -> Float32[Array, "B T E"]:
    count, used = stacks[0].shape[0], chosen.shape[-1]
    tokens, numbers = x.reshape(-1, x.shape[-1]), chosen.reshape(-1)
    numbers = jnp.where((numbers >= 0) & (numbers < count), numbers, count)
    order = jnp.argsort(numbers).astype(jnp.int32)
    experts = numbers[order]
    sizes = jnp.sum(numbers[None] == jnp.arange(count, dtype=jnp.int32)[:, None], 1, jnp.int32)
    tile = min(len(tokens), max(_TILE, len(numbers) // count))
    dot = functools.partial(_product, tile=tile, sizes=sizes, experts=experts)
    rows = tokens[order // used]
    hidden = [
        activated(activation, dot(rows, stack))
        for activation, stack in zip(activations, stacks[:-1], strict=True)
    ]
    y = dot(functools.reduce(operator.mul, hidden), stacks[-1]).astype(jnp.float32)
    y = jnp.where((experts < count)[:, None], y * shares.reshape(-1)[order][:, None], 0.0)
    y = y[jnp.argsort(order)].reshape(len(tokens), used, -1)
    return jnp.sum(y, axis=1).reshape(x.shape)


def _product(
    rows: Float[Array, "R n"],
    stack: Weight,
    *,
    tile: int,
    sizes: Int32[Array, " X"],
    experts: Int32[Array, " R"],
) -> Float[Array, "R m"]:
    if isinstance(stack, StoredWeight):
        return stack.product_of_stack(
            lambda rows, matrices: _grouped(tile, rows, matrices, sizes), rows, experts
        )
    return _grouped(tile, rows, stack.astype(rows.dtype), sizes)


# The product of each row with its expert's matrix. The first rows are of the first expert, and so
# on; those after the last expert's are arbitrary.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(
    tile: int, rows: Float[Array, "R n"], stack: Array, sizes: Int32[Array, " X"]
) -> Float[Array, "R m"]:
    return by_platform(
        rows, stack, sizes, cpu=functools.partial(_in_loop, tile), default=_in_kernel
    )


def _forward(tile: int, rows: Array, stack: Array, sizes: Array) -> tuple[Array, Any]:
    return _grouped(tile, rows, stack, sizes), (rows, stack, sizes)


def _backward(tile: int, given: Any, slopes: Array) -> tuple[Array, Array, None]:
    rows, stack, sizes = given
    _, pulled = jax.vjp(lambda rows, stack: _in_kernel(rows, stack, sizes), rows, stack)
    return (*pulled(slopes), None)


_grouped.defvjp(_forward, _backward)


def _in_kernel(rows: Array, stack: Array, sizes: Array) -> Array:
    padded = jnp.pad(rows, ((0, -len(rows) % _MULTIPLE), (0, 0)))
    y = jax.lax.ragged_dot(
        padded,
        stack,
        sizes,
        precision=product_precision(rows.dtype),
        preferred_element_type=rows.dtype,
    )
    return y[: len(rows)]


# A tile of an expert may reach past its last row: the next tile overwrites what it writes there.
def _in_loop(tile: int, rows: Array, stack: Array, sizes: Array) -> Array:
    tiles = -(-sizes // tile)
    ends, firsts = jnp.cumsum(tiles), jnp.cumsum(sizes) - sizes
    padded = jnp.pad(rows, ((0, tile), (0, 0)))

    def step(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        i, y = carry
        expert = jnp.sum(ends <= i, dtype=jnp.int32)
        at = firsts[expert] + tile * (i - (ends[expert] - tiles[expert]))
        part = jax.lax.dynamic_slice_in_dim(padded, at, tile)
        matrix = jax.lax.dynamic_index_in_dim(stack, expert, keepdims=False).astype(rows.dtype)
        part = jnp.dot(part, matrix, precision=product_precision(rows.dtype))
        return i + 1, jax.lax.dynamic_update_slice_in_dim(y, part, at, 0)

    y = jnp.zeros((len(padded), stack.shape[2]), rows.dtype)
    return jax.lax.while_loop(lambda carry: carry[0] < ends[-1], step, (jnp.int32(0), y))[1][
        : len(rows)
    ]
