"""A mesh, rules for logical axes, and the partitioner that gives every array its sharding."""

from specjax.partitioning.mesh import (
    STANDARD_RULES,
    WHOLE_RULES,
    AxisRules,
    make_mesh,
    partition_spec,
)
from specjax.partitioning.partitioner import Partitioner, local_rows

__all__ = [
    "STANDARD_RULES",
    "WHOLE_RULES",
    "AxisRules",
    "Partitioner",
    "local_rows",
    "make_mesh",
    "partition_spec",
]
