"""`specjax convert`: between all formats, bit for bit, all or nothing."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import transformers

from specjax.acceptance_head import Head, HeadConfig, init_head
from specjax.checkpoints import load_model, read_config, save_model
from specjax.checkpoints.arrays import flatten
from specjax.checkpoints.attachments import has_head, load_head, save_head
from specjax.checkpoints.saving import save_t5x_pair
from specjax.checkpoints.t5x import T5XReader, write_t5x
from specjax.cli.main import main
from specjax.fingerprints import digest
from specjax.models import model_from_config
from specjax.models.families import config_to_dict
from specjax.text.directories import inspect
from specjax.tokenizers.load import load_tokenizer
from specjax.tokenizers.model_files import SpecialIds
from tests.checkpoints import checkpoint_helpers
from tests.checkpoints.checkpoint_helpers import random_params
from tests.models.tiny import CONFIGS

T5_V1_1, T5_V1_0, LLAMA = (checkpoint_helpers.CONFIGS[x] for x in ("t5_v1_1", "t5_v1_0", "llama"))


def _bits(path):
    loaded = load_model(path)
    return {name: np.asarray(value).tobytes() for name, value in flatten(loaded.params).items()}


def _convert(*args):
    return main(["convert", *map(str, args)])


@pytest.fixture
def source(tmp_path):
    """A T5X checkpoint with a tokenizer and settings beside it."""
    ids = SpecialIds(eos=(1,), pad=0)
    save_model(
        tmp_path / "t5x", T5_V1_1, random_params(T5_V1_1), format="t5x", special_ids=ids, step=30
    )
    (tmp_path / "t5x" / "spiece.model").write_bytes(b"pieces")
    (tmp_path / "t5x" / "tokenizer_config.json").write_text('{"extra_ids": 0}')
    (tmp_path / "t5x" / "generation_config.json").write_text('{"eos_token_id": [1, 9]}')
    return tmp_path / "t5x"


def test_t5x_to_hf_and_back_is_bit_exact(source, tmp_path, capsys):
    assert _convert(source, tmp_path / "hf", "--to", "hf") == 0
    count = model_from_config(T5_V1_1).num_params()
    assert f"(hf): {count:,} parameters" in capsys.readouterr().out
    assert _convert(tmp_path / "hf", tmp_path / "back", "--to", "t5x") == 0
    assert _convert(source, tmp_path / "ours", "--to", "orbax") == 0
    assert _convert(tmp_path / "ours", tmp_path / "again", "--to", "hf") == 0
    original = _bits(source)
    for name in ("hf", "back", "ours", "again"):
        assert _bits(tmp_path / name) == original, name
        loaded = load_model(tmp_path / name)
        assert loaded.config == load_model(source).config == T5_V1_1
        # The tokenizer and what ends a generation come along.
        assert (tmp_path / name / "spiece.model").read_bytes() == b"pieces"
        assert loaded.special_ids.eos == (1, 9)
    assert load_model(tmp_path / "ours").step == 30
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written["eos_token_id"] == [1, 9]


@pytest.mark.parametrize("config", [T5_V1_0, LLAMA], ids=["t5_v1_0", "llama"])
def test_dtype(config, tmp_path):
    params = random_params(config)
    save_model(tmp_path / "source", config, params, format="hf")
    for dtype in ("bfloat16", "float16"):
        for format in ("hf", "orbax"):
            out = tmp_path / f"{format}-{dtype}"
            assert _convert(tmp_path / "source", out, "--to", format, "--dtype", dtype) == 0
            loaded = load_model(out, dtype=dtype)
            for name, value in flatten(params).items():
                expected = np.asarray(value.astype(jnp.dtype(dtype)))
                np.testing.assert_array_equal(np.asarray(flatten(loaded.params)[name]), expected)
    assert json.loads((tmp_path / "hf-bfloat16" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_format_is_refused_before_the_arrays_are_read(tmp_path, capsys, monkeypatch):
    save_model(tmp_path / "llama", LLAMA, random_params(LLAMA))
    monkeypatch.setattr("specjax.checkpoints.load_model", None)
    assert _convert(tmp_path / "llama", tmp_path / "x", "--to", "t5x") == 2
    assert "only T5, not Llama" in capsys.readouterr().err
    assert read_config(tmp_path / "llama") == LLAMA


def test_parent_directories_are_made(source, tmp_path):
    assert _convert(source, tmp_path / "a" / "b" / "hf", "--to", "hf") == 0
    assert _bits(tmp_path / "a" / "b" / "hf") == _bits(source)


def test_gin_file(source, tmp_path):
    (source / "config.gin").unlink()
    gin = tmp_path / "given.gin"
    gin.write_text("network.T5Config.mlp_activations = ('silu', 'linear')")
    assert _convert(source, tmp_path / "out", "--to", "hf", "--config", gin) == 0
    assert load_model(tmp_path / "out").config.mlp_activations == ("silu", "linear")


def test_a_configuration_as_json(tmp_path, capsys):
    """What T5X's arrays do not tell, our own JSON does; it reaches config.json."""
    config = T5_V1_1.replace(relpos_buckets=16, relpos_max_distance=40)
    params = random_params(config)
    (tmp_path / "t5x").mkdir()
    write_t5x(tmp_path / "t5x", flatten(params), step=3, dtype=np.dtype("float32"))
    assert _convert(tmp_path / "t5x", tmp_path / "x", "--to", "hf") == 2
    assert "16 buckets" in capsys.readouterr().err
    given = tmp_path / "given.json"
    given.write_text(json.dumps(config_to_dict(config)))
    assert _convert(tmp_path / "t5x", tmp_path / "hf", "--to", "hf", "--config", given) == 0
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written["relative_attention_num_buckets"] == 16
    assert written["relative_attention_max_distance"] == 40
    assert load_model(tmp_path / "hf").config == config
    # It serves every format.
    assert _convert(tmp_path / "hf", tmp_path / "ours", "--to", "orbax", "--config", given) == 0
    assert load_model(tmp_path / "ours").config == config
    for text, part in (("{}", "family=None"), ("[]", "JSON object"), ("{", "not readable as JSON")):
        given.write_text(text)
        assert _convert(tmp_path / "t5x", tmp_path / "y", "--to", "hf", "--config", given) == 2
        error = capsys.readouterr().err
        assert str(given) in error
        assert part in error
        assert error.count("\n") == 1


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A T5's SentencePiece model, without any file that lists its sentinels."""
    import sentencepiece

    model = tmp_path_factory.mktemp("pieces") / "spiece"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a stitch in time saves nine", "blocks of tokens"] * 8),
        model_prefix=str(model),
        vocab_size=30,
        minloglevel=2,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
    )
    return model.with_suffix(".model")


