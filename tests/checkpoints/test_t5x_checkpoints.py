"""T5X checkpoints: written by T5X itself, by our writer, and by hand."""

import json
import shutil

import flax.serialization
import flax.traverse_util
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from checkpoint_helpers import (
    CONFIGS,
    assert_same,
    bits,
    edit_json,
    logits,
    one_line,
    random_params,
    shared,
)

from specjax.checkpoints import load_model, save_model
from specjax.checkpoints.arrays import flatten, unflatten
from specjax.checkpoints.t5x import steps, write_t5x
from specjax.checkpoints.t5x_network import gin_text, read_t5_fields
from specjax.models import T5Config, model_from_config
from specjax.models.families import config_to_dict
from specjax.types import Prompts
from specjax.writing import CHECKSUMS_NAME

V1_0, V1_1 = CONFIGS["t5_v1_0"], CONFIGS["t5_v1_1"]


def _fixture_logits(loaded):
    """Encoder tokens 3..10, decoder inputs 0..7, by prefill and extend: [8, V]."""
    inputs = jnp.arange(3, 11, dtype=jnp.int32)[None]
    prefilled = loaded.model.prefill(loaded.params, Prompts(inputs, jnp.array([8], jnp.int32)), 16)
    block = jnp.arange(8, dtype=jnp.int32)[None]
    extended = loaded.model.extend(loaded.params, prefilled.cache, block, jnp.zeros(1, jnp.int32))
    return np.asarray(extended.logits)[0]


def _as_unscanned(arrays):
    """T5X's scanned tree as ours, written out independently of the loader."""
    out = {}
    for name, value in arrays.items():
        parts = name.split("/")
        if parts[0] != parts[1]:
            out[name] = value
            continue
        for layer in range(value.shape[1]):
            one = value[:, layer]
            if parts[-2] == "out":
                one = one.reshape(one.shape[0] * one.shape[1], one.shape[2])
            elif one.ndim == 3:
                one = one.reshape(one.shape[0], one.shape[1] * one.shape[2])
            out["/".join([parts[0], f"layers_{layer}", *parts[2:]])] = one
    return out


@pytest.mark.parametrize("name", ["t5_unscanned", "t5_scanned", "t5_orbax"])
def test_checkpoints_of_t5x_itself(name):
    directory = shared("fixtures", "t5x", name)
    loaded = load_model(directory)
    expected = dict(np.load(directory.parent / f"{name}_expected.npz"))
    assert_same(loaded.params, unflatten(_as_unscanned(expected)))
    reference = np.load(directory.parent / f"{name}_logits.npy").reshape(8, -1)
    assert np.abs(_fixture_logits(loaded) - reference).max() <= 1e-5
    assert (loaded.step, loaded.special_ids.eos, loaded.format) == (0, (1,), "t5x")
    assert loaded.config.relpos_per_layer == (name == "t5_scanned")
    assert_same(load_model(directory / "checkpoint_0").params, loaded.params)
    half = load_model(directory, dtype="bfloat16")
    rounded = {k: v.astype(ml_dtypes.bfloat16) for k, v in bits(loaded.params).items()}
    assert_same(half.params, unflatten(rounded))


