"""The parameters of tunix in an Orbax directory, by their names here.

    DIR/config.json               of the Hugging Face model that tunix has read
    DIR/<step>/model_params/      Orbax: `layers/0/attn/q_proj/w/value`

Axes: E model width, H heads of width D.

Source: tunix 0.1.7, `models/*/model.py`, `sft/checkpoint_manager.py`.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.checkpoints.arrays import ArraySpec, Piece
from specjax.checkpoints.t5x_network import merged_heads
from specjax.models.family import HEADS, MLP

_QKV = tuple(f"self_attention/{name}/kernel" for name in ("query", "key", "value"))
# tunix's name -> ours, of an array that stacks several parameters all of theirs. Names of a layer
# are below `layers.0.` and `decoder/layers_0/`.
NAMES: Mapping[str, tuple[str, ...]] = {
    "embedder.input_embedding": ("token_embedder/embedding",),
    **{f"mlp.{a}_proj.kernel": (f"mlp/{b}/kernel",) for a, b in MLP.items()},
    # Llama 3, Qwen 2.5 and 3.
    "final_norm.w": ("decoder/decoder_norm/scale",),
    "lm_head.w": ("decoder/logits_dense/kernel",),
    **{f"attn.{a}_proj.w": (f"self_attention/{b}/kernel",) for a, b in HEADS.items()},
    **{f"attn.{a}_bias": (f"self_attention/{HEADS[a]}/bias",) for a in "qkv"},
    **{f"attn.{a}_norm.w": (f"self_attention/{HEADS[a]}_norm/scale",) for a in "qk"},
    "input_layernorm.w": ("pre_self_attention_layer_norm/scale",),
    "post_attention_layernorm.w": ("pre_mlp_layer_norm/scale",),
    # Gemma 2 and 3.
    "final_norm.scale": ("decoder/decoder_norm/scale",),
    "attn.qkv_einsum.w": _QKV,
    "attn.q_einsum.w": _QKV[:1],
    "attn.kv_einsum.w": _QKV[1:],
    "attn.attn_vec_einsum.w": ("self_attention/out/kernel",),
    "attn._query_norm.scale": ("self_attention/query_norm/scale",),
    "attn._key_norm.scale": ("self_attention/key_norm/scale",),
    "pre_attention_norm.scale": ("pre_self_attention_layer_norm/scale",),
    "post_attn_norm.scale": ("post_self_attention_layer_norm/scale",),  # Gemma 2
    "post_attention_norm.scale": ("post_self_attention_layer_norm/scale",),  # Gemma 3
    "pre_ffw_norm.scale": ("pre_mlp_layer_norm/scale",),
    "post_ffw_norm.scale": ("post_mlp_layer_norm/scale",),
}
# Arrays [..., H, E, D]; all others have E, or what else is summed over, first.
HEADS_FIRST = ("attn.qkv_einsum.w", "attn.q_einsum.w", "attn.kv_einsum.w")
_NAME = re.compile(r"(?:layers\.(\d+)\.)?(.+?)(?:\.value)?")


def tunix_pieces(specs: Mapping[str, ArraySpec]) -> tuple[dict[str, ArraySpec], dict[str, Piece]]:
    """The parameters in arrays, by our names, of others by theirs: shapes, and sources."""
    found, pieces = {}, {}
    for source, spec in specs.items():
        match = _NAME.fullmatch(source.replace("/", "."))
        assert match is not None
        layer = "" if match[1] is None else f"decoder/layers_{match[1]}/"
        names = NAMES.get(match[2], (match[2],))
        stacked, heads_first = len(names) > 1, match[2] in HEADS_FIRST
        for number, name in enumerate(names):
            shape = spec.shape[stacked:]
            if heads_first:
                shape = (shape[1], shape[0], *shape[2:])
            shape = merged_heads(name, shape)
            part = number if stacked else ...
            found[layer + name] = ArraySpec(shape, spec.dtype)
            view = functools.partial(_view, part, heads_first, shape)
            pieces[layer + name] = Piece(source, view)
    return found, pieces


def _view(part: Any, heads_first: bool, shape: tuple[int, ...], array: Any) -> np.ndarray:
    array = array[part]
    return (np.swapaxes(array, 0, 1) if heads_first else array).reshape(shape)
