"""What a run's random streams and floats hang on besides its settings: recorded, and compared.

`environments.json` in the run's directory lists each environment in which the run was trained, with
the step at which it took over.
"""

import hashlib
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from specjax.runs.environment import compiling, device, xla_flags
from specjax.runs.run_directory import RunDirectory
from specjax.training.step import GENERATOR, root_key

ENVIRONMENTS_NAME = "environments.json"
PACKAGES = ("specjax", "jax", "jaxlib", "flax", "optax", "numpy")


class _Dropout(nn.Module):
    """Dropout inside a named layer, as a network has it: flax derives its key from the path."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dropout(0.5, deterministic=False, name="layer")(x)


def streams() -> str:
    """A hash of what the generators of a run draw from fixed seeds.

    Versions tell that streams may have changed; this tells whether they have: the keys of steps,
    the initialisers' normals, the masks of dropout, and the order of the data.

    Returns:
      16 hexadecimal digits.
    """
    key = jax.random.fold_in(root_key(0), 1)
    drawn = [
        jax.random.bits(key, (64,)),
        # Rounded: it must not tell one device's floats from another's.
        jnp.round(jax.random.normal(key, (64,)) * 100.0).astype(jnp.int32),
        _Dropout().apply({}, jnp.ones(64), rngs={"dropout": key}),
        np.random.default_rng([0, 1]).permutation(64),
    ]
    sha = hashlib.sha256()
    for array in map(np.asarray, drawn):
        sha.update(array.tobytes())
    return sha.hexdigest()[:16]


def environment() -> dict[str, Any]:
    """Versions, device, random generator and what it draws, as JSON values."""
    return {
        "versions": {name: _version(name) for name in PACKAGES},
        "device": device(),
        "xla_flags": xla_flags(),
        **compiling(),
        "generator": GENERATOR,
        "streams": streams(),
    }


def check_environment(run: RunDirectory, step: int, *, allow_other_streams: bool) -> None:
    """Records the environment of a run, or compares it with the one that trained it last.

    Streams that have changed are refused, for half of the run would drop and order by one, half by
    the other. Another device or version draws the same but rounds otherwise: the run may go on,
    though not to the bits of an uninterrupted one, and says so on stderr.

    Args:
      run: the run's directory; claimed.
      step: from which the run goes on.
      allow_other_streams: go on with other streams, too.

    Raises:
      ValueError: the random streams are not those with which the run began, or the record is
        damaged.
    """
    path = run.own(ENVIRONMENTS_NAME)
    ours = environment()
    history = _read(path)
    if step == 0:
        history = []
    if history:
        theirs = {name: value for name, value in history[-1].items() if name != "step"}
        if theirs == ours:
            return
        told = _differences(theirs, ours)
        if theirs["streams"] != ours["streams"] and not allow_other_streams:
            raise ValueError(
                f"the run in {run.path} was trained with other random streams ({told}); install "
                "these versions again, choose another output_dir, or set "
                "allow_other_streams=True to go on with a mixture"
            )
        print(
            f"specjax: warning: the run in {run.path} was trained in another environment "
            f"({told}); it goes on, but will not end with the bits of an uninterrupted run",
            file=sys.stderr,
        )
    history.append({"step": step, **ours})
    run.write(ENVIRONMENTS_NAME, (json.dumps(history, indent=1) + "\n").encode())


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # specjax run from its source tree
        return None


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        history = json.loads(path.read_bytes())
        assert all(entry["versions"].keys() and entry["streams"] for entry in history)
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError):
        raise ValueError(
            f"{path} is damaged; delete it, and the run goes on without comparing environments"
        ) from None
    return history


def _differences(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """The values that differ, in words, versions first."""
    pairs = {**{name: (theirs["versions"].get(name), ours["versions"][name]) for name in PACKAGES}}
    # A record of an earlier version may lack some.
    pairs |= {
        name: (theirs.get(name), ours.get(name)) for name in sorted({*theirs, *ours} - {"versions"})
    }
    return ", ".join(f"{name}: {a} there, {b} here" for name, (a, b) in pairs.items() if a != b)
