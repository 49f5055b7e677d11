"""Pytrees: frozen dataclasses whose fields are the leaves, and trees of rows."""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True)
def traced_dataclass(cls: type[_T]) -> type[_T]:
    """Makes a frozen dataclass whose fields are the leaves of a pytree.

    Unflattening bypasses `__init__` and `__post_init__`: ranges are checked once, for a user's
    concrete value; jit, vmap, eval_shape and tree maps may put anything into the fields.
    """
    data: Any = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    names = tuple(field.name for field in dataclasses.fields(data))

    def flatten(value: Any) -> tuple[tuple[Any, ...], None]:
        return tuple(getattr(value, name) for name in names), None

    def flatten_with_keys(value: Any) -> tuple[tuple[tuple[Any, Any], ...], None]:
        keys = (jax.tree_util.GetAttrKey(name) for name in names)
        return tuple(zip(keys, flatten(value)[0], strict=True)), None

    def unflatten(_: None, children: Any) -> Any:
        value = object.__new__(data)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(value, name, child)
        return value

    def show(value: Any) -> str:
        shown = (f"{name}={_show(getattr(value, name))}" for name in names)
        return f"{data.__name__}({', '.join(shown)})"

    data.__repr__ = show
    jax.tree_util.register_pytree_with_keys(data, flatten_with_keys, unflatten, flatten)
    return data


def _show(leaf: Any) -> str:
    return str(leaf) if isinstance(leaf, (np.ndarray, np.generic)) else repr(leaf)


def where_rows(rows: jax.Array, new: Any, old: Any) -> Any:
    """The arrays of `new` in the rows where `rows [B]` is true, else those of `old`."""

    def choose(x: Any, y: Any) -> Any:
        return jnp.where(rows.reshape((-1,) + (1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(choose, new, old)
