"""Caches for compiled constraints: limited in bytes, and without a hold on a tokenizer."""

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def bounded_cache(most_bytes: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator that keeps the results used last, as long as they fit into `most_bytes`.

    Results whose arguments include an `Identity` of an object that is gone are dropped. The newest
    result is kept, however large. Arrays and texts of arguments and results count.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        kept: OrderedDict[Any, tuple[T, int]] = OrderedDict()
        lock = threading.Lock()

        @functools.wraps(function)
        def cached(*args: P.args, **kwargs: P.kwargs) -> T:
            key = (*args, *sorted(kwargs.items()))
            with lock:
                if key in kept:
                    kept.move_to_end(key)
                    return kept[key][0]
            result = function(*args, **kwargs)
            with lock:
                for old in [old for old in kept if any(map(_gone, old))]:
                    del kept[old]
                kept[key] = result, _size(result) + _size(key)
                while len(kept) > 1 and sum(size for _, size in kept.values()) > most_bytes:
                    kept.popitem(last=False)
            return result

        cached.kept = kept  # type: ignore[attr-defined]
        return cached

    return decorate


class Identity:
    """An object as part of a key, equal to itself only; without keeping the object alive."""

    def __init__(self, of: Any) -> None:
        self._hash = id(of)
        self._of: Callable[[], Any]
        try:
            self._of = weakref.ref(of)
        except TypeError:  # an object with slots: the limit in bytes ends its stay
            self._of = lambda: of

    @property
    def of(self) -> Any:
        """The object, or None if it is gone."""
        return self._of()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.of is not None and self.of is other.of

    def __hash__(self) -> int:
        return self._hash


def _gone(part: Any) -> bool:
    return isinstance(part, Identity) and part.of is None


def _size(value: Any) -> int:
    if isinstance(value, tuple | list):
        return sum(map(_size, value))
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    return 64 + (len(value) if isinstance(value, str | bytes) else 0)