@pytest.mark.parametrize("rows", [48, 160])
def test_the_vocabulary_is_the_same_in_every_format(rows, pieces, tmp_path):
    """Whether there are sentinels, the embedding's rows tell, which T5X's files do not name."""
    config = T5_V1_1.replace(vocab_size=rows)
    save_model(tmp_path / "0", config, random_params(config), format="hf")
    shutil.copy(pieces, tmp_path / "0" / "spiece.model")
    first = load_tokenizer(tmp_path / "0")
    assert first.vocab_size > 100 or rows == 48
    for number, format in enumerate(("t5x", "hf", "orbax", "t5x", "orbax", "hf")):
        assert _convert(tmp_path / f"{number}", tmp_path / f"{number + 1}", "--to", format) == 0
        tokenizer = load_tokenizer(tmp_path / f"{number + 1}")
        assert tokenizer.fingerprint == first.fingerprint, format
        assert tokenizer.encode("a stitch<extra_id_0>") == first.encode("a stitch<extra_id_0>")


def test_a_published_style_pair_goes_through_every_format(tmp_path):
    """Tied without scaling, as transformers 5 makes T5s."""
    source = Path(__file__).resolve().parents[3] / "shared/models/multi30k-ende/verifier"
    if not source.is_dir():
        pytest.skip(f"{source} is absent")
    for before, after, format in (
        (source, "t5x", "t5x"),
        (tmp_path / "t5x", "hf", "hf"),
        (tmp_path / "hf", "orbax", "orbax"),
    ):
        assert _convert(before, tmp_path / after, "--to", format) == 0
    assert load_model(tmp_path / "orbax").config == load_model(source).config
    assert _bits(tmp_path / "orbax") == _bits(source)
    fingerprint = load_tokenizer(source).fingerprint
    for name in ("t5x", "hf", "orbax"):
        assert load_tokenizer(tmp_path / name).fingerprint == fingerprint


