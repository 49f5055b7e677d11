"""Tiny models of transformers' own classes, with random weights, saved by `save_pretrained`."""

import functools
import itertools
import json
import tempfile
from pathlib import Path

import torch
import transformers

T5_SIZES = {
    "vocab_size": 48,
    "d_model": 16,
    "num_heads": 2,
    "d_kv": 12,
    "d_ff": 20,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "decoder_start_token_id": 0,
}
DECODER_SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "head_dim": 8,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.25, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 4.0, 9.0],
}


def _t5(**options):
    return transformers.T5Config(**T5_SIZES, **options)


# Another size for each new family of encoder-decoders.
WIDER = {"d_model": 24, "num_heads": 3, "d_kv": 4, "num_layers": 3, "num_decoder_layers": 1}


def _mt5(**options):
    return transformers.MT5Config(**{**T5_SIZES, **options})


def _umt5(**options):
    return transformers.UMT5Config(**{**T5_SIZES, **options})


def _t5gemma(**options):
    decoder = {**DECODER_SIZES, "num_key_value_heads": 2, "sliding_window": 6}
    decoder["query_pre_attn_scalar"] = 8
    encoder = {**decoder, **options.pop("encoder", {})}
    return transformers.T5GemmaConfig(encoder=encoder, decoder=decoder, vocab_size=48, **options)


def _t5gemma2(eoi, **options):
    stack = {
        **DECODER_SIZES, "num_key_value_heads": 2, "sliding_window": 6, "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    vision = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
        "image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model",
    }  # fmt: skip
    encoder = {"text_config": {**stack, **options}, "vision_config": vision}
    encoder |= {"mm_tokens_per_image": 4, "eoi_token_index": eoi}
    return transformers.T5Gemma2Config(encoder=encoder, decoder=stack)


def _llama(**options):
    return transformers.LlamaConfig(**DECODER_SIZES, **options)


def _decoder_only(name, size):
    sizes = {**DECODER_SIZES, "num_key_value_heads": 2} if size == "" else _OTHER_SIZES
    if name in ("olmo2", "olmoe", "smollm3", "phi3"):  # their heads divide the width
        sizes = {key: value for key, value in sizes.items() if key != "head_dim"}
    if name == "qwen3_5_moe":
        sizes = {key: value for key, value in sizes.items() if key != "intermediate_size"}
    options = _OPTIONS[name][size != ""]
    made = getattr(transformers, _CLASSES[name])
    return made(**{**sizes, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, **options})


