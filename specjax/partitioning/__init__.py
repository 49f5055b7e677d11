"""A mesh, logical axis rules, and the shardings they give parameters, caches and batches."""

from specjax.partitioning.mesh import (
    STANDARD_RULES,
    Rules,
    batch_shardings,
    cache_shardings,
    make_mesh,
    param_shardings,
    partition_spec,
)

__all__ = [
    "STANDARD_RULES",
    "Rules",
    "batch_shardings",
    "cache_shardings",
    "make_mesh",
    "param_shardings",
    "partition_spec",
]
