"""Families loaded from Hugging Face's format: texts, rollbacks, meshes, and saving again."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

from specjax import Decoder, Pair, TextModel
from specjax.checkpoints import load_model, loading, save_model
from specjax.models import PRESETS
from specjax.models.families import config_from_dict, config_to_dict
from specjax.partitioning import make_mesh
from specjax.types import Sampling
from tests.models.hf_models import HF_CONFIGS, made
from tests.models.test_ragged import worst_error
from tests.models.tiny import CONFIGS, Tiny, error, quick_jit
from tests.training.toy import Numbers
from tests.variants import variants

FAMILIES = [name for name in HF_CONFIGS if not name.endswith("_wide")]
QUICK = ("qwen2", "smollm3", "gemma3")
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(3, 48, length).astype(np.int32) for length in RNG.integers(1, 12, 12)]
NEW = 8


class Words(Numbers):
    vocab_size = 48


def logits_of(theirs):
    tokens = torch.tensor(PROMPTS[0][None])
    more = {"decoder_input_ids": tokens} if theirs.config.is_encoder_decoder else {}
    with torch.no_grad():
        return theirs(input_ids=tokens.long(), **more).logits.numpy()


def text_model(name, another=False, mesh=None):
    loaded = load_model(made(name)[1], mesh=mesh)
    params = loaded.params
    if another:  # weights
        embedding = params["token_embedder"]["embedding"]
        table = {**params["token_embedder"], "embedding": embedding[::-1]}
        params = {**params, "token_embedder": table}
    return TextModel(loaded.model, params, Words(), mesh)


def generated(theirs, prompt):
    with torch.no_grad():
        tokens = theirs.generate(
            torch.tensor(prompt[None]).long(), do_sample=False, max_new_tokens=NEW,
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.long), eos_token_id=1,
            pad_token_id=0,
        )[0].numpy()  # fmt: skip
    return tokens[1:] if theirs.config.is_encoder_decoder else tokens[len(prompt) :]


@pytest.mark.parametrize("name", variants(FAMILIES, "gemma3"))
def test_greedy_tokens_are_those_of_transformers_with_and_without_a_drafter(name):
    verifier = text_model(name)
    options = {
        "sampling": Sampling(0.0), "max_new_tokens": NEW, "batch_size": 4, "buckets": (12,)
    }  # fmt: skip
    alone = Decoder(verifier, **options)(PROMPTS, progress=False)
    pair = Pair(drafter=text_model(name, another=True), verifier=verifier)
    together = Decoder(pair, max_draft=3, **options)(PROMPTS, progress=False)
    theirs = made(name)[0]
    for prompt, ours, drafted in zip(PROMPTS, alone.tokens, together.tokens, strict=True):
        expected = generated(theirs, prompt)
        end = np.flatnonzero(expected == 1)
        expected = expected[: end[0]] if len(end) else expected
        np.testing.assert_array_equal(ours, expected)
        np.testing.assert_array_equal(drafted, expected)


@pytest.mark.parametrize("mesh", variants([(1, 2), (2, 1), (2, 2)], (1, 2)))
@pytest.mark.parametrize(
    "name",
    variants(
        ("qwen3_moe", "qwen3_next", "qwen3_5_moe", "mixtral", "olmoe", "gpt_oss", "gemma4_wide"),
        "qwen3_moe",
    ),
)
def test_on_a_mesh_experts_write_what_they_write_alone(name, mesh):
    options = {"sampling": Sampling(0.0), "max_new_tokens": NEW, "buckets": (12,)}
    alone = Decoder(text_model(name), batch_size=4, **options)(PROMPTS, progress=False)
    models = {"drafter": text_model(name, True, make_mesh(*mesh))}
    pair = Pair(verifier=text_model(name, mesh=make_mesh(*mesh)), **models)
    together = Decoder(pair, max_draft=3, batch_size=4, **options)(PROMPTS, progress=False)
    jax.tree.map(np.testing.assert_array_equal, together.tokens, alone.tokens)


@pytest.mark.parametrize("name", variants(FAMILIES, *QUICK))
def test_rows_that_roll_back_give_the_logits_of_a_full_pass(name):
    loaded = load_model(made(name)[1])
    model = loaded.model
    prefill = quick_jit(model.prefill, static_argnums=2)
    passes = (quick_jit(model.apply), prefill, quick_jit(model.extend))
    assert worst_error(Tiny(model, loaded.params, *passes)) <= 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_reads_what_is_saved_again(name, tmp_path):
    theirs, path = made(name)
    loaded = load_model(path)
    ids = loaded.special_ids
    save_model(tmp_path / "again", loaded.config, loaded.params, format="hf", special_ids=ids)
    kind = type(theirs)
    again, report = kind.from_pretrained(
        str(tmp_path / "again"), attn_implementation="eager", output_loading_info=True
    )
    missing = [x for x in report["missing_keys"] if not re.search("vision_tower|multi_modal", x)]
    assert not any([missing, report["unexpected_keys"], report["mismatched_keys"]])
    assert error(logits_of(again.eval()), logits_of(theirs)) <= 1e-6


@pytest.mark.parametrize("mesh", [(8, 1), (2, 4)])
@pytest.mark.parametrize("name", variants(FAMILIES, "gemma3"))
def test_logits_on_a_mesh_are_those_of_a_device(name, mesh):
    path = made(name)[1]
    alone, spread = load_model(path), load_model(path, mesh=make_mesh(*mesh))
    tokens = np.resize(np.concatenate(PROMPTS), (8, 10))
    inputs = (tokens,) if alone.config.encoder_style is None else (tokens, tokens)
    expected = quick_jit(alone.model.apply)(alone.params, *inputs)
    assert error(quick_jit(spread.model.apply)(spread.params, *inputs), expected) <= 1e-5


@pytest.mark.parametrize("names", ["published", "in memory"])
def test_the_text_network_of_a_larger_model_is_read(names, tmp_path):
    text = HF_CONFIGS["gemma3"]()
    vision = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=40,
        boi_token_index=41, eoi_token_index=42,
    )  # fmt: skip
    theirs = transformers.Gemma3ForConditionalGeneration(config).eval()
    theirs.save_pretrained(str(tmp_path))
    if names == "in memory":  # some tools save these
        file = tmp_path / "model.safetensors"
        rename_arrays(file, "language_model.model.", "model.language_model.")
    loaded = load_model(tmp_path)
    assert loaded.config.num_layers == text.num_hidden_layers
    ours = quick_jit(loaded.model.apply)(loaded.params, PROMPTS[0][None])
    assert error(ours, logits_of(theirs)) <= 2e-5


@pytest.mark.parametrize("name", ["gemma4", "gemma4_unified"])
def test_the_text_network_of_a_gemma_4_is_read(name, tmp_path):
    """Beside networks for images and sounds."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    audio, vision = {**sizes, "output_proj_dims": 8}, {
        **sizes, "intermediate_size": 8, "num_key_value_heads": 1, "head_dim": 8, "patch_size": 2,
    }  # fmt: skip
    kind = transformers.Gemma4Config
    if name == "gemma4_unified":
        kind, audio, vision = transformers.Gemma4UnifiedConfig, {}, {"mm_embed_dim": 8}
    config = kind(
        text_config=HF_CONFIGS[name]().to_dict(), vision_config=vision, audio_config=audio,
        image_token_id=40, audio_token_id=41, video_token_id=42,
    )  # fmt: skip
    theirs = transformers.AutoModelForImageTextToText.from_config(config).eval()
    theirs.save_pretrained(str(tmp_path))
    loaded = load_model(tmp_path)
    ours = quick_jit(loaded.model.apply)(loaded.params, PROMPTS[0][None])
    assert error(ours, logits_of(theirs)) <= 2e-5


