"""Configurations: hashable, checked, and the same after JSON."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

from specjax.models import config_from_dict, config_to_dict, model_from_config
from tests.models.tiny import CONFIGS


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_survive_json(name):
    config = CONFIGS[name].replace(dtype=jnp.bfloat16)
    again = config_from_dict(json.loads(json.dumps(config_to_dict(config))))
    assert again == config
    assert hash(again) == hash(config)


def test_one_spelling_per_dtype():
    config = CONFIGS["llama"]
    assert config.replace(dtype="bfloat16") == config.replace(dtype=jnp.bfloat16)
    assert hash(config.replace(dtype="float32")) == hash(config)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"num_layers": 0}, "LlamaConfig: num_layers=0 must be at least 1"),
        ("llama", {"num_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ("gemma2", {"dtype": "int32"}, "dtype=int32 is not a floating dtype"),
        ("t5_v1_1", {"mlp_activations": ("gelu", "tan")}, "each must be one of"),
        ("t5_v1_1", {"mlp_activations": ()}, "each must be one of"),
        ("t5_v1_1", {"dropout_rate": 1.0}, r"dropout_rate=1.0 must be in \[0, 1\)"),
    ],
)
def test_impossible_values_are_named(name, changes, message):
    with pytest.raises(ValueError, match=message):
        CONFIGS[name].replace(**changes)


def test_unknown_and_missing_fields_are_named():
    values = config_to_dict(CONFIGS["llama"])
    del values["mlp_dim"]
    with pytest.raises(ValueError, match="unknown fields width; missing fields mlp_dim"):
        config_from_dict({**values, "width": 3})
    with pytest.raises(ValueError, match="family='mamba' is not one of t5, llama, gemma2"):
        config_from_dict({"family": "mamba"})


def test_other_configurations_have_no_model():
    @dataclasses.dataclass(frozen=True)
    class Other:
        pass

    with pytest.raises(TypeError, match="Other is no configuration of a model: use one of T5C"):
        model_from_config(Other())
