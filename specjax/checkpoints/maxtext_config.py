"""The network that a YAML of MaxText describes: `configs/models/NAME.yml`, or a run's `config.yml`.

What a file leaves out has its value in MaxText's `configs/base.yml`. MaxText also chooses by the
model's name, which is `model_name`, else the file's.

Source: MaxText 0.2.5, `configs`, `layers/attentions.py`, `layers/moe.py`, `models`.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from specjax.errors import UserError
from specjax.models import Gemma2Config, LlamaConfig, ModelConfig
from specjax.models.decoder_only import types_by_number
from specjax.models.family import Constants, HFFields, constants
from specjax.models.gemma import Gemma3Config
from specjax.models.gemma4 import Gemma4Config
from specjax.models.llama_variants import MixtralConfig
from specjax.models.qwen import Qwen3Config, Qwen3MoeConfig
from specjax.models.rope_scaling import Llama3RopeScaling

_SIZES = {
    "vocab_size": "vocab_size",
    "base_emb_dim": "embed_dim",
    "base_num_query_heads": "num_heads",
    "base_num_kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "base_mlp_dim": "mlp_dim",
    "base_num_decoder_layers": "num_layers",
}
# With other values the same arrays are another network; the first is that of `base.yml`.
_FIXED: Constants = {
    "global_parameter_scale": (1,),
    "param_scan_axis": (1,),
    "attention_type": ("global",),
    "rope_type": ("default", "llama3.1"),
    "rope_min_timescale": (1,),
    "rope_use_scale": (True,),
    "rope_linear_scaling_factor": (1.0,),
    "local_rope_proportion": (1.0,),
    "attn_logits_soft_cap": (0.0,),
    "final_logits_soft_cap": (0.0,),
}
_LLAMA31 = Llama3RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8_192
)

# The fields of ours that a block has besides those of all, from a file and from those.
_Reader = Callable[[HFFields, Mapping[str, Any]], dict[str, Any]]


def _experts(fields: HFFields, ours: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": fields.whole("num_experts"),
        "num_experts_per_tok": fields.whole("num_experts_per_tok"),
        "expert_dim": fields.whole("base_moe_mlp_dim"),
        "renormalised": True,  # whatever `norm_topk_prob` says
    }


def _mixtral(fields: HFFields, ours: Mapping[str, Any]) -> dict[str, Any]:
    sizes = _experts(fields, ours)
    return {**sizes, "mlp_dim": sizes["expert_dim"], "expert_dim": None}


def _gemma2(fields: HFFields, ours: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_layers": 2 * ours["num_layers"],
        "sliding_window": fields.whole("sliding_window_size"),
        "query_pre_attn_scalar": ours["head_dim"],
        "attn_logit_softcap": fields.number("attn_logits_soft_cap", 0.0) or None,
        "final_logit_softcap": fields.number("final_logits_soft_cap", 0.0) or None,
    }


# A base that is not positive means another, `usual`.
def _base(fields: HFFields, name: str, usual: float) -> float:
    base = fields.number(name, -1)
    return base if base > 0 else usual


def _gemma3(fields: HFFields, ours: Mapping[str, Any]) -> dict[str, Any]:
    scalar = ours["head_dim"]
    if fields.values["model_name"] == "gemma3-27b":
        scalar = ours["embed_dim"] // ours["num_heads"]
    return {
        "sliding_window": fields.whole("sliding_window_size"),
        "layer_types": types_by_number(ours["num_layers"], 6),
        "local_rope_theta": _base(fields, "local_rope_max_timescale", ours["rope_theta"]),
        "rope_factor": fields.positive("rope_linear_scaling_factor", 1.0),
        "query_pre_attn_scalar": scalar,
    }


def _gemma4(fields: HFFields, ours: Mapping[str, Any]) -> dict[str, Any]:
    every = 5 if fields.values["model_name"] == "gemma4-e2b" else 6
    sizes: dict[str, Any] = {}
    if fields.whole("num_experts", 1) > 1:
        fields.refuse("norm_topk_prob", (True,), False)
        sizes = _experts(fields, ours)
        del sizes["renormalised"]
    return {
        **sizes,
        "sliding_window": fields.whole("sliding_window_size"),
        "layer_types": types_by_number(ours["num_layers"], every),
        "rope_theta": _base(fields, "global_rope_max_timescale", ours["rope_theta"]),
        "local_rope_theta": _base(fields, "local_rope_max_timescale", ours["rope_theta"]),
        "partial_rotary_factor": fields.positive("global_rope_proportion", 0.25),
        "global_head_dim": fields.whole("global_head_dim", 0, least=0) or ours["head_dim"],
        "num_global_kv_heads": fields.whole("global_num_kv_heads", 0, least=0) or None,
        "keys_are_values": fields.flag("share_kv_projections", False),
        "num_shared_layers": fields.whole("num_kv_shared_layers", 0, least=0) or None,
        "wide_shared_mlps": fields.flag("use_double_wide_mlp", False),
        "layer_input_dim": fields.whole("hidden_size_per_layer_input", 0, least=0) or None,
        "final_logit_softcap": fields.number("final_logits_soft_cap", 0.0) or None,
    }


class _Block(NamedTuple):
    """A `decoder_block` of MaxText.

    Attributes:
      names: beginnings of the names of its models; MaxText chooses rotations by them.
      config: its configuration here.
      read: its own fields.
      also: those of `_FIXED` that `read` reads.
    """

    names: tuple[str, ...]
    config: type[ModelConfig]
    read: _Reader = lambda fields, ours: {}
    also: tuple[str, ...] = ()


_CAPS = ("attn_logits_soft_cap", "final_logits_soft_cap")
_BLOCKS = {
    "llama2": _Block(("llama", "default"), LlamaConfig),
    "mixtral": _Block(("mixtral", "default"), MixtralConfig, _mixtral),
    "qwen3": _Block(("qwen3", "default"), Qwen3Config),
    "qwen3_moe": _Block(("qwen3", "default"), Qwen3MoeConfig, _experts),
    "gemma2": _Block(("gemma2", "default"), Gemma2Config, _gemma2, _CAPS),
    "gemma3": _Block(("gemma3",), Gemma3Config, _gemma3, ("rope_linear_scaling_factor",)),
    "gemma4": _Block(("gemma4",), Gemma4Config, _gemma4, _CAPS[1:]),
    "gemma4_small": _Block(("gemma4",), Gemma4Config, _gemma4, _CAPS[1:]),
}


class _Loader(yaml.SafeLoader):
    """Reads 1e-6 as a number, as MaxText does; YAML 1.1 wants 1.0e-6."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), [*"-+0123456789"]
)