@pytest.mark.parametrize("config", [V1_0, V1_1], ids=["v1_0", "v1_1"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_our_writer(config, dtype, tmp_path):
    params = random_params(config, dtype=jnp.dtype(dtype))
    save_model(tmp_path / "out", config, params, format="t5x", step=1200)
    assert [p.name for p in steps(tmp_path / "out").values()] == ["checkpoint_1200"]
    loaded = load_model(tmp_path / "out")
    assert_same(loaded.params, params)
    assert loaded.step == 1200
    assert loaded.config == config.replace(dtype=dtype, param_dtype=dtype)
    # The layout T5X reads: a spec per array, its path relative, and the step as an array.
    packed = (loaded.path / "checkpoint").read_bytes()
    contents = flax.serialization.msgpack_restore(packed)
    assert contents["version"] == 3
    assert contents["optimizer"]["state"]["step"] == 1200
    spec = contents["optimizer"]["target"]["token_embedder"]["embedding"]
    assert spec["kvstore"] == {"driver": "file", "path": "target.token_embedder.embedding/"}
    assert spec["dtype"] == dtype
    # Without the gin file it is told by the arrays.
    (tmp_path / "out" / "config.gin").unlink()
    assert load_model(tmp_path / "out").config.mlp_activations == config.mlp_activations


class HandWritten:
    """A T5X checkpoint made without our writer."""

    def __init__(self, directory):
        self.directory = directory / "checkpoint_7"
        self.directory.mkdir(parents=True)
        self.target = {}

    def zarr(self, name, value, kvstore="file", old_path=False, stored_dtype=None, separator="."):
        folder = f"target.{name.replace('/', '.')}"
        stored = value.view(stored_dtype) if stored_dtype else value
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": f"{self.directory / folder}/"},
            "metadata": {
                "dtype": ts.dtype(stored.dtype).name
                if stored.dtype.kind == "V"
                else stored.dtype.str,
                "shape": list(value.shape),
                "chunks": [max(1, n // 2) for n in value.shape],
                "compressor": {"id": "gzip", "level": 1},
                "dimension_separator": separator,
            },
        }
        ts.open(spec, create=True).result().write(stored).result()
        pointer = {"driver": "zarr", "dtype": stored.dtype.name, "metadata": spec["metadata"]}
        pointer["kvstore"] = {"driver": kvstore}
        if kvstore == "gcs":
            pointer["kvstore"]["bucket"] = "t5x-dummy-bucket"
        (pointer if old_path else pointer["kvstore"])["path"] = f"{folder}/"
        self.target[name] = pointer

    def inline(self, name, value):
        self.target[name] = value

    def write(self, version=3):
        contents = {
            "version": version,
            "optimizer": {
                "target": flax.traverse_util.unflatten_dict(self.target, sep="/"),
                "state": {"step": np.int32(7), "param_states": {"m": np.ones((1,), np.float32)}},
            },
        }
        packed = flax.serialization.msgpack_serialize(contents)
        (self.directory / "checkpoint").write_bytes(packed)
        return self.directory


def _scanned(params, config, axis=1):
    """Our tree as T5X scans it: layers on one axis, heads apart, a bias per layer."""
    layers = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
    heads, width = config.num_heads, config.head_dim
    groups, out = {}, {}
    for name, value in bits(params).items():
        stack, layer, *rest = name.split("/")
        if layer == "relpos_bias":
            groups[f"{stack}/{stack}/relpos_bias/rel_embedding"] = [value] * layers[stack]
        elif not layer.startswith("layers_"):
            out[name] = value
        else:
            if rest[-1] == "kernel" and "attention" in rest[0]:
                shape = (heads, width, -1) if rest[1] == "out" else (-1, heads, width)
                value = value.reshape(shape)
            groups.setdefault("/".join([stack, stack, *rest]), []).append(value)
    return {**out, **{name: np.stack(group, axis) for name, group in groups.items()}}


@pytest.mark.parametrize("axis", [0, 1])
def test_scanned_layers_with_equal_biases(axis, tmp_path):
    params = random_params(V1_1)
    written = HandWritten(tmp_path)
    for name, value in _scanned(params, V1_1, axis).items():
        written.zarr(name, value)
    written.write()
    loaded = load_model(tmp_path)
    assert loaded.config == V1_1
    assert_same(loaded.params, params)


def test_scanned_layers_with_a_bias_each(tmp_path):
    config = T5Config(
        **{f: getattr(V1_1, f) for f in ("vocab_size", "embed_dim", "num_heads", "head_dim")},
        mlp_dim=20,
        num_encoder_layers=2,
        num_decoder_layers=2,
        relpos_per_layer=True,
    )
    params = random_params(config)
    flat = bits(params)
    biases = {k: v for k, v in flat.items() if k.endswith("rel_embedding")}
    assert len(biases) == 4
    written = HandWritten(tmp_path)
    rest = unflatten({k: v for k, v in flat.items() if k not in biases})
    for name, value in _scanned(rest, config).items():
        written.zarr(name, value)
    for stack in ("encoder", "decoder"):
        own = [flat[f"{stack}/layers_{i}/relpos_bias/rel_embedding"] for i in range(2)]
        written.inline(f"{stack}/{stack}/relpos_bias/rel_embedding", np.stack(own, 1))
    written.write()
    loaded = load_model(tmp_path)
    assert loaded.config == config
    assert_same(loaded.params, params)
    # One bias per stack cannot stand for them.
    shared_bias = config.replace(relpos_per_layer=False)
    one_line(lambda: load_model(tmp_path, config=shared_bias), "relpos_bias/rel_embedding")
    for format in ("t5x", "hf"):
        one_line(
            lambda format=format: save_model(tmp_path / "x", config, params, format=format),
            "relpos_per_layer",
            "orbax",
        )
    save_model(tmp_path / "ours", config, params)
    assert_same(load_model(tmp_path / "ours").params, params)


def test_stores_and_dtypes_that_a_reader_meets(tmp_path):
    """Inlined arrays; file, gfile and gcs; the path outside of the kvstore; bfloat16 as uint16."""
    params = random_params(V1_0, dtype=jnp.bfloat16)
    written = HandWritten(tmp_path)
    kinds = [
        lambda name, value: written.inline(name, value),
        lambda name, value: written.inline(name, value.view(np.uint16)),
        lambda name, value: written.zarr(name, value, stored_dtype=np.uint16),
        lambda name, value: written.zarr(name, value, "gfile", stored_dtype=np.uint16),
        lambda name, value: written.zarr(name, value, "gcs", stored_dtype=np.uint16),
        lambda name, value: written.zarr(name, value, old_path=True, stored_dtype=np.uint16),
    ]
    for number, (name, value) in enumerate(bits(params).items()):
        kinds[number % len(kinds)](name, value)
    written.write(version=2)
    loaded = load_model(tmp_path)
    assert loaded.config.param_dtype == jnp.bfloat16
    assert loaded.config.mlp_activations == ("relu",)
    assert loaded.config.tie_embeddings
    assert_same(loaded.params, params)


def test_the_latest_step(tmp_path):
    for step in (5, 30, 200):
        config = V1_1
        save_model(
            tmp_path / f"{step}", config, random_params(config, step), format="t5x", step=step
        )
        shutil.move(tmp_path / f"{step}" / f"checkpoint_{step}", tmp_path)
    (tmp_path / "checkpoint_900.tmp-12").mkdir()
    loaded = load_model(tmp_path)
    assert loaded.step == 200
    assert_same(loaded.params, random_params(V1_1, 200))
    assert load_model(tmp_path / "checkpoint_30").step == 30
    (tmp_path / "checkpoint_201").mkdir()
    one_line(lambda: load_model(tmp_path), "checkpoint_201", "copy the whole checkpoint")


GIN = """
from __gin__ import dynamic_registration
import __main__ as train_script
from t5x.examples.t5 import network  # a comment

# Macros:
DROPOUT_RATE = 0.25
ACTIVATIONS = ('silu',
               'linear')
include 't5x/examples/t5/t5_1_1/base.gin'

train_script.train.model = @models.EncoderDecoderModel()
network.T5Config:
  dtype = 'bfloat16'  # a string and a comment
  emb_dim = 16
  mlp_activations = %ACTIVATIONS
network.T5Config.dropout_rate = %DROPOUT_RATE
network.T5Config.num_heads = \\
    2
train/network.T5Config.vocab_size = 48
network.Transformer.config = @network.T5Config()
network.T5Config.unknown = %ELSEWHERE
"""


def test_gin_files(tmp_path):
    directory = tmp_path / "model"
    save_model(directory, V1_1, random_params(V1_1), format="t5x")
    written = (directory / "config.gin").read_text()
    assert "network.T5Config.mlp_activations = ('gelu', 'linear')" in written
    (directory / "config.gin").write_text(GIN)
    assert read_t5_fields(directory / "config.gin") == {
        "dtype": "bfloat16",
        "emb_dim": 16,
        "mlp_activations": ("silu", "linear"),
        "dropout_rate": 0.25,
        "num_heads": 2,
        "vocab_size": 48,
    }
    for path in (directory, directory / "checkpoint_0"):
        loaded = load_model(path)
        assert loaded.config.mlp_activations == ("silu", "linear")
        assert loaded.config.dropout_rate == 0.25
    (directory / "config.gin").rename(tmp_path / "other.gin")
    assert load_model(directory).config.mlp_activations == ("gelu", "linear")
    loaded = load_model(directory, config=tmp_path / "other.gin")
    assert loaded.config.mlp_activations == ("silu", "linear")
    explicit = V1_1.replace(mlp_activations=("relu", "linear"))
    assert load_model(directory, config=explicit).config == explicit

    def told(text, *parts):
        (tmp_path / "other.gin").write_text(text)
        gin = tmp_path / "other.gin"
        one_line(lambda: load_model(directory, config=gin), gin, *parts)

    told("network.T5Config.emb_dim = 512", "emb_dim = 512", "16")
    told("network.T5Config.mlp_activations = ('relu',)", "mlp_activations", "2 input projections")
    told("network.T5Config.logits_via_embedding = True", "logits_via_embedding")
    for value in ("%ACT", "%ACT  # 'quoted'", "@activations()", "%LOOP\nLOOP = %LOOP"):
        told(f"network.T5Config.mlp_activations = {value}", "mlp_activations = ", "cannot be read")
    told("network.T5Config.mlp_activations = 3", "mlp_activations = 3", "tuple of names")
    told("network.T5Config.mlp_activations = ('tanh', 'linear')", "tanh", "silu")
    told("network.T5Config.mlp_activations = ('silu',", "not readable as gin")
    one_line(lambda: load_model(directory, config=tmp_path / "absent.gin"), "no such gin file")
    one_line(lambda: load_model(directory, config=CONFIGS["llama"]), "LlamaConfig", "T5Config")


@pytest.mark.parametrize(
    "text",
    [
        "network.T5Config.mlp_activations = ('silu',  # it's the gate\n  'linear')",
        "network.T5Config.mlp_activations = %A\nA = %B  # 'two steps'\nB = ('silu', 'linear')",
        "network.T5Config:\n  mlp_activations = (%GATE, \\\n 'linear')\nGATE = 'silu'",
        "a/network.T5Config.mlp_activations = [\n'silu', # x\n\n'linear',\n]\nX = '#'",
    ],
)
def test_gin_activations_behind_comments_and_macros(text, tmp_path):
    (tmp_path / "config.gin").write_text(text)
    fields = read_t5_fields(tmp_path / "config.gin")
    assert tuple(fields["mlp_activations"]) == ("silu", "linear")


@pytest.mark.parametrize("separator", [".", "/"])
def test_an_absent_chunk_is_no_zeros(separator, tmp_path):
    """zarr reads an absent chunk as zeros; T5X writes even those that are all zero."""
    written = HandWritten(tmp_path)
    params = bits(random_params(V1_1))
    params["token_embedder/embedding"] = np.zeros_like(params["token_embedder/embedding"])
    for name, value in params.items():
        written.zarr(name, value, separator=separator)
    path = written.write()
    assert_same(load_model(tmp_path).params, unflatten(params))
    chunk = path / "target.token_embedder.embedding" / f"1{separator}0"
    chunk.unlink()
    told = one_line(lambda: load_model(tmp_path), path, "1 of 4 chunks", "token_embedder/embedding")
    assert f"target.token_embedder.embedding/1{separator}0" in told


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [10**12, 10**12]}, "chunks of token_embedder/embedding are missing"),
        (
            {"shape": [10**12, 10**12], "fill_value": 0.0},
            "the array token_embedder/embedding of shape (1000000000000, 1000000000000): this "
            "needs at least 4e+06 EB",
        ),
    ],
)
def test_a_shape_beyond_all_memory_is_refused(change, message, tmp_path):
    save_model(tmp_path / "out", V1_1, random_params(V1_1), format="t5x")
    directory = tmp_path / "out" / "checkpoint_0"
    edit_json(directory / "target.token_embedder.embedding" / ".zarray", **change)
    one_line(lambda: load_model(tmp_path / "out"), directory, message)


