"""Experts in MXFP4, compared with what transformers makes of the same files."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from checkpoint_helpers import assert_same, one_line
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from specjax.checkpoints import load_model, mxfp4, save_model
from specjax.checkpoints.arrays import copy_as
from specjax.partitioning import make_mesh
from specjax.text.directories import inspect
from tests.models.hf_models import YARN
from tests.models.tiny import error, quick_jit

RNG = np.random.default_rng(0)
EXPERTS, WIDTH, SIZE = 3, 64, 32
NAME = "model.layers.1.mlp.experts.gate_up_proj"


def packed(columns, rows, exponents=(118, 126)):
    """Random blocks and scales of all experts."""
    shape = (EXPERTS, columns, rows // 32)
    blocks = RNG.integers(0, 256, (*shape, 16), dtype=np.uint8)
    return blocks, RNG.integers(*exponents, shape, dtype=np.uint8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_numbers_are_bit_for_bit_those_of_transformers(dtype):
    """Of all bytes and of all scales but NaN, from the smallest numbers to infinity."""
    blocks, scales = packed(170, 96, (0, 255))
    assert len(np.unique(blocks)) == 256 and len(np.unique(scales)) == 255
    given = map(torch.tensor, (blocks, scales))
    theirs = convert_moe_packed_tensors(*given, dtype=getattr(torch, dtype))
    stack = mxfp4.stack_of(blocks, scales)
    ours = copy_as(stack, jnp.dtype(dtype))
    assert stack.shape == ours.shape == (EXPERTS, 96, 170)
    np.testing.assert_array_equal(
        ours.view(np.uint8), theirs.view(torch.uint8).numpy().reshape(*ours.shape[:2], -1)
    )
    part = copy_as(stack[1:, 10:50, 1::2][:, 3:, :9], jnp.dtype(dtype))
    np.testing.assert_array_equal(part, ours[1:, 13:50, 1:19:2])


@pytest.fixture
def directory(tmp_path):
    """As published: experts in MXFP4, everything else in bfloat16."""
    config = transformers.GptOssConfig(
        vocab_size=48, hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=SIZE, num_hidden_layers=2, num_local_experts=EXPERTS,
        num_experts_per_tok=2, sliding_window=6, rope_parameters={**YARN, "truncate": False},
    )  # fmt: skip
    theirs = transformers.GptOssForCausalLM(config).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    theirs.save_pretrained(str(tmp_path))
    arrays = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for name in [name for name in arrays if name.endswith("_proj") and "experts" in name]:
        _, rows, columns = arrays.pop(name).shape
        blocks, scales = packed(columns, rows)
        arrays |= {f"{name}_blocks": torch.tensor(blocks), f"{name}_scales": torch.tensor(scales)}
    write(tmp_path, arrays)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    file.write_text(json.dumps(values))
    return tmp_path


def write(directory, arrays):
    safetensors.torch.save_file(arrays, directory / "model.safetensors", {"format": "pt"})


def test_a_published_directory_is_read_as_transformers_reads_it(directory, tmp_path):
    def by_transformers(path, **options):
        return transformers.GptOssForCausalLM.from_pretrained(
            str(path), dtype=torch.float32, attn_implementation="eager", **options
        )

    theirs = by_transformers(
        directory, quantization_config=transformers.Mxfp4Config(dequantize=True)
    )
    loaded = load_model(directory)
    assert loaded.stored_dtype == jnp.bfloat16
    mlp = loaded.params["decoder"]["layers_1"]["mlp"]
    experts = theirs.model.layers[1].mlp.experts
    for part, name in enumerate(("wi_0", "wi_1")):
        np.testing.assert_array_equal(mlp[name], experts.gate_up_proj[..., part::2].detach())
    np.testing.assert_array_equal(mlp["wo"], experts.down_proj.detach())
    wide = load_model(directory, dtype="float32")
    tokens = RNG.integers(3, 48, (1, 12))
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(tokens)).logits.numpy()
    assert error(quick_jit(wide.model.apply)(wide.params, tokens), expected) <= 2e-5
    # Spread over devices, saved in floats, and read by transformers again.
    assert_same(load_model(directory, mesh=make_mesh(1, 2)).params, loaded.params)
    save_model(tmp_path / "again", loaded.config, loaded.params, format="hf")
    with torch.no_grad():
        again = by_transformers(tmp_path / "again")(input_ids=torch.tensor(tokens)).logits.numpy()
    assert error(again, expected) <= 1e-6
    assert_same(load_model(tmp_path / "again").params, loaded.params)


def test_it_is_inspected_and_quantised_again(directory):
    found = inspect(directory).summary()
    numbers = 2 * 3 * EXPERTS * WIDTH * SIZE
    assert found["bytes_on_disk"]["MXFP4"] == numbers // 2 + numbers // 32
    loaded, eight = load_model(directory), load_model(directory, weights="int8")
    assert found["parameters"] == loaded.model.num_params()
    wide, narrow = (x.params["decoder"]["layers_0"]["mlp"]["wi_1"] for x in (loaded, eight))
    difference = np.abs(np.asarray(narrow.read(jnp.float32)) - np.asarray(wide, np.float32))
    assert (difference <= 0.51 * np.asarray(narrow.scales)[:, None]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scales": None}, rf"{NAME}_blocks .* shapes are \(3, 64, 2, 16\) and \(\)"),
        ({"blocks": None}, r"shapes are \(\) and \(3, 64, 2\)"),
        (
            {"scales": lambda x: x[:, :, :1].contiguous()},
            r"shapes are \(3, 64, 2, 16\) and \(3, 64, 1\)",
        ),
        (
            dict.fromkeys(("blocks", "scales", "bias"), lambda x: x[:2].contiguous()),
            rf"2 arrays of a wrong shape: {NAME} is \(2, 64, 64\) but should be \(3, 64, 64\)",
        ),
        ({"scales": lambda x: torch.full_like(x, 255)}, "layers_1/mlp/wi_0 has nan at"),
    ],
)
def test_damaged_files_get_one_line(directory, changes, message):
    arrays = safetensors.torch.load_file(directory / "model.safetensors")
    for end, change in changes.items():
        value = arrays.pop(f"{NAME}_{end}")
        arrays |= {} if change is None else {f"{NAME}_{end}": change(value)}
    write(directory, arrays)
    assert re.search(message, one_line(lambda: load_model(directory)))
