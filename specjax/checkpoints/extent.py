"""How much a checkpoint claims to hold, compared with what there is: before anything is made."""

import math
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from specjax.checkpoints.arrays import ArraySpec
from specjax.memory import check_fits, nbytes
from specjax.models.config import ModelConfig

# So many layers are soon traced, and so many weights are traced without an overflow.
_LAYERS, _WEIGHTS = 1_000, 10**12
_COPY = "copy the whole checkpoint again"


def check_arrays(path: Path, specs: Mapping[str, ArraySpec]) -> None:
    """Refuses arrays that the host cannot hold one at a time, as a damaged shape makes them.

    Args:
      path: the checkpoint, for messages.
      specs: its arrays.

    Raises:
      ValueError: naming the largest one.
    """
    name = max(specs, key=lambda name: specs[name].nbytes)
    what = f"{path}: the numbers of {name} of shape {specs[name].shape}"
    check_fits(what, specs[name].nbytes, _COPY)


def check_config(path: Path, config: ModelConfig, specs: Mapping[str, ArraySpec]) -> None:
    """Refuses a configuration that is far from the arrays, before its layers are traced.

    Args:
      path: the checkpoint, for messages.
      config: the configuration.
      specs: the arrays. What is nearer to them is told array by array, elsewhere.

    Raises:
      ValueError: if it asks for far more.
    """
    stored = sum(math.prod(spec.shape) for spec in specs.values())
    layers, weights = max(len(specs), _LAYERS), max(10 * stored, _WEIGHTS)
    if config.num_layers_in_all > layers or config.num_weights > weights:
        raise ValueError(
            f"{path}: the configuration asks for {config.num_layers_in_all:,} layers with "
            f"{config.num_weights:,} weights, but there are {len(specs):,} arrays with {stored:,} "
            "numbers. Give the checkpoint and the configuration that belong together"
        )


def check_params(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
    shardings: Mapping[str, jax.sharding.Sharding],
) -> None:
    """Refuses parameters that cannot fit, before they are read.

    Args:
      path: the checkpoint, for messages.
      shapes: of the parameters.
      dtype: of all of them.
      shardings: where they are to lie.

    Raises:
      ValueError: with an estimate.
    """
    leaves = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    check_fits(
        f"{path}: the parameters in {dtype}",
        nbytes(leaves, {name: shardings[name] for name in leaves}),
        "load them in bfloat16, or over more devices",
        set().union(*(sharding.device_set for sharding in shardings.values())),
    )