def test_other_relative_positions_must_be_told(tmp_path):
    """The arrays show the number of buckets, but not from which distance they are shared."""
    config = V1_1.replace(relpos_buckets=16, relpos_max_distance=40)
    params = random_params(config)
    write_t5x(tmp_path, flatten(params), step=1, dtype=np.dtype(np.float32))
    expected, stock = logits(model_from_config(config), params), gin_text({"": V1_1})
    one_line(
        lambda: load_model(tmp_path),
        tmp_path / "checkpoint_1",
        "have 16 buckets",
        "T5X's T5 has 32",
        "`config` (--config)",
        "T5Config.max_distance",
    )
    (tmp_path / "config.gin").write_text(stock + "network.T5Config.num_buckets = 16\n")
    one_line(lambda: load_model(tmp_path), "have 16 buckets")
    (tmp_path / "config.gin").write_text(stock + "network.T5Config.max_distance = %FAR\nFAR = 40\n")
    (tmp_path / "config.json").unlink(missing_ok=True)
    given = tmp_path / "given.json"
    given.write_text(json.dumps(config_to_dict(config)))
    for explicit in (None, config, given, tmp_path / "config.gin"):
        loaded = load_model(tmp_path, config=explicit)
        assert loaded.config == config
        np.testing.assert_array_equal(logits(loaded.model, loaded.params), expected)
    # 32 buckets, but another distance: only the gin file or the user knows.
    wide = V1_1.replace(relpos_max_distance=40)
    params = random_params(wide)
    save_model(tmp_path / "32", V1_1, params, format="t5x")
    gin = tmp_path / "32" / "config.gin"
    stock = gin.read_text()
    gin.write_text(stock + "network.T5Config.max_distance = 40\n")
    assert load_model(tmp_path / "32").config == wide

    def told(text, *parts):
        gin.write_text(stock + text)
        one_line(lambda: load_model(tmp_path / "32"), gin, *parts)

    told("network.T5Config.num_buckets = 16", "T5Config.num_buckets = 16", "have 32")
    told("network.T5Config.max_distance = 40.5", "relpos_max_distance=40.5 must be a whole")
    told("network.T5Config.max_distance = 3", "relpos_max_distance=3 must be more than half")
    told("network.T5Config.max_distance = %ELSEWHERE", "cannot be read from this file", "128")
    gin.write_text(stock + "layers.RelativePositionBiases:\n  max_distance = 128\n")
    assert load_model(tmp_path / "32").config == V1_1


