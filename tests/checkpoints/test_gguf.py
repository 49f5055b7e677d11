"""GGUF files against the Hugging Face directories that they were made of."""

import dataclasses
import struct
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy

from specjax.checkpoints import load_model, read_config
from specjax.checkpoints.arrays import flatten
from specjax.checkpoints.hf import config_to_hf, longest_context
from specjax.cli.main import main
from specjax.errors import MissingLibraryError, UserError
from specjax.models import Gemma2Config, LlamaConfig, model_from_config
from specjax.models.families import family_of
from specjax.models.family import HFFields
from specjax.models.gemma import Gemma3Config, GemmaConfig
from specjax.models.qwen import Qwen2Config, Qwen3Config
from specjax.models.rope_scaling import Llama3RopeScaling, scaling_from_hf
from specjax.partitioning import make_mesh
from specjax.text import load_pair
from specjax.text.directories import inspect
from specjax.tokenizers.model_files import SpecialIds, write_json
from tests.models.tiny import random_params

gguf = pytest.importorskip("gguf")
Kind = gguf.GGMLQuantizationType

SIZES = {
    "vocab_size": 48,
    "embed_dim": 32,
    "num_heads": 4,
    "head_dim": 8,
    "mlp_dim": 64,
    "num_layers": 2,
    "num_kv_heads": 2,
}
STRETCH = Llama3RopeScaling(
    factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
)
CONFIGS = {
    "llama": LlamaConfig(**SIZES, rope_theta=1e5),
    "llama3": LlamaConfig(
        **{**SIZES, "head_dim": 32}, rope_theta=5e5, rope_scaling=STRETCH, tie_embeddings=True
    ),
    "qwen2": Qwen2Config(**SIZES, rope_theta=1e6, tie_embeddings=True),
    "qwen3": Qwen3Config(**{**SIZES, "head_dim": 16}, rope_theta=1e6),
    "gemma": GemmaConfig(**SIZES),
    "gemma2": Gemma2Config(**SIZES, sliding_window=4, query_pre_attn_scalar=8.0),
    "gemma3": Gemma3Config(
        **{**SIZES, "num_layers": 6},
        sliding_window=4,
        layer_types=("sliding_attention",) * 5 + ("full_attention",),
        query_pre_attn_scalar=8.0,
        rope_factor=8.0,
    ),
}
# All rows of its matrices are whole blocks of every quantisation.
_WIDE = {"embed_dim": 256, "head_dim": 64, "mlp_dim": 512, "num_layers": 1}
WIDE = LlamaConfig(**{**SIZES, **_WIDE}, tie_embeddings=True)
KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q5_K", "Q6_K"]


def hf_arrays(config, seed=0):
    """Random arrays under Hugging Face's names, for no two parameters alike."""
    arrays = {}
    for path, leaf in flatten(random_params(model_from_config(config), seed)).items():
        line = family_of(config).hf_names(path)[0]
        arrays[line.hf] = np.asarray(leaf.T if line.transposed else leaf)
    return arrays


def order(rows, heads):
    """Where llama.cpp's converter takes the rows of a Llama's queries or keys from."""
    return np.arange(rows).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(-1)


