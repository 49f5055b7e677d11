"""A mesh, rules for named axes, and the partitioner that gives every array its sharding.

A mesh has the axes `data` (rows of a batch) and `model` (heads, feed-forward width, vocabulary).
Rules map logical axes to mesh axes, as in T5X: each dimension takes the first rule of its name
whose mesh axis is still free in this array. A dimension that its mesh axis does not divide is not
split (replicated): a Llama with 2 key-value heads runs on `model=4`, and each device has all its
keys and values. A head is never split: a kernel's joined dimension is split only if the mesh axis
divides the number of heads.

The networks do not mention a mesh: the compiler follows the shardings of the arrays.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.checks import check_count
from specjax.errors import UserError
from specjax.types import Axes, LanguageModel, Params, row_axes

AxisRules = Sequence[tuple[str, str | None]]

# T5X's standard rules for one-dimensional partitioning, with additional axes that T5 lacks.
STANDARD_RULES: AxisRules = (
    ("batch", "data"),
    ("vocab", "model"),
    ("experts", "model"),  # before "mlp": an expert is split only if there are too few
    ("routes", None),
    ("embed", None),
    ("mlp", "model"),
    ("heads", "model"),
    ("kv_heads", "model"),
    ("kv", None),
    ("joined_kv", "model"),
    ("joined_grouped_kv", "model"),
    ("delta_heads", "model"),
    ("joined_delta_keys", "model"),
    ("joined_delta_values", "model"),
    ("joined_delta_heads", "model"),
    ("window", None),
    ("relpos_buckets", None),
    ("length", None),
)

# Only the rows are spread; each device that computes a row has everything else.
WHOLE_RULES: AxisRules = tuple(
    (name, axis if name == "batch" else None) for name, axis in STANDARD_RULES
)


def make_mesh(
    data: int | None = None, model: int = 1, *, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh of `data * model` devices, with the axes `data` and `model`.

    Args:
      data: the number of devices that the rows are split over; by default the number of devices
        divided by `model`.
      model: the number of devices that the computation of each row is split over.
      devices: the devices; by default those of all processes.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = {"model": model} if data is None else {"data": data, "model": model}
    for name, size in sizes.items():
        check_count(f"mesh size {name}", size, "give numbers of devices")
    if not devices:
        raise UserError("devices must have at least one device, got []: leave it out for all")
    count = len(devices)
    if data is None:
        data = max(1, count // model)
        if data * model < count:
            raise UserError(f"model={model} does not divide {count} devices: give `data` too")
    if data * model > count:
        product = " times ".join(f"{name}={size}" for name, size in sizes.items())
        raise UserError(
            f"{product} needs {data * model} devices, but there {'is' if count == 1 else 'are'} "
            f"{count}: choose smaller sizes"
        )
    left_out = {d.process_index for d in devices} - {
        d.process_index for d in devices[: data * model]
    }
    if left_out:
        raise UserError(
            f"data={data} times model={model} leaves out the devices of process {min(left_out)}: "
            f"spread the program over all {len(devices)} devices"
        )
    # `Mesh`, not `jax.make_mesh`: its axes are Auto, so the compiler propagates shardings.
    return Mesh(np.asarray(devices[: data * model]).reshape(data, model), ("data", "model"))


def partition_spec(
    shape: Sequence[int],
    axes: Sequence[str | None],
    mesh: Mesh,
    rules: AxisRules = STANDARD_RULES,
    units: Mapping[str, int] | None = None,
) -> PartitionSpec:
    """The mesh axis that each dimension of an array is split over.

    Args:
      axes: the logical name of each dimension; a dimension with None is not split.
      rules: pairs of a logical axis and a mesh axis, or None for an axis that is not split.
      units: name -> size of a unit that must not be split; 1 by default.
    """
    if unknown := {axis for _, axis in rules if axis is not None} - set(mesh.axis_names):
        raise UserError(
            f"rules must name axes of the mesh, {list(mesh.axis_names)}, got {sorted(unknown)}"
        )
    if unruled := set(axes) - {name for name, _ in rules} - {None}:
        raise UserError(
            f"rules have no entry for the logical axes {sorted(map(str, unruled))}: add "
            "(name, None) for an axis that is not split"
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


@dataclasses.dataclass(frozen=True)
class Partitioner:
    """Turns logical axis names into shardings on one mesh; static and hashable.

    Attributes:
      mesh: from `make_mesh`.
      rules: see `partition_spec`.
    """

    mesh: Mesh
    rules: AxisRules = STANDARD_RULES

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh):
            raise UserError(
                f"mesh must come from specjax.partitioning.make_mesh, got {self.mesh!r}"
            )
        object.__setattr__(self, "rules", tuple(map(tuple, self.rules)))

    @property
    def row_multiple(self) -> int:
        """The number of rows must be a multiple of this, so that devices share them evenly."""
        return self.ways("batch")

    def ways(self, name: str) -> int:
        """The number of devices that split an axis of this logical name, if its size allows it."""
        axis = next((axis for logical, axis in self.rules if logical == name), None)
        return 1 if axis is None else self.mesh.shape[axis]

    def shardings(self, shapes: Any, axes: Axes, units: Mapping[str, int] | None = None) -> Any:
        """The shardings of a tree of arrays or shapes, by the names of their axes."""

        def sharding(leaf: Any, names: Any) -> NamedSharding:
            spec = partition_spec(leaf.shape, names, self.mesh, self.rules, units)
            return NamedSharding(self.mesh, spec)

        return jax.tree.map(sharding, shapes, axes)

    def param_shardings(self, model: LanguageModel, params: Params) -> Any:
        """The shardings of a model's parameters, which are arrays or shapes."""
        return self.shardings(params, model.param_axes(params), model.axis_units())

    def place(self, tree: Any, shardings: Any) -> Any:
        """Places arrays with `shardings`; each process has the whole arrays, and keeps its part."""

        def place(leaf: Any, sharding: Any) -> jax.Array:
            if isinstance(leaf, jax.Array):
                return jax.device_put(leaf, sharding)
            whole = np.asarray(leaf)
            return jax.make_array_from_callback(whole.shape, sharding, lambda at: whole[at])

        return jax.tree.map(place, tree, shardings)

    def replicate(self, tree: Any) -> Any:
        """Places the whole arrays on every device; see `place`."""
        return self.place(tree, jax.tree.map(lambda _: NamedSharding(self.mesh, jax.P()), tree))

    def place_rows(self, tree: Any) -> Any:
        """Places arrays whose leading axis is the batch, split over the rows; see `place`."""
        arrays = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.asarray(x), tree)
        return self.place(arrays, self.shardings(arrays, row_axes(arrays)))
