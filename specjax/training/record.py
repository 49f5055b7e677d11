"""The settings that determine a training run, as comparable JSON values."""

import dataclasses
import importlib.metadata
import json
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from specjax.environment import environment
from specjax.fingerprints import digest
from specjax.models import ModelConfig, config_to_dict
from specjax.training.step import GENERATOR, root_key


def describe(value: Any) -> Any:
    """A frozen configuration as JSON values, each with the name of its class."""
    if isinstance(value, ModelConfig):
        return config_to_dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"class": type(value).__name__, **fields}
    return json.loads(json.dumps(value))


def training_environment() -> dict[str, Any]:
    """The environment that a run's random numbers and rounding depend on, as JSON values."""
    versions = {name: importlib.metadata.version(name) for name in ("flax", "optax", "numpy")}
    common = environment()
    return {
        **common,
        "versions": {**common["versions"], **versions},
        "generator": GENERATOR,
        "streams": streams(),
    }


class _Dropout(nn.Module):
    """Dropout inside a named layer, as in a network: flax derives its key from the path."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dropout(0.5, deterministic=False, name="layer")(x)


def streams() -> str:
    """A hash of the numbers that a run's generators draw from fixed seeds.

    Versions only show that streams may have changed; this shows whether they have: the keys of
    steps, the initialisers' normals, the masks of dropout, and the order of the data.

    Returns:
      16 hexadecimal digits.
    """
    key = jax.random.fold_in(root_key(0), 1)
    drawn = [
        jax.random.bits(key, (64,)),
        # Rounded, so that the floats of all devices agree.
        jnp.round(jax.random.normal(key, (64,)) * 100.0).astype(jnp.int32),
        _Dropout().apply({}, jnp.ones(64), rngs={"dropout": key}),
        np.random.default_rng([0, 1]).permutation(64),
    ]
    return digest(drawn)