def quantised(array, kind):
    """The bytes of an array; of a kind that gguf cannot write, any bytes with a small scale."""
    if kind not in (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K):
        return gguf.quants.quantize(array, kind)
    size = gguf.GGML_QUANT_SIZES[kind][1]
    rng = np.random.default_rng(array.size)
    blocks = rng.integers(0, 256, (array.size // 256, size), np.uint8)
    scales = slice(size - 2, size) if kind == Kind.Q6_K else slice(0, 4)
    count = (scales.stop - scales.start) // 2
    blocks[:, scales] = np.full(count, 0.01, np.float16).view(np.uint8)
    return blocks.reshape(array.shape[0], -1)


def architecture_of(config):
    return family_of(config).name.removesuffix("_text")


def write_gguf(file, config, arrays, kind=Kind.F32, *, architecture=None, more=None, keys=None):
    """Writes what llama.cpp's converter writes; `arrays` become those that a reader gets.

    `more` writes more; `keys` are written besides, without those whose values are None.
    """
    architecture = architecture or architecture_of(config)
    writer = gguf.GGUFWriter(file, architecture)
    if more is not None:
        more(writer)
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(77)
    writer.add_embedding_length(config.embed_dim)
    writer.add_feed_forward_length(config.mlp_dim)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if isinstance(config, Gemma2Config):
        writer.add_attn_logit_softcapping(config.attn_logit_softcap)
        writer.add_final_logit_softcapping(config.final_logit_softcap)
    if isinstance(config, Gemma3Config):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_factor)
    if getattr(config, "rope_scaling", None):
        plain = config.replace(rope_scaling=None).style.layers[0].rope
        divisors = np.array(plain) / np.array(config.style.layers[0].rope)
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    for key, value in (keys or {}).items():
        if value is None:
            del writer.kv_data[0][key]
        else:
            writer.kv_data[0].pop(key, None)
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    known = getattr(gguf.MODEL_ARCH, architecture_of(config).upper())
    names = gguf.get_tensor_name_map(known, config.num_layers)
    for name in list(arrays):
        array, rows = arrays[name], slice(None)
        if isinstance(config, LlamaConfig) and ("q_proj" in name or "k_proj" in name):
            heads = config.num_heads if "q_proj" in name else config.num_kv_heads
            rows = order(len(array), heads)
        gemma = architecture.startswith("gemma") and name.endswith("norm.weight")
        stored = array[rows] + np.float32(gemma)
        if stored.ndim > 1:
            raw = quantised(stored, kind)
            read = gguf.quants.dequantize(raw, kind)
            arrays[name] = np.empty_like(read)
            arrays[name][rows] = read
        else:
            raw = stored
        kind_of = kind if stored.ndim > 1 else Kind.F32
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), raw, raw_dtype=kind_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def write_hf(directory, config, arrays):
    directory.mkdir()
    ids = SpecialIds(eos=(1,), pad=0)
    write_json(directory / "config.json", config_to_hf(config, ids, np.dtype(np.float32)))
    safetensors.numpy.save_file(arrays, directory / "model.safetensors")
    return directory


