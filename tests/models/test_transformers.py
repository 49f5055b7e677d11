"""Logits, also with a cache, compared with transformers on the same weights."""

import dataclasses
import re
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from specjax.checkpoints import load_model
from specjax.checkpoints.hf import config_to_hf
from specjax.models import PRESETS, T5Config, model_from_config
from specjax.models.families import config_from_dict, config_to_dict
from specjax.models.family import HFFields
from specjax.models.position_encoding import buckets
from specjax.models.rope_scaling import scaling_from_hf
from specjax.tokenizers.model_files import SpecialIds
from specjax.types import Prompts
from tests.models.hf_models import HF_CONFIGS, UNTIED, YARN, made
from tests.models.tiny import error, quick_jit
from tests.variants import variants

PROMPT, NEW = 150, 9  # past T5's largest distance (128) and Gemma's window


@pytest.fixture(
    scope="module", params=variants(HF_CONFIGS, *(n for n in HF_CONFIGS if not n.endswith("_wide")))
)
def pair(request):
    """A transformers model with random weights, and the same weights loaded by specjax."""
    name = request.param
    theirs, path = made(name)
    ours = load_model(path)
    stretched = name in ("llama3", "qwen2_yarn", "phi3_long", "gpt_oss")
    assert (getattr(ours.config, "rope_scaling", None) is not None) == stretched
    assert ours.config.tie_embeddings == (theirs.config.tie_word_embeddings and name not in UNTIED)
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
    prefill = quick_jit(model.prefill, static_argnums=2)
    cache, tokens, positions = prefill(
        params, Prompts(inputs.astype(np.int32), lengths), PROMPT + NEW
    )
    np.testing.assert_array_equal(tokens, outputs[:, 0])
    cached = quick_jit(model.extend)(params, cache, outputs.astype(np.int32), positions)
    assert error(cached.logits, expected[:, -NEW:]) <= 2e-5


# A tied network of each family.
TIED = (
    "t5_v1_0", "mt5", "umt5", "t5gemma", "t5gemma2", "llama_tied", "qwen2_wide", "qwen3",
    "qwen3_moe_wide", "qwen3_next_wide", "qwen3_5_wide", "qwen3_5_moe_wide", "mistral_wide",
    "mixtral_wide", "olmo2_wide", "olmoe_wide", "smollm3", "phi3_wide",
    "gpt_oss_wide", "gemma", "gemma2", "gemma3", "gemma4", "gemma4_unified",
)  # fmt: skip


@pytest.mark.parametrize("name", variants(TIED, "t5_v1_0", "t5gemma", "llama_tied"))
def test_a_tied_matrix_may_be_stored_under_any_of_its_names(name, tmp_path):
    theirs, path = made(name)
    matrix = theirs.get_output_embeddings().weight
    names = [n for n, x in theirs.state_dict(keep_vars=True).items() if x is matrix]
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    stored = load_file(path / "model.safetensors")
    others = {n: x for n, x in stored.items() if not torch.equal(x, matrix)}
    assert len(names) >= 2 and len(stored) - len(others) == 1
    tokens = np.random.default_rng(0).integers(3, 48, (1, 12))
    model = load_model(path).model
    inputs = {"input_ids": torch.tensor(tokens)}
    arguments = (tokens,)
    if model.config.encoder_style is not None:
        inputs["decoder_input_ids"], arguments = inputs["input_ids"], (tokens, tokens)
    with torch.no_grad():
        expected = theirs(**inputs).logits.numpy()
    apply = quick_jit(model.apply)
    for alias in names:
        arrays = {**others, alias: matrix.detach()}
        save_file(arrays, tmp_path / "model.safetensors", {"format": "pt"})
        loaded = load_model(tmp_path)
        assert loaded.model.config == model.config, alias
        assert error(apply(loaded.params, *arguments), expected) <= 2e-5, alias


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("sizes", [(32, 128), (8, 20), (4, 3), (5, 3), (8, 5)])
def test_relative_position_buckets_are_those_of_transformers(sizes, bidirectional):
    """Also of the least sizes that a configuration may have."""
    distances = np.arange(-300, 301)
    theirs = transformers.models.t5.modeling_t5.T5Attention._relative_position_bucket(
        torch.tensor(-distances), bidirectional, *sizes
    )
    named = dict(zip(("num_buckets", "max_distance"), sizes, strict=True))
    np.testing.assert_array_equal(buckets(distances, bidirectional=bidirectional, **named), theirs)


def _on_meta_device(config):
    """The transformers model of a configuration, without allocated memory."""
    values = config_to_hf(config, SpecialIds(), np.dtype(np.float32))
    theirs = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    causal = config.encoder_style is None
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForSeq2SeqLM
    with torch.device("meta"):
        model = kind.from_config(theirs)
        if isinstance(config, T5Config) and not config.tie_embeddings:  # untie
            model.lm_head.weight = torch.nn.Parameter(torch.empty(model.lm_head.weight.shape))
    return model


@pytest.mark.parametrize(
    "name",
    variants(PRESETS, "t5_v1_1_xl", "gemma4_e2b"),
)
def test_presets_count_as_transformers_does(name):
    made = _on_meta_device(PRESETS[name])
    scales = (x for x in made.named_buffers() if x[0].endswith("layer_scalar"))
    parameters = (*made.named_parameters(), *scales)
    theirs = sum(p.numel() for at, p in parameters if not re.search("vision_tower|multi_modal", at))
    assert model_from_config(PRESETS[name]).num_params() == theirs


def test_the_factors_of_long_texts_are_chosen_for_all_texts():
    """transformers takes them where a text of the batch passes the original length."""
    theirs, path = made("phi3_long")
    short = load_model(path)
    tokens = np.random.default_rng(0).integers(3, 48, (1, 250))
    with pytest.raises(ValueError, match="for at most 200 positions, got a cache or text of 250"):
        short.model.apply(short.params, tokens)
    with pytest.raises(ValueError, match="for at most 200 positions, got a cache or text of 201"):
        short.model.prefill(short.params, Prompts(tokens[:, :9], np.array([9])), 201)
    scaling = dataclasses.replace(short.config.rope_scaling, long=True)
    long = load_model(path, config=short.config.replace(rope_scaling=scaling))
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(tokens)).logits.numpy()
    assert error(quick_jit(long.model.apply)(long.params, tokens), expected) <= 2e-5
    assert config_from_dict(config_to_dict(long.config)) == long.config


@pytest.mark.parametrize(
    "changes",
    [
        {"truncate": False},
        {"mscale": 0.7, "mscale_all_dim": 0.3},
        {"attention_factor": 1.3, "beta_fast": 2.0, "beta_slow": 0.5},
        {"original_max_position_embeddings": 4, "factor": 1.5},
        {"factor": 0.5},
    ],
)
def test_yarn_is_that_of_transformers(changes):
    given = {**YARN, **changes}
    theirs = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=2, rope_parameters=dict(given)
    )
    wanted, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](theirs)
    scaling = scaling_from_hf(HFFields({}), "yarn", HFFields(given))
    found = scaling.frequencies(32, given["rope_theta"])
    np.testing.assert_allclose(found, wanted.numpy(), rtol=2e-6)
    assert scaling.attention_factor == pytest.approx(factor)
