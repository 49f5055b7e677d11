"""Converts T5X's networks to specjax's, whose caches are ragged; the parameters stay T5X's.

T5X's attention reads one token at a time and has the same position for the whole batch. So decoding
uses specjax's network of the same architecture, with the parameters that T5X restored.

Source: `t5x/examples/{t5,scalable_t5,decoder_only}/network.py`.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoints.arrays import ArraySpec, check_same, flatten, unflatten
from specjax.checkpoints.t5x_network import BUCKETS, MAX_DISTANCE, SIZES, ParamTree
from specjax.errors import UserError
from specjax.models import CausalLM, Model, Seq2SeqLM, T5Config
from specjax.models.config import (
    DecoderOnlyConfig,
    LayerSpec,
    RelativePositions,
    Style,
    common_dtype,
)
from specjax.types import Params

_KNOWN = "t5x.examples.t5, t5x.examples.scalable_t5 and t5x.examples.decoder_only"
# Fields of both networks: T5X's, and ours.
_SHARED = {name: ours for name, ours in SIZES.items() if not name.endswith("_layers")}
_SHARED["dtype"] = "dtype"
# Fields of T5X's configurations that are read below, or do not affect what a network computes.
_FIELDS = {
    *_SHARED,
    "mlp_activations",
    "num_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "dropout_rate",
    "float32_attention_logits",
    "remat_policy",
    "scan_layers",
    "param_scan_axis",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderOnlyT5Config(DecoderOnlyConfig):
    """T5X's `TransformerConfig`: T5's decoder without cross-attention.

    A prompt consists of token 0, then the inputs, as in T5X.

    Attributes:
      mlp_activations: see `specjax.models.T5Config`.
      bidirectional_inputs: whether the tokens of a prompt see each other in both directions (T5X's
        `inputs_bidirectional_attention`, a prefix language model).
    """

    mlp_activations: tuple[str, ...] = ("relu",)
    bidirectional_inputs: bool = False

    @property
    def style(self) -> Style:
        return Style(
            activations=self.mlp_activations,
            layers=(LayerSpec(),) * self.num_layers,
            relative=RelativePositions(BUCKETS, MAX_DISTANCE),
            hidden_scale=self.embed_dim**-0.5 if self.tie_embeddings else 1.0,
            bidirectional_inputs=self.bidirectional_inputs,
        )


class _InMemory:
    """Parameters, possibly traced, in the form of a checkpoint reader for `ParamTree`."""

    def __init__(self, flat: dict[str, Any]) -> None:
        self._flat = flat
        self.directory = Path("the network's parameters")  # in messages
        self.specs = _specs(flat)

    def read(self, name: str) -> Any:
        return self._flat[name]


def read_config(role: str, module: Any, *, bidirectional_inputs: bool = False) -> Model:
    """The language model for a network's configuration, before its parameters are known.

    Its parameters are float32, and its layers share one relative position bias. `role` is
    "verifier" or "drafter", for messages; with `bidirectional_inputs` all inputs of a decoder see
    each other.
    """
    config: Any = getattr(module, "config", None)
    is_config = dataclasses.is_dataclass(config) and not isinstance(config, type)
    fields = {f.name: f for f in dataclasses.fields(config)} if is_config else {}
    is_t5 = "num_encoder_layers" in fields
    if not (is_t5 or "num_layers" in fields) or not set(_SHARED) <= set(fields):
        raise UserError(
            f"the {role}'s network, {type(module).__name__}, is not supported: give a network of "
            f"{_KNOWN}"
        )
    for name in sorted(set(fields) - _FIELDS):
        value, default = getattr(config, name), fields[name].default
        if value != default:
            raise UserError(
                f"the {role}'s {type(config).__name__} has {name} = {value!r}, which specjax does "
                f"not support: leave {name} out, or give a network of {_KNOWN}"
            )
    sizes = {ours: getattr(config, theirs) for theirs, ours in _SHARED.items()}
    sizes["mlp_activations"] = tuple(config.mlp_activations)
    if not is_t5:
        return CausalLM(
            DecoderOnlyT5Config(
                **sizes,
                num_layers=config.num_layers,
                num_kv_heads=config.num_heads,
                bidirectional_inputs=bidirectional_inputs,
            )
        )
    return Seq2SeqLM(
        T5Config(
            **sizes,
            num_encoder_layers=config.num_encoder_layers,
            num_decoder_layers=config.num_decoder_layers,
            relpos_buckets=BUCKETS,
            relpos_max_distance=MAX_DISTANCE,
        )
    )


def read_network(
    role: str, module: Any, params: Params, *, bidirectional_inputs: bool = False
) -> tuple[Model, Params]:
    """The language model that is equivalent to a network of T5X, and its parameters.

    These are arrays or tracers, nested as in T5X. Scanned layers are separated, which copies their
    arrays once per call. See `read_config` for the others.
    """
    model = read_config(role, module, bidirectional_inputs=bidirectional_inputs)
    flat = flatten(params)
    tree = ParamTree(_InMemory(flat))
    values = {name: piece.view(flat[piece.source]) for name, piece in tree.pieces.items()}
    changes: dict[str, Any] = {"param_dtype": common_dtype(leaf.dtype for leaf in flat.values())}
    if isinstance(model.config, T5Config):
        changes["relpos_per_layer"] = any("layers_0/relpos_bias" in name for name in values)
    else:
        # T5X's decoder-only network keeps its embedding in the decoder.
        inside = "decoder/token_embedder/"
        values = {n.replace(inside, inside.removeprefix("decoder/")): x for n, x in values.items()}
    model = type(model)(model.config.replace(**changes))
    shapes = {name: tuple(x.shape) for name, x in flatten(model.abstract_params()).items()}
    what = Path(f"the {role}'s {type(module).__name__}")
    remedy = f"give the sizes that the checkpoint was trained with, and a network of {_KNOWN}"
    check_same(what, _specs(values), shapes, remedy)
    return model, unflatten(values)


def _specs(flat: dict[str, Any]) -> dict[str, ArraySpec]:
    return {name: ArraySpec(tuple(x.shape), np.dtype(x.dtype)) for name, x in flat.items()}
