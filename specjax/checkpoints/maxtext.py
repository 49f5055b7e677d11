"""The parameters of MaxText in an Orbax directory, by their names here.

    DIR/NAME.yml                         see `maxtext_config`
    DIR/[checkpoints/][<step>/]items/    Orbax: `params/params/decoder/...`

With `scan_layers` an array has the layers on axis 1: `decoder/layers/mlp/wi_0/kernel (E, L, M)`;
else `decoder/layers_3/...`. Gemma 2's layers are pairs, `mlp_local` and `mlp_global`. Gemma 3's are
in blocks of six, `decoder/layers/layers_2/...`, with the last few in `decoder/layers_remainder`;
Gemma 4's in `decoder/scanned_blocks`, of which `local_layers` has five on axis 2. A tree of NNX has
no `params`, and each array is the `value` of its name.

MaxText divides the queries' kernels by the square root of a head's width where the network does not
scale queries (Llama, Mixtral, Gemma 2); interleaves the halves of rotations where it stretches them
(Llama 3.1); adds 1 to the norms of Gemma 2 and 3; and scales Gemma's embeddings.

Source: MaxText 0.2.5, `checkpoint_conversion/utils/param_mapping.py`, `common/checkpointing.py`.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoints.arrays import ArraySpec, Piece
from specjax.checkpoints.t5x_network import merged_heads
from specjax.errors import UserError

# What the names of parameters begin with, in a layer and without one; the longer ones first.
_NAMES = {
    "pre_self_attention_norm": "pre_self_attention_layer_norm",
    "post_self_attention_norm": "post_self_attention_layer_norm",
    "post_self_attention_layer_norm": "pre_mlp_layer_norm",
    "pre_ffw_norm": "pre_mlp_layer_norm",
    "post_ffw_norm": "post_mlp_layer_norm",
    "MoeBlock_0/gate/kernel": "mlp/router",
    "MoeBlock_0": "mlp",
    "moe_block/gate/kernel": "mlp/router",
    "moe_block": "mlp",
    "mlp/moe_block/MoeBlock_0/gate/kernel": "experts/router",
    "mlp/moe_block/MoeBlock_0/per_expert_scale": "experts/share_scales",
    "mlp/moe_block/MoeBlock_0": "experts",
    "mlp/moe_block/shared_experts": "mlp",
    "mlp/pre_forward_scale_2": "router_norm/scale",
    "mlp/pre_feedforward_layernorm_2": "pre_experts_layer_norm",
    "mlp/post_feedforward_layernorm_1": "post_mlp_norm",
    "mlp/post_feedforward_layernorm_2": "post_experts_norm",
    "layer_scalar": "residual_scale",
    "per_layer_input_gate": "input_gate",
    "per_layer_projection": "input_out",
    "post_per_layer_input_norm": "post_input_layer_norm",
    "decoder/per_layer_embedder/embed_tokens_per_layer": "layer_inputs/embedding",
    "decoder/per_layer_embedder/per_layer_model_projection": "layer_inputs/projection",
    "decoder/per_layer_embedder/per_layer_projection_norm": "layer_inputs/norm",
}
_NAME = re.compile(rf"^({'|'.join(_NAMES)})(?=/|$)")
_PARAMETER = re.compile(r"(?:(?:params|base)/)*((?:decoder|token_embedder)/.+?)(?:/value)?")
_LAYER = re.compile(
    r"decoder/(?=layers|scanned_blocks)(?:(layers|scanned_blocks|layers_remainder)/)?"
    r"(?:layers_(\d+)/|(local_layers|global_layer)/)?(.+)"
)
_OF_PAIR = re.compile(r"(\w+)_(local|global)(/.+)")
_BLOCK = 6  # the layers of a block of Gemma 3 or 4


def maxtext_file(directory: Path) -> Path:
    """The only YAML of a directory."""
    files = sorted(directory.glob("*.yml"))
    if len(files) != 1:
        raise UserError(
            f"{directory} has Orbax's items, as MaxText writes them, and must have one .yml with "
            f"their configuration, got {len(files)}: copy MaxText's configs/models/NAME.yml, with "
            "what the run changed in it"
        )
    return files[0]


def maxtext_pieces(
    specs: Mapping[str, ArraySpec], config: Any
) -> tuple[dict[str, ArraySpec], dict[str, Piece]]:
    """The parameters in arrays, by our names: their shapes, and their sources."""
    found: dict[str, ArraySpec] = {}
    pieces = {}
    for source, spec in specs.items():
        match = _PARAMETER.fullmatch(source)
        if match is None:
            continue
        for name, index in _parameters(match[1], spec.shape, config):
            shape = merged_heads(name, spec.shape[:1] + spec.shape[1 + len(index) :])
            found[name] = ArraySpec(shape, spec.dtype)
            pieces[name] = Piece(source, functools.partial(_view, name, index, shape, config))
    return found, pieces


# The parameters in an array, with their indices along the axes of layers.
def _parameters(
    name: str, shape: tuple[int, ...], config: Any
) -> Iterator[tuple[str, tuple[int, ...]]]:
    match = _LAYER.fullmatch(name)
    if match is None:
        yield _ours(name), ()
        return
    stack, number, kind, rest = match.groups()
    if (pair := _OF_PAIR.fullmatch(rest)) is not None:
        rest = pair[1] + pair[3]
    scanned = stack in ("layers", "scanned_blocks")
    for index in np.ndindex(shape[1 : 1 + scanned + (kind == "local_layers")]):
        layer = int(number or 0)
        if kind is not None:
            layer = index[-1] if kind == "local_layers" else _BLOCK - 1
        if scanned:
            layer += index[0] * (_BLOCK if number or kind else 1)
        if stack == "layers_remainder":
            layer += config.num_layers // _BLOCK * _BLOCK
        if pair is not None:
            layer = 2 * layer + (pair[2] == "global")
        yield f"decoder/layers_{layer}/{_ours(rest)}", index


def _ours(name: str) -> str:
    return _NAME.sub(lambda found: _NAMES[found[0]], name)


def _view(
    name: str, index: tuple[int, ...], shape: tuple[int, ...], config: Any, array: Any
) -> np.ndarray:
    array, style = array[(slice(None), *index)], config.style
    query, key = (name.endswith(f"self_attention/{kernel}/kernel") for kernel in ("query", "key"))
    if (query or key) and config.rope_scaling:
        array = np.concatenate([array[..., ::2], array[..., 1::2]], -1)
    if query and style.qk_norms is None:
        array = np.asarray(array, np.float32) / np.float32(style.query_scale)
    if name == "token_embedder/embedding" and style.embed_scale != 1.0:
        array = np.asarray(array, np.float32) / np.float32(style.embed_scale)
    if name.endswith("/scale") and style.plus_one_norms:
        array = array - 1
    return array.reshape(shape)
