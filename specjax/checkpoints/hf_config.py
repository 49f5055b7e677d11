"""`config.json` of Hugging Face transformers, as 4.x and as 5.x write it, to and from ours."""

from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoints.config_fields import ConfigFields
from specjax.models import Gemma2Config, LlamaConfig, T5Config
from specjax.models.config import Llama3RopeScaling, ModelConfig
from specjax.tokenizers.model_files import SpecialIds

ARCHITECTURES: dict[str, tuple[str, ...]] = {
    "t5": ("T5ForConditionalGeneration", "T5WithLMHeadModel"),
    "llama": ("LlamaForCausalLM", "LLaMAForCausalLM"),
    "gemma2": ("Gemma2ForCausalLM",),
}

# What transformers assumes where config.json is silent.
DEFAULT_IDS: dict[type[ModelConfig], SpecialIds] = {
    T5Config: SpecialIds(eos=(1,), pad=0, decoder_start=0),
    LlamaConfig: SpecialIds(eos=(2,), bos=1),
    Gemma2Config: SpecialIds(eos=(1,), pad=0, bos=2),
}

# "gelu" of ours is the tanh approximation, which Hugging Face calls gelu_new; its own "gelu" is
# exact, except that T5's "gated-gelu" has always meant gelu_new.
_T5_ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "relu": ("relu",),
    "gelu_new": ("gelu",),
    "silu": ("silu",),
    "gated-gelu": ("gelu", "linear"),
    "gated-gelu_new": ("gelu", "linear"),
    "gated-relu": ("relu", "linear"),
    "gated-silu": ("silu", "linear"),
}


def config_from_hf(values: dict[str, Any], path: Path) -> ModelConfig:
    """Reads a `config.json`.

    A T5's head is returned as tied: the arrays decide that later (see `hf.open_hf`).

    Args:
      values: the JSON object.
      path: of the file, for messages.

    Returns:
      The configuration, in float32.

    Raises:
      ValueError: for another architecture, or a value this package does not compute.
    """
    model_type = values.get("model_type")
    known = ", ".join(ARCHITECTURES)
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise ValueError(f"{path}: model_type={model_type!r} must be one of {known}")
    architectures = values.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        raise ValueError(f"{path}: architectures={architectures!r} must be a list of names")
    if architectures and not set(architectures) & set(ARCHITECTURES[model_type]):
        raise ValueError(
            f"{path}: architectures={architectures} must name {ARCHITECTURES[model_type][0]}, "
            f"which is what specjax runs for model_type {model_type!r}"
        )
    if values.get("quantization_config"):
        raise ValueError(
            f"{path}: quantization_config is set, but quantised checkpoints are not read; use the "
            "float32 or bfloat16 one, or delete the field if the arrays are not quantised"
        )
    fields = ConfigFields(values, path)
    build = {"t5": _t5, "llama": _llama, "gemma2": _gemma2}[model_type]
    for name in ("tie_word_embeddings", "scale_decoder_outputs"):
        if not isinstance(value := values.get(name), bool | None):
            raise ValueError(f"{path}: {name}={value!r} must be true or false")
    for name in ("eos_token_id", "decoder_start_token_id"):
        fields.check_token(name, fields.whole("vocab_size"))
    try:
        return build(fields)
    except ValueError as error:
        prefix = "" if str(error).startswith(str(path)) else f"{path}: "
        raise ValueError(f"{prefix}{error}") from None


