"""The programs of a method on a mesh, lowered for shapes: nothing is allocated.

The devices may be those of another machine (`jax.experimental.topologies`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from specjax.compilation import placement
from specjax.decoding.method import (
    ByToken,
    Method,
    first_state,
    jitted_init,
    jitted_insert,
    jitted_run,
)
from specjax.models.model import Model
from specjax.models.quantised import quantised_form
from specjax.partitioning import Partitioner
from specjax.types import DecodeState, Params, PromptBatch, Sampling, row_axes

PROGRAMS = ("prefill", "step", "refill")


class Sizes(NamedTuple):
    """B slots, n refilled, L prompt, N output, S cache, G draft."""

    rows: int = 16
    refill: int = 8
    prompt: int = 7
    output: int = 12
    cache: int = 37
    draft: int = 4


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """The shapes of a pytree, each with its sharding of a pytree like it."""
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        shapes,
        shardings,
    )


def abstract_quantised(params: Params, form: str | None) -> Params:
    """The shapes of a model's quantised parameters, from `Model.abstract_params`."""

    def change(path: Any, leaf: Any) -> Any:
        kind = quantised_form("/".join(str(key.key) for key in path), leaf.shape, form)
        return leaf if kind is None else kind.abstract(leaf.shape)

    return jax.tree_util.tree_map_with_path(change, params)


def of_params(model: Model, part: Partitioner, weights: str | None = None) -> Any:
    """The shapes of a model's parameters, with shardings; `weights` as for `load_model`."""
    shapes = abstract_quantised(model.abstract_params(), weights)
    return with_shardings(shapes, part.param_shardings(model, shapes))


def of_numbers(tree: Any, part: Partitioner) -> Any:
    """The shapes of the numbers of a rule or a policy; every device has them."""
    where = NamedSharding(part.mesh, jax.P())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.float32), tree)
    return with_shardings(shapes, jax.tree.map(lambda _: where, shapes))


def lower_programs(
    method: Method,
    params: Any,
    sizes: Sizes,
    programs: tuple[str, ...] = PROGRAMS,
    *,
    filtered: bool = False,
) -> dict[str, jax.stages.Lowered]:
    """The programs of a method, ready to be compiled, by names in `PROGRAMS`.

    The method has a partitioner, and `params` the shapes of its parameters with shardings. "step"
    is the loop of steps. `filtered`: top-p filters the tokens.
    """
    part = method.partitioner
    assert part is not None
    everywhere = NamedSharding(part.mesh, jax.P())

    def of_ints(*shape: int) -> jax.ShapeDtypeStruct:
        """The shape of int32 numbers that every device has in whole."""
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=everywhere)

    def first(rows: int) -> tuple[jax.stages.Lowered, DecodeState]:
        """The program of `method.init`, and the shapes of its result."""
        prompts = _prompts(rows, sizes, part, filtered)
        static = (sizes.output, sizes.cache, ByToken(), 1)
        shapes, where = first_state(method, static, params, prompts)
        program = jitted_init(where).lower(method, *static, params, prompts)
        leaves, structure = jax.tree.flatten(shapes)
        return program, jax.tree.unflatten(structure, with_shardings(leaves, list(where[1])))

    prefill, state = first(sizes.rows)
    where, stop = placement(state), of_ints()

    def refill() -> jax.stages.Lowered:
        return jitted_insert(where).lower(state, of_ints(sizes.refill), first(sizes.refill)[1])

    make = {
        "prefill": lambda: prefill,
        "step": lambda: jitted_run(where).lower(method, params, state, stop, stop),
        "refill": refill,
    }
    return {name: make[name]() for name in programs}


def _prompts(rows: int, sizes: Sizes, part: Partitioner, filtered: bool) -> PromptBatch:
    """The shapes of prompts, with shardings. Each row has its own sampling, as in an engine."""
    each: Any = np.ones(rows, np.float32)
    batch = PromptBatch(
        np.ones((rows, sizes.prompt), np.int32),
        np.full(rows, sizes.prompt, np.int32),
        ids=np.zeros(rows, np.uint32),
        seeds=np.zeros(rows, np.uint32),
        limits=np.full(rows, sizes.output, np.int32),
        sampling=Sampling(temperature=each, top_p=each if filtered else None),
    )
    return with_shardings(batch, part.shardings(batch, row_axes(batch)))
