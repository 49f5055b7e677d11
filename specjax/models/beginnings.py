"""Prompts that begin alike: a model reads their common beginning once.

A method reads its prompts by one `prefill` of each of its models, always in the same order. So the
caches of a beginning are noted in this order, and continued in it. Only decoder-only models of
`specjax.models` do so; all others read whole prompts.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from specjax.types import Cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Beginning:
    """The common beginning of prompts, as models have read it.

    Attributes:
      caches: of each model, in the order of their prefills, its cache of one row.
      length: the number of tokens; static.
    """

    caches: tuple[Cache, ...]
    length: int = dataclasses.field(metadata={"static": True})


_noted: contextvars.ContextVar[list[Cache] | None] = contextvars.ContextVar("noted", default=None)
_given: contextvars.ContextVar[tuple[int, list[Cache]] | None] = contextvars.ContextVar(
    "given", default=None
)


@contextlib.contextmanager
def noting() -> Iterator[list[Cache]]:
    """Prefills traced in this context note their caches in the list."""
    found: list[Cache] = []
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


@contextlib.contextmanager
def continuing(beginning: Beginning | None) -> Iterator[None]:
    """Prefills traced in this context begin with these caches; None changes nothing."""
    given = None if beginning is None else (beginning.length, list(beginning.caches))
    token = _given.set(given)
    try:
        yield
    finally:
        _given.reset(token)


def note(cache: Any) -> Any:
    """Returns a model's cache after a prompt, and notes it if asked to."""
    if (found := _noted.get()) is not None:
        found.append(cache)
    return cache


def next_given() -> tuple[int, Cache] | None:
    """The length of the beginning and this model's cache of it, or None."""
    given = _given.get()
    return None if given is None else (given[0], given[1].pop(0))
