"""Places decoding states by T5X's own logical axis rules, on T5X's own mesh."""

import math
from typing import Any

import jax
from flax.core.spmd import get_logical_axis_rules
from flax.linen.partitioning import logical_to_mesh_axes
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from t5x import partitioning

# An axis without a name in T5X is split like another axis.
_ALIASES = {"kv_heads": "heads"}


def constrain(tree: Any, axes: Any) -> Any:
    """Constrains arrays to the placement of T5X's partitioner for their logical axes; traced.

    A dimension that the devices do not divide evenly stays whole. Without a partitioner around the
    call there is no constraint.

    Args:
      tree: a pytree of traced arrays.
      axes: the same structure with a tuple of logical axis names in place of each array.

    Returns:
      The tree.
    """
    mesh = partitioning.pxla.thread_resources.env.physical_mesh
    rules = tuple(get_logical_axis_rules())
    if mesh.empty or not rules:
        return tree

    def place(leaf: Any, names: tuple[str | None, ...]) -> Any:
        spec = partition_spec(leaf.shape, names, mesh, rules)
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(place, tree, axes)


def partition_spec(
    shape: tuple[int, ...],
    names: tuple[str | None, ...],
    mesh: Mesh,
    rules: tuple[tuple[str, Any], ...],
) -> PartitionSpec:
    """The split of an array by T5X's rules, except dimensions that do not divide.

    Args:
      shape: the array's shape.
      names: the logical names of its axes.
      mesh: T5X's mesh.
      rules: pairs of a logical axis and a mesh axis, several mesh axes, or None.
    """
    wanted = logical_to_mesh_axes([_ALIASES.get(n, n) if n else None for n in names], rules)
    spec: list[Any] = []
    for size, axis in zip(shape, wanted or (), strict=True):
        parts = axis if isinstance(axis, tuple) else (axis,) if axis else ()
        whole = not parts or size % math.prod(mesh.shape[part] for part in parts)
        spec.append(None if whole else axis)
    return PartitionSpec(*spec)
