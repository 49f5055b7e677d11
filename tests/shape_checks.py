"""The check of shapes and dtypes that jaxtyping's import hook applies while tests run.

Only annotations of arrays are checked: a user's wrong value must reach the message that names it.
"""

import functools
import inspect
import types
import typing

import jax
import jaxtyping
import numpy as np

# The packages whose functions are traced. The others take users' values.
PACKAGES = (
    "acceptance_head",
    "decoding",
    "drafting",
    "models",
    "processing",
    "processors",
    "rules",
    "sampling",
    "types",
    "verification",
)


def install():
    names = [f"specjax.{name}" for name in PACKAGES]
    jaxtyping.install_import_hook(names, "tests.shape_checks.checked")


def checked(function):
    """Checks the arrays of a function's arguments and result."""
    if function.__name__ == "__init__":  # JAX makes pytrees of anything, by row too
        return function
    signature = inspect.signature(function)
    hints = {name: p.annotation for name, p in signature.parameters.items()}
    hints = {name: hint for name, hint in hints.items() if _has_array(hint)}
    returned = signature.return_annotation
    returns = _has_array(returned)
    if not hints and not returns:
        return function

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        arguments = signature.bind(*args, **kwargs).arguments
        for name, hint in hints.items():
            if name in arguments and not _fits(arguments[name], hint):
                raise TypeError(f"{name} must be {hint}, got {_told(arguments[name])}")
        result = function(*args, **kwargs)
        if returns and not _fits(result, returned):
            raise TypeError(f"the result must be {returned}, got {_told(result)}")
        return result

    return wrapped


def _has_array(hint):
    if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_has_array, typing.get_args(hint)))


def _fits(value, hint):
    if not _has_array(hint):  # not checked, but for None in a union
        return value is None if hint in (None, types.NoneType) else True
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is tuple and Ellipsis not in parts:
        return len(value) == len(parts) and all(map(_fits, value, parts))
    if origin is dict:
        return all(_fits(each, parts[1]) for each in value.values())
    if not inspect.isclass(hint):
        return True
    if isinstance(value, np.ndarray) and hint.array_type is jax.Array:  # JAX takes both
        hint = hint.dtype[np.ndarray, hint.dim_str]
    return isinstance(value, hint)


def _told(value):
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else repr(value)[:80]
