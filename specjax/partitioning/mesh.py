"""Spreading parameters, caches and batches over a mesh by the names of their axes.

A mesh has the axes `data` (rows of a batch) and `model` (heads, feed-forward width, vocabulary).
Rules say which mesh axis a logical axis goes to, as in T5X: in order, each dimension takes the
first rule of its name whose mesh axis is still free in this array. A dimension that its mesh axis
does not divide is left whole (replicated): a Llama with 2 key-value heads runs on `model=4`, each
device holding all its keys and values. Heads are never cut through: a kernel's joined dimension is
split only if the number of heads is divisible.

Nothing inside the networks mentions a mesh: arrays are placed, and the compiler follows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.models import Model, RaggedCache
from specjax.models.cache import logical_axes

Rules = Sequence[tuple[str, str | None]]

# T5X's standard rules for one-dimensional partitioning, and the axes that T5 does not have.
STANDARD_RULES: Rules = (
    ("batch", "data"),
    ("vocab", "model"),
    ("embed", None),
    ("mlp", "model"),
    ("heads", "model"),
    ("kv_heads", "model"),
    ("kv", None),
    ("joined_kv", "model"),
    ("joined_grouped_kv", "model"),
    ("relpos_buckets", None),
    ("length", None),
)


def make_mesh(
    data: int | None = None, model: int = 1, *, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh of `data * model` devices.

    Args:
      data: over how many devices the rows are spread; by default all that `model` leaves.
      model: over how many devices each row's arithmetic is spread.
      devices: the devices; all of this process group's by default.

    Returns:
      A mesh with the axes `data` and `model`, of which the compiler places what is in between.

    Raises:
      TypeError: if a size is not a whole number.
      ValueError: if the sizes do not fit the number of devices, or there are none.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = {"model": model} if data is None else {"data": data, "model": model}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise TypeError(f"mesh sizes must be whole numbers, got {name}={size!r}")
    if not devices:
        raise ValueError("devices=[] has no device for a mesh: give some, or leave it out")
    if model < 1 or (data is not None and data < 1):
        raise ValueError(f"mesh sizes must be at least 1, got data={data}, model={model}")
    if data is None:
        data = len(devices) // model
        if data * model != len(devices):
            raise ValueError(
                f"model={model} does not divide {len(devices)} devices: give data as well"
            )
    if data * model > len(devices):
        raise ValueError(
            f"data={data} times model={model} needs {data * model} devices but there are "
            f"{len(devices)}"
        )
    # `Mesh` rather than `jax.make_mesh`: its axes are Auto, so the compiler propagates shardings.
    return Mesh(np.asarray(devices[: data * model]).reshape(data, model), ("data", "model"))


def partition_spec(
    shape: Sequence[int],
    axes: Sequence[str],
    mesh: Mesh,
    rules: Rules = STANDARD_RULES,
    units: Mapping[str, int] | None = None,
) -> PartitionSpec:
    """Which mesh axis each dimension of an array is split over.

    Args:
      shape: of the array.
      axes: the logical name of each dimension.
      mesh: the mesh.
      rules: pairs of a logical axis and a mesh axis, or None to leave it whole.
      units: name -> size of what must not be cut through; 1 by default.

    Returns:
      A `PartitionSpec`.

    Raises:
      ValueError: for a logical axis without a rule, or a rule to a mesh axis that is not there.
    """
    if unknown := {axis for _, axis in rules if axis is not None} - set(mesh.axis_names):
        raise ValueError(
            f"rules name the mesh axes {sorted(unknown)} but the mesh has {list(mesh.axis_names)}"
        )
    if unruled := set(axes) - {name for name, _ in rules}:
        raise ValueError(
            f"no rule for the logical axes {sorted(unruled)}: add (name, None) to leave them whole"
        )
    spec: list[str | None] = [None] * len(shape)
    settled = [False] * len(shape)
    for name, mesh_axis in rules:
        for i, axis in enumerate(axes):
            if axis != name or settled[i] or (mesh_axis is not None and mesh_axis in spec):
                continue
            unit = (units or {}).get(name, 1)
            if mesh_axis is None:
                settled[i] = True
            elif shape[i] % (mesh.shape[mesh_axis] * unit) == 0:
                spec[i], settled[i] = mesh_axis, True
    return PartitionSpec(*spec)


def param_shardings(model: Model, mesh: Mesh, rules: Rules = STANDARD_RULES) -> Any:
    """Where each parameter lies.

    Args:
      model: the model.
      mesh: the mesh.
      rules: see `partition_spec`.

    Returns:
      A pytree of `NamedSharding` like the parameters; `jax.device_put(params, ...)` takes it.

    Raises:
      ValueError: see `partition_spec`.
    """
    units = model.axis_units()
    return jax.tree.map(
        lambda leaf, axes: NamedSharding(
            mesh, partition_spec(leaf.shape, axes, mesh, rules, units)
        ),
        model.abstract_params(),
        model.logical_axes(),
    )


def cache_shardings(cache: RaggedCache, mesh: Mesh, rules: Rules = STANDARD_RULES) -> Any:
    """Where each part of a cache lies.

    Args:
      cache: a cache of arrays or of shapes (`jax.eval_shape` of a prefill).
      mesh: the mesh.
      rules: see `partition_spec`.

    Returns:
      A pytree of `NamedSharding` like the cache.

    Raises:
      ValueError: see `partition_spec`.
    """
    return jax.tree.map(
        lambda leaf, axes: NamedSharding(mesh, partition_spec(leaf.shape, axes, mesh, rules)),
        cache,
        logical_axes(cache),
    )


def batch_shardings(tree: Any, mesh: Mesh, rules: Rules = STANDARD_RULES) -> Any:
    """Where arrays lie whose leading axis is the batch: tokens, positions, the state of a loop.

    Args:
      tree: a pytree of arrays or shapes.
      mesh: the mesh.
      rules: see `partition_spec`.

    Returns:
      A pytree of `NamedSharding` like `tree`; leaves without axes are replicated.

    Raises:
      ValueError: see `partition_spec`.
    """

    def sharding(leaf: Any) -> NamedSharding:
        spec = partition_spec(leaf.shape[:1], ("batch",)[: leaf.ndim], mesh, rules)
        return NamedSharding(mesh, spec)

    return jax.tree.map(sharding, tree)