def test_the_dtype_and_the_longest_context_stay(tmp_path):
    save_model(tmp_path / "a", LLAMA, random_params(LLAMA), format="hf", dtype="float16")
    values = json.loads((tmp_path / "a" / "config.json").read_text())
    values["max_position_embeddings"] = 131072
    (tmp_path / "a" / "config.json").write_text(json.dumps(values))
    assert _convert(tmp_path / "a", tmp_path / "b", "--to", "orbax") == 0
    assert _convert(tmp_path / "b", tmp_path / "c", "--to", "hf") == 0
    again = json.loads((tmp_path / "c" / "config.json").read_text())
    assert again["max_position_embeddings"] == 131072
    assert again["dtype"] == "float16"
    before, after = (safetensors.numpy.load_file(tmp_path / n / "model.safetensors") for n in "ac")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert after[name].dtype == np.float16
        np.testing.assert_array_equal(after[name], value)
    assert load_model(tmp_path / "c").config.param_dtype == jnp.float32


@pytest.mark.parametrize("name", ["t5gemma", "t5gemma2"])
def test_the_longest_context_of_inner_configurations_stays(name, tmp_path):
    config = CONFIGS[name]
    longest = 12_345
    params = random_params(config)
    save_model(tmp_path / "a", config, params, format="hf", max_position_embeddings=longest)
    assert _convert(tmp_path / "a", tmp_path / "b", "--to", "orbax") == 0
    assert _convert(tmp_path / "b", tmp_path / "c", "--to", "hf") == 0
    read = transformers.AutoConfig.from_pretrained(tmp_path / "c")
    encoder = getattr(read.encoder, "text_config", read.encoder)
    assert [x.max_position_embeddings for x in (encoder, read.decoder)] == [longest] * 2
    assert inspect(tmp_path / "c").summary()["context"] == longest


def test_an_acceptance_head_goes_with_the_same_weights(tmp_path, capsys):
    source, params = tmp_path / "a", random_params(T5_V1_1)
    save_model(source, T5_V1_1, params, format="hf")
    config = HeadConfig(T5_V1_1.embed_dim, 1)
    head = Head(config, init_head(config, jax.random.key(0)), digest(params, as_bfloat16=True))
    save_head(source, head)
    for format, dtype in (("orbax", "float32"), ("hf", "bfloat16"), ("t5x", "float32")):
        assert _convert(source, tmp_path / format, "--to", format, "--dtype", dtype) == 0
        assert load_head(tmp_path / format).drafter_fingerprint == head.drafter_fingerprint
    assert "left out" not in capsys.readouterr().err
    assert _convert(source, tmp_path / "b", "--to", "hf", "--dtype", "float16") == 0
    assert "the acceptance head is left out" in capsys.readouterr().err
    assert not has_head(tmp_path / "b")


def test_two_checkpoints_become_one_of_t5x(source, tmp_path, capsys):
    drafter = T5_V1_1.replace(num_encoder_layers=1)
    save_model(tmp_path / "hf", drafter, random_params(drafter), format="hf")
    args = (source, tmp_path / "pair", "--to", "t5x", "--drafter", tmp_path / "hf")
    assert _convert(*args) == 0
    assert "verifier and drafter" in capsys.readouterr().out
    assert (tmp_path / "pair" / "spiece.model").is_file()
    reader = T5XReader(tmp_path / "pair" / "checkpoint_30")
    values = {name: reader.read(name) for name in reader.specs}
    for role, directory in (("verifier", source), ("drafter", tmp_path / "hf")):
        kept = {
            name.removeprefix(f"{role}/"): value.tobytes()
            for name, value in values.items()
            if name.startswith(role)
        }
        assert kept == _bits(directory)
    gin = (tmp_path / "pair" / "pair.gin").read_text()
    assert "drafter/network.T5Config.num_encoder_layers = 1\n" in gin
    assert "verifier/network.T5Config.num_encoder_layers = 2\n" in gin


def test_a_pair_of_t5x_keeps_scanned_layers(tmp_path):
    kernel = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for name in ("large", "small"):
        (tmp_path / name).mkdir()
        write_t5x(
            tmp_path / name,
            {"decoder/decoder/mlp/wi/kernel": kernel},
            step=3,
            dtype=np.dtype(np.float32),
        )
    save_t5x_pair(tmp_path / "pair", verifier=tmp_path / "large", drafter=tmp_path / "small")
    reader = T5XReader(tmp_path / "pair" / "checkpoint_3")
    assert {name: spec.shape for name, spec in reader.specs.items()} == {
        "verifier/decoder/decoder/mlp/wi/kernel": (2, 3, 4),
        "drafter/decoder/decoder/mlp/wi/kernel": (2, 3, 4),
    }
    assert not (tmp_path / "pair" / "pair.gin").exists()
