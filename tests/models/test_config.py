"""Configurations: hashable, checked, and the same after JSON."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import model_from_config
from specjax.models.families import config_from_dict, config_to_dict
from tests.models.tiny import CONFIGS


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_survive_json(name):
    config = CONFIGS[name].replace(dtype=jnp.bfloat16)
    again = config_from_dict(json.loads(json.dumps(config_to_dict(config))))
    assert again == config
    assert hash(again) == hash(config)


def test_equal_values_have_one_spelling():
    config = CONFIGS["gemma2"].replace(num_layers=np.int64(2), query_pre_attn_scalar=8)
    assert config == CONFIGS["gemma2"]
    assert type(config.num_layers) is int
    assert type(config.query_pre_attn_scalar) is float
    assert config.replace(final_logit_softcap=None).final_logit_softcap is None
    assert config.replace(dtype="bfloat16") == config.replace(dtype=jnp.bfloat16)
    assert hash(config.replace(dtype="float32")) == hash(config)


# A tiny model, changes and a part of the message.
T5, FLOATS = "t5_v1_1", "must be one of float32, bfloat16, float16"
REFUSED = [
    ("llama", {"num_layers": 0}, "LlamaConfig: num_layers=0 must be at least 1"),
    ("llama", {"num_layers": 2**31}, "num_layers=2147483648 must be at most 1000"),
    ("llama", {"num_layers": True}, "num_layers=True must be a whole number, an int"),
    ("llama", {"embed_dim": 16.0}, "LlamaConfig: embed_dim=16.0 must be a whole number"),
    ("llama", {"num_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
    ("llama", {"head_dim": 7}, "LlamaConfig: head_dim=7 must be even"),
    ("llama", {"head_dim": 2**20}, "num_heads=4 times head_dim=1048576 must be at most 1048576"),
    ("llama", {"norm_eps": 0.0}, "LlamaConfig: norm_eps=0.0 must be positive and finite"),
    ("llama", {"norm_eps": "1e-5"}, "norm_eps='1e-5' must be a number"),
    ("llama", {"rope_theta": float("nan")}, "rope_theta=nan must be positive"),
    ("llama", {"rope_theta": 10**400}, "rope_theta=10.* is too large for a float"),
    ("llama", {"tie_embeddings": 1}, "tie_embeddings=1 must be True or False"),
    ("llama", {"rope_scaling": {"factor": 8.0}}, "rope_scaling=.* must be None or a Llama3Rope"),
    ("llama", {"colour": 1}, "LlamaConfig has no field colour; its fields are vocab_size, emb"),
    ("gemma2", {"final_logit_softcap": 0.0}, "final_logit_softcap=0.0 must be positive"),
    ("gemma2", {"final_logit_softcap": "no"}, "final_logit_softcap='no' must be a number"),
    ("gemma2", {"sliding_window": 0}, "sliding_window=0 must be at least 1"),
    ("gemma2", {"dtype": "int32"}, f"Gemma2Config: dtype {FLOATS}, got 'int32'"),
    ("gemma2", {"dtype": "floaty"}, f"dtype {FLOATS}, got 'floaty'"),
    ("gemma2", {"param_dtype": None}, f"param_dtype {FLOATS}, got None"),
    (T5, {"mlp_activations": ("gelu", "tan")}, "may only name gelu, linear"),
    (T5, {"mlp_activations": ()}, "may only name gelu, linear"),
    (T5, {"mlp_activations": "relu"}, r"mlp_activations='relu' must .* \('relu',\)"),
    (T5, {"mlp_activations": 5}, "mlp_activations=5 must be a tuple of names"),
    (T5, {"dropout_rate": 1.0}, r"dropout_rate=1.0 must be in \[0, 1\)"),
    (T5, {"dropout_rate": float("nan")}, r"dropout_rate=nan must be in \[0, 1\)"),
    (T5, {"relpos_buckets": 3}, "relpos_buckets=3 must be at least 4"),
    (T5, {"relpos_buckets": 10**9}, "relpos_buckets=1000000000 must be at most 1048576"),
    (T5, {"relpos_max_distance": 4}, "relpos_max_distance=4 must be more than half of r"),
    (T5, {"decoder_start_token": 48}, "decoder_start_token=48 must be .* in 0 .. 47"),
    (T5, {"decoder_start_token": -1}, "decoder_start_token=-1 must be a token id"),
    ("t5gemma", {"encoder": None}, "encoder must be a Gemma2Config"),
    ("t5gemma", {"encoder": 3}, "encoder=3 must be None or a Gemma2Config"),
    ("t5gemma2", {"embed_dim": 32}, "embed_dim=32 must be the encoder's, 16"),
    ("t5gemma2", {"tie_embeddings": False}, "tie_embeddings=False is not supported"),
    ("t5gemma2", {"eoi_token": -1}, "eoi_token=-1 must be at least 0"),
    ("t5gemma2", {"layer_types": 5}, "layer_types=5 may only name sliding_attention"),
    ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 must be at most num_experts=4"),
    ("mixtral", {"num_experts": 0}, "num_experts=0 must be at least 1"),
    ("mixtral", {"dense_layers": (2,)}, r"dense_layers=\(2,\) must be .* in 0 .. 1"),
    ("mixtral", {"dense_layers": 1}, "dense_layers=1 must be numbers of layers"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED, ids=str)
def test_impossible_values_are_named(name, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        CONFIGS[name].replace(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"high_freq_factor": 1.0}, "low_freq_factor=1.0 must be less than high_freq_factor=1.0"),
        ({"factor": 0}, "factor=0.0 must be positive"),
        ({"original_max_position": 0}, "original_max_position=0 must be at least 1"),
    ],
)
def test_impossible_stretching_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIGS["llama_grouped_tied"].rope_scaling, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "mamba"}, "family='mamba' must be one of t5, .*, qwen2, .*, gemma3_text"),
        ({"width": 3}, "configuration of family 'llama': unknown fields width"),
        ({"mlp_dim": ...}, "'llama': missing fields mlp_dim"),
        ({"num_layers": 1.5}, "'llama': LlamaConfig: num_layers=1.5 must be a whole number"),
        ({"rope_scaling": {"factor": 8.0}}, "missing fields high_freq_factor, low_freq_factor"),
        ({"rope_scaling": "llama3"}, "rope_scaling='llama3' must be None or a Llama3RopeScaling"),
    ],
)
def test_files_that_cannot_be_are_refused(changes, message):
    values = {**config_to_dict(CONFIGS["llama"]), **changes}
    with pytest.raises(ValueError, match=message):
        config_from_dict({name: x for name, x in values.items() if x is not ...})


def test_the_encoder_has_the_dtypes_of_the_decoder():
    config = CONFIGS["t5gemma"].replace(dtype="bfloat16", vocab_size=50)
    assert (config.encoder.dtype, config.encoder.vocab_size) == (config.dtype, 50)


def test_other_configurations_have_no_model():
    @dataclasses.dataclass(frozen=True)
    class Other:
        pass

    with pytest.raises(ValueError, match="`config` must be one of T5Config, .* got a Other"):
        model_from_config(Other())
