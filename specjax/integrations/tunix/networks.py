"""The configurations of tunix's networks as specjax's.

A network is the policy that tunix trains, so it computes what tunix computes, which for some
checkpoints is not what Hugging Face's network does (see `_rope_theta`).

Source: `tunix/models/{llama3,qwen2,qwen3,gemma,gemma3}/model.py` of tunix 0.1.7.
"""

from collections.abc import Callable, Mapping
from typing import Any

from specjax.errors import UserError
from specjax.models import Gemma2Config, LlamaConfig, Model, ModelConfig, model_from_config
from specjax.models.decoder_only import types_by_number
from specjax.models.gemma import Gemma3Config
from specjax.models.qwen import Qwen2Config, Qwen3Config


def network_of(actor: Any, dtype: Any = None) -> Model:
    """The model of a tunix network.

    Args:
      actor: a Llama 3, Qwen 2.5 or 3, or Gemma 2 or 3 of `tunix.models`, perhaps with Qwix's LoRA.
      dtype: of parameters and activations; None: the actor's.

    Raises:
      UserError: it is another network, or has an option that specjax's network has not.
    """
    kinds = [kind.__name__ for kind in type(actor).__mro__]
    name = next((name for name in _FAMILIES if name in kinds), None)
    if name is None:
        raise UserError(
            f"`rollout_actor` must be one of tunix's {', '.join(_FAMILIES)}, got {kinds[0]}: use "
            'rollout_engine="vanilla"'
        )
    config, own = actor.config, actor.embedder.input_embedding.value
    sizes = {
        "vocab_size": own.shape[0],
        "mlp_dim": config.hidden_dim,
        "dtype": dtype or getattr(config, "dtype", own.dtype),
        "param_dtype": dtype or own.dtype,
    }
    same = ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "num_layers")
    sizes |= {field: getattr(config, field) for field in same}
    return model_from_config(_FAMILIES[name](actor, sizes))


def _rope_theta(actor: Any) -> float:
    """The base that the network rotates with.

    The attention of tunix 0.1.7's Llama 3 and Qwen 3 does not read `config.rope_theta`: it rotates
    with its function's default, whatever the checkpoint's base is.
    """
    attention = type(actor.layers[0].attn)
    if "rope_theta" in attention.block.__code__.co_names:
        return float(actor.config.rope_theta)
    return 1_000_000.0


def _refuse(config: Any, **allowed: Any) -> None:
    for name, value in allowed.items():
        if (given := getattr(config, name, value)) != value:
            raise UserError(f"`rollout_actor` must have {name}={value!r}, got {given!r}")


def _llama(actor: Any, sizes: dict[str, Any]) -> ModelConfig:
    config = actor.config
    return LlamaConfig(
        **sizes,
        norm_eps=config.norm_eps,
        tie_embeddings=config.weight_tying,
        rope_theta=_rope_theta(actor),
    )


def _qwen2(actor: Any, sizes: dict[str, Any]) -> ModelConfig:
    config = actor.config
    return Qwen2Config(
        **sizes,
        norm_eps=config.norm_eps,
        tie_embeddings=config.use_tied_embedding,
        rope_theta=float(config.rope_theta),
    )


def _qwen3(actor: Any, sizes: dict[str, Any]) -> ModelConfig:
    config = actor.config
    _refuse(config, num_experts=None)
    return Qwen3Config(
        **sizes,
        norm_eps=config.norm_eps,
        tie_embeddings=config.use_tied_embedding,
        rope_theta=_rope_theta(actor),
    )


def _gemma2(actor: Any, sizes: dict[str, Any]) -> ModelConfig:
    config = actor.config
    # Of a Gemma 1, which is the same class, these are false.
    _refuse(config, use_post_attn_norm=True, use_post_ffw_norm=True)
    kinds = tuple(kind.name for kind in config.attention_types)
    if kinds != tuple(("LOCAL_SLIDING", "GLOBAL")[i % 2] for i in range(config.num_layers)):
        raise UserError(
            "`rollout_actor` must have attention_types that alternate between LOCAL_SLIDING and "
            f"GLOBAL, got {', '.join(kinds)}"
        )
    return Gemma2Config(
        **sizes,
        sliding_window=config.sliding_window_size,
        attn_logit_softcap=config.attn_logits_soft_cap,
        final_logit_softcap=config.final_logit_softcap,
        query_pre_attn_scalar=float(config.head_dim),
    )


def _gemma3(actor: Any, sizes: dict[str, Any]) -> ModelConfig:
    config = actor.config
    _refuse(config, vision_config=None, local_scale_factor=1.0)
    by_head = config.query_pre_attn_norm.name == "BY_ONE_OVER_SQRT_HEAD_DIM"
    return Gemma3Config(
        **sizes,
        sliding_window=config.sliding_window_size,
        layer_types=types_by_number(config.num_layers, 6),
        rope_theta=float(config.global_base_frequency),
        local_rope_theta=float(config.local_base_frequency),
        rope_factor=config.global_scale_factor,
        query_pre_attn_scalar=float(
            config.head_dim if by_head else config.embed_dim // config.num_heads
        ),
    )


# By the name of tunix's class.
_FAMILIES: Mapping[str, Callable[[Any, dict[str, Any]], ModelConfig]] = {
    "Llama3": _llama,
    "Qwen2": _qwen2,
    "Qwen3": _qwen3,
    "Gemma": _gemma2,
    "Gemma3": _gemma3,
}
