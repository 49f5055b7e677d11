"""What `Style` can say: networks of families that are not loaded yet, against transformers."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from specjax.checkpoints.arrays import flatten, unflatten
from specjax.models import (
    CausalLM,
    DecoderOnlyConfig,
    Family,
    Style,
    decoder_only_names,
    rope_frequencies,
)
from tests.models.tiny import error, quick_jit

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
BEFORE = {
    "input_layernorm": "pre_self_attention_layer_norm",
    "post_attention_layernorm": "pre_mlp_layer_norm",
}
AFTER = {
    "post_attention_layernorm": "post_self_attention_layer_norm",
    "post_feedforward_layernorm": "post_mlp_layer_norm",
}
LAYERS = range(4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StyledConfig(DecoderOnlyConfig):
    """Sizes with any style."""

    styled: Any = None

    @property
    def style(self):
        return self.styled


def rope(theta):
    return tuple(rope_frequencies(8, theta).tolist())


def style(**changes):
    usual = {
        "activations": ("silu", "linear"),
        "windows": (None,) * 4,
        "ropes": (rope(1e4),) * 4,
        "query_scale": 8**-0.5,
    }
    return Style(**(usual | changes))


def gemma3(**options):
    kinds = ["full_attention" if i % 3 == 2 else "sliding_attention" for i in LAYERS]
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    }
    return transformers.Gemma3TextConfig(
        **options, sliding_window=6, layer_types=kinds, rope_parameters=ropes,
        query_pre_attn_scalar=8, final_logit_softcapping=None,
    )  # fmt: skip


# By family: transformers' configuration, our style, and the names of the norms.
FAMILIES = {
    "qwen2": (
        lambda **o: transformers.Qwen2Config(**o, rope_parameters={"rope_theta": 1e4}),
        style(biases=True),
        BEFORE,
    ),
    "qwen3": (transformers.Qwen3Config, style(qk_norms="head"), BEFORE),
    "olmo2": (
        transformers.Olmo2Config,
        style(qk_norms="all", pre_norms=False, post_norms=True),
        AFTER,
    ),
    "smollm3": (
        lambda **o: transformers.SmolLM3Config(**o, rope_parameters={"rope_theta": 1e4}),
        style(ropes=tuple(None if i % 4 == 3 else rope(1e4) for i in LAYERS)),
        BEFORE,
    ),
    "gemma3_text": (
        gemma3,
        style(
            activations=("gelu", "linear"),
            windows=tuple(None if i % 3 == 2 else 6 for i in LAYERS),
            ropes=tuple(rope(1e6 if i % 3 == 2 else 1e4) for i in LAYERS),
            qk_norms="head",
            post_norms=True,
            plus_one_norms=True,
            embed_scale=32**0.5,
        ),
        {
            **AFTER,
            "input_layernorm": "pre_self_attention_layer_norm",
            "pre_feedforward_layernorm": "pre_mlp_layer_norm",
        },
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers(name):
    make, ours, norms = FAMILIES[name]
    theirs = transformers.AutoModelForCausalLM.from_config(
        make(**SIZES), attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 0.3, generator=generator)
    config = StyledConfig(
        vocab_size=48, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=20,
        num_layers=4, norm_eps=theirs.config.rms_norm_eps, styled=ours,
    )  # fmt: skip
    model = CausalLM(config)
    names = decoder_only_names(norms)
    family = Family(name, StyledConfig, CausalLM, (), {}, names, None, None)
    arrays = {name: value.numpy() for name, value in theirs.state_dict().items()}
    params = {}
    for path, leaf in flatten(model.abstract_params()).items():
        line = family.hf_name(path)
        value = arrays.pop(line.hf)
        params[path] = jnp.asarray(value.T if line.transposed else value)
        assert params[path].shape == leaf.shape, path
    assert not arrays, arrays.keys()
    params = unflatten(params)
    tokens = np.random.default_rng(0).integers(3, 48, (1, 30)).astype(np.int32)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens).long()).logits.numpy()
    assert error(quick_jit(model.apply)(params, tokens), expected) <= 2e-5
    lengths = np.array([25], np.int32)
    cache, _, positions = quick_jit(model.prefill, static_argnums=3)(
        params, tokens[:, :25], lengths, 30
    )
    extended = quick_jit(model.extend)(params, cache, tokens[:, 24:], positions)
    assert error(extended.logits, expected[:, 24:]) <= 2e-5