def test_every_difference_is_named_in_one_line(tmp_path):
    params = bits(random_params(V1_1))
    written = HandWritten(tmp_path)
    for name, value in params.items():
        if name.endswith("encoder/layers_1/mlp/wo/kernel"):
            value = value[:, :5]
        if "layers_0/attention/key" not in name:
            written.zarr(name, value)
    written.inline("encoder/layers_0/adapter/kernel", np.ones((2, 2), np.float32))
    path = written.write()
    one_line(
        lambda: load_model(tmp_path),
        path,
        "1 array missing: encoder/layers_0/attention/key/kernel",
        "encoder/layers_1/mlp/wo/kernel is (20, 5) but should be (20, 16)",
        "1 array unknown: encoder/layers_0/adapter/kernel",
    )


def test_damaged_checkpoints(tmp_path):
    save_model(tmp_path / "out", V1_1, random_params(V1_1), format="t5x")
    directory = tmp_path / "out" / "checkpoint_0"
    packed = (directory / "checkpoint").read_bytes()

    def told(*parts):
        one_line(lambda: load_model(tmp_path / "out"), directory, *parts)

    for damaged in (packed[:-50], packed[:3], b"", b"\xc1junk", b"\x01"):
        (directory / "checkpoint").write_bytes(damaged)
        told()
    (directory / "checkpoint").write_bytes(b'model_checkpoint_path: "model.ckpt-1"')
    told("TensorFlow", "convert")
    pack = flax.serialization.msgpack_serialize
    (directory / "checkpoint").write_bytes(pack({"version": 3, "optimizer": {"target": {}}}))
    told("does not have a T5's parameters")
    stored = {"driver": "zarr", "kvstore": {"driver": "file", "path": "../../etc/"}}
    for leaf, part in (
        (stored, "outside the checkpoint"),
        ({"driver": "n5", "kvstore": {"driver": "file"}}, "zarr on file, gfile or gcs"),
        ("text", "neither an array"),
    ):
        optimizer = {"target": {"token_embedder": {"embedding": leaf}}}
        (directory / "checkpoint").write_bytes(pack({"version": 3, "optimizer": optimizer}))
        told("token_embedder/embedding", part)
    target = {"decoder": {"layers_0": {"mlp": {"wi": {"kernel": np.ones((2, 2), np.float32)}}}}}
    (directory / "checkpoint").write_bytes(pack({"version": 3, "optimizer": {"target": target}}))
    told("does not have a T5's parameters", "token_embedder/embedding")
    (directory / "checkpoint").write_bytes(packed)
    load_model(tmp_path / "out")
    # One chunk cut short; then no metadata; then no arrays at all. T5X writes no checksums.
    (directory / CHECKSUMS_NAME).unlink()
    folder = directory / "target.decoder.logits_dense.kernel"
    (folder / "0.0").write_bytes((folder / "0.0").read_bytes()[:20])
    told("decoder/logits_dense/kernel is damaged")
    (folder / ".zarray").write_text("{")
    told("target.decoder.logits_dense.kernel", "not a readable zarr array")
    for path in directory.glob("target.*"):
        shutil.rmtree(path)
    told("arrays are missing", "target.decoder.decoder_norm.scale", " more); copy")


