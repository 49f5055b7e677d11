"""Logits, also with a cache, compared with transformers on the same weights."""

import json

import numpy as np
import pytest
import torch
import transformers

from specjax.checkpoints import load_model
from specjax.checkpoints.hf import config_to_hf
from specjax.models import PRESETS, T5Config, model_from_config
from specjax.models.position_encoding import buckets
from specjax.tokenizers.model_files import SpecialIds
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


# Another size for each new family of encoder-decoders.
WIDER = {"d_model": 24, "num_heads": 3, "d_kv": 4, "num_layers": 3, "num_decoder_layers": 1}


def _mt5(**options):
    return transformers.MT5Config(**{**T5_SIZES, **options})


def _umt5(**options):
    return transformers.UMT5Config(**{**T5_SIZES, **options})


def _llama(**options):
    return transformers.LlamaConfig(**DECODER_SIZES, **options)


HF_CONFIGS = {
    "t5_v1_0": lambda: _t5(feed_forward_proj="relu"),
    "t5_v1_1": lambda: _t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mt5": _mt5,
    "mt5_untied": lambda: _mt5(**WIDER),
    "umt5": _umt5,
    "umt5_untied": lambda: _umt5(**WIDER),
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
UNTIED = ("t5_v1_1", "mt5_untied", "umt5_untied")
PROMPT, NEW = 150, 9  # past T5's largest distance (128) and Gemma's window


def save_random(name, path):
    """Saves the transformers model of `HF_CONFIGS[name]` with random weights; returns it."""
    kind = transformers.AutoModelForSeq2SeqLM if "t5" in name else transformers.AutoModelForCausalLM
    theirs = kind.from_config(HF_CONFIGS[name](), attn_implementation="eager").eval()
    if name in UNTIED:  # transformers ties every T5 that it creates
        theirs.lm_head.weight = torch.nn.Parameter(torch.zeros_like(theirs.lm_head.weight))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 0.3, generator=generator)
    theirs.save_pretrained(str(path))
    if name == "umt5_untied":
        # As published. transformers 5 reads it as tied, too, and scales the logits.
        file = path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": False}))
        with torch.no_grad():
            theirs.lm_head.weight *= theirs.config.d_model**0.5
    return theirs


@pytest.fixture(scope="module", params=HF_CONFIGS)
def pair(request, tmp_path_factory):
    """A transformers model with random weights, and the same weights loaded by specjax."""
    name = request.param
    path = tmp_path_factory.mktemp(name)
    theirs = save_random(name, path)
    ours = load_model(path)
    assert (getattr(ours.config, "rope_scaling", None) is not None) == (name == "llama3")
    if "t5" in name:
        assert ours.config.tie_embeddings == (name not in UNTIED)
    else:
        assert ours.config.tie_embeddings == (name in ("llama_tied", "gemma2"))
    return theirs, ours


def test_logits_equal_those_of_transformers(pair):
    theirs, ours = pair
    rng = np.random.default_rng(0)
    model, params = ours.model, ours.params
    lengths = np.array([PROMPT], np.int32)
    if ours.config.encoder_style is not None:
        lengths = np.array([PROMPT, PROMPT // 2], np.int32)  # the encoder's inputs are padded
        inputs = rng.integers(3, 48, (2, PROMPT))
        outputs = rng.integers(3, 48, (2, NEW))
        outputs[:, 0] = ours.config.decoder_start_token
        mask = np.arange(PROMPT) < lengths[:, None]
        full = quick_jit(model.apply)(params, inputs, outputs, encoder_mask=mask)
        batch = {
            "input_ids": torch.tensor(inputs),
            "attention_mask": torch.tensor(mask),
            "decoder_input_ids": torch.tensor(outputs),
        }
    else:
        inputs = rng.integers(3, 48, (1, PROMPT))
        outputs = rng.integers(3, 48, (1, NEW))
        lengths = lengths + 1
        inputs = np.concatenate([inputs, outputs], axis=1)
        full = quick_jit(model.apply)(params, inputs)
        batch = {"input_ids": torch.tensor(inputs)}
        inputs = inputs[:, : PROMPT + 1]  # the first output is the last token to prefill
    with torch.no_grad():
        expected = theirs(**batch).logits.numpy()
    assert error(full, expected) <= 2e-5
    prefill = quick_jit(model.prefill, static_argnums=3)
    cache, tokens, positions = prefill(params, inputs.astype(np.int32), lengths, PROMPT + NEW)
    np.testing.assert_array_equal(tokens, outputs[:, 0])
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


def _on_meta_device(config):
    """The transformers model of a configuration, without allocated memory."""
    values = config_to_hf(config, SpecialIds(), np.dtype(np.float32))
    theirs = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    causal = config.encoder_style is None
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForSeq2SeqLM
    with torch.device("meta"):
        model = kind.from_config(theirs)
        if isinstance(config, T5Config):  # untie
            model.lm_head.weight = torch.nn.Parameter(torch.empty(model.lm_head.weight.shape))
    return model


@pytest.mark.parametrize(
    "name", variants(PRESETS, "t5_v1_1_xl", "mt5_small", "pile_t5_base", "llama2_7b", "gemma2_9b")
)
def test_presets_count_as_transformers_does(name):
    theirs = sum(p.numel() for p in _on_meta_device(PRESETS[name]).parameters())
    assert model_from_config(PRESETS[name]).num_params() == theirs
