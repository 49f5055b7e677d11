"""Checkpoints that MaxText 0.2.5 wrote, against the logits of its own forward pass.

`tests/integrations/maxtext_checkpoints.py` made the archive.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers
import yaml
from checkpoint_helpers import Archive, assert_logits, logits, one_line, tokens

import specjax
from specjax.checkpoints import load_model, read_config
from specjax.checkpoints.arrays import flatten, unflatten
from specjax.checkpoints.orbax import OrbaxReader
from specjax.cli.main import main
from specjax.text.directories import inspect
from specjax.tokenizers.model_files import write_json

ARCHIVE = Archive("maxtext.zip")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return ARCHIVE.unpack(tmp_path_factory.mktemp("maxtext"))


@pytest.fixture
def llama(written, tmp_path):
    """A copy of the checkpoint of a Llama 3.1."""
    return Path(shutil.copytree(written / "llama_unscanned", tmp_path / "llama"))


def edit(directory, **changes):
    (file,) = directory.glob("*.yml")
    file.write_text(yaml.dump({**yaml.safe_load(file.read_text()), **changes}))


def theirs(directory):
    return np.load(directory / "logits.npy")


@pytest.mark.parametrize("case", ARCHIVE.cases)
def test_logits_are_those_of_maxtext(written, case):
    loaded = load_model(written / case)
    assert loaded.format == "maxtext"
    assert_logits(loaded, written / case)


@pytest.mark.parametrize("case", [x for x in ARCHIVE.cases if "unscanned" not in x])
def test_transformers_reads_the_converted_checkpoint(written, tmp_path, case):
    assert main(["convert", str(written / case), str(tmp_path / "hf"), "--to", "hf"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.tensor(np.asarray(tokens(read_config(written / case))), dtype=torch.int64)
    with torch.no_grad():
        ours = model(ids).logits.numpy()
    np.testing.assert_allclose(ours, theirs(written / case), rtol=0, atol=1e-4)


def test_each_rule_of_the_arrays_counts(written):
    """Without one of them the logits are others."""
    for case, path in {
        "llama": "decoder/layers_0/self_attention/query/kernel",
        "mixtral": "decoder/layers_1/self_attention/query/kernel",
        "gemma2": "decoder/layers_3/self_attention/query/kernel",
        "gemma3": "decoder/layers_12/pre_mlp_layer_norm/scale",
        "gemma4": "token_embedder/embedding",
    }.items():
        loaded = load_model(written / case)
        flat = flatten(loaded.params)
        stored = {
            "gemma3": flat[path] + 1,
            "gemma4": flat[path] * np.float32(8**0.5),
        }.get(case, flat[path] / np.float32(6**0.5))
        changed = logits(loaded.model, unflatten({**flat, path: stored}))
        assert np.abs(changed - theirs(written / case)).max() > 1e-2
    # The halves of Llama 3.1's rotations, which the name of the model tells.
    config = read_config(written / "llama").replace(rope_scaling=None)
    loaded = load_model(written / "llama", config=config)
    assert np.abs(logits(loaded.model, loaded.params) - theirs(written / "llama")).max() > 1e-2


def test_what_is_not_scaled_keeps_its_bits(written):
    loaded = load_model(written / "llama")
    reader = OrbaxReader(written / "llama" / "0" / "items")
    name = "params/params/decoder/layers/self_attention/value/kernel"
    stacked = reader.read(name)  # [E, L, K, D]
    for layer in range(2):
        ours = loaded.params["decoder"][f"layers_{layer}"]["self_attention"]["value"]["kernel"]
        np.testing.assert_array_equal(ours, stacked[:, layer].reshape(8, 12))


def test_a_pair_of_two_checkpoints_decodes(written, tmp_path):
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(24)}, unk_token="w0")
    words = tokenizers.Tokenizer(words)
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.decoder = tokenizers.decoders.Fuse()
    words.save(str(tmp_path / "tokenizer.json"))
    for case in ("llama", "llama3"):
        shutil.copytree(written / case, tmp_path / case)
        shutil.copy(tmp_path / "tokenizer.json", tmp_path / case)
        write_json(tmp_path / case / "generation_config.json", {"eos_token_id": 1})
    pair = specjax.load_pair(verifier=tmp_path / "llama", drafter=tmp_path / "llama3")
    greedy = {"sampling": specjax.Sampling(temperature=0.0), "max_new_tokens": 8}
    result = specjax.Decoder(pair, max_draft=3, **greedy)(["w3 w4 w5", "w9"])
    alone = specjax.Decoder(pair.verifier, **greedy)(["w3 w4 w5", "w9"])
    assert list(result.texts) == list(alone.texts)
    assert result.info.emitted == 16
    assert inspect(tmp_path / "llama").summary()["format"] == "maxtext"


def test_the_last_step_below_a_run_is_read(llama, written):
    (llama / "checkpoints").mkdir()
    shutil.move(llama / "0", llama / "checkpoints" / "9")
    shutil.copytree(written / "qwen3_unscanned" / "0", llama / "checkpoints" / "8")
    shutil.copytree(llama / "checkpoints" / "9", llama / "checkpoints" / "10")
    shutil.rmtree(llama / "checkpoints" / "9" / "items" / "d")
    loaded = load_model(llama)
    assert_logits(loaded, llama)


def test_a_directory_needs_one_yaml(llama):
    (llama / "llama3.1-8b.yml").rename(llama / "config.yml")
    one_line(lambda: read_config(llama), llama, "model_name='config'", "llama3.1-8b.yml")
    edit(llama, model_name="llama3.1-8b")
    assert read_config(llama).rope_scaling is not None
    shutil.copy(llama / "config.yml", llama / "other.yml")
    one_line(lambda: read_config(llama), llama, "got 2", "configs/models/NAME.yml")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"decoder_block": "deepseek"}, ["decoder_block='deepseek'", "gemma4_small"]),
        ({"decoder_block": "gemma3"}, ["model_name='llama3.1-8b'", "begin with gemma3"]),
        ({"head_dim": "wide"}, ["head_dim='wide'", "number"]),
        ({"attention_type": "mla"}, ["attention_type='mla'"]),
        ({"mlp_activations": ["relu"]}, ["mlp_activations=['relu']"]),
        ({"logits_via_embedding": True}, ["normalize_embedding_logits=True"]),
        ({"base_num_decoder_layers": 3}, ["missing", "layers_2"]),
    ],
)
def test_another_network_is_refused(llama, changes, parts):
    edit(llama, **changes)
    one_line(lambda: load_model(llama), llama, *parts)


def test_a_damaged_yaml_is_refused(llama):
    (llama / "llama3.1-8b.yml").write_text("vocab_size: [")
    one_line(lambda: read_config(llama), llama / "llama3.1-8b.yml", "not readable as YAML")


def test_numbers_are_those_of_maxtext(llama):
    """YAML 1.1 reads 1e-6, as Gemma 3's files have it, as a text."""
    (file,) = llama.glob("*.yml")
    file.write_text(file.read_text().replace("1.0e-5", "1e-6"))
    assert read_config(llama).norm_eps == 1e-6
