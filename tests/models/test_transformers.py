"""Logits, also with a cache, compared with transformers on the same weights."""

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
from specjax.models.position_encoding import buckets
from specjax.tokenizers.model_files import SpecialIds
from specjax.types import Prompts
from tests.models.hf_models import HF_CONFIGS, UNTIED, made
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
    assert (getattr(ours.config, "rope_scaling", None) is not None) == (name == "llama3")
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
    "qwen3_moe_wide", "mistral_wide", "mixtral_wide", "olmo2_wide", "olmoe_wide", "smollm3",
    "phi3_wide", "gemma", "gemma2", "gemma3",
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
        if isinstance(config, T5Config) and not config.tie_embeddings:  # untie
            model.lm_head.weight = torch.nn.Parameter(torch.empty(model.lm_head.weight.shape))
    return model


@pytest.mark.parametrize(
    "name", variants(PRESETS, "t5_v1_1_xl", "mt5_small", "pile_t5_base", "gemma3_27b", "phi4")
)
def test_presets_count_as_transformers_does(name):
    parameters = _on_meta_device(PRESETS[name]).named_parameters()
    theirs = sum(p.numel() for at, p in parameters if not re.search("vision_tower|multi_modal", at))
    assert model_from_config(PRESETS[name]).num_params() == theirs
