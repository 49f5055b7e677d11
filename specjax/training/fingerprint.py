"""What determines a training run, as JSON values that two starts of it can compare."""

import dataclasses
import hashlib
import json
from typing import Any

import jax
import numpy as np

from specjax.models import ModelConfig, config_to_dict
from specjax.types import Params


def describe(value: Any) -> Any:
    """A frozen configuration as JSON values, each with its class's name.

    Args:
      value: a plain value, a network's configuration, or a dataclass of such.

    Returns:
      JSON values.

    Raises:
      TypeError: for what JSON cannot hold, such as a function.
    """
    if isinstance(value, ModelConfig):
        return config_to_dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"class": type(value).__name__, **fields}
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        raise TypeError(
            f"{value!r} cannot be recorded with the run; make it a frozen dataclass of plain "
            "values, such as InverseSqrt"
        ) from None


def digest(params: Params) -> str:
    """A short hash of a pytree of arrays: dtypes, shapes and contents."""
    sha = hashlib.sha256()
    for array in map(np.ascontiguousarray, jax.tree.leaves(params)):
        sha.update(f"{array.dtype}{array.shape}".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()[:16]
