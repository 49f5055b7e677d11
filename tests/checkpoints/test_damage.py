"""What is wrong inside a checkpoint is told when it is read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import CONFIGS, assert_same, edit_json, one_line, random_params
from jax.sharding import NamedSharding, PartitionSpec

from specjax.checkpoints import arrays, load_model, save_model
from specjax.checkpoints.arrays import flatten, unflatten
from specjax.partitioning import make_mesh
from specjax.writing import CHECKSUMS_NAME

# The format, and a file of its arrays.
FORMATS = [("hf", "model.safetensors"), ("orbax", "params/**/d/*"), ("t5x", "checkpoint_0/**/0*")]


def refused(path):
    return one_line(lambda: load_model(path))


def saved(path, format, params=None):
    config = CONFIGS["t5_v1_1"]
    return save_model(path, config, params or random_params(config), format=format)


@pytest.mark.parametrize(("format", "pattern"), FORMATS)
def test_each_flipped_bit_and_a_missing_file_is_found(format, pattern, tmp_path):
    path = saved(tmp_path / "out", format)
    files = sorted(file for file in path.glob(pattern) if file.is_file())
    rng = np.random.default_rng(0)
    for file in files[:: max(1, len(files) // 4)]:
        sound = file.read_bytes()
        data = bytearray(sound)
        data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        file.write_bytes(data)
        message = refused(path)
        assert "was changed after specjax wrote it: copy the checkpoint again" in message
        assert file.name in message and str(path) in message
        file.write_bytes(sound)
    assert load_model(path).format == format
    files[0].unlink()
    assert str(path) in refused(path)


@pytest.mark.parametrize("format", ["hf", "orbax", "t5x"])
@pytest.mark.parametrize(("dtype", "value"), [("float32", "-inf"), ("bfloat16", "nan")])
def test_weights_that_are_not_finite_are_named(format, dtype, value, tmp_path):
    config = CONFIGS["t5_v1_1"]
    flat = flatten(random_params(config, dtype=jnp.dtype(dtype)))
    name = "decoder/layers_0/mlp/wo/kernel"
    flat[name] = flat[name].at[2, 1].set(float(value))
    params = unflatten(flat)
    path = save_model(tmp_path / "out", config.replace(param_dtype=dtype), params, format=format)
    message = refused(path)
    assert f"has {value} at (" in message and "wo" in message
    assert "or load it with check_weights=False" in message
    assert_same(load_model(path, check_weights=False).params, params)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("spec", [(), ("data",), (None, "model"), ("data", "model")])
def test_a_nan_is_found_wherever_it_is(monkeypatch, dtype, spec):
    monkeypatch.setattr(arrays, "_BLOCK", 50)
    sharding = NamedSharding(make_mesh(2, 4), PartitionSpec(*spec))
    values = np.ones((6, 12, 7), dtype)
    arrays.check_shards("w", jax.device_put(values, sharding))
    arrays.check_shards("w", jax.device_put(values[:0], sharding))
    for place in list(np.ndindex(values.shape))[::97]:
        values[place] = np.nan
        spread = jax.device_put(values, sharding)
        one_line(
            lambda spread=spread: arrays.check_shards("w", spread),
            f"w has nan at {place}: copy the checkpoint again",
        )
        values[place] = 1


def test_the_check_of_weights_covers_checksums(tmp_path):
    path = saved(tmp_path / "out", "hf")
    edit_json(path / "config.json", eos_token_id=5)  # people correct it by hand
    load_model(path)
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    load_model(path, check_weights=False)
    (path / CHECKSUMS_NAME).write_text("{")
    message = refused(path)
    assert f"{CHECKSUMS_NAME} cannot be read" in message
    (path / CHECKSUMS_NAME).unlink()  # what the message advises those who changed the arrays
    load_model(path)
