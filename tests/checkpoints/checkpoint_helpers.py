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
from specjax.models import Gemma2Config, LlamaConfig, T5Config, model_from_config
from specjax.models.rope_scaling import Llama3RopeScaling
from specjax.models.t5 import MT5Config, UMT5Config
from specjax.models.t5gemma import T5GemmaConfig

_T5 = {
    "vocab_size": 48,
    "embed_dim": 16,
    "num_heads": 2,
    "head_dim": 12,
    "mlp_dim": 20,
    "num_encoder_layers": 2,
    "num_decoder_layers": 1,
}
_DECODER = {
    "vocab_size": 48,
    "embed_dim": 16,
    "num_heads": 4,
    "head_dim": 8,
    "mlp_dim": 20,
    "num_layers": 2,
    "num_kv_heads": 2,
}
_LLAMA3 = Llama3RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
)
_GEMMA = {"sliding_window": 4, "query_pre_attn_scalar": 8.0}
_ENCODER = {**_DECODER, "embed_dim": 24, "num_layers": 1, "sliding_window": 3}
CONFIGS = {
    "t5_v1_0": T5Config(**_T5, mlp_activations=("relu",), tie_embeddings=True),
    "t5_v1_1": T5Config(**_T5),
    "t5_tied_unscaled": T5Config(**_T5, tie_embeddings=True, scale_tied_logits=False),
    "mt5": MT5Config(**_T5),
    "mt5_tied_unscaled": MT5Config(**_T5, tie_embeddings=True, scale_tied_logits=False),
    "umt5": UMT5Config(**_T5, tie_embeddings=True),
    "llama": LlamaConfig(**_DECODER),
    "llama_tied": LlamaConfig(
        **_DECODER, tie_embeddings=True, rope_theta=5e5, rope_scaling=_LLAMA3
    ),
    "t5gemma": T5GemmaConfig(
        **_DECODER,
        **_GEMMA,
        tie_embeddings=False,
        encoder=Gemma2Config(**_ENCODER, query_pre_attn_scalar=4.0),
    ),
    "gemma2": Gemma2Config(**_DECODER, **_GEMMA),
}


def random_params(config, seed=0, dtype=np.float32):
    """Unlike `model.init`, norms differ from one another: a mix-up shows."""
    rng = np.random.default_rng(seed)
    abstract = flatten(model_from_config(config).abstract_params())
    params = {}
    for path, leaf in abstract.items():
        norm = leaf.ndim == 1
        value = rng.uniform(0.5, 1.5, leaf.shape) if norm else 0.3 * rng.normal(size=leaf.shape)
        params[path] = jnp.asarray(value.astype(np.float32).astype(dtype))
    return unflatten(params)


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
