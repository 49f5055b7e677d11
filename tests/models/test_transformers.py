"""Logits, also with a cache, compared with transformers on the same weights."""

import numpy as np
import pytest
import torch
import transformers

from specjax.checkpoints import load_model
from specjax.models import PRESETS, T5Config, model_from_config
from specjax.models.position_encoding import buckets
from tests.models.tiny import error, quick_jit
from tests.variants import variants

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


def _t5(**options):
    return transformers.T5Config(**T5_SIZES, **options)


def _llama(**options):
    return transformers.LlamaConfig(**DECODER_SIZES, **options)


HF_CONFIGS = {
    "t5_v1_0": lambda: _t5(feed_forward_proj="relu"),
    "t5_v1_1": lambda: _t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "llama": lambda: _llama(num_key_value_heads=4),
    "llama_grouped": lambda: _llama(num_key_value_heads=2),
    "llama_tied": lambda: _llama(num_key_value_heads=4, tie_word_embeddings=True),
    # Stretched: the prompt is longer than the context before stretching.
    "llama3": lambda: _llama(
        num_key_value_heads=2,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **DECODER_SIZES, num_key_value_heads=2, sliding_window=6, query_pre_attn_scalar=8
    ),
}
PROMPT, NEW = 150, 9  # past T5's largest distance (128) and Gemma's window


@pytest.fixture(scope="module", params=HF_CONFIGS)
def pair(request, tmp_path_factory):
    """A transformers model with random weights, and the same weights loaded by specjax."""
    name = request.param
    kind = transformers.AutoModelForSeq2SeqLM if "t5" in name else transformers.AutoModelForCausalLM
    theirs = kind.from_config(HF_CONFIGS[name](), attn_implementation="eager").eval()
    if name == "t5_v1_1":  # transformers ties every T5 that it creates
        theirs.lm_head.weight = torch.nn.Parameter(torch.zeros(48, 16))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 0.3, generator=generator)
    path = tmp_path_factory.mktemp(name)
    theirs.save_pretrained(str(path))
    ours = load_model(path)
    assert (getattr(ours.config, "rope_scaling", None) is not None) == (name == "llama3")
    assert ours.config.tie_embeddings == (name in ("t5_v1_0", "llama_tied", "gemma2"))
    return theirs, ours


def test_logits_equal_those_of_transformers(pair):
    theirs, ours = pair
    rng = np.random.default_rng(0)
    inputs = rng.integers(3, 48, (1, PROMPT))
    outputs = rng.integers(3, 48, (1, NEW))
    model, params = ours.model, ours.params
    if isinstance(ours.config, T5Config):
        outputs[:, 0] = ours.config.decoder_start_token
        full = quick_jit(model.apply)(params, inputs, outputs)
        batch = {"input_ids": torch.tensor(inputs), "decoder_input_ids": torch.tensor(outputs)}
    else:
        inputs = np.concatenate([inputs, outputs], axis=1)
        full = quick_jit(model.apply)(params, inputs)
        batch = {"input_ids": torch.tensor(inputs)}
        inputs = inputs[:, : PROMPT + 1]  # the first output is the last token to prefill
    with torch.no_grad():
        expected = theirs(**batch).logits.numpy()
    assert error(full, expected) <= 2e-5
    lengths = np.array([inputs.shape[1]], np.int32)
    prefill = quick_jit(model.prefill, static_argnums=3)
    cache, tokens, positions = prefill(params, inputs.astype(np.int32), lengths, PROMPT + NEW)
    assert int(tokens[0]) == outputs[0, 0]
    cached = quick_jit(model.extend)(params, cache, outputs.astype(np.int32), positions)
    assert error(cached.logits, expected[:, -NEW:]) <= 2e-5


def test_relative_position_buckets_are_those_of_transformers():
    distances = np.arange(-300, 301)
    for bidirectional in (True, False):
        for num_buckets, max_distance in ((32, 128), (8, 20)):
            theirs = transformers.models.t5.modeling_t5.T5Attention._relative_position_bucket(
                torch.tensor(-distances), bidirectional, num_buckets, max_distance
            )
            ours = buckets(
                distances,
                bidirectional=bidirectional,
                num_buckets=num_buckets,
                max_distance=max_distance,
            )
            np.testing.assert_array_equal(ours, theirs)


def _on_meta_device(name):
    """The transformers model of a preset, without allocated memory."""
    config = PRESETS[name]
    if isinstance(config, T5Config):
        theirs = transformers.T5Config(
            vocab_size=config.vocab_size,
            d_model=config.embed_dim,
            d_kv=config.head_dim,
            d_ff=config.mlp_dim,
            num_layers=config.num_encoder_layers,
            num_heads=config.num_heads,
            feed_forward_proj="gated-gelu",
        )
        kind = transformers.AutoModelForSeq2SeqLM
    else:
        gemma = name.startswith("gemma2")
        cls = transformers.Gemma2Config if gemma else transformers.LlamaConfig
        theirs = cls(
            vocab_size=config.vocab_size,
            hidden_size=config.embed_dim,
            head_dim=config.head_dim,
            intermediate_size=config.mlp_dim,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            tie_word_embeddings=config.tie_embeddings,
        )
        kind = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(theirs)
        if isinstance(config, T5Config):  # untie
            model.lm_head.weight = torch.nn.Parameter(torch.empty(model.lm_head.weight.shape))
    return model


@pytest.mark.parametrize("name", variants(PRESETS, "t5_v1_1_xl", "llama2_7b", "gemma2_9b"))
def test_presets_count_as_transformers_does(name):
    theirs = sum(p.numel() for p in _on_meta_device(name).parameters())
    assert model_from_config(PRESETS[name]).num_params() == theirs
