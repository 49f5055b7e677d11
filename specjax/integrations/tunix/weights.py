"""tunix's weights as specjax's: one table of names a family, and an update in place.

Axes: E model width, D width of a head, R rank of an adapter.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from tunix.rl.reshard import reshard_pytree
from tunix.rl.utils import to_flat_dict

from specjax.checks import join_names
from specjax.compilation import jit
from specjax.errors import UserError
from specjax.models import Model
from specjax.models.family import HEADS, MLP
from specjax.partitioning import Partitioner, make_mesh
from specjax.types import Params

Names = Mapping[str, tuple[str, ...]]

_THEIRS, _OURS = "layers.{i}.", "decoder/layers_{i}/"
_QKV = tuple(f"{_OURS}self_attention/{name}/kernel" for name in ("query", "key", "value"))
_LORA = re.compile("(.*)_lora_[ab]")


def _layers(names: Mapping[str, str]) -> Names:
    return {_THEIRS + theirs: (_OURS + ours,) for theirs, ours in names.items()}


_SHARED: Names = {
    "embedder.input_embedding": ("token_embedder/embedding",),
    **_layers({f"mlp.{a}_proj.kernel": f"mlp/{b}/kernel" for a, b in MLP.items()}),
}
# Of Llama 3, Qwen 2.5 and Qwen 3: tunix's name -> ours.
LLAMA_NAMES: Names = {
    **_SHARED,
    "final_norm.w": ("decoder/decoder_norm/scale",),
    "lm_head.w": ("decoder/logits_dense/kernel",),
    **_layers({f"attn.{a}_proj.w": f"self_attention/{b}/kernel" for a, b in HEADS.items()}),
    **_layers({f"attn.{a}_bias": f"self_attention/{HEADS[a]}/bias" for a in "qkv"}),
    **_layers({f"attn.{a}_norm.w": f"self_attention/{HEADS[a]}_norm/scale" for a in "qk"}),
    **_layers(
        {
            "input_layernorm.w": "pre_self_attention_layer_norm/scale",
            "post_attention_layernorm.w": "pre_mlp_layer_norm/scale",
        }
    ),
}
# Of Gemma 2 and 3; some arrays stack several parameters.
GEMMA_NAMES: Names = {
    **_SHARED,
    "final_norm.scale": ("decoder/decoder_norm/scale",),
    f"{_THEIRS}attn.qkv_einsum.w": _QKV,
    f"{_THEIRS}attn.q_einsum.w": _QKV[:1],
    f"{_THEIRS}attn.kv_einsum.w": _QKV[1:],
    **_layers(
        {
            "attn.attn_vec_einsum.w": "self_attention/out/kernel",
            "attn._query_norm.scale": "self_attention/query_norm/scale",
            "attn._key_norm.scale": "self_attention/key_norm/scale",
            "pre_attention_norm.scale": "pre_self_attention_layer_norm/scale",
            "post_attn_norm.scale": "post_self_attention_layer_norm/scale",  # Gemma 2
            "post_attention_norm.scale": "post_self_attention_layer_norm/scale",  # Gemma 3
            "pre_ffw_norm.scale": "pre_mlp_layer_norm/scale",
            "post_ffw_norm.scale": "post_mlp_layer_norm/scale",
        }
    ),
}
# Arrays [..., heads, E, D]; in all others the inputs come first.
_HEADS_FIRST = ("qkv_einsum.w", "q_einsum.w", "kv_einsum.w")


class Weights:
    """The parameters of specjax's network, which follow those of tunix's.

    Args:
      actor: tunix's network.
      model: specjax's.
      mesh: tunix's mesh for rollouts.
      lora_scale: alpha / R of the actor's adapters, which are folded in; None if it has none.

    Attributes:
      mesh: specjax's mesh of the same devices; None for one device.
      params: the parameters.

    Raises:
      UserError: the networks have not the same arrays, or are not on devices.
    """

    def __init__(self, actor: Any, model: Model, mesh: Mesh, lora_scale: float | None) -> None:
        arrays = _by_name(nnx.state(actor, nnx.Param))
        adapted = [name for name in arrays if _LORA.fullmatch(name)]
        if adapted and lora_scale is None:
            raise UserError(
                "`lora_scale` must be given, because the actor has adapters: alpha / rank of "
                "their LoraProvider"
            )
        for name, array in arrays.items():
            if array.sharding.memory_kind not in (None, mesh.devices.flat[0].default_memory().kind):
                raise UserError(
                    f"`rollout_actor` has {name} in {array.sharding.memory_kind} memory, but its "
                    "weights must stay on the devices: set offload_to_cpu=False"
                )
        ways = mesh.shape.get("tp", 1)
        self.mesh = None
        one: Sharding = SingleDeviceSharding(mesh.devices.flat[0])
        if mesh.size > 1:
            self.mesh = make_mesh(mesh.size // ways, ways, devices=[*mesh.devices.flat])
        # Always the same, so that the update is compiled once.
        self._places = {
            name: NamedSharding(mesh, getattr(array.sharding, "spec", jax.P()))
            if self.mesh
            else one
            for name, array in arrays.items()
        }
        # tunix sends adapters without the weights that they change.
        frozen = {name: x for name, x in arrays.items() if adapted and name not in adapted}
        self._frozen = self._placed(frozen)
        shapes = model.abstract_params()
        where: Any = one
        if self.mesh is not None:
            where = Partitioner(self.mesh).param_shardings(model, shapes)
        convert = functools.partial(
            params_of,
            names=LLAMA_NAMES if "final_norm.w" in arrays else GEMMA_NAMES,
            shapes=flatten_dict(shapes, sep="/"),
            lora_scale=lora_scale,
        )
        # The old parameters' buffers take the new ones.
        self._updated = jit(
            lambda arrays, old: convert(arrays),
            donate_argnums=1,
            keep_unused=True,
            out_shardings=where,
        )
        zeros = jit(
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
            out_shardings=where,
        )
        self.params: Params = zeros()
        self.update(arrays)

    def update(self, state: Any) -> None:
        """Takes tunix's new arrays, all or all adapters; the old parameters are gone."""
        arrays = self._frozen | self._placed(_by_name(state))
        self.params = self._updated(arrays, self.params)

    def _placed(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        if not arrays:
            return {}
        return reshard_pytree(dict(arrays), {name: self._places[name] for name in arrays})


def params_of(
    arrays: Mapping[str, jax.Array],
    names: Names,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    lora_scale: float | None = None,
) -> Params:
    """Our parameters from all of tunix's arrays, by name; to be jitted.

    Args:
      arrays: such as "layers.0.attn.q_proj.w" -> array.
      names: the family's.
      shapes: of our parameters, by path.
      lora_scale: see `Weights`.
    """
    found: dict[str, jax.Array] = {}
    unknown = []
    for name, array in arrays.items():
        adapter = _LORA.fullmatch(name)
        whose = name if adapter is None else adapter[1]
        layer = match[1] if (match := re.match(r"layers\.(\d+)\.", name)) else ""
        paths = names.get(whose.replace(f"layers.{layer}.", _THEIRS, 1))
        # An adapter of a tied embedding changes the logits alone.
        if paths is None or (adapter is not None and whose.startswith("embedder.")):
            unknown.append(name)
        elif adapter is None:
            heads_first = name.endswith(_HEADS_FIRST)
            if f"{name}_lora_a" in arrays:
                array = _with_adapter(arrays, name, heads_first, lora_scale)
            if heads_first:
                array = jnp.swapaxes(array, -3, -2)
            parts = array if len(paths) > 1 else (array,)
            for path, part in zip(paths, parts, strict=True):
                ours = path.replace("{i}", layer)
                found[ours] = part.reshape(shapes[ours].shape).astype(shapes[ours].dtype)
    if unknown:
        raise UserError(
            f"`rollout_actor` has {join_names(unknown)}, which specjax's network has not: give a "
            "text network without experts, quantised weights and adapters of the embedding"
        )
    if missing := sorted(set(shapes) - set(found)):
        raise UserError(f"`rollout_actor` lacks the arrays of {join_names(missing)}")
    return unflatten_dict({tuple(path.split("/")): value for path, value in found.items()})


def _with_adapter(
    arrays: Mapping[str, jax.Array], name: str, heads_first: bool, scale: float | None
) -> jax.Array:
    """An array plus the product of its adapter, A [..., R] and B [R, ...]."""
    assert scale is not None
    a, b, weight = (
        arrays[x].astype(jnp.float32) for x in (f"{name}_lora_a", f"{name}_lora_b", name)
    )
    change = jnp.tensordot(a, b, 1, precision=jax.lax.Precision.HIGHEST)
    if heads_first:  # [E, ..., heads, D]
        change = jnp.moveaxis(change, 0, -2)
    return weight + scale * change.reshape(weight.shape)


def _by_name(state: Any) -> dict[str, jax.Array]:
    flat, _ = to_flat_dict(state)
    return {".".join(map(str, path)): array for path, array in flat.items()}