def assert_same(file, directory):
    one, other = (load_model(path) for path in (file, directory))
    assert one.config == other.config and one.format == "gguf"
    for path, value in flatten(other.params).items():
        np.testing.assert_allclose(
            flatten(one.params)[path], value, rtol=0, atol=1e-6, err_msg=path
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_each_family_is_its_directory(tmp_path, name):
    config, arrays = CONFIGS[name], hf_arrays(CONFIGS[name])
    file = write_gguf(tmp_path / "m.gguf", config, arrays)
    assert_same(file, write_hf(tmp_path / "hf", config, arrays))
    assert longest_context(load_model(file).path) == 77


# What converters and other tools write that changes no network.
HARMLESS = {
    "general.type": "model",
    "general.sampling.top_k": 20,
    "general.base_model.0.name": "Base",
    "general.tags": ["chat"],
    "general.quantization_version": 2,
    "quantize.imatrix.entries_count": 168,
    "split.no": 0,
    "split.count": 1,
    "someone.quantized_by": "x",
    "{}.vocab_size": 48,
    "{}.rope.dimension_count": 8,
    "{}.attention.value_length": 8,
    "{}.rope.scaling.type": "none",
    "{}.rope.scaling.factor": 4.0,
    "{}.rope.scaling.original_context_length": 64,
    "{}.rope.scaling.finetuned": True,
    "{}.rope.scaling.yarn_ext_factor": 1.0,
    "{}.attention.causal": True,
    "{}.expert_count": 0,
}


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma", "gemma2"])
def test_keys_that_change_no_network(tmp_path, name):
    config = CONFIGS[name]
    keys = {key.format(name): value for key, value in HARMLESS.items()}
    file = write_gguf(tmp_path / "m.gguf", config, hf_arrays(config), keys=keys)
    assert read_config(file) == config


FACTOR = "rope.scaling.factor"
# As transformers' own files have it.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("name", "keys", "named"),
    [
        ("llama", {FACTOR: 4.0}, f"llama.{FACTOR}=4.0"),
        ("llama", {"rope.scaling.type": "linear", FACTOR: 4.0}, f"llama.{FACTOR}=4.0"),
        ("llama", {"rope.scale_linear": 4.0}, "llama.rope.scale_linear=4.0"),
        ("llama", {"rope.scaling.type": ""}, "llama.rope.scaling.type=''"),
        ("qwen2", {"rope.scaling.type": "yarn", FACTOR: 4.0, "rope.freq_base": 1.0}, "above 1 for"),
        ("qwen2", {"rope.scaling.type": "longrope"}, "qwen2.rope.scaling.type='longrope'"),
        ("qwen3", {"rope.scaling.type": "yarn"}, f"qwen3.{FACTOR} must be a number above 0"),
        ("gemma3", {"rope.scaling.type": "yarn"}, "gemma3.rope.scaling.type='yarn'"),
        ("llama3", {"rope.scaling.type": "yarn", FACTOR: 4.0}, "rope_freqs.weight"),
        ("llama", {"rope.scaling.attn_factor": 0.5}, "llama.rope.scaling.attn_factor must be"),
        ("llama", {"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor must be absent or 1"),
        ("llama", {"rope.scaling.yarn_attn_factor": 0.5}, "llama.rope.scaling.yarn_attn_factor"),
        ("llama", {"rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ("llama", {"rope.freq_base_swa": 1e4}, "llama.rope.freq_base_swa must be absent"),
        ("llama", {"rope.dimension_count": 4}, "llama.rope.dimension_count must be 8"),
        ("gemma2", {"attention.value_length": 4}, "gemma2.attention.value_length must be 8"),
        ("llama", {"logit_scale": 0.1}, "llama.logit_scale must be absent, got 0.1"),
        ("llama", {"attention.scale": 0.1}, "llama.attention.scale must be absent"),
        ("llama", {"expert_count": 8}, "llama.expert_count must be absent or 0, got 8"),
        ("qwen2", {"attention.sliding_window": 4}, "qwen2.attention.sliding_window must be absent"),
        ("qwen3", {"attention.causal": False}, "qwen3.attention.causal must be absent or True"),
        ("gemma", {"final_logit_softcapping": 30.0}, "gemma.final_logit_softcapping must be"),
        ("gemma2", {"attention.sliding_window_pattern": 3}, "sliding_window_pattern must be"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "gemma3.final_logit_softcapping must be"),
        ("gemma3", {"attention.sliding_window_pattern": [True]}, "layer_types has 1 names"),
        ("gemma3", {"attention.sliding_window": None}, "sliding_window must be .* and is missing"),
        ("llama", {"attention.layer_norm_rms_epsilon": None}, "rms_epsilon must be .* is missing"),
        ("llama", {"block_count": None}, "llama.block_count must be .* and is missing"),
        ("llama", {"block_count": 1001}, "must be at most 1000"),
        ("llama", {"new_key": [1.0, 2.0]}, "llama.new_key must be absent"),
        ("llama", {"diffusion.shift_logits": True}, "diffusion.shift_logits must be absent"),
        ("llama", {"general.type": "adapter"}, "general.type must be 'model', got 'adapter'"),
        ("llama", {"split.count": 2}, "split.count must be 1, got 2; join the files"),
    ],
)
def test_keys_of_another_network_are_refused(tmp_path, name, keys, named):
    config = CONFIGS[name]
    other = ("general.", "split.", "diffusion.")
    architecture = architecture_of(config)
    keys = {k if k.startswith(other) else f"{architecture}.{k}": v for k, v in keys.items()}
    file = write_gguf(tmp_path / "m.gguf", config, hf_arrays(config), keys=keys)
    with pytest.raises(UserError, match=rf"{tmp_path}/m\.gguf: .*{named}"):
        read_config(file)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2"])
@pytest.mark.parametrize(
    ("own", "changes"),
    [
        ({}, {}),
        ({"original_context_length": None}, {"original_max_position": 77}),  # the context
        *[({f"yarn_{x}": y}, {x: y}) for x, y in (("beta_fast", 16.0), ("beta_slow", 2.0))],
    ],
)
def test_yarn(tmp_path, name, own, changes):
    config = CONFIGS[name]
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 32, **own}
    keys = {f"{name}.rope.scaling.{x}": y for x, y in scaling.items() if y is not None}
    file = write_gguf(tmp_path / "m.gguf", config, hf_arrays(config), keys=keys)
    wanted = scaling_from_hf(HFFields({}), "yarn", HFFields(YARN))
    wanted = dataclasses.replace(wanted, **changes)
    assert read_config(file) == config.replace(rope_scaling=wanted)


PATTERN = ("full_attention", "sliding_attention", "sliding_attention")


@pytest.mark.parametrize(
    ("pattern", "types", "base"),
    [
        (2, ("sliding_attention", "full_attention") * 3, 2e6),
        ([False, True, True] * 2, PATTERN * 2, 2e6),
        ([True] * 6, (), None),  # without a base it is that of llama.cpp
    ],
)
def test_a_gemma_3_has_its_own_pattern_and_bases(tmp_path, pattern, types, base):
    config = CONFIGS["gemma3"].replace(layer_types=types, local_rope_theta=5e4)
    keys = {"attention.sliding_window_pattern": pattern, "rope.freq_base_swa": 5e4}
    keys = {f"gemma3.{name}": value for name, value in {**keys, "rope.freq_base": base}.items()}
    config, arrays = config.replace(rope_theta=base or 1e4), hf_arrays(config)
    file = write_gguf(tmp_path / "m.gguf", config, arrays, keys=keys)
    assert_same(file, write_hf(tmp_path / "hf", config, arrays))


@pytest.mark.parametrize("kind", KINDS)
def test_each_quantisation_is_the_dequantised_directory(tmp_path, kind):
    arrays = hf_arrays(WIDE)
    file = write_gguf(tmp_path / "m.gguf", WIDE, arrays, Kind[kind])
    assert_same(file, write_hf(tmp_path / "hf", WIDE, arrays))
    on_disk = inspect(file).summary()["bytes_on_disk"]
    bits = {"F32": 32, "F16": 16, "BF16": 16, "Q8_0": 8.5, "Q4_0": 4.5, "Q4_1": 5, "Q4_K": 4.5}
    bits |= {"Q5_0": 5.5, "Q5_K": 5.5, "Q6_K": 6.5625}
    matrices = sum(x.size for x in arrays.values() if x.ndim > 1)
    assert on_disk[kind] >= matrices * bits[kind] / 8
    assert sum(on_disk.values()) < file.stat().st_size


@pytest.mark.parametrize(
    ("shape", "dtype", "weights"),
    [
        (None, "bfloat16", None), ((1, 1), None, None), ((1, 2), None, None), ((2, 2), None, None),
        ((1, 2), None, "int8"), (None, "bfloat16", "int8"),
    ],
)  # fmt: skip
def test_blocks_are_placed_as_the_floats_they_stand_for(tmp_path, shape, dtype, weights):
    """On meshes, in other dtypes and in 8 bits, bit for bit and in the same shardings."""
    if weights is not None:
        pytest.importorskip("qwix")
    arrays = hf_arrays(WIDE)
    file = write_gguf(tmp_path / "m.gguf", WIDE, arrays, Kind.Q6_K)
    options = {"mesh": shape and make_mesh(*shape), "dtype": dtype, "weights": weights}
    both = [
        load_model(path, **options).params
        for path in (file, write_hf(tmp_path / "hf", WIDE, arrays))
    ]
    for ours, theirs in zip(*map(jax.tree.leaves, both), strict=True):
        assert ours.dtype == theirs.dtype and ours.sharding == theirs.sharding
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def write_vocabulary(writer):
    """The 48 tokens of a byte-level vocabulary, without merges."""
    tokens = ["<|end|>", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRS", "Ġ", "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * 47])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)


