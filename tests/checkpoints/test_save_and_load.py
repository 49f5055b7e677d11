"""Our own directories, shardings, dtypes, and writing all or nothing."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import CONFIGS, assert_same, bits, edit_json, one_line, random_params
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.checkpoints import load_model, save_model
from specjax.checkpoints.arrays import (
    condense,
    copy_as,
    flatten,
    same_values,
    unflatten,
)
from specjax.checkpoints.orbax import OrbaxReader
from specjax.checkpoints.saving import FORMATS
from specjax.models import model_from_config
from specjax.models.config import float_dtype
from specjax.partitioning import Partitioner, make_mesh
from specjax.tokenizers.model_files import SpecialIds
from specjax.writing import new_directory
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
    assert load_model(path, dtype="float32", param_dtype=dtype).config == config
    assert_same(loaded.params, params)
    assert loaded.model == model_from_config(loaded.config)
    assert (loaded.format, loaded.step, loaded.path) == ("orbax", 12, path)
    assert (loaded.special_ids.eos, loaded.special_ids.pad, loaded.special_ids.bos) == (
        (5, 7),
        3,
        4,
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("name", ["t5_v1_1", "gemma2"])
@pytest.mark.parametrize("format", FORMATS)
def test_loads_straight_into_a_sharding(name, format, tmp_path):
    """Every array is spread over 8 devices as asked, in the dtype asked for."""
    if (name, format) == ("gemma2", "t5x"):
        pytest.skip("T5X holds T5 alone")
    config, params = CONFIGS[name], random_params(CONFIGS[name])
    save_model(tmp_path / "out", config, params, format=format)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))

    def sharding(leaf):
        # The last axis that four devices can share.
        axes = [i for i, n in enumerate(leaf.shape) if n % 4 == 0][-1:]
        spec = ["model" if i in axes else None for i in range(leaf.ndim)]
        return NamedSharding(mesh, PartitionSpec(*spec))

    shardings = jax.tree.map(sharding, params)
    loaded = load_model(tmp_path / "out", dtype="bfloat16", shardings=shardings)
    assert_same(loaded.params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    split = 0
    for path, leaf in flatten(loaded.params).items():
        assert leaf.sharding == flatten(shardings)[path], path
        split += leaf.addressable_shards[0].data.size == leaf.size // 4
    assert split == len(flatten(params))
    everywhere = NamedSharding(mesh, PartitionSpec())
    again = load_model(tmp_path / "out", shardings=everywhere)
    assert all(x.sharding == everywhere for x in jax.tree.leaves(again.params))
    assert_same(again.params, params)
    one_line(lambda: load_model(tmp_path / "out", shardings={"x": everywhere}), "shardings")
    one_line(
        lambda: load_model(tmp_path / "out", mesh=mesh, shardings=everywhere),
        "`mesh` and `shardings` exclude each other",
    )


def test_shards_are_read_by_themselves(tmp_path, monkeypatch):
    """No device's host reads a whole array of our own format, and NaN is found where it lies."""
    config, params = CONFIGS["t5_v1_1"], random_params(CONFIGS["t5_v1_1"])
    save_model(tmp_path / "out", config, params)
    monkeypatch.setattr(OrbaxReader, "arrays", None)
    mesh = make_mesh(4, 2)
    assert_same(load_model(tmp_path / "out", mesh=mesh).params, params)
    kernel = params["decoder"]["layers_0"]["mlp"]["wo"]["kernel"]
    last = tuple(size - 1 for size in kernel.shape)
    params["decoder"]["layers_0"]["mlp"]["wo"]["kernel"] = kernel.at[last].set(jnp.nan)
    save_model(tmp_path / "bad", config, params)
    place = re.escape(f"decoder/layers_0/mlp/wo/kernel has nan at {last}")
    with pytest.raises(ValueError, match=place):
        load_model(tmp_path / "bad", mesh=mesh)


