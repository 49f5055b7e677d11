"""Prompts that begin alike: a model reads their common beginning once.

A method reads its prompts by one `prefill` of each of its models, always in the same order. So the
caches of a beginning are noted in this order, and continued in it. Only decoder-only models of
`specjax.models` do so; all others read whole prompts.
"""

import contextvars
import dataclasses
import math
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp

from specjax.platforms import scoped
from specjax.types import Array, Cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Beginning:
    """The common beginning of prompts, as models have read it.

    Attributes:
      caches: of each model, in the order of their prefills, its cache of R equal rows: one, or one
        per part of the batch on a mesh. It may have fewer or more positions than that of a prompt.
      lengths: the number of tokens that each prompt takes from it: scalar or `[B]`.
    """

    caches: tuple[Cache, ...]
    lengths: Any


_notes: contextvars.ContextVar[list[Cache] | None] = contextvars.ContextVar("notes", default=None)
_rest: contextvars.ContextVar[tuple[Array, list[Cache]] | None] = contextvars.ContextVar(
    "rest", default=None
)


def noting() -> AbstractContextManager[Any]:
    """Prefills traced in this context note their caches in the list."""
    return scoped(_notes, [])


def continuing(beginning: Beginning | None) -> AbstractContextManager[Any]:
    """Prefills traced in this context begin with these caches; None changes nothing."""
    rest = None if beginning is None else (beginning.lengths, list(beginning.caches))
    return scoped(_rest, rest)


def note(cache: Any) -> Any:
    """Returns a model's cache after a prompt, and notes it if asked to."""
    if (caches := _notes.get()) is not None:
        caches.append(cache)
    return cache


def next_beginning() -> tuple[Array, Cache] | None:
    """The lengths of the beginning and this model's cache of it, or None."""
    rest = _rest.get()
    return None if rest is None else (rest[0], rest[1].pop(0))


def fill(empty: Any, beginning: Any) -> Any:
    """An empty cache of any number of rows and positions, filled with that of a beginning."""

    def fill_one(empty: Array, part: Array) -> Array:
        if math.prod(part.shape[2:]) == math.prod(empty.shape[2:]):
            part = part.reshape(*part.shape[:2], *empty.shape[2:])  # see `CacheLayout`
        rows = jnp.repeat(part, empty.shape[0] // part.shape[0], axis=0)
        kept = rows[tuple(map(slice, empty.shape))]
        sizes = zip(empty.shape, kept.shape, strict=True)
        return jnp.pad(kept, [(0, wanted - size) for wanted, size in sizes])

    return jax.tree.map(fill_one, empty, beginning)