def test_two_files_are_a_pair_that_commands_read(tmp_path, capsys):
    config = CONFIGS["llama"]
    files = {
        name: write_gguf(
            tmp_path / f"{name}.gguf", config, hf_arrays(config, seed), more=write_vocabulary
        )
        for seed, name in enumerate(("verifier", "drafter"))
    }
    assert load_pair(**files).verifier.context == 77
    (tmp_path / "in.txt").write_text("abc\nde f\n")
    bindings = {
        "VERIFIER": str(files["verifier"]),
        "DRAFTER": str(files["drafter"]),
        "INPUT": str(tmp_path / "in.txt"),
        "OUTPUT_DIR": str(tmp_path / "run"),
        "MAX_NEW_TOKENS": 4,
    }
    assert main(["infer", *(f"--gin.{name}={value!r}" for name, value in bindings.items())]) == 0
    assert len((tmp_path / "run" / "predictions.jsonl").read_text().splitlines()) == 2
    assert main(["inspect", *map(str, files.values())]) == 0
    assert main(["convert", str(files["drafter"]), str(tmp_path / "out"), "--to=hf"]) == 0
    assert "(gguf)" in capsys.readouterr().out
    assert_same(files["drafter"], tmp_path / "out")


def test_another_architecture_is_refused(tmp_path):
    config = CONFIGS["llama"]
    file = write_gguf(tmp_path / "m.gguf", config, hf_arrays(config), architecture="falcon")
    with pytest.raises(UserError, match="architecture='falcon' must be one of llama, qwen2"):
        load_model(file)