def test_the_text_network_of_a_qwen_3_5_is_read(tmp_path):
    vision = {
        "depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "patch_size": 2,
        "out_hidden_size": 16,
    }  # fmt: skip
    text = HF_CONFIGS["qwen3_5"]()
    config = transformers.Qwen3_5Config(text_config=text.to_dict(), vision_config=vision)
    theirs = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    theirs.save_pretrained(str(tmp_path))
    loaded = load_model(tmp_path)
    ours = quick_jit(loaded.model.apply)(loaded.params, PROMPTS[0][None])
    assert error(ours, logits_of(theirs)) <= 2e-5


def rename_arrays(path, old, new):
    arrays = safetensors.numpy.load_file(path)
    renamed = {new + k[len(old) :] if k.startswith(old) else k: v for k, v in arrays.items()}
    assert renamed.keys() != arrays.keys()
    safetensors.numpy.save_file(renamed, path, metadata={"format": "pt"})


def test_fields_outside_and_arrays_of_other_networks_are_named(tmp_path):
    place = shutil.copytree(made("gemma3")[1], tmp_path / "model")
    values = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": 3}))
    with pytest.raises(ValueError, match="text_config=3 must be an object"):
        load_model(place)
    outer = {"model_type": "gemma3", "architectures": ["Other"], "text_config": values}
    (place / "config.json").write_text(json.dumps(outer))
    with pytest.raises(ValueError, match="must name Gemma3ForConditionalGeneration"):
        load_model(place)


