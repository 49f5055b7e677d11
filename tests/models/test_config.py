"""Configurations: hashable, checked, and the same after JSON."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import model_from_config, position_encoding
from specjax.models.families import config_from_dict, config_to_dict
from tests.models.tiny import CONFIGS


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_survive_json(name):
    config = CONFIGS[name].replace(dtype=jnp.bfloat16)
    again = config_from_dict(json.loads(json.dumps(config_to_dict(config))))
    assert again == config
    assert hash(again) == hash(config)


def test_a_number_too_large_for_a_float_is_named():
    values = {**config_to_dict(CONFIGS["llama"]), "rope_theta": 10**400}
    with pytest.raises(ValueError, match="rope_theta=10.* is too large for a float"):
        config_from_dict(values)


def test_one_spelling_per_dtype():
    config = CONFIGS["llama"]
    assert config.replace(dtype="bfloat16") == config.replace(dtype=jnp.bfloat16)
    assert hash(config.replace(dtype="float32")) == hash(config)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"num_layers": 0}, "LlamaConfig: num_layers=0 must be at least 1"),
        ("llama", {"num_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ("llama", {"head_dim": 7}, "LlamaConfig: head_dim=7 must be even"),
        ("llama", {"norm_eps": 0.0}, "LlamaConfig: norm_eps=0.0 must be positive and finite"),
        ("llama", {"rope_theta": -1}, "LlamaConfig: rope_theta=-1.0 must be positive"),
        ("llama", {"rope_theta": float("nan")}, "rope_theta=nan must be positive"),
        ("gemma2", {"final_logit_softcap": 0.0}, "final_logit_softcap=0.0 must be positive"),
        ("gemma2", {"attn_logit_softcap": -3.0}, "attn_logit_softcap=-3.0 must be positive"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0.0 must be positive"),
        ("gemma2", {"sliding_window": 0}, "sliding_window=0 must be at least 1"),
        (
            "gemma2",
            {"dtype": "int32"},
            "Gemma2Config: dtype must be one of float32, bfloat16, float16",
        ),
        (
            "gemma2",
            {"dtype": "floaty"},
            "dtype must be one of float32, bfloat16, float16, got 'floaty'",
        ),
        ("gemma2", {"param_dtype": None}, "param_dtype must be one of float32"),
        ("t5_v1_1", {"mlp_activations": ("gelu", "tan")}, "may only name gelu, linear"),
        ("t5_v1_1", {"mlp_activations": ()}, "may only name gelu, linear"),
        ("t5_v1_1", {"dropout_rate": 1.0}, r"dropout_rate=1.0 must be in \[0, 1\)"),
        ("t5_v1_1", {"dropout_rate": float("nan")}, r"dropout_rate=nan must be in \[0, 1\)"),
        ("t5_v1_1", {"relpos_buckets": 3}, "relpos_buckets=3 must be at least 4"),
        (
            "t5_v1_1",
            {"relpos_max_distance": 4},
            "relpos_max_distance=4 must be more than half of r",
        ),
        (
            "t5_v1_1",
            {"relpos_max_distance": 10**9},
            "relpos_max_distance=1000000000 must be at most",
        ),
        ("t5_v1_1", {"relpos_buckets": 10**9}, "relpos_buckets=1000000000 must be at most 1048576"),
        ("t5_v1_1", {"decoder_start_token": 48}, "decoder_start_token=48 must be .* in 0 .. 47"),
        ("t5_v1_1", {"decoder_start_token": -1}, "decoder_start_token=-1 must be a token id"),
        ("llama", {"num_layers": 2**31}, "num_layers=2147483648 must be at most 1000"),
        (
            "llama",
            {"head_dim": 2**20},
            "num_heads=4 times head_dim=1048576 must be at most 1048576",
        ),
        ("llama", {"colour": 1}, "LlamaConfig has no field colour; its fields are vocab_size, emb"),
    ],
)
def test_impossible_values_are_named(name, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        CONFIGS[name].replace(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "llama",
            {"embed_dim": 16.5},
            "LlamaConfig: embed_dim=16.5 must be a whole number, an int",
        ),
        ("llama", {"num_layers": 1.0}, "LlamaConfig: num_layers=1.0 must be a whole number"),
        ("llama", {"num_layers": True}, "num_layers=True must be a whole number"),
        ("llama", {"norm_eps": "1e-5"}, "norm_eps='1e-5' must be a number"),
        ("llama", {"tie_embeddings": 1}, "tie_embeddings=1 must be True or False"),
        (
            "llama",
            {"rope_scaling": {"factor": 8.0}},
            "rope_scaling=.* must be None or a Llama3Rope",
        ),
        ("gemma2", {"final_logit_softcap": "no"}, "final_logit_softcap='no' must be a number"),
        ("t5_v1_1", {"mlp_activations": "relu"}, r"mlp_activations='relu' must .* \('relu',\)"),
        ("t5_v1_1", {"mlp_activations": 5}, "mlp_activations=5 must be a tuple of names"),
        ("t5gemma2", {"layer_types": 5}, "layer_types=5 may only name sliding_attention"),
    ],
)
def test_values_of_a_wrong_type_are_named(name, changes, message):
    with pytest.raises(ValueError, match=message):
        CONFIGS[name].replace(**changes)


def test_the_least_relative_positions_that_are_allowed_work():
    for buckets in (4, 5, 8):
        config = CONFIGS["t5_v1_1"].replace(
            relpos_buckets=buckets, relpos_max_distance=buckets // 2 + 1
        )
        for bidirectional in (True, False):
            found = position_encoding.buckets(
                np.arange(-20, 21),
                bidirectional=bidirectional,
                num_buckets=config.relpos_buckets,
                max_distance=config.relpos_max_distance,
            )
            assert found.min() == 0
            assert found.max() == (buckets // 2 * 2 if bidirectional else buckets) - 1


def test_numbers_have_one_spelling():
    config = CONFIGS["gemma2"].replace(num_layers=np.int64(2), query_pre_attn_scalar=8)
    assert config == CONFIGS["gemma2"]
    assert type(config.num_layers) is int
    assert type(config.query_pre_attn_scalar) is float
    json.dumps(config_to_dict(config))
    assert config.replace(final_logit_softcap=None).final_logit_softcap is None


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


def test_unknown_and_missing_fields_are_named():
    values = config_to_dict(CONFIGS["llama"])
    del values["mlp_dim"]
    with pytest.raises(ValueError, match="unknown fields width; missing fields mlp_dim"):
        config_from_dict({**values, "width": 3})
    with pytest.raises(
        ValueError, match="family='mamba' must be one of t5, .*, llama, qwen2, .*, gemma3_text"
    ):
        config_from_dict({"family": "mamba"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 1.5}, "family 'llama': LlamaConfig: num_layers=1.5 must be a whole number"),
        (
            {"rope_scaling": {"factor": 8.0}},
            "'llama': missing fields high_freq_factor, low_freq_factor",
        ),
        ({"rope_scaling": "llama3"}, "rope_scaling='llama3' must be None or a Llama3RopeScaling"),
    ],
)
def test_values_from_a_file_that_cannot_be_are_value_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict({**config_to_dict(CONFIGS["llama"]), **changes})


def test_other_configurations_have_no_model():
    @dataclasses.dataclass(frozen=True)
    class Other:
        pass

    with pytest.raises(ValueError, match="`config` must be one of T5Config, .* got a Other"):
        model_from_config(Other())
