"""Tiny models of transformers' own classes, with random weights, saved by `save_pretrained`."""

import copy
import functools
import json
import tempfile
from pathlib import Path

import torch
import transformers

_STACKS = {"num_layers": 2, "num_decoder_layers": 2, "decoder_start_token_id": 0}
T5_SIZES = {"vocab_size": 48, "d_model": 16, "num_heads": 2, "d_kv": 12, "d_ff": 20, **_STACKS}
# Another size for each new family of encoder-decoders.
WIDER = {"d_model": 24, "num_heads": 3, "d_kv": 4, "num_layers": 3, "num_decoder_layers": 1}
DECODER_SIZES = {
    "vocab_size": 48, "hidden_size": 16, "num_attention_heads": 4, "head_dim": 8,
    "intermediate_size": 20, "num_hidden_layers": 2,
}  # fmt: skip
_GROUPED = {**DECODER_SIZES, "num_key_value_heads": 2}
_OTHER_SIZES = {
    "vocab_size": 53, "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3,
    "intermediate_size": 36, "num_hidden_layers": 3, "rms_norm_eps": 1e-4,
}  # fmt: skip
_IDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
    "original_max_position_embeddings": 32, "beta_fast": 4.0,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.25, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 4.0, 9.0],
}  # fmt: skip
# Rotations of layers with and without a window.
_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 900.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
_PARTIAL = {
    "rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.6,
    "mrope_section": [1, 1, 1],
}  # fmt: skip
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def _hf(model_type, *sizes, **options):
    """Makes a configuration; later sizes replace earlier ones."""
    values = {name: value for each in (*sizes, options) for name, value in each.items()}
    return lambda: transformers.AutoConfig.for_model(model_type, **copy.deepcopy(values))


def _t5gemma(encoder, **options):
    decoder = {**_GROUPED, "sliding_window": 6, "query_pre_attn_scalar": 8}
    both = {"encoder": {**decoder, **encoder}, "decoder": decoder}
    return _hf("t5gemma", both, vocab_size=48, **options)


def _t5gemma2(eoi, **options):
    stack = {
        **_GROUPED, "sliding_window": 6, "query_pre_attn_scalar": 8,
        "layer_types": [SLIDING, FULL],
    }  # fmt: skip
    vision = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
        "image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model",
    }  # fmt: skip
    encoder = {"text_config": {**stack, **options}, "vision_config": vision}
    encoder |= {"mm_tokens_per_image": 4, "eoi_token_index": eoi}
    return _hf("t5gemma2", encoder=encoder, decoder=stack)


_OTHER_ENCODER = {
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6, "num_hidden_layers": 3,
    "sliding_window": 9,
}  # fmt: skip
_DELTA = {
    "num_hidden_layers": 4, "rms_norm_eps": 1e-3, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
}  # fmt: skip
_OTHER_DELTA = {
    "head_dim": 10, "layer_types": [LINEAR, FULL, LINEAR], "linear_num_key_heads": 3,
    "linear_num_value_heads": 3, "linear_key_head_dim": 4, "linear_value_head_dim": 8,
    "tie_word_embeddings": True,
}  # fmt: skip
_SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_OTHER_SPARSE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 8}
_SHARED, _OTHER_SHARED = ({"shared_expert_intermediate_size": size} for size in (10, 14))
_WINDOWED = {"use_sliding_window": True, "sliding_window": 7}
_TIED = {"tie_word_embeddings": True}
# What a family has besides sizes, for both of its sizes.
_OPTIONS = {
    "qwen2": (
        {},
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
         "rope_theta": 300.0, **_TIED},
    ),
    "qwen3": (_TIED, {"head_dim": 10, "layer_types": [FULL, SLIDING, FULL], **_WINDOWED}),
    "qwen3_5": (
        _DELTA, {**_OTHER_DELTA, "linear_conv_kernel_dim": 3, "rope_parameters": _PARTIAL}
    ),
    "qwen3_next": (
        {**_DELTA, **_SPARSE, **_SHARED},
        {**_OTHER_DELTA, **_OTHER_SPARSE, **_OTHER_SHARED, "linear_num_value_heads": 9,
         "linear_conv_kernel_dim": 3, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "qwen3_5_moe": (
        {**_DELTA, **_SPARSE, **_SHARED},
        {**_OTHER_DELTA, **_OTHER_SPARSE, **_OTHER_SHARED, "rope_parameters": _PARTIAL,
         "layer_types": [FULL, LINEAR, LINEAR]},
    ),
    "qwen3_moe": (
        {**_SPARSE, "norm_topk_prob": True},
        {**_OTHER_SPARSE, "head_dim": 10, "mlp_only_layers": [0], "decoder_sparse_step": 1,
         **_WINDOWED, **_TIED},
    ),
    "mistral": ({"sliding_window": 6}, {"sliding_window": None, "head_dim": 12, **_TIED}),
    "mixtral": (
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"head_dim": 12, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 7,
         "rope_theta": 300.0, **_TIED},
    ),
    "olmo2": ({}, _TIED),
    "olmoe": (
        {"num_experts": 4, "num_experts_per_tok": 2},
        {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True, **_TIED},
    ),
    "smollm3": (
        {"num_hidden_layers": 4},
        {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 9,
         "tie_word_embeddings": False},
    ),
    "gpt_oss": (
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6,
         "rope_parameters": {**YARN, "truncate": False}},
        {"head_dim": 12, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 9,
         "layer_types": [FULL, SLIDING, FULL],
         "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, **_TIED},
    ),
    "phi3": ({"sliding_window": 6}, _TIED),
    "gemma": ({}, {"head_dim": 10, "num_key_value_heads": 1}),
    "gemma3": (
        {"sliding_window": 6, "query_pre_attn_scalar": 8, "num_hidden_layers": 6},
        {"head_dim": 10, "sliding_window": 4, "query_pre_attn_scalar": 5, "rope_parameters": _ROPES,
         "layer_types": [SLIDING, FULL, SLIDING]},
    ),
    # With shared keys and values and an input of each layer; with experts and keys as values.
    "gemma4": (
        {"global_head_dim": 16, "sliding_window": 6, "num_hidden_layers": 6,
         "layer_types": [SLIDING, FULL] * 3, "num_kv_shared_layers": 3,
         "use_double_wide_mlp": True, "hidden_size_per_layer_input": 10,
         "vocab_size_per_layer_input": 48, "final_logit_softcapping": 5.0},
        {"head_dim": 10, "global_head_dim": 12, "num_global_key_value_heads": 2,
         "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "enable_moe_block": True,
         "sliding_window": 4, "final_logit_softcapping": 6.0,
         "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 8, "rope_parameters": {
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 4.0,
                   "rope_theta": 900.0},
            SLIDING: _ROPES[SLIDING]},
         "layer_types": [SLIDING, FULL, FULL]},
    ),
}  # fmt: skip
_TEXT = ("qwen3_5", "qwen3_5_moe", "gemma3", "gemma4")  # their model_type ends so