def test_a_mesh_and_the_standard_rules(tmp_path):
    config, params = CONFIGS["t5_v1_1"], random_params(CONFIGS["t5_v1_1"])
    save_model(tmp_path / "out", config, params)
    mesh = make_mesh(4, 2)
    loaded = load_model(tmp_path / "out", mesh=mesh)
    assert_same(loaded.params, params)
    expected = flatten(Partitioner(mesh).param_shardings(loaded.model, loaded.params))
    for path, leaf in flatten(loaded.params).items():
        assert leaf.sharding == expected[path], path
    kernel = loaded.params["decoder"]["layers_0"]["mlp"]["wo"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 2


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_is_overwritten_or_left_half_written(format, tmp_path, monkeypatch):
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
    from specjax.checkpoints import hf, orbax, t5x

    for module, name in ((hf, "write_hf"), (orbax, "write_orbax"), (t5x, "write_t5x")):
        real = getattr(module, name)

        def fails(*args, real=real, **kwargs):
            real(*args, **kwargs)
            raise KeyboardInterrupt

        monkeypatch.setattr(module, name, fails)
    with pytest.raises(KeyboardInterrupt):
        save()
    assert list(tmp_path.rglob("*")) == [out]
    monkeypatch.undo()
    # What a killed run left goes; what a running one writes stays.
    with new_directory(out, replace=True) as running:
        one_line(save, "another process is writing")
        (running / "rest").touch()
    shutil.rmtree(out)
    (tmp_path / ".out.specjax-partial").mkdir()
    save()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    assert_same(load_model(out).params, params)
    (tmp_path / "file").touch()
    one_line(
        lambda: save_model(tmp_path / "file" / "b", config, params), "file is a file: give a path"
    )
    one_line(lambda: save_model(tmp_path / "file", config, params), "a file")


@pytest.mark.parametrize("format", FORMATS)
def test_special_ids_survive_every_format(format, tmp_path):
    config = CONFIGS["t5_v1_1"].replace(decoder_start_token=0 if format == "t5x" else 3)
    params = random_params(config)
    ids = SpecialIds(eos=(5, 7), pad=2)
    out = save_model(tmp_path / "out", config, params, format=format, special_ids=ids)
    loaded = load_model(out)
    assert (loaded.special_ids.eos, loaded.special_ids.pad) == ((5, 7), 2)
    assert loaded.config.decoder_start_token == config.decoder_start_token
    # What the caller gives goes before what is copied; the rest of the copied file stays.
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    copied = {"eos_token_id": 1, "pad_token_id": 4, "decoder_start_token_id": 9, "max_length": 30}
    edit_json(tokenizer / "generation_config.json", **copied)
    for given, eos in ((None, (1,)), (SpecialIds(eos=(9,)), (9,))):
        out = tmp_path / f"copied-{eos[0]}"
        save_model(out, config, params, format=format, special_ids=given, tokenizer_from=tokenizer)
        loaded = load_model(out)
        assert (loaded.special_ids.eos, loaded.special_ids.pad) == (eos, 4)
        written = json.loads((out / "generation_config.json").read_text())
        assert written["max_length"] == 30
        assert written["decoder_start_token_id"] == config.decoder_start_token
        if format == "hf":
            values = json.loads((out / "config.json").read_text())
            assert values["eos_token_id"] == eos[0]
            assert values["decoder_start_token_id"] == 3
    # Without any ids the two files of an hf directory still agree.
    out = save_model(tmp_path / "plain", config, params, format=format)
    written = out / "generation_config.json"
    if format != "orbax":
        start = json.loads(written.read_text())["decoder_start_token_id"]
        assert start == config.decoder_start_token


def test_bad_arguments(tmp_path):
    config, params = CONFIGS["llama"], random_params(CONFIGS["llama"])
    one_line(lambda: save_model(tmp_path / "x", config, params, format="torch"), "hf, t5x, orbax")
    one_line(lambda: save_model(tmp_path / "x", config, params, dtype="int8"), "got 'int8'")
    one_line(lambda: save_model(tmp_path / "x", config, params, dtype="float64"), "'float64'")
    one_line(lambda: load_model(tmp_path, dtype="float64"), "got 'float64'", "bfloat16")
    one_line(lambda: load_model(None), "`path` must be", "got None", error=ValueError)
    one_line(
        lambda: load_model(tmp_path, config=[1]), "`config` must be", "got [1]", error=ValueError
    )
    wrong = CONFIGS["llama_tied"]
    one_line(lambda: save_model(tmp_path / "x", wrong, params), "decoder/logits_dense/kernel")
    wrong = config.replace(mlp_dim=24)
    one_line(lambda: save_model(tmp_path / "x", wrong, params), "layers_0/mlp/wi_0/kernel")
    assert not list(tmp_path.iterdir())


def test_damaged_directories_of_ours(tmp_path):
    config, params = CONFIGS["llama"], random_params(CONFIGS["llama"])
    out = save_model(tmp_path / "out", config, params)
    settings = out / "specjax.json"
    whole = settings.read_text()

    def told(*parts):
        one_line(lambda: load_model(out), *parts)

    settings.write_text(whole[:40])
    told(settings, "not readable as JSON")
    settings.write_text("{}")
    told(settings, "family=None")
    edit_json(settings, config={**json.loads(whole)["config"], "num_layers": 3})
    told(out, "9 arrays missing: decoder/layers_2/mlp/wi_0/kernel")
    edit_json(settings, config={**json.loads(whole)["config"], "mlp_dim": 24})
    told("decoder/layers_*/mlp/wi_0/kernel is (16, 20) but should be (16, 24)")
    edit_json(settings, config={**json.loads(whole)["config"], "colour": "red"})
    told(settings, "unknown fields colour")
    for field, value, part in (
        ("vocab_size", "48", "whole number"),
        ("vocab_size", 48.5, "whole number"),
        ("num_layers", True, "whole number"),
        ("norm_eps", "x", "a number"),
        ("tie_embeddings", 1, "True or False"),
    ):
        edit_json(settings, config={**json.loads(whole)["config"], field: value})
        told(settings, f"{field}={value!r} must be", part)
    edit_json(settings, config={**json.loads(whole)["config"], "num_layers": 10**9})
    told(settings, "num_layers=1000000000 must be at most 1000")
    edit_json(settings, config="x")
    told(settings, "config='x' must be an object")
    settings.write_text("9" * 5000)
    told(settings, "is not readable as JSON")
    settings.write_text(whole)
    edit_json(settings, config=[1])
    told(settings, "config=[1] must be an object")
    edit_json(settings, version=99)
    told(settings, "version=99 must be 1")
    settings.write_text(whole)
    (out / "specjax_checksums.json").unlink()
    for file in (out / "params").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:20])
    told(out / "params", "cut short or damaged")
    shutil.rmtree(out / "params")
    told(out / "params", "no Orbax arrays")


