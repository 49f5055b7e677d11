"""The partitioner: it chooses the sharding of every array from the names of its axes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from specjax.errors import UserError
from specjax.partitioning.mesh import STANDARD_RULES, AxisRules, partition_spec
from specjax.types import Axes, LanguageModel, Params, row_axes


@dataclasses.dataclass(frozen=True)
class Partitioner:
    """Turns logical axis names into shardings on one mesh; static and hashable.

    Attributes:
      mesh: from `make_mesh`.
      rules: pairs of a logical axis and a mesh axis, or None for an axis that is not split; see
        `partition_spec`.
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
        """The number of rows must be a multiple of this, so that the devices share them evenly."""
        return self.ways("batch")

    def ways(self, name: str) -> int:
        """The number of devices that split an axis of this logical name, if its size allows it."""
        axis = next((axis for logical, axis in self.rules if logical == name), None)
        return 1 if axis is None else self.mesh.shape[axis]

    def shardings(self, shapes: Any, axes: Axes, units: Mapping[str, int] | None = None) -> Any:
        """The shardings of the arrays of a tree.

        Args:
          shapes: a pytree of arrays or shapes.
          axes: the same structure with a tuple of logical axis names instead of each array.
          units: axis name -> size of a unit that must not be split; 1 by default.

        Returns:
          A pytree of `NamedSharding` like `shapes`.
        """

        def sharding(leaf: Any, names: Any) -> NamedSharding:
            spec = partition_spec(leaf.shape, names, self.mesh, self.rules, units)
            return NamedSharding(self.mesh, spec)

        return jax.tree.map(sharding, shapes, axes)

    def param_shardings(self, model: LanguageModel, params: Params) -> Any:
        """The shardings of a model's parameters; `params` are arrays or shapes.

        Returns:
          A pytree of `NamedSharding` like `params`.
        """
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


def local_rows(array: Any) -> tuple[np.ndarray, np.ndarray]:
    """The rows of an array that belong to this process; each row belongs to a single process.

    Args:
      array: `[B, ...]`, split over its leading axis or not split.

    Returns:
      `[n]` the increasing indices of the rows, and `[n, ...]` the rows. With one process: all rows.
    """
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        whole = np.asarray(array)
        return np.arange(len(whole)), whole
    # Of the devices with the same rows, exactly one has replica 0.
    owned = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    parts = {shard.index[0].start or 0: np.asarray(shard.data) for shard in owned}
    if not parts:
        return np.arange(0), np.zeros((0, *array.shape[1:]), array.dtype)
    starts = sorted(parts)
    places = [np.arange(start, start + len(parts[start])) for start in starts]
    return np.concatenate(places), np.concatenate([parts[start] for start in starts])
