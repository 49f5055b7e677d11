"""The experts of few tokens in one TPU kernel, which reads only the experts in use.

XLA would copy the matrices of all experts of a chip into on-chip memory, for its own kernel of
`jax.lax.ragged_dot`, wherever they fit: 16 of Qwen 3 30B-A3B's, of which a token uses one. Here one
expert after the other passes by, and is multiplied with all tokens: there are so few that its
reading takes longer. A token that does not use it has no share of what it gives.

Axes: N tokens, X experts, E model width, M width of an expert.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32

from specjax.compilation import jit, product_precision
from specjax.models.int8 import Int8Weight
from specjax.models.layers import activate
from specjax.models.weights import Weight

# With more tokens a v5e takes longer to multiply an expert than to read it.
MOST_TOKENS = 256
# A block of a matrix, and all that the kernel holds.
_BLOCK, _VMEM = 4 << 20, 48 << 20
_LANES, _SUBLANES = 128, 16


def fits(stacks: Sequence[Weight]) -> bool:
    """Whether the kernel reads the stored form of these matrices."""
    return all(isinstance(stack, jax.Array | Int8Weight) for stack in stacks)


@functools.partial(jit, static_argnames=("activations", "interpret"))
def mixed_few(
    x: Float[Array, "N E"],
    shares: Float32[Array, "N X"],
    stacks: Sequence[Weight],
    biases: Sequence[Array] | None,
    *,
    activations: tuple[str, ...],
    interpret: bool = False,
) -> Float32[Array, "N E"]:
    """The sum of what the experts give for each token, by its shares.

    Args:
      x: the tokens.
      shares: 0 for experts that a token does not use.
      stacks: for each activation the matrices `[X, E, M]`, and those of the outputs, `[X, M, E]`.
      biases: for each activation `[X, M]`, and those of the outputs, `[X, E]`; None for none.
      activations: of the inner products, which are multiplied.
      interpret: works on any machine.
    """
    rows, width = x.shape
    x, shares = (jnp.pad(y, ((0, -rows % _SUBLANES), (0, 0))) for y in (x, shares))
    inner = stacks[-1].shape[1]
    used = jnp.any(shares != 0.0, axis=0)
    experts = jnp.argsort(~used).astype(jnp.int32)
    steps = jnp.maximum(jnp.sum(used, dtype=jnp.int32), 1)
    matrices: list[Any] = [
        stack.values if isinstance(stack, Int8Weight) else stack for stack in stacks
    ]
    size = _tile(inner, width, matrices[0].dtype.itemsize)

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda s, j, experts: (0,) * len(shape))

    args, specs = [x, shares], [whole(*x.shape), whole(*shares.shape)]
    for i, (stack, values) in enumerate(zip(stacks, matrices, strict=True)):
        axes, blocks = (2, 2), ((1, width, size), (1, 1, size))
        if stack is stacks[-1]:
            axes, blocks = (1, 0), ((1, size, width), (1, 1, width))
        matrix, vector = (
            pl.BlockSpec(block, functools.partial(_place, axis))
            for block, axis in zip(blocks, axes, strict=True)
        )
        args.append(values if interpret else pltpu.with_memory_space_constraint(values, pltpu.HBM))
        specs.append(matrix)
        if isinstance(stack, Int8Weight):
            args.append(stack.scales[:, None])
            specs.append(vector)
        if biases is not None:
            args.append(biases[i][:, None])
            specs.append(vector)
    y = pl.pallas_call(
        functools.partial(
            _kernel,
            activations=activations,
            scaled=tuple(isinstance(stack, Int8Weight) for stack in stacks),
            biased=biases is not None,
            inner=inner,
            precision=product_precision(x.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(steps, pl.cdiv(inner, size)),
            in_specs=specs,
            out_specs=whole(*x.shape),
        ),
        out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=_VMEM
        ),
        interpret=interpret,
        name="mixed_few",
    )(experts, *args)
    return y[:rows]


# A block's place: of an expert, and of the tile j on one of its axes.
def _place(axis: int, s: Any, j: Any, experts: Any) -> tuple[Any, ...]:
    return experts[s], j if axis == 1 else 0, j if axis == 2 else 0


# Columns of a block: a divisor if there is one, of full vectors.
def _tile(inner: int, width: int, itemsize: int) -> int:
    most = _BLOCK // (width * itemsize)
    if inner <= most:
        return inner
    most = max(most - most % _LANES, _LANES)
    sizes = range(most, 0, -_LANES)
    return next((size for size in sizes if inner % size == 0), most)


# One tile of an expert: all tokens times its columns, and these times rows of the output.
def _kernel(
    experts: Any,
    x_ref: Any,
    shares_ref: Any,
    *refs: Any,
    activations: tuple[str, ...],
    scaled: tuple[bool, ...],
    biased: bool,
    inner: int,
    precision: Any,
) -> None:
    *parts, out_ref = refs
    s, j = pl.program_id(0), pl.program_id(1)

    @pl.when((s == 0) & (j == 0))
    def _() -> None:
        out_ref[...] = jnp.zeros(out_ref.shape, jnp.float32)

    rest = iter(parts)
    projections = [
        (next(rest), next(rest) if scales else None, next(rest) if biased else None)
        for scales in scaled
    ]
    size = projections[-1][0].shape[1]

    def inside(y: Array, axis: int) -> Array:
        if inner % size == 0:
            return y
        place = lax.broadcasted_iota(jnp.int32, y.shape, axis)
        return jnp.where(place < inner - j * size, y, jnp.zeros_like(y))

    def projected(x: Array, values: Array, scales: Any, bias: Any) -> Array:
        y = lax.dot(x, values, precision=precision, preferred_element_type=jnp.float32)
        y = y if scales is None else y * scales[0]
        return y if bias is None else y + bias[0].astype(jnp.float32)

    x = x_ref[...]
    hidden = [
        activate(activation, projected(x, matrix[0].astype(x.dtype), *others))
        for activation, (matrix, *others) in zip(activations, projections[:-1], strict=True)
    ]
    y = inside(functools.reduce(operator.mul, hidden), 1).astype(x.dtype)
    matrix, scales, bias = projections[-1]
    y = projected(y, inside(matrix[0].astype(x.dtype), 0), scales, None)
    if bias is not None:  # once, with the first tile
        y += jnp.where(j == 0, bias[0].astype(jnp.float32), 0.0)
    shares = shares_ref[...]
    expert = lax.broadcasted_iota(jnp.int32, shares.shape, 1) == experts[s]
    share = jnp.sum(jnp.where(expert, shares, 0.0), axis=1, keepdims=True)
    # Not a product with zero: of a token that does not use the expert, y may be infinite.
    out_ref[...] += jnp.where(share != 0.0, share * y, 0.0)
