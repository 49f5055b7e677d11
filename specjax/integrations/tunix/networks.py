"""tunix's networks as specjax's: the configuration.

A rollout follows the network that tunix trains, even where that differs from Hugging Face's: see
`_llama`.

Source: `tunix/models/{llama3,qwen2,qwen3,gemma,gemma3}/model.py` of tunix 0.1.7.
"""

from typing import Any

from specjax.errors import UserError
from specjax.models import Gemma2Config, LlamaConfig, Model, model_from_config
from specjax.models.decoder_only import types_by_number
from specjax.models.gemma import Gemma3Config
from specjax.models.qwen import Qwen2Config, Qwen3Config


def network_of(actor: Any, dtype: Any = None) -> Model:
    """The model of a tunix network.

    Args:
      actor: a Llama 3, Qwen 2.5 or 3, or Gemma 2 or 3 of `tunix.models`, perhaps with adapters.
      dtype: of parameters and activations; None: the actor's.

    Raises:
      UserError: it is another network, or has an option that specjax's network has not.
    """
    # Qwix puts a class of the same name before tunix's.
    kinds = [kind for kind in type(actor).__mro__ if kind.__name__ in _FAMILIES]
    if not kinds:
        raise UserError(
            f"`rollout_actor` must be one of tunix's {', '.join(_FAMILIES)}, got "
            f'{type(actor).__name__}: give rollout_engine="vanilla"'
        )
    family, fields = _FAMILIES[kinds[-1].__name__]
    config, table = actor.config, actor.embedder.input_embedding
    same = ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "num_layers")
    ours = family(
        vocab_size=table.shape[0],
        mlp_dim=config.hidden_dim,
        dtype=dtype or getattr(config, "dtype", table.dtype),
        param_dtype=dtype or table.dtype,
        **{name: getattr(config, name) for name in same},
        **fields(config, kinds[-1].__call__, actor.layers[0].attn),
    )
    return model_from_config(ours)


def _refuse(config: Any, **allowed: Any) -> None:
    for name, value in allowed.items():
        if (given := getattr(config, name, value)) != value:
            raise UserError(f"`rollout_actor` must have {name}={value!r}, got {given!r}")


def _llama(config: Any, call: Any, attention: Any) -> dict[str, Any]:
    _refuse(config, num_experts=None)
    # The Llama 3 and the Qwen 3 of tunix 0.1.7 do not read their base: they rotate with the default
    # of a function, whatever the checkpoint was trained with.
    functions = call, type(attention).block
    reads_theta = any("rope_theta" in function.__code__.co_names for function in functions)
    is_llama = hasattr(config, "weight_tying")
    return {
        "norm_eps": config.norm_eps,
        "tie_embeddings": config.weight_tying if is_llama else config.use_tied_embedding,
        "rope_theta": float(config.rope_theta) if reads_theta else 1e6,
    }


def _gemma2(config: Any, *_: Any) -> dict[str, Any]:
    _refuse(config, use_post_attn_norm=True, use_post_ffw_norm=True)  # not so in Gemma 1
    kinds = [kind.name for kind in config.attention_types]
    if kinds != [("LOCAL_SLIDING", "GLOBAL")[i % 2] for i in range(config.num_layers)]:
        raise UserError(
            "`rollout_actor` must have attention_types that alternate, LOCAL_SLIDING first, got "
            f"{', '.join(kinds)}"
        )
    return {
        "sliding_window": config.sliding_window_size,
        "attn_logit_softcap": config.attn_logits_soft_cap,
        "final_logit_softcap": config.final_logit_softcap,
        "query_pre_attn_scalar": float(config.head_dim),
    }


def _gemma3(config: Any, *_: Any) -> dict[str, Any]:
    _refuse(config, vision_config=None, local_scale_factor=1.0)
    by_head = config.query_pre_attn_norm.name == "BY_ONE_OVER_SQRT_HEAD_DIM"
    divisor = config.head_dim if by_head else config.embed_dim // config.num_heads
    return {
        "sliding_window": config.sliding_window_size,
        "layer_types": types_by_number(config.num_layers, 6),
        "rope_theta": float(config.global_base_frequency),
        "local_rope_theta": float(config.local_base_frequency),
        "rope_factor": config.global_scale_factor,
        "query_pre_attn_scalar": float(divisor),
    }


# By the name of tunix's class.
_FAMILIES: dict[str, Any] = {
    "Llama3": (LlamaConfig, _llama),
    "Qwen2": (Qwen2Config, _llama),
    "Qwen3": (Qwen3Config, _llama),
    "Gemma": (Gemma2Config, _gemma2),
    "Gemma3": (Gemma3Config, _gemma3),
}