def test_damaged_orbax_of_t5x(tmp_path):
    source = shared("fixtures", "t5x", "t5_orbax", "checkpoint_0")
    directory = tmp_path / "checkpoint_0"
    shutil.copytree(source, directory)
    metadata = directory / "state" / "_METADATA"
    whole = json.loads(metadata.read_text())
    metadata.write_text("{")
    one_line(lambda: load_model(tmp_path), directory, "cut short or damaged")
    metadata.write_text(json.dumps(whole))
    for file in (directory / "state" / "ocdbt.process_0" / "d").iterdir():
        file.write_bytes(file.read_bytes()[:10])
    one_line(lambda: load_model(tmp_path), directory, "cut short or damaged")


def test_what_t5x_cannot_hold(tmp_path):
    def told(config, *parts):
        call = lambda: save_model(tmp_path / "x", config, random_params(config), format="t5x")  # noqa: E731
        one_line(call, *parts, "orbax")
        assert not (tmp_path / "x").exists()

    told(CONFIGS["llama"], "only T5, not Llama")
    told(V1_1.replace(decoder_start_token=3), "decoder_start_token=3")
    told(V1_1.replace(norm_eps=1e-5), "norm_eps=1e-05")
    told(V1_1.replace(relpos_max_distance=64), "relpos_max_distance=64")