def test_the_names_of_a_t5gemma_2_in_memory_are_read(tmp_path):
    place = shutil.copytree(made("t5gemma2")[1], tmp_path / "model")
    file = place / "model.safetensors"
    arrays = safetensors.numpy.load_file(file)
    inner = re.compile(r"model\.encoder\.(?=embed_tokens|layers|norm)")
    renamed = {inner.sub("model.encoder.text_model.", name): x for name, x in arrays.items()}
    assert renamed.keys() != arrays.keys()
    safetensors.numpy.save_file(renamed, file, metadata={"format": "pt"})
    ours, same = load_model(place), load_model(made("t5gemma2")[1])
    jax.tree.map(np.testing.assert_array_equal, ours.params, same.params)


def test_a_second_copy_of_an_array_must_be_equal(tmp_path):
    place = shutil.copytree(made("t5gemma2")[1], tmp_path / "model")
    file = place / "model.safetensors"
    arrays = safetensors.numpy.load_file(file)
    one, copy = (f"model.{side}.embed_tokens.eoi_embedding" for side in ("encoder", "decoder"))
    safetensors.numpy.save_file({**arrays, copy: arrays[one]}, file, metadata={"format": "pt"})
    ours, same = load_model(place), load_model(made("t5gemma2")[1])
    jax.tree.map(np.testing.assert_array_equal, ours.params, same.params)
    safetensors.numpy.save_file({**arrays, copy: arrays[one] + 1}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{copy} \\(a copy that differs from {one}\\)"):
        load_model(place)


def test_a_tied_mt5_says_whether_its_head_scales(tmp_path):
    """transformers 4 scales it, transformers 5 does not, and their files look the same."""
    place = shutil.copytree(made("mt5")[1], tmp_path / "model")
    file = place / "config.json"
    values = {**json.loads(file.read_text()), "transformers_version": "4.57.6"}
    file.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="set scale_decoder_outputs to true or false"):
        load_model(place)
    for scales in (True, False):
        file.write_text(json.dumps({**values, "scale_decoder_outputs": scales}))
        config = load_model(place).config
        assert (config.tie_embeddings, config.scale_tied_logits) == (True, scales)
    file.write_text(json.dumps({**values, "tie_word_embeddings": False}))
    with pytest.raises(ValueError, match="tie_word_embeddings is false, but lm_head"):
        load_model(place)


def test_a_size_covers_the_encoder(monkeypatch):
    monkeypatch.setattr(loading, "read_config", lambda _: PRESETS["t5gemma_9b_2b"])
    assert loading.sized("DIR", "t5gemma_9b_2b") == "DIR"
    with pytest.raises(ValueError, match=r"encoder's embed_dim 3584 \(not 2304\)"):
        loading.sized("DIR", "t5gemma_2b_2b")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("t5gemma", {"encoder": None}, "encoder must be a Gemma2Config"),
        ("t5gemma", {"encoder": 3}, "encoder=3 must be None or a Gemma2Config"),
        ("t5gemma", {"decoder_start_token": 48}, "decoder_start_token=48 must be a token id"),
        ("t5gemma2", {"embed_dim": 32}, "embed_dim=32 must be the encoder's, 16"),
        ("t5gemma2", {"tie_embeddings": False}, "tie_embeddings=False is not supported"),
        ("t5gemma2", {"eoi_token": -1}, "eoi_token=-1 must be at least 0"),
    ],
)
def test_encoder_decoders_that_cannot_be_are_refused(name, change, message):
    with pytest.raises(ValueError, match=message):
        CONFIGS[name].replace(**change)


def test_the_encoder_has_the_dtypes_of_the_decoder():
    config = CONFIGS["t5gemma"].replace(dtype="bfloat16", vocab_size=50)
    assert (config.encoder.dtype, config.encoder.vocab_size) == (config.dtype, 50)
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config


def test_a_umt5_that_transformers_5_saved_again_keeps_its_head(tmp_path):
    """It calls every head tied, and writes those that are not."""
    place = shutil.copytree(made("umt5_wide")[1], tmp_path / "model")
    values = json.loads((place / "config.json").read_text())
    assert values["transformers_version"].startswith("5.")
    (place / "config.json").write_text(json.dumps({**values, "tie_word_embeddings": True}))
    assert load_model(place).config == load_model(made("umt5_wide")[1]).config
    values = {**values, "tie_word_embeddings": True, "transformers_version": "4.53.0"}
    (place / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="lm_head.weight differs from shared.weight"):
        load_model(place)