def _t5(f: ConfigFields) -> T5Config:
    f.refuse("feed_forward_proj", tuple(_T5_ACTIVATIONS), "relu")
    buckets = f.whole("relative_attention_num_buckets", 32, least=4)
    # Half of a decoder's buckets hold one distance each, and the others begin after these.
    distance = f.whole("relative_attention_max_distance", 128, least=buckets // 2 + 1)
    return T5Config(
        vocab_size=f.whole("vocab_size"),
        embed_dim=f.whole("d_model"),
        num_heads=f.whole("num_heads"),
        head_dim=f.whole("d_kv"),
        mlp_dim=f.whole("d_ff"),
        num_encoder_layers=f.whole("num_layers"),
        num_decoder_layers=f.whole("num_decoder_layers", f.whole("num_layers")),
        mlp_activations=_T5_ACTIVATIONS[f.values.get("feed_forward_proj") or "relu"],
        norm_eps=f.positive("layer_norm_epsilon", 1e-6),
        relpos_buckets=buckets,
        relpos_max_distance=distance,
        dropout_rate=f.number("dropout_rate", 0.1),
        decoder_start_token=f.whole(
            "decoder_start_token_id", max(0, f.number("pad_token_id", 0)), least=0
        ),
        scale_tied_logits=t5_scales_outputs(f.values),
        tie_embeddings=True,
    )


def t5_scales_outputs(values: dict[str, Any]) -> bool:
    """Whether a T5's config multiplies the decoder's output by d_model ** -0.5.

    transformers 5 records it. 4.x does not, and scales if the head is tied.
    """
    scales = values.get("scale_decoder_outputs")
    return values.get("tie_word_embeddings") is not False if scales is None else bool(scales)


def _llama(f: ConfigFields) -> LlamaConfig:
    f.refuse("hidden_act", ("silu", "swish"), "silu")
    f.refuse("attention_bias", (False,), False)
    f.refuse("mlp_bias", (False,), False)
    theta, scaling = _rope(f)
    return LlamaConfig(
        **_decoder_sizes(f),
        norm_eps=f.positive("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=bool(f.values.get("tie_word_embeddings", False)),
    )


def _gemma2(f: ConfigFields) -> Gemma2Config:
    name = "hidden_activation" if f.values.get("hidden_activation") else "hidden_act"
    f.refuse(name, ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    f.refuse("attention_bias", (False,), False)
    f.refuse("use_bidirectional_attention", (False,), False)
    sizes = _decoder_sizes(f)
    types = f.values.get("layer_types")
    # As long as the list, for a damaged file may name any number of layers.
    count = len(types) if isinstance(types, list) else 0
    alternating = ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]
    if types is not None and (types != alternating or count != sizes["num_layers"]):
        raise ValueError(
            f"{f.path}: layer_types={f.values['layer_types']} must alternate between "
            "sliding_attention and full_attention, as in Gemma 2"
        )
    theta, scaling = _rope(f)
    if scaling is not None:
        raise ValueError(f"{f.path}: rope_scaling is not supported for gemma2")
    return Gemma2Config(
        **sizes,
        norm_eps=f.positive("rms_norm_eps", 1e-6),
        rope_theta=theta,
        sliding_window=(
            f.whole("sliding_window") if "sliding_window" in f.values else 4096  # null is no window
        ),
        # null means no cap, an absent key the default.
        attn_logit_softcap=_cap(f, "attn_logit_softcapping", 50.0),
        final_logit_softcap=_cap(f, "final_logit_softcapping", 30.0),
        query_pre_attn_scalar=f.positive("query_pre_attn_scalar", 256),
        tie_embeddings=bool(f.values.get("tie_word_embeddings", True)),
    )


def _cap(f: ConfigFields, name: str, default: float) -> float | None:
    value = f.positive(name, None) if name in f.values else default
    return None if value is None else float(value)


def _decoder_sizes(f: ConfigFields) -> dict[str, Any]:
    heads = f.whole("num_attention_heads")
    return {
        "vocab_size": f.whole("vocab_size"),
        "embed_dim": f.whole("hidden_size"),
        "num_heads": heads,
        "head_dim": f.whole("head_dim", f.whole("hidden_size") // max(1, heads)),
        "mlp_dim": f.whole("intermediate_size"),
        "num_layers": f.whole("num_hidden_layers"),
        "num_kv_heads": f.whole("num_key_value_heads", heads),
    }


def _rope(f: ConfigFields) -> tuple[float, Llama3RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (5.x) or `rope_theta` and `rope_scaling` (4.x).

    Where a file has both, 4.x and 5.x take `rope_scaling`.
    """
    found = {name: f.values.get(name) or {} for name in ("rope_scaling", "rope_parameters")}
    for name, value in found.items():
        if not isinstance(value, dict):
            raise ValueError(f"{f.path}: {name}={value!r} must be an object")
    parameters = found["rope_scaling"] or found["rope_parameters"]
    if nested := [name for name, value in parameters.items() if isinstance(value, dict)]:
        raise ValueError(
            f"{f.path}: rope parameters for {', '.join(nested)} alone are not supported, only one "
            "set for all layers"
        )
    rope = ConfigFields(parameters, f.path)
    theta = float(rope.positive("rope_theta", f.positive("rope_theta", 10_000.0)))
    other = found["rope_parameters"].get("rope_theta")
    if other is not None and other != theta:
        raise ValueError(
            f"{f.path}: rope_parameters has rope_theta={other!r}, but rope_scaling, which goes "
            f"before it, makes it {theta!r}; remove one of the two fields"
        )
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    for fields in (rope, f):
        fields.refuse("partial_rotary_factor", (1, 1.0), 1.0)
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(
            f"{f.path}: rope_type={kind!r} is not supported, only 'default' or 'llama3'"
        )
    longest = "original_max_position_embeddings"
    outer = f.values.get(longest)
    if outer is not None and outer != parameters.get(longest):
        raise ValueError(
            f"{f.path}: {longest}={outer!r} differs from {parameters.get(longest)!r} in the rope "
            "parameters; keep the one that the model was trained with"
        )
    return theta, Llama3RopeScaling(
        factor=float(rope.positive("factor")),
        low_freq_factor=float(rope.positive("low_freq_factor")),
        high_freq_factor=float(rope.positive("high_freq_factor")),
        original_max_position=rope.whole(longest),
    )


def config_to_hf(config: ModelConfig, ids: SpecialIds, dtype: np.dtype) -> dict[str, Any]:
    """Makes a `config.json` that transformers 4.x and 5.x read alike.

    Args:
      config: the model's configuration.
      ids: its special ids.
      dtype: of the arrays written beside it.

    Returns:
      The JSON object.

    Raises:
      ValueError: for a configuration that transformers cannot hold.
    """
    ids = ids.or_else(DEFAULT_IDS[type(config)])
    common = {
        "vocab_size": config.vocab_size,
        "dtype": dtype.name,  # 5.x
        "torch_dtype": dtype.name,  # 4.x
        "use_cache": True,
        **ids.to_json(),
    }
    if isinstance(config, T5Config):
        return {**common, **_t5_to_hf(config)}
    assert isinstance(config, LlamaConfig | Gemma2Config)
    return {**common, **_decoder_only_to_hf(config)}


def _decoder_only_to_hf(config: LlamaConfig | Gemma2Config) -> dict[str, Any]:
    _check_readable(config)
    decoder: dict[str, Any] = {
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
    }
    rope: dict[str, Any] = {"rope_type": "default"}
    if isinstance(config, Gemma2Config):
        decoder |= {
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": config.sliding_window,
            "attn_logit_softcapping": config.attn_logit_softcap,
            "final_logit_softcapping": config.final_logit_softcap,
            "query_pre_attn_scalar": int(config.query_pre_attn_scalar),
            "max_position_embeddings": 8192,
        }
    else:
        max_position = 4096
        if (scaling := config.rope_scaling) is not None:
            rope = {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position,
            }
            max_position = int(scaling.original_max_position * scaling.factor)
        decoder |= {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "mlp_bias": False,
            "max_position_embeddings": max_position,
        }
    return decoder | {
        "rope_theta": config.rope_theta,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
    }


def _check_readable(config: LlamaConfig | Gemma2Config) -> None:
    """Raises for what transformers 5 refuses to read, though 4.x may."""
    if config.embed_dim % config.num_heads:
        raise ValueError(
            f"embed_dim={config.embed_dim} must be a multiple of num_heads={config.num_heads} for "
            "transformers 5 to read the model; convert it to orbax"
        )
    if isinstance(config, Gemma2Config) and not config.query_pre_attn_scalar.is_integer():
        raise ValueError(
            f"query_pre_attn_scalar={config.query_pre_attn_scalar} must be a whole number for "
            "transformers 5 to read the model; convert it to orbax"
        )


def _t5_to_hf(config: T5Config) -> dict[str, Any]:
    if config.relpos_per_layer:
        raise ValueError(
            "this model has a relative position bias per layer (relpos_per_layer), but "
            "transformers' T5 has one per stack; convert it to orbax"
        )
    names = {ours: theirs for theirs, ours in reversed(_T5_ACTIVATIONS.items())}
    activation = names.get(config.mlp_activations)
    if activation is None:
        raise ValueError(
            f"mlp_activations={config.mlp_activations} is no MLP of transformers' T5, which has "
            f"{', '.join(str(a) for a in names)}; convert it to orbax"
        )
    # Scaling belongs to a tied head alone. 4.x takes "tied" for both; see hf.write_hf.
    scales = config.tie_embeddings and config.scale_tied_logits
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "d_model": config.embed_dim,
        "d_kv": config.head_dim,
        "d_ff": config.mlp_dim,
        "num_heads": config.num_heads,
        "num_layers": config.num_encoder_layers,
        "num_decoder_layers": config.num_decoder_layers,
        "feed_forward_proj": activation,
        "layer_norm_epsilon": config.norm_eps,
        "relative_attention_num_buckets": config.relpos_buckets,
        "relative_attention_max_distance": config.relpos_max_distance,
        "dropout_rate": config.dropout_rate,
        "decoder_start_token_id": config.decoder_start_token,
        "is_encoder_decoder": True,
        "scale_decoder_outputs": scales,
        "tie_word_embeddings": scales,
    }
