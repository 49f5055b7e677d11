"""tunix's weights as specjax's: an update in place.

Axes: E model width, D width of a head, R rank of an adapter.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from tunix.rl.reshard import reshard_pytree
from tunix.rl.utils import to_flat_dict

from specjax.checkpoints.tunix import HEADS_FIRST, NAMES
from specjax.checks import join_names
from specjax.compilation import jit
from specjax.errors import UserError
from specjax.models import Model
from specjax.partitioning import Partitioner, make_mesh
from specjax.types import Params

_ADAPTER = re.compile("(.*)_lora_[ab]")


class Weights:
    """The parameters of specjax's network, which follow those of tunix's.

    Args:
      actor: tunix's network.
      model: specjax's.
      mesh: tunix's, for rollouts.
      lora_scale: alpha / R of the actor's adapters, which are folded in; None if it has none.

    Attributes:
      mesh: specjax's, of the same devices; None for one device.
      params: the parameters.

    Raises:
      UserError: the networks have not the same arrays, or not on devices.
    """

    def __init__(self, actor: Any, model: Model, mesh: Mesh, lora_scale: float | None) -> None:
        arrays, shapes = _by_name(nnx.state(actor, nnx.Param)), model.abstract_params()
        self._adapted = any(map(_ADAPTER.fullmatch, arrays))
        if self._adapted and lora_scale is None:
            raise UserError(
                "`lora_scale` must be given, because the actor has adapters: alpha / rank of "
                "their LoraProvider"
            )
        kinds = {array.sharding.memory_kind for array in arrays.values()}
        if "pinned_host" in kinds:
            raise UserError(
                "`rollout_actor` must have its weights on the devices: set offload_to_cpu=False"
            )
        where: Any = SingleDeviceSharding(mesh.devices.flat[0])
        self.mesh: Mesh | None = None
        self._places = dict.fromkeys(arrays, where)
        if mesh.size > 1:
            ways = mesh.shape.get("tp", 1)
            self.mesh = make_mesh(mesh.size // ways, ways, devices=[*mesh.devices.flat])
            where = Partitioner(self.mesh).param_shardings(model, shapes)
            for name, array in arrays.items():
                self._places[name] = NamedSharding(mesh, getattr(array.sharding, "spec", jax.P()))

        def converted(arrays: Mapping[str, jax.Array], old: Params) -> Params:
            return params_of(arrays, flatten_dict(shapes, sep="/"), lora_scale)

        def zeros() -> Params:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        # The new parameters take the buffers of the old ones.
        self._converted = jit(converted, donate_argnums=1, keep_unused=True, out_shardings=where)
        self.params: Params = jit(zeros, out_shardings=where)()
        self._whole: dict[str, jax.Array] = {}
        self.update(arrays)

    def update(self, state: Any) -> None:
        """Takes tunix's new arrays: all, or all adapters. The old parameters are lost."""
        arrays = _by_name(state)
        # From other devices; or to the same layout, so that one program serves all updates. JAX
        # would bring another layout of the same devices over the host, so the program takes it.
        moved = {
            name: place
            for name, place in self._places.items()
            if (array := arrays.get(name)) is not None
            and (
                array.sharding.device_set != place.device_set
                or array.sharding.is_equivalent_to(place, array.ndim)
            )
        }
        if moved:
            arrays |= reshard_pytree({name: arrays[name] for name in moved}, moved)
        arrays = self._whole | arrays
        if self._adapted:
            self._whole = arrays
        self.params = self._converted(arrays, self.params)


def params_of(
    arrays: Mapping[str, jax.Array],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    lora_scale: Any = None,
) -> Params:
    """Our parameters from tunix's arrays; to be jitted.

    Args:
      arrays: all of a network, such as "layers.0.attn.q_proj.w" -> array.
      shapes: of our parameters, by path.
      lora_scale: see `Weights`.
    """
    found: dict[str, jax.Array] = {}
    unknown = []
    for name, array in arrays.items():
        adapter = _ADAPTER.fullmatch(name)
        whole = name if adapter is None else adapter[1]
        rest = re.sub(r"^layers\.(\d+)\.", "", whole)
        layer = whole.removesuffix(rest).replace("layers.", "decoder/layers_").replace(".", "/")
        # An adapter of a tied embedding would change the logits alone.
        if rest not in NAMES or (adapter and rest.startswith("embedder.")):
            unknown.append(name)
        elif adapter is None:
            heads_first = rest in HEADS_FIRST
            if f"{name}_lora_a" in arrays:
                # [..., R] and [R, ...].
                a, b = (arrays[f"{name}_lora_{x}"].astype(jnp.float32) for x in "ab")
                change = jnp.tensordot(a, b, 1, precision=jax.lax.Precision.HIGHEST)
                change = jnp.moveaxis(change, 0, -2) if heads_first else change
                array = array.astype(jnp.float32) + lora_scale * change.reshape(array.shape)
            if heads_first:
                array = jnp.swapaxes(array, -3, -2)
            parts = array if len(NAMES[rest]) > 1 else (array,)
            for path, part in zip(NAMES[rest], parts, strict=True):
                shape = shapes[layer + path]
                found[layer + path] = part.reshape(shape.shape).astype(shape.dtype)
    if unknown:
        raise UserError(
            f"`rollout_actor` has {join_names(unknown)}, which specjax's network has not: give a "
            "text network without experts, quantised weights and adapters of the embedding"
        )
    if missing := sorted(set(shapes) - set(found)):
        raise UserError(f"`rollout_actor` has no arrays for {join_names(missing)}")
    return unflatten_dict(found, sep="/")


def _by_name(state: Any) -> dict[str, jax.Array]:
    flat, _ = to_flat_dict(state)
    return {".".join(map(str, path)): array for path, array in flat.items()}