HF_CONFIGS = {
    "t5_v1_0": lambda: _t5(feed_forward_proj="relu"),
    "t5_v1_1": lambda: _t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mt5": _mt5,
    "mt5_wide": lambda: _mt5(**WIDER),
    "umt5": _umt5,
    "umt5_wide": lambda: _umt5(**WIDER),
    "t5gemma": _t5gemma,
    "t5gemma_wide": lambda: _t5gemma(encoder=_WIDE_ENCODER, tie_word_embeddings=False),
    "t5gemma2": lambda: _t5gemma2(eoi=7),
    "t5gemma2_wide": lambda: _t5gemma2(eoi=256_000, **_OTHER_ENCODER),
    "llama": lambda: _llama(num_key_value_heads=4),
    "llama_grouped": lambda: _llama(num_key_value_heads=2),
    "llama_tied": lambda: _llama(num_key_value_heads=4, tie_word_embeddings=True),
    # Stretched: the prompt is longer than the context before stretching.
    "llama3": lambda: _llama(num_key_value_heads=1, rope_parameters=LLAMA3),
    "qwen2_yarn": lambda: transformers.Qwen2Config(
        **DECODER_SIZES, num_key_value_heads=2, rope_parameters=YARN, max_position_embeddings=128
    ),
    "phi3_long": lambda: transformers.Phi3Config(
        vocab_size=48, hidden_size=16, intermediate_size=20, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, eos_token_id=1,
        bos_token_id=2, max_position_embeddings=800, original_max_position_embeddings=200,
        rope_parameters=LONGROPE,
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **DECODER_SIZES, num_key_value_heads=2, sliding_window=6, query_pre_attn_scalar=8
    ),
    **{
        f"{name}{size}": functools.partial(_decoder_only, name, size)
        for name, size in itertools.product(("qwen2", "qwen3", "qwen3_moe", "qwen3_next",
                                             "qwen3_5", "qwen3_5_moe", "mistral", "mixtral",
                                             "olmo2", "olmoe", "smollm3", "phi3", "gpt_oss",
                                             "gemma", "gemma3", "gemma4"), ("", "_wide"))
    },
    "gemma4_unified": lambda: transformers.Gemma4UnifiedTextConfig(
        **{**DECODER_SIZES, "num_hidden_layers": 3}, num_key_value_heads=2, global_head_dim=12,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        attention_k_eq_v=True, num_global_key_value_heads=1, sliding_window=6, pad_token_id=0,
        eos_token_id=1, bos_token_id=2, final_logit_softcapping=9.0,
    ),
}  # fmt: skip
# Others of their families.
T5_CONFIGS = {
    "t5_v1_1_tied": HF_CONFIGS["t5_v1_1"],
    "t5_gated_silu": lambda: _t5(feed_forward_proj="gated-silu"),
}
_WIDE_ENCODER = {
    "hidden_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "num_hidden_layers": 3,
    "sliding_window": 9,
    "rms_norm_eps": 1e-5,
    "query_pre_attn_scalar": 16,
}
_OTHER_ENCODER = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "num_hidden_layers": 3,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 900.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}
_OTHER_SIZES = {
    "vocab_size": 53,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 36,
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-4,
}
# What a family has besides sizes, for both of its sizes.
_OPTIONS = {
    "qwen2": (
        {"head_dim": 8},
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
         "rope_theta": 300.0, "tie_word_embeddings": True},
    ),
    "qwen3": (
        {"head_dim": 8, "tie_word_embeddings": True},
        {"head_dim": 10, "layer_types": ["full_attention", "sliding_attention", "full_attention"],
         "use_sliding_window": True, "sliding_window": 7},
    ),
    "qwen3_5": (
        {"num_hidden_layers": 4, "rms_norm_eps": 1e-3, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5},
        {"head_dim": 10, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
         "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 4,
         "linear_value_head_dim": 8, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 300.0,
                             "partial_rotary_factor": 0.6, "mrope_section": [1, 1, 1]}},
    ),
    "qwen3_next": (
        {"num_hidden_layers": 4, "rms_norm_eps": 1e-3, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
         "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
         "shared_expert_intermediate_size": 10},
        {"head_dim": 10, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
         "linear_num_key_heads": 3, "linear_num_value_heads": 9, "linear_key_head_dim": 4,
         "linear_value_head_dim": 8, "linear_conv_kernel_dim": 3, "num_experts": 6,
         "num_experts_per_tok": 3, "moe_intermediate_size": 8, "mlp_only_layers": [1],
         "shared_expert_intermediate_size": 14, "norm_topk_prob": False,
         "tie_word_embeddings": True},
    ),
    "qwen3_5_moe": (
        {"num_hidden_layers": 4, "rms_norm_eps": 1e-3, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
         "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
         "shared_expert_intermediate_size": 10},
        {"head_dim": 10, "layer_types": ["full_attention", "linear_attention", "linear_attention"],
         "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 4,
         "linear_value_head_dim": 8, "num_experts": 6, "num_experts_per_tok": 3,
         "moe_intermediate_size": 8, "shared_expert_intermediate_size": 14,
         "tie_word_embeddings": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 300.0,
                             "partial_rotary_factor": 0.6, "mrope_section": [1, 1, 1]}},
    ),
    "qwen3_moe": (
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
         "norm_topk_prob": True},
        {"head_dim": 10, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 8,
         "mlp_only_layers": [0], "decoder_sparse_step": 1, "use_sliding_window": True,
         "sliding_window": 7, "tie_word_embeddings": True},
    ),
    "mistral": (
        {"sliding_window": 6, "head_dim": 8},
        {"sliding_window": None, "head_dim": 12, "tie_word_embeddings": True},
    ),
    "mixtral": (
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"head_dim": 12, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 7,
         "rope_theta": 300.0, "tie_word_embeddings": True},
    ),
    "olmo2": ({}, {"tie_word_embeddings": True}),
    "olmoe": (
        {"num_experts": 4, "num_experts_per_tok": 2},
        {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True,
         "tie_word_embeddings": True},
    ),
    "smollm3": (
        {"num_hidden_layers": 4},
        {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 9,
         "tie_word_embeddings": False},
    ),
    "gpt_oss": (
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6,
         "rope_parameters": {**YARN, "truncate": False}},
        {"head_dim": 12, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 9,
         "layer_types": ["full_attention", "sliding_attention", "full_attention"],
         "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
         "tie_word_embeddings": True},
    ),
    "phi3": ({"sliding_window": 6}, {"tie_word_embeddings": True}),
    "gemma": ({"head_dim": 8}, {"head_dim": 10, "num_key_value_heads": 1}),
    "gemma3": (
        {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8, "num_hidden_layers": 6},
        {"head_dim": 10, "sliding_window": 4, "query_pre_attn_scalar": 5, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 900.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}},
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    # With shared keys and values and an input of each layer; with experts and keys as values.
    "gemma4": (
        {"head_dim": 8, "global_head_dim": 16, "sliding_window": 6, "num_hidden_layers": 6,
         "layer_types": ["sliding_attention", "full_attention"] * 3,
         "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
         "hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 48,
         "final_logit_softcapping": 5.0},
        {"head_dim": 10, "global_head_dim": 12, "num_global_key_value_heads": 2,
         "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "enable_moe_block": True,
         "sliding_window": 4, "final_logit_softcapping": 6.0,
         "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 8, "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5,
                               "factor": 4.0, "rope_theta": 900.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}},
         "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    ),
}  # fmt: skip
_CLASSES = {
    "qwen2": "Qwen2Config", "qwen3": "Qwen3Config", "qwen3_moe": "Qwen3MoeConfig",
    "qwen3_next": "Qwen3NextConfig", "qwen3_5": "Qwen3_5TextConfig",
    "qwen3_5_moe": "Qwen3_5MoeTextConfig",
    "mistral": "MistralConfig", "mixtral": "MixtralConfig", "olmo2": "Olmo2Config",
    "olmoe": "OlmoeConfig", "smollm3": "SmolLM3Config", "phi3": "Phi3Config",
    "gpt_oss": "GptOssConfig",
    "gemma": "GemmaConfig", "gemma3": "Gemma3TextConfig",
    "gemma4": "Gemma4TextConfig",
}  # fmt: skip


