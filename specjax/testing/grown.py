"""Makes a T5 larger without changing its outputs: it costs more time and behaves the same.

The added widths, heads and layers are zeros. RMSNorm divides by the mean square over the width, so
its scale is multiplied by sqrt(E / E') and its epsilon by E / E'. Nothing else has to change.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models import T5, T5Config
from specjax.types import Array, Params

# T5 v1.1 base, except its vocabulary.
T5_BASE = {
    "embed_dim": 768,
    "num_heads": 12,
    "head_dim": 64,
    "mlp_dim": 2048,
    "num_encoder_layers": 12,
    "num_decoder_layers": 12,
}


def grow_t5(model: T5, params: Params, **sizes: int) -> tuple[T5, Params]:
    """Widens and deepens a T5 by zero-padding.

    Args:
      model: the small model.
      params: its parameters.
      **sizes: any of embed_dim, num_heads, head_dim, mlp_dim, num_encoder_layers and
        num_decoder_layers, each at least the small model's; `T5_BASE` by default.

    Returns:
      A larger model and its parameters. Their logits equal the small model's up to float rounding.

    Raises:
      ValueError: if a size is unknown or smaller than the model's.
    """
    small = model.config
    sizes = sizes or dict(T5_BASE)
    for name, size in sizes.items():
        if name not in T5_BASE:
            raise ValueError(f"{name!r} cannot grow: choose from {', '.join(T5_BASE)}")
        if size < getattr(small, name):
            raise ValueError(
                f"{name}={size} is below the model's {getattr(small, name)}: give a larger size"
            )
    share = small.embed_dim / sizes.get("embed_dim", small.embed_dim)
    changes: dict[str, Any] = {**sizes, "norm_eps": small.norm_eps * share}
    large = T5(dataclasses.replace(small, **changes))

    def place(path: tuple[Any, ...], wanted: jax.ShapeDtypeStruct) -> Array:
        names = [key.key for key in path]
        source = params
        for name in names:
            if name not in source:
                return jnp.zeros(wanted.shape, wanted.dtype)  # an added layer
            source = source[name]
        before = _split_heads(names, source.shape, small)
        after = _split_heads(names, wanted.shape, large.config)
        padding = [(0, b - a) for a, b in zip(before, after, strict=True)]
        grown = jnp.pad(source.reshape(before), padding).reshape(wanted.shape)
        if names[-1] == "scale":
            grown = grown * jnp.asarray(share**0.5, grown.dtype)
            if names[-2] == "decoder_norm" and small.tie_embeddings and small.scale_tied_logits:
                # The logits are scaled by the width as well.
                grown = grown * jnp.asarray(share**-0.5, grown.dtype)
        return grown.astype(wanted.dtype)

    return large, jax.tree_util.tree_map_with_path(place, large.abstract_params())


def _split_heads(names: list[str], shape: tuple[int, ...], config: T5Config) -> tuple[int, ...]:
    """The shape with heads as an axis: zeros follow each head, and the last head."""
    heads = (config.num_heads, config.head_dim)
    if names[-1] == "kernel" and names[-2] in ("query", "key", "value"):
        return (shape[0], *heads)
    if names[-1] == "kernel" and names[-2] == "out":
        return (*heads, shape[1])
    return shape
