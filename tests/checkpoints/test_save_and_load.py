"""Our own directories, shardings, dtypes, and writing all or nothing."""

import dataclasses
import functools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import CONFIGS, assert_same, edit_json, one_line, random_params
from jax.sharding import NamedSharding, PartitionSpec

from specjax.checkpoints import load_model, save_model
from specjax.checkpoints.arrays import (
    copy_as,
    flatten,
    same_values,
)
from specjax.checkpoints.orbax import OrbaxReader
from specjax.checkpoints.saving import FORMATS
from specjax.models.config import float_dtype
from specjax.partitioning import Partitioner, make_mesh
from specjax.tokenizers.model_files import SpecialIds
from tests.variants import variants

OWN = [(name, dtype) for name in CONFIGS for dtype in ("float32", "bfloat16")]


@pytest.mark.parametrize("case", variants(OWN, *OWN[::3]), ids="-".join)
def test_our_own_directory(case, tmp_path):
    name, dtype = case
    config = CONFIGS[name].replace(param_dtype=dtype, dtype="float32")
    params = random_params(config, dtype=jnp.dtype(dtype))
    ids = SpecialIds(eos=(5, 7), pad=3, bos=4)
    path = save_model(tmp_path / "out", config, params, special_ids=ids, step=12)
    loaded = load_model(path)
    assert loaded.config == config.replace(dtype=dtype)
    assert_same(loaded.params, params)
    assert (loaded.format, loaded.step, loaded.path) == ("orbax", 12, path)
    starts = getattr(config, "decoder_start_token", None)
    assert loaded.special_ids == dataclasses.replace(ids, decoder_start=starts)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("name", "format"), [("gemma2", "hf"), *(("t5_v1_1", format) for format in FORMATS)]
)
def test_loads_straight_into_a_sharding(name, format, tmp_path):
    """Arrays are spread over a mesh, or have the sharding asked for, in the dtype asked for."""
    config, params = CONFIGS[name], random_params(CONFIGS[name])
    save_model(tmp_path / "out", config, params, format=format)
    mesh = make_mesh(2, 4)
    loaded = load_model(tmp_path / "out", dtype="bfloat16", mesh=mesh)
    assert_same(loaded.params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    expected = flatten(Partitioner(mesh).param_shardings(loaded.model, loaded.params))
    for path, leaf in flatten(loaded.params).items():
        assert leaf.sharding == expected[path], path
    table = loaded.params["token_embedder"]["embedding"]
    assert table.addressable_shards[0].data.size == table.size // 4
    everywhere = NamedSharding(mesh, PartitionSpec())
    again = load_model(tmp_path / "out", sharding=everywhere)
    assert all(x.sharding == everywhere for x in jax.tree.leaves(again.params))
    assert_same(again.params, params)
    one_line(
        lambda: load_model(tmp_path / "out", mesh=mesh, sharding=everywhere),
        "`mesh` and `sharding` exclude each other",
    )
    one_line(lambda: load_model(tmp_path / "out", sharding={}), "`sharding` must be a jax")


def test_shards_are_read_by_themselves(tmp_path, monkeypatch):
    """No device's host reads a whole array of our own format, and NaN is found where it lies."""
    config, params = CONFIGS["t5_v1_1"], random_params(CONFIGS["t5_v1_1"])
    save_model(tmp_path / "out", config, params)
    read = OrbaxReader.read  # without `how`, whole arrays
    monkeypatch.setattr(OrbaxReader, "read", lambda self, name, how: read(self, name, how))
    mesh = make_mesh(4, 2)
    loaded = load_model(tmp_path / "out", mesh=mesh)
    assert_same(loaded.params, params)
    kernel = loaded.params["decoder"]["layers_0"]["mlp"]["wo"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 2
    last = tuple(size - 1 for size in kernel.shape)
    params["decoder"]["layers_0"]["mlp"]["wo"]["kernel"] = kernel.at[last].set(jnp.nan)
    save_model(tmp_path / "bad", config, params)
    place = f"decoder/layers_0/mlp/wo/kernel has nan at {last}"
    one_line(lambda: load_model(tmp_path / "bad", mesh=mesh), place)


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_is_overwritten_or_left_half_written(format, tmp_path, monkeypatch):
    """`tests/test_writing.py` has what a directory that is written as a whole keeps and leaves."""
    config, params = CONFIGS["t5_v1_1"], random_params(CONFIGS["t5_v1_1"])
    out = tmp_path / "out"

    def save():
        save_model(out, config, params, format=format)

    out.mkdir()
    (out / "mine").touch()
    one_line(save, out, "not empty")
    assert [p.name for p in out.iterdir()] == ["mine"]
    (out / "mine").unlink()

    # An error at the very last step leaves neither the directory nor the partial one.
    def fails(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("specjax.checkpoints.saving.write_checksums", fails)
    with pytest.raises(KeyboardInterrupt):
        save()
    assert list(tmp_path.rglob("*")) == [out]
    monkeypatch.undo()
    save()
    assert_same(load_model(out).params, params)


@pytest.mark.parametrize("format", FORMATS)
def test_special_ids_survive_every_format(format, tmp_path):
    config = CONFIGS["t5_v1_1"].replace(decoder_start_token=0 if format == "t5x" else 3)
    params = random_params(config)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    copied = {"eos_token_id": 1, "pad_token_id": 4, "decoder_start_token_id": 9, "max_length": 30}
    edit_json(tokenizer / "generation_config.json", **copied)
    start, both = config.decoder_start_token, SpecialIds(eos=(5, 7), pad=2)
    for number, (given, source, expected) in enumerate(
        (
            (both, None, ((5, 7), 2)),
            (None, tokenizer, ((1,), 4)),
            # What the caller gives goes before what is copied.
            (SpecialIds(eos=(9,)), tokenizer, ((9,), 4)),
            (None, None, ((1,), 0)),
        )
    ):
        out = tmp_path / f"{number}"
        save_model(out, config, params, format=format, special_ids=given, tokenizer_from=source)
        ids = load_model(out).special_ids
        assert ((ids.eos, ids.pad), ids.decoder_start) == (expected, start)
        file = out / "generation_config.json"
        if source is not None or format != "orbax":
            values = json.loads(file.read_text())
            assert values["decoder_start_token_id"] == start
            assert (values.get("max_length") == 30) == (source is not None)
        if format == "hf":  # the two files agree
            values = json.loads((out / "config.json").read_text())
            eos = expected[0]
            assert values["eos_token_id"] == (eos[0] if len(eos) == 1 else list(eos))
            assert values["decoder_start_token_id"] == start


def test_bad_arguments(tmp_path):
    config, params = CONFIGS["llama"], random_params(CONFIGS["llama"])
    for model, options, parts in (
        (config, {"format": "torch"}, ["hf, t5x, orbax"]),
        (config, {"dtype": "int8"}, ["got 'int8'"]),
        (config, {"dtype": "float64"}, ["'float64'"]),
        (CONFIGS["llama_tied"], {}, ["decoder/logits_dense/kernel"]),
        (config.replace(mlp_dim=24), {}, ["layers_0/mlp/wi_0/kernel"]),
    ):
        call = functools.partial(save_model, tmp_path / "x", model, params, **options)
        one_line(call, *parts)
    for path, options, parts in (
        (tmp_path, {"dtype": "float64"}, ["`dtype` must be", "got 'float64'", "bfloat16"]),
        (tmp_path, {"dtype": "int4"}, ["`dtype` must be", "'int4'"]),
        (None, {}, ["`path` must be", "got None"]),
        (tmp_path, {"config": [1]}, ["`config` must be", "got [1]"]),
    ):
        one_line(functools.partial(load_model, path, **options), *parts, error=ValueError)
    assert not list(tmp_path.iterdir())


# Changes of specjax.json, or of its object `config`, and what the message says.
SETTINGS = [
    ("specjax.json", b"9" * 5000, ["is not readable as JSON"]),
    ("specjax.json", b"{}", ["family=None"]),
    ("specjax.json", {"config": "x"}, ["config='x' must be an object"]),
    ("specjax.json", {"version": 99}, ["version=99 must be 1"]),
    ("", {"num_layers": 3}, ["9 arrays missing: decoder/layers_2/mlp/wi_0/kernel"]),
    ("", {"mlp_dim": 24}, ["decoder/layers_*/mlp/wi_0/kernel is (16, 20) but should be (16, 24)"]),
    ("specjax.json", {"config": {"vocab_size": 48.5}}, ["vocab_size=48.5 must be a whole number"]),
]


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    config = CONFIGS["llama"]
    return save_model(tmp_path_factory.mktemp("ours") / "out", config, random_params(config))


@pytest.mark.parametrize(("place", "change", "parts"), SETTINGS, ids=lambda x: str(x)[:40])
def test_damaged_settings_of_ours(ours, tmp_path, place, change, parts):
    out = shutil.copytree(ours, tmp_path / "out")
    file = out / "specjax.json"
    if isinstance(change, bytes):
        file.write_bytes(change)
    else:
        values = json.loads(file.read_text())
        inner = change.get("config", change if place == "" else {})
        more = {"config": {**values["config"], **inner}} if isinstance(inner, dict) else {}
        edit_json(file, **{**change, **more} if place else more)
    one_line(lambda: load_model(out), out / place, *parts)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda params: [x.write_bytes(x.read_bytes()[:20]) for x in params.rglob("d/*")], ""),
        (lambda params: (params / "_METADATA").write_text("{"), ""),
        (lambda params: (params / "manifest.ocdbt").unlink(), ".*manifest.ocdbt"),
        (lambda params: _replaced(params / "manifest.ocdbt").mkdir(), ".*manifest.ocdbt"),
        (lambda params: _replaced(params / "manifest.ocdbt").symlink_to("no"), ".*manifest.ocdbt"),
        (shutil.rmtree, "no Orbax arrays"),
        # Damaged metadata that nothing needs is not told.
        (lambda params: (params / "_CHECKPOINT_METADATA").write_bytes(b"{"), None),
    ],
)
def test_damaged_arrays_of_ours(ours, tmp_path, damage, message, capfd):
    out = shutil.copytree(ours, tmp_path / "out")
    (out / "specjax_checksums.json").unlink()  # T5X writes none
    damage(out / "params")
    if message is None:
        load_model(out)
    else:
        told = one_line(lambda: load_model(out), out / "params")
        assert re.search(
            message if "no " in message else f"is cut short or damaged {message}", told
        )
    assert not re.search("Traceback|Failed", capfd.readouterr().err)


def _replaced(file):
    file.unlink()
    return file


def test_copies():
    matrix = np.random.default_rng(0).normal(size=(130, 70)).astype(np.float32)
    for view in (matrix, matrix.T, matrix[:, ::2], matrix[0], np.array(2.0, np.float32)):
        for dtype in (np.float32, jnp.bfloat16):
            copy = copy_as(view, np.dtype(dtype))
            assert copy.flags.c_contiguous and not np.shares_memory(copy, view)
            np.testing.assert_array_equal(copy, view.astype(dtype))
    other = matrix.copy()
    assert same_values(matrix, other)
    other[-1, -1] += 1
    assert not any(same_values(matrix, x) for x in (other, matrix[:, :-1], matrix.astype(float)))
    assert same_values(np.full((2, 2), np.nan), np.full((2, 2), np.nan))


@pytest.mark.parametrize("text", ["1]", "01", "\ud800", (1, 2), []])
def test_a_dtype_that_numpy_cannot_parse_is_named(text):
    with pytest.raises(ValueError, match="`dtype` must be one of float32"):
        float_dtype(text)