def test_a_tied_head_that_does_not_scale_is_written_as_an_equal_one(tmp_path):
    config, params = CONFIGS["t5_tied_unscaled"], random_params(CONFIGS["t5_tied_unscaled"])
    loaded = load_model(save_model(tmp_path / "t5x", config, params, format="t5x"))
    assert loaded.config == config.replace(tie_embeddings=False, scale_tied_logits=True)
    np.testing.assert_array_equal(
        bits(loaded.params)["decoder/logits_dense/kernel"],
        bits(params)["token_embedder/embedding"].T,
    )
    ours, theirs = logits(loaded.model, loaded.params), logits(model_from_config(config), params)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * np.abs(theirs).max())
    again = load_model(save_model(tmp_path / "hf", loaded.model, loaded.params, format="hf"))
    assert again.config == config
    assert_same(again.params, params)


def test_bias_per_layer_computes_what_shared_ones_do():
    """Equal biases in each layer give the network with one."""
    config = V1_1.replace(relpos_per_layer=True)
    flat = bits(random_params(V1_1))
    own = dict(flat)
    for stack, layers in (("encoder", 2), ("decoder", 1)):
        bias = own.pop(f"{stack}/relpos_bias/rel_embedding")
        own |= {f"{stack}/layers_{i}/relpos_bias/rel_embedding": bias for i in range(layers)}
    a = logits(model_from_config(V1_1), unflatten(flat))
    b = logits(model_from_config(config), unflatten(own))
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(a).max())