def _decoder_only(name):
    model_type = f"{name}_text" if name in _TEXT else name
    found = {}
    without = {
        "head_dim": name in ("olmo2", "olmoe", "smollm3", "phi3"),  # their heads divide the width
        "intermediate_size": name == "qwen3_5_moe",
    }
    for i, sizes in enumerate((_GROUPED, _OTHER_SIZES)):
        sizes = {key: value for key, value in sizes.items() if not without.get(key)}
        found[f"{name}{'_wide' * i}"] = _hf(model_type, sizes, _IDS, _OPTIONS[name][i])
    return found


HF_CONFIGS = {
    "t5_v1_0": _hf("t5", T5_SIZES, feed_forward_proj="relu"),
    "t5_v1_1": _hf("t5", T5_SIZES, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mt5": _hf("mt5", T5_SIZES),
    "mt5_wide": _hf("mt5", T5_SIZES, WIDER),
    "umt5": _hf("umt5", T5_SIZES),
    "umt5_wide": _hf("umt5", T5_SIZES, WIDER),
    "t5gemma": _t5gemma({}),
    "t5gemma_wide": _t5gemma(
        {**_OTHER_ENCODER, "hidden_size": 24, "rms_norm_eps": 1e-5, "query_pre_attn_scalar": 16},
        tie_word_embeddings=False,
    ),
    "t5gemma2": _t5gemma2(eoi=7),
    "t5gemma2_wide": _t5gemma2(
        **{"eoi": 256_000, **_OTHER_ENCODER, "rope_parameters": _ROPES},
        layer_types=[SLIDING, FULL, SLIDING],
    ),
    "llama": _hf("llama", DECODER_SIZES, num_key_value_heads=4),
    "llama_grouped": _hf("llama", _GROUPED),
    "llama_tied": _hf("llama", DECODER_SIZES, num_key_value_heads=4, tie_word_embeddings=True),
    # Stretched: the prompt is longer than the context before stretching.
    "llama3": _hf("llama", DECODER_SIZES, num_key_value_heads=1, rope_parameters=LLAMA3),
    "qwen2_yarn": _hf("qwen2", _GROUPED, rope_parameters=YARN, max_position_embeddings=128),
    "phi3_long": _hf(
        "phi3", _IDS, vocab_size=48, hidden_size=16, intermediate_size=20, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=800,
        original_max_position_embeddings=200, rope_parameters=LONGROPE,
    ),
    "gemma2": _hf("gemma2", _GROUPED, sliding_window=6, query_pre_attn_scalar=8),
    **{key: make for name in _OPTIONS for key, make in _decoder_only(name).items()},
    "gemma4_unified": _hf(
        "gemma4_unified_text", _GROUPED, _IDS, num_hidden_layers=3, global_head_dim=12,
        layer_types=[SLIDING, SLIDING, FULL], attention_k_eq_v=True,
        num_global_key_value_heads=1, sliding_window=6, final_logit_softcapping=9.0,
    ),
}  # fmt: skip
# Others of their families.
T5_CONFIGS = {
    "t5_v1_1_tied": HF_CONFIGS["t5_v1_1"],
    "t5_gated_silu": _hf("t5", T5_SIZES, feed_forward_proj="gated-silu"),
}
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
