"""A feed-forward block of experts, of which each token uses a few.

Axes: B rows, T tokens, X experts, k of them for each token, E model width, M width of an expert; R
rows of a product: one for each expert of each token, sorted by expert.

On TPUs few tokens take `experts_kernel`, more take XLA's kernel for `jax.lax.ragged_dot`, which
reads the experts of the whole chip. Elsewhere XLA would multiply all rows with all experts, and a
loop reads those in use, each once.

Sources: Shazeer et al. 2017, Jiang et al. 2024 (Mixtral), Muennighoff et al. 2024 (OLMoE), Qwen
Team 2025, OpenAI 2025 (gpt-oss); `transformers/models/mixtral`, `olmoe`, `qwen3_moe`,
`qwen3_next`, `gpt_oss`.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.partitioning import param_with_axes
from jaxtyping import Array, Float, Float32, Int32

from specjax.compilation import product_precision
from specjax.models.config import Routing
from specjax.models.experts_kernel import MOST_TOKENS, fits, mixed_few
from specjax.models.layers import MLP, activate
from specjax.models.weights import (
    StoredWeight,
    Weight,
    declare,
    float32_logits,
    product,
    truncated_init,
)
from specjax.platforms import (
    by_platform,
    is_for_one_device,
    runs_no_kernels,
    traced_partitioner,
)

# XLA on TPUs has a kernel for a multiple of so many rows; others it multiplies with all experts.
_MULTIPLE = 8
# The loop multiplies at least so many rows with an expert at once, if there are so many.
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

    # The router reads `routed`, or x.
    @nn.compact
    def __call__(
        self, x: Float[Array, "B T E"], routed: Float[Array, "B T E"] | None = None
    ) -> Float[Array, "B T E"]:
        count, width, size = self.routing.experts, x.shape[-1], self.routing.mlp_dim
        router = declare(self, "router", truncated_init, (width, count), ("embed", "routes"))
        stacks = [
            declare(self, f"wi_{i}", stacked_init, (count, width, size), _INNER)
            for i in range(len(self.activations))
        ]
        stacks.append(declare(self, "wo", stacked_init, (count, size, width), _OUTER))
        logits = float32_logits(x if routed is None else routed, router, 0)
        biases: list[Array] | None = None
        if self.routing.biases:
            bias, *biases = self._biases(width)
            logits = logits + bias.astype(jnp.float32)[None, None]
        top, chosen = jax.lax.top_k(logits, self.routing.per_token)
        among = top if self.routing.renormalised else logits
        shares = jnp.exp(top - jax.nn.logsumexp(among, axis=-1, keepdims=True))
        if self.routing.beside_mlp:
            scales = param_with_axes(
                "share_scales", nn.initializers.ones, (count,), self.param_dtype, axes=("routes",)
            )
            shares = shares * jnp.take(scales.astype(jnp.float32), chosen, axis=0, mode="clip")
        mix: Callable[..., Array] = functools.partial(_mix, self.activations)
        if (part := traced_partitioner()) is not None and part.mesh.size > 1:
            mix = _on_each_device(self.activations, part, x, stacks, biases)
        elif not is_for_one_device():
            mix = functools.partial(_in_groups, self.activations)
        y = mix(x.astype(self.dtype), shares, chosen, stacks, biases)
        if self.routing.shared_dim is not None:
            gate = declare(self, "shared_gate", truncated_init, (width, 1), ("embed", "routes"))
            dtypes = self.dtype, self.param_dtype
            shared = MLP(self.routing.shared_dim, self.activations, *dtypes, name="shared")(x)
            y += nn.sigmoid(float32_logits(x, gate, 0)) * shared
        return y.astype(x.dtype)

    # Those of the router, of the input projections and of the output projection.
    def _biases(self, width: int) -> list[Array]:
        count, size = self.routing.experts, self.routing.mlp_dim
        shapes = {
            "router_bias": ((count,), ("routes",)),
            **{f"wi_{i}_bias": ((count, size), _INNER[::2]) for i in range(len(self.activations))},
            "wo_bias": ((count, width), _OUTER[::2]),
        }
        zeros = nn.initializers.zeros
        return [
            param_with_axes(name, zeros, shape, self.param_dtype, axes=axes)
            for name, (shape, axes) in shapes.items()
        ]


# `_mix` where a mesh splits the experts: each device adds what its own give. (The compiler would
# gather the experts of all devices.)
def _on_each_device(
    activations: tuple[str, ...],
    part: Any,
    x: Array,
    stacks: list[Weight],
    biases: list[Array] | None,
) -> Callable[..., Array]:
    def specs(value: Any, names: Any) -> Any:
        return jax.tree.map(lambda sharding: sharding.spec, part.shardings(value, names))

    names = [_INNER] * (len(stacks) - 1) + [_OUTER]
    places = [
        specs(stack, stack.axes(axes) if isinstance(stack, StoredWeight) else axes)
        for stack, axes in zip(stacks, names, strict=True)
    ]
    beside = None
    if biases is not None:
        beside = [specs(bias, axes[::2]) for bias, axes in zip(biases, names, strict=True)]
    rows = specs(x, ("batch", "length", "embed"))
    axis = jax.tree.leaves(places, is_leaf=lambda spec: isinstance(spec, jax.P))[0][0]
    if axis is None:
        return functools.partial(_in_groups, activations)

    def own(x: Array, shares: Array, chosen: Array, stacks: list[Weight], biases: Any) -> Array:
        first = jax.lax.axis_index(axis) * stacks[0].shape[0]
        return jax.lax.psum(_mix(activations, x, shares, chosen - first, stacks, biases), axis)

    given = (rows, rows, rows, places, beside)
    return jax.shard_map(own, mesh=part.mesh, in_specs=given, out_specs=rows, check_vma=False)


# What the experts in the stacks give, in shares; others may be chosen, too.
def _mix(
    activations: tuple[str, ...],
    x: Float[Array, "B T E"],
    shares: Float32[Array, "B T k"],
    chosen: Int32[Array, "B T k"],
    stacks: list[Weight],
    biases: list[Array] | None,
) -> Float32[Array, "B T E"]:
    in_groups = functools.partial(_in_groups, activations)
    if x.shape[0] * x.shape[1] > MOST_TOKENS or not fits(stacks) or runs_no_kernels():
        return in_groups(x, shares, chosen, stacks, biases)
    few = _with_gradient_of(in_groups, functools.partial(_by_kernel, activations))
    return by_platform(x, shares, chosen, stacks, biases, tpu=few, default=in_groups)


def _by_kernel(
    activations: tuple[str, ...],
    x: Array,
    shares: Array,
    chosen: Array,
    stacks: list[Weight],
    biases: list[Array] | None,
) -> Float32[Array, "B T E"]:
    experts = jnp.arange(stacks[0].shape[0], dtype=jnp.int32)
    own = chosen.reshape(-1, chosen.shape[-1], 1) == experts[None, None]
    shares = jnp.sum(jnp.where(own, shares.reshape(own.shape[0], -1, 1), 0.0), axis=1)
    tokens = x.reshape(-1, x.shape[-1])
    return mixed_few(tokens, shares, stacks, biases, activations=activations).reshape(x.shape)


# `forward`, with the gradient of `plain`.
def _with_gradient_of(plain: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    both = jax.custom_vjp(forward)
    both.defvjp(
        lambda *given: (forward(*given), given),
        lambda given, slopes: jax.vjp(plain, *given)[1](slopes),
    )
    return both


def _in_groups(
    activations: tuple[str, ...],
    x: Array,
    shares: Array,
    chosen: Array,
    stacks: list[Weight],
    biases: list[Array] | None,
) -> Float32[Array, "B T E"]:
    count, used = stacks[0].shape[0], chosen.shape[-1]
    tokens, numbers = x.reshape(-1, x.shape[-1]), chosen.reshape(-1)
    numbers = jnp.where((numbers >= 0) & (numbers < count), numbers, count)
    order = jnp.argsort(numbers).astype(jnp.int32)
    experts = numbers[order]
    sizes = jnp.sum(numbers[None] == jnp.arange(count, dtype=jnp.int32)[:, None], 1, jnp.int32)
    tile = min(len(tokens), max(_TILE, len(numbers) // count))

    def multiplied(rows: Array, stack: Array) -> Array:
        return _multiply(tile, rows, stack, sizes)

    def projected(rows: Array, number: int) -> Array:
        stack = stacks[number]
        if isinstance(stack, StoredWeight):
            y = stack.product_of_stack(multiplied, rows, experts)
        else:
            y = multiplied(rows, stack.astype(rows.dtype))
        if biases is not None:
            y = y + jnp.take(biases[number].astype(y.dtype), experts, axis=0, mode="clip")
        return y

    rows = tokens[order // used]
    hidden = [
        activate(activation, projected(rows, number))
        for number, activation in enumerate(activations)
    ]
    y = projected(functools.reduce(operator.mul, hidden), -1).astype(jnp.float32)
    y = jnp.where((experts < count)[:, None], y * shares.reshape(-1)[order][:, None], 0.0)
    y = y[jnp.argsort(order)].reshape(len(tokens), used, -1)
    return jnp.sum(y, axis=1).reshape(x.shape)


# The product of each row with its expert's matrix. The first rows are of the first expert, and so
# on; those after the last expert's are arbitrary.
def _multiply(
    tile: int, rows: Float[Array, "R n"], stack: Array, sizes: Int32[Array, " X"]
) -> Float[Array, "R m"]:
    in_loop = functools.partial(_in_loop, tile)
    forms = functools.partial(by_platform, tpu=_in_kernel, default=in_loop)
    return _with_gradient_of(_in_kernel, forms)(rows, stack, sizes)


def _in_kernel(rows: Array, stack: Array, sizes: Array) -> Array:
    padded = jnp.pad(rows, ((0, -len(rows) % _MULTIPLE), (0, 0)))
    y = jax.lax.ragged_dot(
        padded,
        stack,
        sizes,
        precision=product_precision(rows.dtype),
        preferred_element_type=rows.dtype,
    )
    # After the last expert's rows a TPU leaves what was there.
    own = jnp.arange(len(rows), dtype=jnp.int32) < jnp.sum(sizes)
    return jnp.where(own[:, None], y[: len(rows)], 0)


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
        matrix = jax.lax.dynamic_index_in_dim(stack, expert, keepdims=False)
        part = product(part, matrix)
        return i + 1, jax.lax.dynamic_update_slice_in_dim(y, part, at, 0)

    y = jnp.zeros((len(padded), stack.shape[2]), rows.dtype)
    return jax.lax.while_loop(lambda carry: carry[0] < ends[-1], step, (jnp.int32(0), y))[1][
        : len(rows)
    ]
