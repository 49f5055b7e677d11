"""Pytrees: frozen dataclasses whose fields are the leaves, and trees of rows."""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True)
def traced_dataclass(cls: type[_T]) -> type[_T]:
    """Makes a frozen dataclass whose fields are the leaves of a pytree.

    A field with `metadata={"static": True}` is hashable and belongs to the tree's structure. One
    with `metadata={"host": True}` belongs to neither, so another value compiles nothing: a program
    must not read it (see `without_host`), and what it returns may have the value of another call.
    Unflattening bypasses `__init__` and `__post_init__`: ranges are checked once, for a user's
    concrete value; jit, vmap, eval_shape and tree maps may put anything into the fields.
    """
    data: Any = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    fields = dataclasses.fields(data)
    static = tuple(field.name for field in fields if field.metadata.get("static"))
    host = tuple(field.name for field in fields if field.metadata.get("host"))
    names = tuple(field.name for field in fields if field.name not in (*static, *host))

    def flatten(value: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        leaves, fixed, unseen = (
            tuple(getattr(value, name) for name in of) for of in (names, static, host)
        )
        return leaves, (*fixed, _Unseen(unseen))

    def flatten_with_keys(value: Any) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        keys = (jax.tree_util.GetAttrKey(name) for name in names)
        leaves, fixed = flatten(value)
        return tuple(zip(keys, leaves, strict=True)), fixed

    def unflatten(fixed: tuple[Any, ...], children: Any) -> Any:
        value = object.__new__(data)
        *fixed_values, unseen = fixed
        values = (*children, *fixed_values, *unseen.values)
        for name, child in zip((*names, *static, *host), values, strict=True):
            object.__setattr__(value, name, child)
        return value

    def show(value: Any) -> str:
        shown = (f"{field.name}={_show(getattr(value, field.name))}" for field in fields)
        return f"{data.__name__}({', '.join(shown)})"

    for name in {*host} & {*vars(data)}:
        delattr(data, name)  # a default, which `without_host` would show
    data.__repr__ = show
    jax.tree_util.register_pytree_with_keys(data, flatten_with_keys, unflatten, flatten)
    return data


def host_values(value: Any) -> tuple[Any, ...]:
    """The values of the fields of the host; see `traced_dataclass`."""
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return tuple(getattr(value, field.name) for field in fields if field.metadata.get("host"))


def without_host(value: _T) -> _T:
    """A copy that has no fields of the host, so that reading one is an AttributeError."""
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    if not any(field.metadata.get("host") for field in fields):
        return value
    copy = object.__new__(type(value))
    for field in fields:
        if not field.metadata.get("host"):
            object.__setattr__(copy, field.name, getattr(value, field.name))
    return copy


class _Unseen:
    """Values that make no difference between the structures of trees."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unseen)

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "unseen"


def _show(leaf: Any) -> str:
    return str(leaf) if isinstance(leaf, (np.ndarray, np.generic)) else repr(leaf)


def where_rows(rows: Bool[Array, " B"], new: Any, old: Any) -> Any:
    """The arrays of `new` in the rows where `rows` is true, else those of `old`."""

    def choose(x: Any, y: Any) -> Any:
        return jnp.where(rows.reshape((-1,) + (1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(choose, new, old)
