"""T5X checkpoints: written by T5X itself, by our writer, and by hand."""

import json
import shutil

import flax.serialization
import flax.traverse_util
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from checkpoint_helpers import (
    CONFIGS,
    assert_same,
    bits,
    edit_json,
    one_line,
    random_params,
    shared,
)

from specjax.checkpoints import load_model, read_config, save_model
from specjax.checkpoints.arrays import flatten, unflatten
from specjax.checkpoints.t5x import write_t5x
from specjax.checkpoints.t5x_network import gin_text, read_t5_fields
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


@pytest.mark.parametrize("name", ["t5_unscanned", "t5_scanned", "t5_orbax"])
def test_checkpoints_of_t5x_itself(name):
    directory = shared("fixtures", "t5x", name)
    loaded = load_model(directory)
    reference = np.load(directory.parent / f"{name}_logits.npy").reshape(8, -1)
    assert np.abs(_fixture_logits(loaded) - reference).max() <= 1e-5
    assert (loaded.step, loaded.special_ids.eos, loaded.format) == (0, (1,), "t5x")
    assert loaded.config.relpos_per_layer == (name == "t5_scanned")
    assert load_model(directory / "checkpoint_0").config == loaded.config


@pytest.mark.parametrize("config", [V1_0, V1_1], ids=["v1_0", "v1_1"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_our_writer(config, dtype, tmp_path):
    params = random_params(config, dtype=jnp.dtype(dtype))
    save_model(tmp_path / "out", config, params, format="t5x", step=1200)
    assert [p.name for p in (tmp_path / "out").glob("checkpoint_*")] == ["checkpoint_1200"]
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
                "dtype": stored.dtype.str,
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
    config = V1_1.replace(num_decoder_layers=2, relpos_per_layer=True)
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
    one_line(
        lambda: save_model(tmp_path / "x", config, params, format="hf"), "relpos_per_layer", "orbax"
    )


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
        flat = flatten(random_params(V1_1, step))
        write_t5x(tmp_path, flat, step=step, dtype=np.dtype(np.float32))
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
DROPOUT_RATE = %RATE  # 'two steps'
RATE = 0.25
ACTIVATIONS = (%GATE,  # it's the gate

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
GATE = 'silu'
network.Transformer.config = @network.T5Config()
network.T5Config.unknown = %ELSEWHERE
"""


def test_gin_files(tmp_path):
    directory, gin = tmp_path / "model", tmp_path / "other.gin"
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
    (directory / "config.gin").rename(gin)
    assert read_config(directory).mlp_activations == ("gelu", "linear")
    assert read_config(directory, gin).mlp_activations == ("silu", "linear")
    explicit = V1_1.replace(mlp_activations=("relu", "linear"))
    assert read_config(directory, explicit) == explicit
    absent = tmp_path / "absent.gin"
    one_line(lambda: read_config(directory, absent), absent, "no such gin file")
    one_line(lambda: read_config(directory, CONFIGS["llama"]), "LlamaConfig", "T5Config")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("emb_dim = 512", ["emb_dim = 512", "16"]),
        ("logits_via_embedding = True", ["logits_via_embedding"]),
        *[
            (f"mlp_activations = {value}", ["mlp_activations = ", "cannot be read from this file"])
            for value in ("%ACT", "%ACT  # 'quoted'", "@activations()", "%LOOP\nLOOP = %LOOP")
        ],
        ("mlp_activations = ('relu',)", ["mlp_activations", "2 input projections"]),
        ("mlp_activations = 3", ["mlp_activations = 3", "tuple of names"]),
        ("mlp_activations = ('tanh', 'linear')", ["tanh", "silu"]),
        ("mlp_activations = ('silu',", ["not readable as gin"]),
        ("num_buckets = 16", ["T5Config.num_buckets = 16", "have 32"]),
        ("max_distance = 40.5", ["relpos_max_distance=40.5 must be a whole"]),
        ("max_distance = 3", ["relpos_max_distance=3 must be more than half"]),
        ("max_distance = %ELSEWHERE", ["cannot be read from this file", "128"]),
    ],
)
def test_a_gin_file_of_another_network_is_refused(text, parts, tmp_path):
    save_model(tmp_path / "model", V1_1, random_params(V1_1), format="t5x")
    gin = tmp_path / "model" / "config.gin"
    with gin.open("a") as file:
        file.write(f"network.T5Config.{text}")
    one_line(lambda: read_config(tmp_path / "model"), gin, *parts)


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
    one_line(lambda: load_model(tmp_path), path, "1 of 4 chunks", "token_embedder/embedding")


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
    gin, stock = tmp_path / "config.gin", gin_text({"": V1_1})
    parts = ["T5X's T5 has 32", "`config` (--config)", "T5Config.max_distance"]
    for text in ("", "network.T5Config.num_buckets = 16\n"):
        gin.write_text(stock + text)
        one_line(lambda: load_model(tmp_path), tmp_path / "checkpoint_1", "have 16 buckets", *parts)
    gin.write_text(stock + "network.T5Config.max_distance = %FAR\nFAR = 40\n")
    given = tmp_path / "given.json"
    given.write_text(json.dumps(config_to_dict(config)))
    for explicit in (None, config, given, gin):
        loaded = load_model(tmp_path, config=explicit)
        assert loaded.config == config
        assert_same(loaded.params, params)


def test_another_distance_of_32_buckets_is_told_by_the_gin_file(tmp_path):
    save_model(tmp_path, V1_1, random_params(V1_1), format="t5x")
    stock = (tmp_path / "config.gin").read_text()
    for text, distance in (
        ("network.T5Config.max_distance = 40\n", 40),
        ("layers.RelativePositionBiases:\n  max_distance = 40\n", 128),
    ):
        (tmp_path / "config.gin").write_text(stock + text)
        assert read_config(tmp_path) == V1_1.replace(relpos_max_distance=distance)


def packed(target):
    optimizer = {"target": target} if isinstance(target, dict) else target
    return flax.serialization.msgpack_serialize({"version": 3, "optimizer": optimizer})


KERNEL = {"kernel": np.ones((2, 2), np.float32)}


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        *[(x, []) for x in (-50, 3, 0, b"\xc1junk", b"\x01")],
        (b'model_checkpoint_path: "model.ckpt-1"', ["TensorFlow", "convert"]),
        (packed({}), ["does not have a T5's parameters"]),
        (
            packed({"decoder": {"layers_0": {"mlp": {"wi": KERNEL}}}}),
            ["does not have a T5's parameters", "token_embedder/embedding"],
        ),
        *[
            (packed({"token_embedder": {"embedding": leaf}}), ["token_embedder/embedding", part])
            for leaf, part in (
                ({"driver": "zarr", "kvstore": {"driver": "file", "path": "../e/"}}, "outside the"),
                ({"driver": "n5", "kvstore": {"driver": "file"}}, "zarr on file, gfile or gcs"),
                ("text", "neither an array"),
            )
        ],
    ],
)
def test_a_damaged_index_of_arrays(content, parts, tmp_path):
    save_model(tmp_path / "out", V1_1, random_params(V1_1), format="t5x")
    directory = tmp_path / "out" / "checkpoint_0"
    file = directory / "checkpoint"
    file.write_bytes(file.read_bytes()[:content] if isinstance(content, int) else content)
    one_line(lambda: load_model(tmp_path / "out"), directory, *parts)


def test_damaged_arrays(tmp_path):
    """One chunk cut short; then no metadata; then no arrays at all."""
    save_model(tmp_path / "out", V1_1, random_params(V1_1), format="t5x")
    directory = tmp_path / "out" / "checkpoint_0"
    (directory / CHECKSUMS_NAME).unlink()  # T5X writes none
    folder = directory / "target.decoder.logits_dense.kernel"

    def told(*parts):
        one_line(lambda: load_model(tmp_path / "out"), directory, *parts)

    (folder / "0.0").write_bytes((folder / "0.0").read_bytes()[:20])
    told("decoder/logits_dense/kernel is damaged")
    (folder / ".zarray").write_text("{")
    told("target.decoder.logits_dense.kernel", "not a readable zarr array")
    for path in directory.glob("target.*"):
        shutil.rmtree(path)
    told("arrays are missing", "target.decoder.decoder_norm.scale", " more); copy")


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (CONFIGS["llama"], "only T5, not Llama"),
        (V1_1.replace(decoder_start_token=3), "decoder_start_token=3"),
        (V1_1.replace(norm_eps=1e-5), "norm_eps=1e-05"),
        (V1_1.replace(relpos_max_distance=64), "relpos_max_distance=64"),
        (V1_1.replace(relpos_per_layer=True), "relpos_per_layer=True"),
    ],
)
def test_what_t5x_cannot_hold(config, part, tmp_path):
    params = random_params(config)
    one_line(lambda: save_model(tmp_path / "x", config, params, format="t5x"), part, "orbax")
    assert not (tmp_path / "x").exists()


def test_a_tied_head_that_does_not_scale_is_written_as_an_equal_one(tmp_path):
    config, params = CONFIGS["t5_tied_unscaled"], random_params(CONFIGS["t5_tied_unscaled"])
    loaded = load_model(save_model(tmp_path / "t5x", config, params, format="t5x"))
    assert loaded.config == config.replace(tie_embeddings=False, scale_tied_logits=True)
    head = bits(params)["token_embedder/embedding"].T
    assert_same(loaded.params, unflatten({**bits(params), "decoder/logits_dense/kernel": head}))
    again = load_model(save_model(tmp_path / "hf", loaded.model, loaded.params, format="hf"))
    assert again.config == config
    assert_same(again.params, params)