def test_lists_of_names_are_condensed():
    names = [f"decoder/layers_{i}/mlp/wo/kernel" for i in (0, 1, 2, 5)]
    assert condense(names) == "decoder/layers_*/mlp/wo/kernel"
    names = [f"decoder.block.{i}.layer.{j}.wo" for i in range(12) for j in (0, 1)]
    assert condense(names) == "decoder.block.*.layer.0.wo, decoder.block.*.layer.1.wo"
    assert condense(["b", "model.layers.7.x", "a"]) == "b, model.layers.7.x, a"


def test_copies():
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(130, 70)).astype(np.float32)
    for view in (matrix, matrix.T, matrix[:, ::2], matrix[0], np.array(2.0, np.float32)):
        for dtype in (np.float32, jnp.bfloat16):
            copy = copy_as(view, np.dtype(dtype))
            assert copy.flags.c_contiguous
            assert not np.shares_memory(copy, view)
            np.testing.assert_array_equal(copy, view.astype(dtype))
    assert same_values(matrix, matrix.copy())
    other = matrix.copy()
    other[-1, -1] += 1
    assert not same_values(matrix, other)
    assert not same_values(matrix, matrix[:, :-1])
    assert not same_values(matrix, matrix.astype(np.float64))
    assert same_values(np.full((2, 2), np.nan), np.full((2, 2), np.nan))
    tree = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert unflatten(flatten(tree)) == tree
    assert list(bits({"a": {"b": np.ones(2)}})) == ["a/b"]


@pytest.mark.parametrize("text", ["1]", "01", "\ud800", (1, 2), []])
def test_a_dtype_that_numpy_cannot_parse_is_named(text):
    with pytest.raises(ValueError, match="`dtype` must be one of float32"):
        float_dtype(text)


@pytest.mark.parametrize("kind", ["missing", "directory", "link"])
def test_an_orbax_tree_without_its_manifest_is_damaged(tmp_path, kind, capfd):
    config = CONFIGS["t5_v1_1"]
    save_model(tmp_path / "model", config, random_params(config), format="orbax")
    (tmp_path / "model/specjax_checksums.json").unlink()  # T5X writes none
    manifest = tmp_path / "model/params/manifest.ocdbt"
    manifest.unlink()
    if kind == "directory":
        manifest.mkdir()
    elif kind == "link":
        manifest.symlink_to("nothing")
    with pytest.raises(ValueError, match="params is cut short or damaged .*manifest.ocdbt"):
        load_model(tmp_path / "model")
    assert "Traceback" not in capfd.readouterr().err


def test_damaged_metadata_that_nothing_needs_is_not_told(tmp_path, capfd):
    config = CONFIGS["t5_v1_1"]
    save_model(tmp_path / "model", config, random_params(config), format="orbax")
    (tmp_path / "model/params/_CHECKPOINT_METADATA").write_bytes(b"{")
    (tmp_path / "model/specjax_checksums.json").unlink()
    load_model(tmp_path / "model")
    assert "Failed" not in capfd.readouterr().err
