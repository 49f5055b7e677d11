"""Makes a T5 or a Llama larger without changing its outputs: only the time grows.

The added widths, heads and layers are zeros. RMSNorm divides by the mean square over the width, so
its scale is multiplied by sqrt(E / E') and its epsilon by E / E'. Nothing else changes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models import LlamaConfig, T5Config
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


# 203 M parameters with 2,048 words. A query's head has the keys of its group, and positions rotate
# the halves of a head: so the sizes of groups and heads must not change.
LLAMA_200M = {
    "embed_dim": 1024,
    "num_heads": 16,
    "num_kv_heads": 8,
    "mlp_dim": 3072,
    "num_layers": 16,
}


def grow(model: Any, params: Params, **sizes: int) -> tuple[Any, Params]:
    """Widens and deepens a T5 or a Llama by zero-padding; logits are equal up to float rounding.

    `sizes` has names in `T5_BASE` or `LLAMA_200M`, each at least the small model's; all by default.
    """
    small: Any = getattr(model, "config", None)
    assert isinstance(small, T5Config | LlamaConfig), f"a T5 or a Llama can grow, got {model!r}"
    usual = T5_BASE if isinstance(small, T5Config) else LLAMA_200M
    sizes = sizes or dict(usual)
    for name, size in sizes.items():
        assert name in usual, f"{name!r} cannot grow"
        assert size >= getattr(small, name), f"{name}={size} is smaller than the model's"
    share = small.embed_dim / sizes.get("embed_dim", small.embed_dim)
    changes: dict[str, Any] = {**sizes, "norm_eps": small.norm_eps * share}
    large: Any = type(model)(dataclasses.replace(small, **changes))
    if isinstance(small, LlamaConfig):
        before, after = (c.num_heads // c.num_kv_heads for c in (small, large.config))
        assert before == after, f"groups of {before} queries cannot become groups of {after}"

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
            scaled = isinstance(small, T5Config) and small.scale_tied_logits
            if names[-2] == "decoder_norm" and small.tie_embeddings and scaled:
                # The logits are scaled by the width as well.
                grown = grown * jnp.asarray(share**-0.5, grown.dtype)
        return grown.astype(wanted.dtype)

    return large, jax.tree_util.tree_map_with_path(place, large.abstract_params())


def _split_heads(
    names: list[str], shape: tuple[int, ...], config: T5Config | LlamaConfig
) -> tuple[int, ...]:
    """The shape with heads as an axis: zeros follow each head, and the last head."""
    if names[-1] != "kernel":
        return shape
    if names[-2] in ("query", "key", "value"):
        return (shape[0], shape[1] // config.head_dim, config.head_dim)
    if names[-2] == "out":
        return (shape[0] // config.head_dim, config.head_dim, shape[1])
    return shape