def read_maxtext_config(file: Path) -> ModelConfig:
    """The configuration in a YAML file."""
    try:
        values = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(
            f"{file} is not readable as YAML ({' '.join(str(error).split())}); restore the file"
        ) from None
    block = values.get("decoder_block") if isinstance(values, dict) else None
    if block not in _BLOCKS:
        raise UserError(f"{file}: decoder_block={block!r} must be one of {', '.join(_BLOCKS)}")
    return HFFields({"model_name": file.stem, **values}, file).read(_config)


def _config(fields: HFFields) -> ModelConfig:
    block, name = fields.values["decoder_block"], str(fields.values["model_name"])
    kind, gemma = _BLOCKS[block], block.startswith("gemma")
    if not name.startswith(kind.names):
        raise UserError(
            f"model_name={name!r} must begin with {' or '.join(kind.names)}, for decoder_block is "
            f"{block!r}: state it, or name the file like MaxText's, such as llama3.1-8b.yml"
        )
    constants({x: allowed for x, allowed in _FIXED.items() if x not in kind.also}).read(fields, {})
    activations = ["gelu" if gemma else "silu", "linear"]
    fields.refuse("mlp_activations", (activations,), ["silu", "linear"])
    ours: dict[str, Any] = {ours: fields.whole(theirs) for theirs, ours in _SIZES.items()}
    ours["norm_eps"] = fields.positive("normalization_layer_epsilon", 1e-5)
    ours["tie_embeddings"] = fields.flag("logits_via_embedding", False)
    ours["rope_theta"] = fields.positive("rope_max_timescale", 10_000)
    if gemma:
        fields.refuse("logits_via_embedding", (True,), False)
        fields.refuse("normalization_layer_epsilon", (1e-6,), 1e-5)  # that of most of its norms
    if ours["tie_embeddings"]:
        fields.refuse("normalize_embedding_logits", (gemma,), True)
    if name.startswith("llama3.1") or fields.values.get("rope_type") == "llama3.1":
        ours["rope_scaling"] = _LLAMA31
    return kind.config(**ours | kind.read(fields, ours))
