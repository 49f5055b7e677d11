"""A mesh, and which of its axes each named axis of an array is split over.

A mesh has the axes `data` (rows of a batch) and `model` (heads, feed-forward width, vocabulary).
Rules say which mesh axis a logical axis goes to, as in T5X: in order, each dimension takes the
first rule of its name whose mesh axis is still free in this array. A dimension that its mesh axis
does not divide is left whole (replicated): a Llama with 2 key-value heads runs on `model=4`, each
device holding all its keys and values. Heads are never cut through: a kernel's joined dimension is
split only if the number of heads is divisible.

Nothing inside the networks mentions a mesh: arrays are placed, and the compiler follows.
"""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

AxisRules = Sequence[tuple[str, str | None]]

# T5X's standard rules for one-dimensional partitioning, and the axes that T5 does not have.
STANDARD_RULES: AxisRules = (
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
    axes: Sequence[str | None],
    mesh: Mesh,
    rules: AxisRules = STANDARD_RULES,
    units: Mapping[str, int] | None = None,
) -> PartitionSpec:
    """Which mesh axis each dimension of an array is split over.

    Args:
      shape: of the array.
      axes: the logical name of each dimension; None leaves it whole.
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
    if unruled := set(axes) - {name for name, _ in rules} - {None}:
        raise ValueError(
            f"no rule for the logical axes {sorted(map(str, unruled))}: add (name, None) to leave "
            "them whole"
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
