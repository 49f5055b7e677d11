"""How networks read and multiply their matrices, whatever form these are stored in.

Products of float32 activations are float32 on every device; see `compilation.product_precision`.
"""

import abc
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.partitioning import param_with_axes
from jaxtyping import Array, Float, Float32, Integer

from specjax import cpu_kernels
from specjax.compilation import product_precision
from specjax.kernel_choice import on_one_cpu
from specjax.platforms import by_platform

Initializer = Callable[..., Array]

normal_init = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
truncated_init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


class StoredWeight(abc.ABC):
    """A matrix, or a stack of them, that is not an array of numbers, among the parameters.

    A subclass is a pytree of arrays, such as a `types.traced_dataclass`: for example, whole numbers
    with their scales. Networks do not know the form of their matrices: they only call `product`,
    `product_of_stack` and `rows`.
    """

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""

    is_scaled: ClassVar[bool] = False  # whether its arrays are numbers and a factor of each output
    is_transposed: ClassVar[bool] = False  # whether they are those of the transpose

    @abc.abstractmethod
    def read(self, dtype: Any) -> Array:
        """The matrix as an array of `dtype`."""

    def rows(self, index: Integer[Array, "*B"], dtype: Any) -> Float[Array, "*B m"]:
        """The rows `index` of the matrix, like `jnp.take` with `mode="clip"`."""
        return jnp.take(self.read(dtype), index, axis=0, mode="clip")

    def product(self, dot: Callable[[Array, Array], Array], x: Array) -> Array:
        """`dot(x, matrix)`; applying scales after the product may be cheaper."""
        return dot(x, self.read(x.dtype))

    def product_of_stack(
        self,
        dot: Callable[[Array, Array], Array],
        x: Float[Array, "R n"],
        experts: Integer[Array, " R"],
    ) -> Array:
        """`dot(x, stack)`, where row r is multiplied with matrix `experts[r]` of the stack."""
        return dot(x, self.read(x.dtype))

    def axes(self, names: tuple[str | None, ...]) -> Any:
        """The weight with `names` for its arrays of the matrix's shape; others are not split."""
        return jax.tree.map(
            lambda x: names if tuple(x.shape) == self.shape else (None,) * x.ndim, self
        )


Weight = Array | StoredWeight


def is_stack(path: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter has a matrix for each expert of a layer."""
    return ("/mlp/" in path or "/experts/" in path) and len(shape) == 3


def is_stored(value: Any) -> bool:
    """Whether a value in a tree of parameters is a `StoredWeight`."""
    return isinstance(value, StoredWeight)


def has_stored(params: Any) -> bool:
    """Whether a tree of parameters has a `StoredWeight`."""
    return any(map(is_stored, jax.tree.leaves(params, is_leaf=is_stored)))


def declare(
    module: nn.Module,
    name: str,
    init: Initializer,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
) -> Any:
    """A parameter of a module with a `param_dtype`: a matrix or a stack, as it is stored."""
    if module.has_variable("params", name):
        value: Any = module.get_variable("params", name)
        if isinstance(value, StoredWeight):
            assert tuple(value.shape) == shape, f"{name} must have shape {shape}"
            return value
    return param_with_axes(name, init, shape, module.param_dtype, axes=axes, module=module)


def rows(weight: Weight, index: Integer[Array, "*B"], dtype: Any) -> Float[Array, "*B m"]:
    """Rows of a matrix in `dtype`; an index outside takes the nearest row."""
    if isinstance(weight, StoredWeight):
        return weight.rows(index, dtype)
    table = weight
    if table.dtype == jnp.bfloat16:
        # Without the barrier, a loop that reads rows has a copy in floats on CPUs.
        table, index = jax.lax.optimization_barrier((table, index))
    return jnp.take(table, index, axis=0, mode="clip").astype(dtype)


def product(
    x: Float[Array, "n E"],
    weight: Weight,
    contract: int = 0,
    dtype: Any = None,
    network_dtype: Any = None,
) -> Float[Array, "n m"]:
    """The product with a matrix that has E on axis `contract`, and that is read in x's dtype.

    On a CPU few rows take `cpu_kernels`, which read it as it is. On TPUs a single row gets a second
    row of zeros: XLA does not use the matrix units for the product of a matrix and a vector, which
    takes four times as long.

    Args:
      dtype: of the result, in which sums are kept; None: x's.
      network_dtype: that of the activations, which decides the precision; None: x's.
    """
    precision = product_precision(x.dtype if network_dtype is None else network_dtype)
    by_rows = (contract == 1) != (isinstance(weight, StoredWeight) and weight.is_transposed)
    kernel, plain = _forms(jax.tree.structure(weight), contract, by_rows, dtype, precision)
    numbers = jax.tree.leaves(weight)

    def once(x: Array, *numbers: Array) -> Array:
        readable = not isinstance(weight, StoredWeight) or weight.is_scaled
        if readable and cpu_kernels.takes(x, numbers[0], by_rows=by_rows):
            return on_one_cpu(x, *numbers, kernel=kernel, plain=plain)
        return plain(x, *numbers)

    def of_two(x: Array, *numbers: Array) -> Array:
        # Without the barrier XLA takes the row out before the product.
        return jax.lax.optimization_barrier(plain(jnp.pad(x, ((0, 1), (0, 0))), *numbers))[:1]

    if x.shape[0] > 1:
        return once(x, *numbers)
    return by_platform(x, *numbers, tpu=of_two, default=once)


# Cached because they identify programs.
@functools.cache
def _forms(tree: Any, contract: int, by_rows: bool, dtype: Any, precision: Any) -> tuple[Any, Any]:
    def kernel(x: Array, *numbers: Array) -> Array:
        y = cpu_kernels.product(x.astype(jnp.float32), *numbers, by_rows=by_rows)
        return y.astype(dtype or x.dtype)

    def plain(x: Array, *numbers: Array) -> Array:
        dot = functools.partial(
            jax.lax.dot_general,
            dimension_numbers=(((1,), (contract,)), ((), ())),
            precision=precision,
            preferred_element_type=dtype,
        )
        weight = jax.tree.unflatten(tree, numbers)
        if isinstance(weight, StoredWeight):
            return weight.product(dot, x)
        return dot(x, weight.astype(x.dtype))

    return kernel, plain


def float32_logits(
    x: Float[Array, "*B E"], weight: Weight, contract: int
) -> Float32[Array, "*B V"]:
    """The product with a matrix that has E on axis `contract`, summed in float32.

    bfloat16 operands are not converted first: their products are exact in float32, and the matrix,
    the largest of a small network, is read as bfloat16.
    """
    flat, dtype = x.reshape(-1, x.shape[-1]), x.dtype
    if not isinstance(weight, StoredWeight) and weight.dtype != dtype:
        flat = flat.astype(jnp.float32)
    y = product(flat, weight, contract, jnp.float32, dtype)
    return y.reshape(*x.shape[:-1], y.shape[-1])