# The place of a tensor is its rank, shape, type and offset; see `write_gguf`.
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"shape": 10**12}, "ends at byte"),
        ({"shape": 0}, "'output_norm.weight' has shape"),
        ({"kind": Kind.F16.value}, "does not follow the tensor before it"),
        ({"kind": Kind.Q8_K.value}, "type of output_norm.weight cannot be read .*, such as Q8_0"),
        ({"kind": 200}, r"200\)? is not a valid GGMLQuantizationType.*, such as Q8_0"),
        ({"offset": 32}, "does not follow the tensor before it"),
        ({"offset": 2**63}, "ends at byte"),
        (
            {"name": b"output_mean.weight"},
            "1 array missing: model.norm.weight; 1 array unknown: output_mean.weight",
        ),
        ({"end": b""}, r"m\.gguf ends at byte \d"),
    ],
)
def test_a_damaged_tensor_is_refused(tmp_path, damage, message):
    file = write_gguf(tmp_path / "m.gguf", WIDE, hf_arrays(WIDE))
    content, name = file.read_bytes(), b"output_norm.weight"
    before, _, after = content.partition(name)
    parts = struct.unpack_from("<IQIQ", after)
    values = {"name": name, **dict(zip(("rank", "shape", "kind", "offset"), parts, strict=True))}
    name, *numbers, end = (values | {"end": after[24:]} | damage).values()
    file.write_bytes(before + name + struct.pack("<IQIQ", *numbers) + end)
    with pytest.raises(UserError, match=message):
        load_model(file)


def test_two_names_of_a_tensor_are_refused(tmp_path):
    def more(writer):
        writer.add_tensor("blk.0.post_attention_norm.weight", np.ones(32, np.float32))

    config = CONFIGS["llama"]
    file = write_gguf(tmp_path / "m.gguf", config, hf_arrays(config), more=more)
    with pytest.raises(UserError, match=r"blk\.0\.ffn_norm\.weight and another tensor are both"):
        load_model(file)


def test_another_stretching_is_refused(tmp_path):
    other = Llama3RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=2.0, original_max_position=64
    )
    config = CONFIGS["llama3"].replace(rope_scaling=other)
    file = write_gguf(tmp_path / "m.gguf", config, hf_arrays(config))
    with pytest.raises(UserError, match="is not the stretching of Llama"):
        load_model(file)


def test_the_missing_package_is_named(tmp_path, monkeypatch):
    config = CONFIGS["llama"]
    file = write_gguf(tmp_path / "m.gguf", config, hf_arrays(config))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingLibraryError, match=r"run pip install '\.\[gguf\]'"):
        load_model(file)
