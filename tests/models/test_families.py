"""Families loaded from Hugging Face's format: texts, rollbacks, meshes, and saving again."""

import itertools
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
from specjax.partitioning import make_mesh
from specjax.types import Sampling
from tests.models.hf_models import HF_CONFIGS, made
from tests.models.tiny import error, quick_jit
from tests.training.toy import Numbers
from tests.variants import variants

FAMILIES = [name for name in HF_CONFIGS if not name.endswith("_wide")]
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


# Where a mesh splits experts, each device has its own.
EXPERTS = ("qwen3_moe", "qwen3_next", "qwen3_5_moe", "mixtral", "olmoe", "gpt_oss", "gemma4_wide")
WRITTEN = [
    *((name, None) for name in FAMILIES),
    *itertools.product(EXPERTS, [(1, 2), (2, 1), (2, 2)]),
]


@pytest.mark.parametrize(
    ("name", "mesh"), variants(WRITTEN, ("gemma3", None), ("qwen3_moe", (1, 2)), several=True)
)
def test_greedy_tokens_are_those_of_transformers_with_and_without_a_drafter(name, mesh):
    options = {
        "sampling": Sampling(0.0), "max_new_tokens": NEW, "batch_size": 4, "buckets": (12,)
    }  # fmt: skip
    alone = Decoder(text_model(name), **options)(PROMPTS, progress=False)
    mesh = mesh and make_mesh(*mesh)
    models = {"drafter": text_model(name, True, mesh), "verifier": text_model(name, mesh=mesh)}
    together = Decoder(Pair(**models), max_draft=3, **options)(PROMPTS, progress=False)
    theirs = made(name)[0]
    for prompt, ours, drafted in zip(PROMPTS, alone.tokens, together.tokens, strict=True):
        expected = generated(theirs, prompt)
        end = np.flatnonzero(expected == 1)
        expected = expected[: end[0]] if len(end) else expected
        np.testing.assert_array_equal(ours, expected)
        np.testing.assert_array_equal(drafted, expected)


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


def stored(file, changes):
    """Changes the arrays of a file."""
    arrays = changes(safetensors.numpy.load_file(file))
    safetensors.numpy.save_file(arrays, file, metadata={"format": "pt"})


def renamed(old, new):
    """Replaces a pattern in the names of arrays."""

    def change(arrays):
        found = {re.sub(old, new, name): x for name, x in arrays.items()}
        assert found.keys() != arrays.keys()
        return found

    return change


_VISION = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
_IMAGES = {**_VISION, "intermediate_size": 8}
# The outer class, and the fields beside the text network's.
NESTED = {
    "gemma3": (
        "Gemma3Config",
        {
            "vision_config": {**_IMAGES, "image_size": 28, "patch_size": 14},
            "mm_tokens_per_image": 4,
            "image_token_index": 40, "boi_token_index": 41, "eoi_token_index": 42,
        },
    ),
    "gemma4": (
        "Gemma4Config",
        {
            "vision_config": {
                **_IMAGES, "num_key_value_heads": 1, "head_dim": 8, "patch_size": 2,
            },
            "audio_config": {**_VISION, "output_proj_dims": 8},
            "image_token_id": 40, "audio_token_id": 41, "video_token_id": 42,
        },
    ),
    "gemma4_unified": (
        "Gemma4UnifiedConfig",
        {
            "vision_config": {"mm_embed_dim": 8},
            "audio_config": {},
            "image_token_id": 40, "audio_token_id": 41, "video_token_id": 42,
        },
    ),
    "qwen3_5": (
        "Qwen3_5Config",
        {
            "vision_config": {
                "depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1,
                "patch_size": 2, "out_hidden_size": 16,
            }
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NESTED)
def test_the_text_network_of_a_larger_model_is_read(name, tmp_path):
    """Beside networks for images and sounds, under published names and those in memory."""
    kind, fields = NESTED[name]
    config = getattr(transformers, kind)(text_config=HF_CONFIGS[name]().to_dict(), **fields)
    theirs = transformers.AutoModelForImageTextToText.from_config(config).eval()
    theirs.save_pretrained(str(tmp_path))

    def check():
        loaded = load_model(tmp_path)
        ours = quick_jit(loaded.model.apply)(loaded.params, PROMPTS[0][None])
        assert error(ours, logits_of(theirs)) <= 2e-5

    check()
    if name == "gemma3":  # some tools save these
        stored(
            tmp_path / "model.safetensors",
            renamed(r"^language_model\.model\.", "model.language_model."),
        )
        check()


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


def test_the_names_of_a_t5gemma_2_in_memory_and_equal_copies_are_read(tmp_path):
    place = shutil.copytree(made("t5gemma2")[1], tmp_path / "model")
    file, same = place / "model.safetensors", load_model(place)
    one, copy = (f"model.{side}.embed_tokens.eoi_embedding" for side in ("encoder", "decoder"))
    stored(file, lambda arrays: {**arrays, copy: arrays[one] + 1})
    with pytest.raises(ValueError, match=f"{copy} \\(a copy that differs from {one}\\)"):
        load_model(place)
    stored(file, lambda arrays: {**arrays, copy: arrays[one]})
    jax.tree.map(np.testing.assert_array_equal, load_model(place).params, same.params)
    inner = r"model\.encoder\.(?=embed_tokens|layers|norm)"
    stored(file, renamed(inner, "model.encoder.text_model."))
    jax.tree.map(np.testing.assert_array_equal, load_model(place).params, same.params)


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
