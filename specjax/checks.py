"""Checks of values that users give, with messages of one form."""

import importlib
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def check_path(path: Any, what: str = "") -> None:
    """Raises TypeError unless `path` is a str or os.PathLike; `what` is "name=" in the message."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{what}{path!r} must be a path; put a path of digits in quotes")


def check_count(name: str, value: Any, remedy: str) -> None:
    """Raises ValueError unless `value` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}: {remedy}")


def check_part(name: str, value: Any, needed: Sequence[str], example: str) -> None:
    """Raises TypeError unless `value` is an instance that has all attributes of its protocol.

    Args:
      name: the argument's name, for the message.
      value: the part, such as a rule or a drafter.
      needed: the names of the attributes.
      example: code that makes such a part, for the message.
    """
    if isinstance(value, type):
        raise TypeError(
            f"{name} must be an instance, got the class {value.__name__}: write "
            f"{value.__name__}(...)"
        )
    missing = [attribute for attribute in needed if not hasattr(value, attribute)]
    if missing:
        lacks = f" (it has no {missing[0]})" if len(missing) < len(needed) else ""
        raise TypeError(f"{name} must be one such as {example}, got {value!r}{lacks}")


def require(module: str, extra: str) -> Any:
    """Imports a library that one of specjax's extras installs.

    Args:
      module: the library's name, such as "sacrebleu".
      extra: the extra's name, such as "eval".

    Returns:
      The module.

    Raises:
      ImportError: it cannot be imported; the message gives the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == module
        reason = "is not installed" if absent else f"cannot be imported ({error})"
        raise ImportError(
            f"{module} {reason}; install it with: pip install 'specjax[{extra}]'", name=module
        ) from None


def checked(
    name: str,
    value: Any,
    *,
    low: float = -np.inf,
    high: float = np.inf,
    open_low: bool = False,
    open_high: bool = False,
    dtype: Any = np.float32,
) -> Any:
    """Checks a number that a user gives, and fixes its dtype so that a sweep compiles once.

    Args:
      name: the argument's name, for the message.
      value: a number or an array of one number per row; a traced value is not checked.
      low: the smallest value allowed.
      high: the largest value allowed.
      open_low: whether `low` itself is excluded.
      open_high: whether `high` itself is excluded.
      dtype: the dtype of the result.

    Returns:
      `value` as an array of `dtype`.

    Raises:
      TypeError: if `value` is not numeric.
      ValueError: if any entry is NaN, outside the range or too large for the dtype, or `value` has
        more than one axis.
    """
    if isinstance(value, jax.core.Tracer):
        return value.astype(dtype)
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise TypeError(f"{name} must be a number or one number per row, got {value!r}") from error
    if array.dtype.kind not in "iuf" and array.dtype != jax.numpy.bfloat16:
        raise TypeError(f"{name} must be a number, got {value!r}")
    if array.ndim > 1 or not array.size:
        raise ValueError(f"{name} must be a number or one number per row, got shape {array.shape}")
    whole = np.dtype(dtype).kind == "i"
    exact = array.astype(np.float64)
    if whole:
        limit = np.iinfo(dtype).max
        low, high = max(low, -limit), min(high, limit)
        good = np.trunc(exact) == exact
    else:
        with np.errstate(over="ignore"):
            used = exact.astype(dtype).astype(np.float64)
        # The rounded value is compared too: float32(1 - 1e-9) is 1, and float32(1e39) is infinite.
        good = _within(used, low, high, open_low, open_high)
        good &= np.isfinite(used) | ~np.isfinite(exact)
    good &= _within(exact, low, high, open_low, open_high)
    if not np.all(good):
        row = f" in row {int(np.argmin(good))}" if array.ndim else ""
        bad = array.reshape(-1)[np.argmin(good)]
        span = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
        kind = "be a whole number in" if whole else "lie in"
        raise ValueError(f"{name} must {kind} {span}, got {bad}{row}")
    return array.astype(dtype)


def _within(x: Any, low: float, high: float, open_low: bool, open_high: bool) -> Any:
    return (x > low if open_low else x >= low) & (x < high if open_high else x <= high)


def check_scalars(tree: Any) -> None:
    """Raises ValueError (at trace time) unless each strength is one number: none may broadcast."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jax.numpy.ndim(leaf):
            name = f"{type(tree).__name__}{jax.tree_util.keystr(path)}"
            raise ValueError(
                f"{name} has shape {jax.numpy.shape(leaf)}, but must be one number per position: "
                "vmap over the rows"
            )
