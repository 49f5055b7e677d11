"""Tiny models of every family, their parameters random in every array."""

import functools
import json
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints.arrays import flatten, unflatten
from specjax.models import model_from_config
from specjax.models.t5 import MT5Config, UMT5Config
from tests.models import tiny

# T5X has 32 buckets up to a distance of 128.
_T5 = tiny.CONFIGS["t5_v1_1"].replace(
    mlp_dim=20, num_decoder_layers=1, relpos_buckets=32, relpos_max_distance=128
)
_MT5 = MT5Config(**vars(_T5))
_TIED = {"tie_embeddings": True}
_UNSCALED = {**_TIED, "scale_tied_logits": False}
CONFIGS = {
    "t5_v1_0": _T5.replace(mlp_activations=("relu",), **_TIED),
    "t5_v1_1": _T5,
    "t5_tied_unscaled": _T5.replace(**_UNSCALED),
    "mt5": _MT5,
    "mt5_tied_unscaled": _MT5.replace(**_UNSCALED),
    "umt5": UMT5Config(**vars(_T5)).replace(**_TIED),
    "llama": tiny.CONFIGS["llama"].replace(mlp_dim=20, num_kv_heads=2),
    "llama_tied": tiny.CONFIGS["llama_grouped_tied"].replace(rope_theta=5e5),
    "t5gemma": tiny.CONFIGS["t5gemma"].replace(tie_embeddings=False),
    "gemma2": tiny.CONFIGS["gemma2"],
}


def random_params(config, seed=0, dtype=np.float32):
    return tiny.random_params(model_from_config(config.replace(param_dtype=dtype)), seed)


def bits(tree):
    """The parameters by path, as NumPy arrays."""
    return {path: np.asarray(leaf, order="C") for path, leaf in flatten(tree).items()}


def assert_same(a, b):
    """Equal names, dtypes and bits."""

    def same(x, y):
        x, y = (np.asarray(value, order="C") for value in (x, y))
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))

    jax.tree.map(same, *(unflatten(flatten(tree)) for tree in (a, b)))


def tokens(config, length=9, seed=1):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(3, config.vocab_size, (2, length)), jnp.int32)


@functools.cache
def _forward(model):
    return jax.jit(model.apply)  # one compilation for equal configurations


def logits(model, params):
    """Logits of fixed random tokens, [2, 9, V]."""
    config = model.config
    forward = _forward(model)
    if config.encoder_style is not None:
        decoder = tokens(config, seed=2).at[:, 0].set(config.decoder_start_token)
        return np.asarray(forward(params, tokens(config, 7), decoder))
    return np.asarray(forward(params, tokens(config)))


def edit_json(path: Path, **changes):
    """Changes fields of a JSON file; `...` removes one."""
    values = json.loads(path.read_text()) if path.exists() else {}
    for name, value in changes.items():
        if value is ...:
            values.pop(name, None)
        else:
            values[name] = value
    path.write_text(json.dumps(values))


def one_line(call, *parts, error=(ValueError, OSError)):
    """Runs a call that must fail with one clear line holding `parts`; returns the line."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message, message
    return message


class Archive:
    """Checkpoints of another library in an archive beside this file, each with its `logits.npy`."""

    def __init__(self, name):
        self._path = Path(__file__).parent / name
        with zipfile.ZipFile(self._path) as archive:
            self.cases = sorted({name.partition("/")[0] for name in archive.namelist()})

    def unpack(self, directory):
        with zipfile.ZipFile(self._path) as archive:
            archive.extractall(directory)
        return directory


def assert_logits(loaded, directory):
    """Those of a loaded model are its directory's."""
    golden = np.load(directory / "logits.npy")
    np.testing.assert_allclose(logits(loaded.model, loaded.params), golden, rtol=0, atol=1e-4)


SHARED = Path(__file__).resolve().parents[2].parent / "shared"


def shared(*parts):
    """A file of the fixtures beside the repository, or a skip."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{path} is absent")
    return path