UNTIED = ("t5_v1_1", "mt5_wide", "umt5_wide")  # transformers ties every T5 that it creates


def save_random(name, path):
    """Saves the transformers model of that name with random weights; returns it."""
    kind = transformers.AutoModelForSeq2SeqLM if "t5" in name else transformers.AutoModelForCausalLM
    config = {**HF_CONFIGS, **T5_CONFIGS}[name]()
    theirs = kind.from_config(config, attn_implementation="eager").eval()
    if name in UNTIED:
        theirs.lm_head.weight = torch.nn.Parameter(torch.zeros_like(theirs.lm_head.weight))
    # A Gemma before the fourth, a Qwen3-Next and a Qwen 3.5 add 1 to the scales of their norms.
    adding = ("gemma", "qwen3_next", "qwen3_5")
    low = -0.5 if any(x in name for x in adding) and "gemma4" not in name else 0.5
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(low, low + 1.0, generator=generator)
            else:
                parameter.normal_(0, 0.3, generator=generator)
        for place, value in theirs.state_dict().items() if "gemma4" in name else ():
            if place.endswith("layer_scalar"):
                value.uniform_(0.5, 1.5, generator=generator)
            if place.endswith("q_norm.weight"):  # nothing else scales the logits of attention
                value *= 0.3
    theirs.save_pretrained(str(path))
    if name == "umt5_wide":
        # As published. transformers 5 reads it as tied, too, and scales the logits.
        file = path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": False}))
        with torch.no_grad():
            theirs.lm_head.weight *= theirs.config.d_model**0.5
    return theirs


@functools.cache
def made(name):
    """The model of `save_random`, and its directory."""
    path = Path(tempfile.mkdtemp(prefix=f"specjax-{name}-"))
    return save_random(name, path), path
