"""Hugging Face directories, written by transformers and by us, read by us and by transformers."""

import functools
import json
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
from checkpoint_helpers import (
    CONFIGS,
    assert_same,
    edit_json,
    logits,
    one_line,
    random_params,
    shared,
    tokens,
)

from specjax.checkpoints import hf, load_model, save_model
from specjax.checkpoints.arrays import flatten
from specjax.checkpoints.loading import read_config
from specjax.models import FAMILIES, Gemma2Config, LlamaConfig, T5Config, model_from_config
from specjax.models.families import family_of
from specjax.tokenizers.load import load_tokenizer
from specjax.tokenizers.model_files import SpecialIds
from specjax.writing import CHECKSUMS_NAME
from tests.models.hf_models import DECODER_SIZES, LLAMA3, T5_CONFIGS, made, save_random

MODELS = (*T5_CONFIGS, "t5_v1_0", "t5_v1_1", "llama", "llama_tied", "llama3", "gemma2")


def _auto(name):
    decoder_only = transformers.AutoModelForCausalLM
    return transformers.AutoModelForSeq2SeqLM if "t5" in name else decoder_only


def _their_logits(model, config):
    with torch.no_grad():
        if config.encoder_style is not None:
            decoder = np.array(tokens(config, seed=2).at[:, 0].set(config.decoder_start_token))
            inputs = {
                "input_ids": torch.tensor(np.array(tokens(config, 7))),
                "decoder_input_ids": torch.tensor(decoder),
            }
        else:
            inputs = {"input_ids": torch.tensor(np.array(tokens(config)))}
        return model(**{k: v.long() for k, v in inputs.items()}).logits.float().numpy()


def _assert_close(ours, theirs):
    assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max()


@functools.cache
def saved(name):
    """A directory written by transformers, with its logits, and the model read from it."""
    model, directory = made(name)
    loaded = load_model(directory)
    return directory, _their_logits(model, loaded.config), loaded


@pytest.fixture
def copy(tmp_path):
    """A copy of a saved directory, to be spoilt."""

    def get(name):
        shutil.copytree(made(name)[1], tmp_path / name)
        return tmp_path / name

    return get


@pytest.mark.parametrize("name", MODELS)
def test_logits_agree_with_transformers(name):
    _, theirs, loaded = saved(name)
    assert np.abs(theirs).max() > 0.5  # a scale that a wrong array would move
    _assert_close(logits(loaded.model, loaded.params), theirs)
    assert loaded.format == "hf"
    assert loaded.config.param_dtype == loaded.config.dtype == jnp.float32


def test_t5_head_is_decided_by_the_arrays(copy):
    """transformers 5 says tied for every T5; 4.x says untied in another field."""
    directory, theirs, loaded = saved("t5_v1_1")
    assert json.loads((directory / "config.json").read_text())["tie_word_embeddings"] is True
    assert not loaded.config.tie_embeddings
    tied = saved("t5_v1_1_tied")[2].config
    assert (tied.tie_embeddings, tied.scale_tied_logits) == (True, False)
    v1_0 = saved("t5_v1_0")[2].config
    assert (v1_0.tie_embeddings, v1_0.scale_tied_logits) == (True, True)
    # As 4.x writes it.
    untied = copy("t5_v1_1")
    edit_json(untied / "config.json", scale_decoder_outputs=..., tie_word_embeddings=False)
    again = load_model(untied)
    assert not again.config.tie_embeddings
    _assert_close(logits(again.model, again.params), theirs)
    # Where nothing says that it is untied, transformers 5 scales its logits; we refuse it.
    for flag in (True, ...):
        edit_json(untied / "config.json", scale_decoder_outputs=..., tie_word_embeddings=flag)
        model = transformers.T5ForConditionalGeneration.from_pretrained(str(untied)).eval()
        _assert_close(_their_logits(model, loaded.config) * 4, theirs)  # sqrt(d_model)
        one_line(lambda: load_model(untied), "lm_head.weight differs", "tie_word_embeddings to fal")
    # A tied head in 4.x: no lm_head.weight, no scale_decoder_outputs.
    tied_dir = copy("t5_v1_0")
    edit_json(tied_dir / "config.json", scale_decoder_outputs=..., tie_word_embeddings=True)
    again = load_model(tied_dir)
    _assert_close(logits(again.model, again.params), saved("t5_v1_0")[1])
    # 4.x says untied, and the head is not there.
    edit_json(tied_dir / "config.json", tie_word_embeddings=False)
    one_line(lambda: load_model(tied_dir), "1 array missing: lm_head.weight")
    edit_json(untied / "config.json", scale_decoder_outputs=True)
    one_line(lambda: load_model(untied), "config.json", "scale_decoder_outputs", "differs from")
    # Both flags at odds, and no head: it cannot differ.
    edit_json(tied_dir / "config.json", scale_decoder_outputs=True)
    told = one_line(lambda: load_model(tied_dir), "lm_head.weight is absent", "to true if the head")
    assert "differs" not in told


def test_rope_parameters_of_4_and_5(copy):
    """5.x nests the base in `rope_parameters`; 4.x has `rope_theta` and `rope_scaling`."""
    _, theirs, loaded = saved("llama3")
    assert loaded.config.rope_theta == 500.0
    assert loaded.config.rope_scaling.original_max_position == 64
    directory = copy("llama3")
    old = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    edit_json(
        directory / "config.json",
        rope_parameters=...,
        rope_theta=500.0,
        rope_scaling={**old, "type": old["rope_type"], "rope_type": None},
    )
    again = load_model(directory)
    assert again.config == loaded.config
    _assert_close(logits(again.model, again.params), theirs)
    edit_json(directory / "config.json", rope_scaling=None)
    plain = load_model(directory)
    assert (plain.config.rope_theta, plain.config.rope_scaling) == (500.0, None)
    edit_json(
        directory / "config.json",
        rope_scaling={"type": "yarn", "factor": 2.0},
        max_position_embeddings=...,
    )
    one_line(lambda: load_model(directory), "max_position_embeddings=None must be a number")
    edit_json(directory / "config.json", rope_scaling={"type": "dynamic", "factor": 2.0})
    one_line(lambda: load_model(directory), "rope_type='dynamic'", "'llama3'")


def test_rope_parameters_and_rope_scaling_in_one_file(copy):
    """transformers takes `rope_scaling`; a base that it would leave out is refused."""
    loaded = saved("llama3")[2]
    directory = copy("llama3")
    scaling = {**LLAMA3, "factor": 4.0}
    no_base = {k: v for k, v in scaling.items() if k != "rope_theta"}
    plain = {"rope_type": "default", "rope_theta": 500.0}
    for fields in (
        {"rope_parameters": plain, "rope_scaling": scaling},
        {"rope_parameters": LLAMA3, "rope_scaling": scaling},
        {"rope_parameters": plain, "rope_scaling": no_base, "rope_theta": 500.0},
        {"rope_parameters": LLAMA3, "rope_scaling": {}},
    ):
        edit_json(directory / "config.json", **{"rope_theta": ..., **fields})
        again = load_model(directory)
        factor = 4.0 if fields["rope_scaling"] else 8.0
        assert again.config.rope_scaling.factor == factor
        assert again.config.rope_theta == 500.0
        model = transformers.LlamaForCausalLM.from_pretrained(
            str(directory), attn_implementation="eager"
        )
        _assert_close(logits(again.model, again.params), _their_logits(model.eval(), loaded.config))
    edit_json(directory / "config.json", rope_parameters=plain, rope_scaling=no_base)
    one_line(
        lambda: load_model(directory),
        directory / "config.json",
        "rope_parameters has rope_theta=500.0",
        "rope_scaling, which has priority, has 10000.0",
    )
    edit_json(directory / "config.json", rope_parameters=[1])
    one_line(lambda: load_model(directory), "rope_parameters=[1] must be an object")
    edit_json(
        directory / "config.json",
        rope_parameters=LLAMA3,
        rope_scaling=...,
        original_max_position_embeddings=32,
    )
    one_line(lambda: load_model(directory), "original_max_position_embeddings=32 differs from 64")


def test_generation_config_says_what_the_decoder_reads_first(copy):
    directory = copy("t5_v1_0")
    model = transformers.T5ForConditionalGeneration.from_pretrained(str(directory))
    edit_json(directory / "config.json", decoder_start_token_id=3)
    edit_json(directory / "generation_config.json", decoder_start_token_id=7)
    model = transformers.T5ForConditionalGeneration.from_pretrained(str(directory))
    first = int(model.generate(torch.tensor([[4, 5]]), max_new_tokens=1)[0, 0])
    loaded = load_model(directory)
    assert loaded.config.decoder_start_token == loaded.special_ids.decoder_start == first == 7
    # The arrays with a configuration of one's own: that one decides.
    given = loaded.config.replace(decoder_start_token=5)
    assert load_model(directory, config=given).config.decoder_start_token == 5
    edit_json(directory / "generation_config.json", decoder_start_token_id=...)
    assert load_model(directory).config.decoder_start_token == 3
    edit_json(directory / "generation_config.json", decoder_start_token_id=48)
    one_line(
        lambda: load_model(directory), directory, "generation_config.json", "decoder_start_token=48"
    )


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("llama", {"embed_dim": 18}, {"hidden_size": 18}),
        ("gemma2", {"embed_dim": 18}, {"hidden_size": 18}),
        ("gemma2", {"query_pre_attn_scalar": 7.5}, {"query_pre_attn_scalar": 7.5}),
    ],
)
def test_what_transformers_5_refuses_to_read_is_not_written(name, ours, theirs, tmp_path):
    kind = {"llama": transformers.LlamaConfig, "gemma2": transformers.Gemma2Config}[name]
    with pytest.raises(Exception, match="multiple of the number|query_pre_attn_scalar"):
        kind(**{**DECODER_SIZES, **theirs})
    config = CONFIGS[name].replace(**ours)
    params = random_params(config)
    (field, value), *_ = ours.items()
    one_line(
        lambda: save_model(tmp_path / "hf", config, params, format="hf"),
        f"{field}={value} must be",
        "transformers 5",
        "convert it to orbax",
    )
    assert save_model(tmp_path / "orbax", config, params)


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_reads_what_we_write(name, tmp_path):
    config, params = CONFIGS[name], random_params(CONFIGS[name])
    save_model(tmp_path / "out", config, params, format="hf")
    model, report = _auto(name).from_pretrained(
        str(tmp_path / "out"), attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    _assert_close(logits(model_from_config(config), params), _their_logits(model.eval(), config))
    again = load_model(tmp_path / "out")
    assert again.config == config
    assert_same(again.params, params)


@pytest.mark.parametrize("name", ["t5_v1_0", "t5_v1_1", "t5_tied_unscaled", "llama_tied"])
def test_config_as_transformers_4_reads_it(name, tmp_path):
    """4.x knows tie_word_embeddings (and scales when it is true), rope_theta, torch_dtype."""
    save_model(tmp_path / "out", CONFIGS[name], random_params(CONFIGS[name]), format="hf")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    arrays = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert config["torch_dtype"] == config["dtype"] == "float32"
    if name == "llama_tied":
        assert config["rope_theta"] == 5e5
        assert config["rope_scaling"]["rope_type"] == "llama3"
        assert "lm_head.weight" not in arrays
    else:
        scaled = name == "t5_v1_0"
        assert config["tie_word_embeddings"] is scaled
        assert ("lm_head.weight" in arrays) is not scaled
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_dtypes(tmp_path):
    directory, _, loaded = saved("llama_tied")
    half = load_model(directory, dtype="bfloat16")
    assert half.config.dtype == half.config.param_dtype == jnp.bfloat16
    rounded = {k: v.astype(jnp.bfloat16) for k, v in flatten(loaded.params).items()}
    assert_same(half.params, rounded)
    mixed = load_model(directory, dtype="bfloat16", param_dtype="float32")
    assert mixed.config.dtype == jnp.bfloat16
    assert_same(mixed.params, loaded.params)
    # A bfloat16 checkpoint stays bfloat16, a float16 one becomes float32, exactly.
    for disk, kept in (("bfloat16", "bfloat16"), ("float16", "float32")):
        save_model(tmp_path / disk, loaded.model, loaded.params, format="hf", dtype=disk)
        again = load_model(tmp_path / disk)
        assert again.config.param_dtype == again.config.dtype == jnp.dtype(kept)
        expected = {
            k: v.astype(jnp.dtype(disk)).astype(jnp.dtype(kept))
            for k, v in flatten(loaded.params).items()
        }
        assert_same(again.params, expected)
    one_line(
        lambda: load_model(directory, dtype="int8"), "`dtype` must be", "float32", "got 'int8'"
    )
    one_line(lambda: load_model(directory, param_dtype="int4"), "`param_dtype` must be", "'int4'")


def test_sharded_files_with_an_index(tmp_path):
    config, params = CONFIGS["llama"], random_params(CONFIGS["llama"])
    (tmp_path / "out").mkdir()
    flat = flatten(params)
    hf.write_hf(
        tmp_path / "out",
        config,
        flat,
        ids=SpecialIds(),
        dtype=np.dtype(np.float32),
        shard_bytes=9000,
    )
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 2
    assert_same(load_model(tmp_path / "out").params, params)
    # transformers agrees that these are all arrays.
    _, report = transformers.LlamaForCausalLM.from_pretrained(
        str(tmp_path / "out"), output_loading_info=True
    )
    assert not report["missing_keys"]
    shards[1].rename(tmp_path / "aside")
    one_line(lambda: load_model(tmp_path / "out"), shards[1], "missing", "index.json")
    (tmp_path / "aside").rename(shards[1])
    edit_json(tmp_path / "out" / hf.INDEX, weight_map={"x": shards[0].name})
    one_line(lambda: load_model(tmp_path / "out"), "arrays missing")
    edit_json(tmp_path / "out" / hf.INDEX, weight_map={})
    one_line(lambda: load_model(tmp_path / "out"), "no weight_map")


@pytest.mark.parametrize("counts", [1, 2])
def test_of_two_arrays_of_a_name_the_index_says_which_one_counts(tmp_path, counts):
    config, params = CONFIGS["llama"], random_params(CONFIGS["llama"])
    hf.write_hf(tmp_path, config, flatten(params), ids=SpecialIds(), dtype=np.dtype(np.float32))
    arrays = safetensors.numpy.load_file(tmp_path / hf.SINGLE)
    (tmp_path / hf.SINGLE).unlink()
    name, shards = "model.norm.weight", {1: "a.safetensors", 2: "b.safetensors"}
    for number, shard in shards.items():
        own = {x: array for x, array in arrays.items() if ("layers.0" in x) == (number == 1)}
        value = arrays[name] if number == counts else np.zeros_like(arrays[name])
        safetensors.numpy.save_file({**own, name: value}, tmp_path / shard)
    placed = {x: shards[1 if "layers.0" in x else 2] for x in arrays} | {name: shards[counts]}
    edit_json(tmp_path / hf.INDEX, weight_map=placed)
    assert_same(load_model(tmp_path).params, params)
    edit_json(tmp_path / hf.INDEX, weight_map={x: y for x, y in placed.items() if x != name})
    one_line(lambda: load_model(tmp_path), tmp_path, "has the array model.norm.weight twice")
    for wrong in ({**placed, name: None}, {**placed, name: []}, [], None, 5, True, "x"):
        edit_json(tmp_path / hf.INDEX, weight_map=wrong)
        one_line(lambda: load_model(tmp_path), hf.INDEX, "no weight_map of file names")


# The bits of each number of safetensors' dtypes, and NumPy's dtype of those that are read.
DTYPES = {
    "BOOL": (8, bool),
    **{f"{kind}{bits}": (bits, None) for kind in "IU" for bits in (8, 16, 32, 64)},
    "F16": (16, np.float16),
    "BF16": (16, ml_dtypes.bfloat16),
    "F32": (32, np.float32),
    "F64": (64, np.float64),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), (8, ...)),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), (6, ...)),
    "F4": (4, ...),
    "C64": (64, ...),
}


def _write_array(file, name, label, shape, data):
    header = json.dumps({name: {"dtype": label, "shape": shape, "data_offsets": [0, len(data)]}})
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + data)


@pytest.mark.parametrize("label", DTYPES)
def test_every_dtype_of_safetensors_is_read_or_refused_by_name(label, tmp_path):
    bits, dtype = DTYPES[label]
    data = np.random.default_rng(0).integers(0, 2, bits, np.uint8).tobytes()  # 8 numbers
    _write_array(tmp_path / hf.SINGLE, "x", label, [2, 4], data)
    reader = hf.SafetensorsReader(tmp_path)
    if dtype is ...:
        message = one_line(lambda: reader.read("x"), tmp_path, "x has dtype")
        assert f"dtype {label}, but quantised checkpoints are not supported" in message
        return
    kind = {"I": "int", "U": "uint"}.get(label[0])
    expected = np.frombuffer(data, dtype or f"{kind}{bits}").reshape(2, 4)
    assert reader.read("x").dtype == reader.specs["x"].dtype == expected.dtype
    np.testing.assert_array_equal(reader.read("x"), expected)


@pytest.mark.parametrize("label", ["I32", "F4", "F8_E4M3"])
def test_an_output_that_is_not_of_floats_is_refused(copy, label):
    directory = copy("t5_v1_1")
    place = directory / "aside.safetensors"
    arrays = safetensors.numpy.load_file(directory / hf.SINGLE)
    shape = arrays.pop("lm_head.weight").shape
    safetensors.numpy.save_file(arrays, directory / "rest.safetensors")
    (directory / hf.SINGLE).unlink()
    size = int(np.prod(shape)) * DTYPES[label][0] // 8
    _write_array(place, "lm_head.weight", label, list(shape), bytes(size))
    weight_map = {**dict.fromkeys(arrays, "rest.safetensors"), "lm_head.weight": place.name}
    edit_json(directory / hf.INDEX, weight_map=weight_map)
    one_line(lambda: load_model(directory), f"lm_head.weight has dtype {label}, but quantised")


# The tie_word_embeddings of a nested configuration, as transformers reads it.
OUTER = {"gemma3": True, "gemma4": True, "qwen3_5": False}


@pytest.mark.parametrize("model_type", OUTER)
@pytest.mark.parametrize("outer", [..., None, True, False])
@pytest.mark.parametrize("inner", [..., True, False])
def test_the_outer_field_says_whether_embeddings_are_tied(copy, model_type, outer, inner):
    directory = copy(model_type)
    _rewrite(directory, lambda arrays: arrays.pop("lm_head.weight", None))
    file = directory / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({"model_type": model_type, "text_config": values}))
    edit_json(file, tie_word_embeddings=outer)
    text = {x: y for x, y in values.items() if x != "tie_word_embeddings"}
    edit_json(file, text_config=text if inner is ... else {**text, "tie_word_embeddings": inner})
    expected = OUTER[model_type] if outer is ... else bool(outer)
    assert read_config(directory).tie_embeddings == expected
    if outer is not None or model_type == "gemma3":
        theirs = transformers.AutoConfig.from_pretrained(directory)
        assert bool(theirs.tie_word_embeddings) == expected


def test_a_null_that_says_whether_a_t5_scales(copy):
    directory = copy("t5_v1_0")
    edit_json(directory / "config.json", scale_decoder_outputs=None)
    theirs = transformers.T5Config.from_pretrained(directory)
    assert not theirs.scale_decoder_outputs
    assert not read_config(directory).scale_tied_logits


@pytest.mark.parametrize("name", ["llama3", "qwen2_yarn", "gpt_oss"])
@pytest.mark.parametrize("inner", [..., 32, 64])
@pytest.mark.parametrize("outer", [..., 32])
@pytest.mark.parametrize("old", [False, True])
def test_the_length_before_a_stretching_is_where_transformers_finds_it(
    copy, name, inner, outer, old
):
    directory = copy(name)
    field, file = "original_max_position_embeddings", directory / "config.json"
    rope = json.loads(file.read_text())["rope_parameters"]
    rope = {x: y for x, y in rope.items() if x != field} | ({} if inner is ... else {field: inner})
    changes = {"rope_parameters": ..., "rope_scaling": rope} if old else {"rope_parameters": rope}
    edit_json(file, **changes, max_position_embeddings=640, **{field: outer})
    if outer is not ... and inner not in (..., outer):
        one_line(lambda: read_config(directory), f"{field}=32 differs from 64")
        return
    config = transformers.AutoConfig.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_config(config)
    expected = model.model.rotary_emb.inv_freq.numpy()
    np.testing.assert_allclose(read_config(directory).style.layers[0].rope, expected, rtol=1e-6)


def test_a_gemma_3_that_versions_of_transformers_rotate_differently_is_refused(copy):
    directory = copy("gemma3")
    file = directory / "config.json"
    edit_json(file, rope_parameters=..., rope_scaling={"type": "linear", "factor": 8.0})
    rope = transformers.AutoConfig.from_pretrained(directory).rope_parameters
    assert rope["full_attention"]["rope_type"] == "default"
    one_line(lambda: read_config(directory), file, "rope_scaling has type='linear'", "rope_type")
    edit_json(file, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert read_config(directory).rope_factor == 8.0
    edit_json(file, rope_scaling={"type": "linear", "rope_type": "linear", "factor": 8.0})
    assert read_config(directory).rope_factor == 8.0


@pytest.mark.parametrize("value", [2**63, 1e299, 1.5])
@pytest.mark.parametrize("name", ["qwen3_5", "gemma4_wide"])
def test_more_dimensions_than_a_head_has_are_not_rotated(copy, name, value):
    directory = copy(name)
    file = directory / "config.json"
    values = json.loads(file.read_text())
    rope = values["rope_parameters"]
    rope.get("full_attention", rope)["partial_rotary_factor"] = value
    file.write_text(json.dumps(values))
    one_line(lambda: read_config(directory), file, "partial_rotary_factor", "must be at most 1")


@pytest.mark.parametrize("format", ["hf", "orbax"])
@pytest.mark.parametrize("family", ["phi3", "smollm3", "olmo2", "llama"])
def test_usual_ids_above_a_small_vocabulary_are_left_out(family, format, tmp_path):
    config = next(iter(FAMILIES[family].presets.values())).replace(
        vocab_size=48, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=8,
        num_layers=4,
    )  # fmt: skip
    params = random_params(config)
    place = save_model(tmp_path / "out", config, params, format=format)
    assert load_model(place).special_ids.eos == ((2,) if family == "llama" else ())
    if format == "hf":
        transformers.AutoModelForCausalLM.from_pretrained(place)
    wrong = SpecialIds(eos=(1, 48))
    one_line(
        lambda: save_model(tmp_path / "other", config, params, format=format, special_ids=wrong),
        "eos_token_id=[1, 48] must be below vocab_size=48; give other `special_ids`",
    )


def test_special_ids(copy):
    directory = copy("llama")
    assert load_model(directory).special_ids.eos == (2,)
    assert load_model(directory).special_ids.bos == 1
    edit_json(directory / "config.json", eos_token_id=[7, 8], pad_token_id=-1)
    (directory / "generation_config.json").unlink()
    loaded = load_model(directory)
    assert (loaded.special_ids.eos, loaded.special_ids.pad) == ((7, 8), None)
    edit_json(directory / "generation_config.json", eos_token_id=[9, 9, 5], pad_token_id=4)
    assert load_model(directory).special_ids.eos == (9, 5)
    assert load_model(directory).special_ids.pad == 4
    edit_json(directory / "generation_config.json", eos_token_id=[9, 48])
    one_line(lambda: load_model(directory), directory, "eos_token_id=[9, 48]", "vocab_size=48")
    edit_json(directory / "generation_config.json", eos_token_id="</s>")
    one_line(lambda: load_model(directory), "generation_config.json", "eos_token_id='</s>'")


def _rewrite(directory, change):
    """Loads a directory's arrays as a dict, changes it, writes it back."""
    arrays = safetensors.numpy.load_file(directory / "model.safetensors")
    change(arrays)
    arrays = {k: np.ascontiguousarray(v) for k, v in arrays.items()}
    safetensors.numpy.save_file(arrays, directory / "model.safetensors")
    (directory / CHECKSUMS_NAME).unlink(missing_ok=True)  # others write none


def test_known_duplicates_are_dropped(copy):
    directory = copy("t5_v1_0")

    def duplicate(arrays):
        for name in (
            "encoder.embed_tokens.weight",
            "decoder.embed_tokens.weight",
            "lm_head.weight",
        ):
            arrays[name] = arrays["shared.weight"].copy()
        arrays["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = np.zeros(
            (32, 2), np.float32
        )

    _rewrite(directory, duplicate)
    loaded = load_model(directory)
    assert loaded.config.tie_embeddings
    assert_same(loaded.params, saved("t5_v1_0")[2].params)
    # Only a copy of the embedding is left.
    _rewrite(directory, lambda arrays: [arrays.pop(n) for n in ("shared.weight", "lm_head.weight")])
    assert_same(load_model(directory).params, saved("t5_v1_0")[2].params)
    _rewrite(directory, lambda arrays: arrays["decoder.embed_tokens.weight"].__iadd__(1))
    one_line(lambda: load_model(directory), "decoder.embed_tokens.weight (a copy that differs")

    llama = copy("llama_tied")

    def old(arrays):
        arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
        for i in range(2):
            arrays[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    _rewrite(llama, old)
    assert_same(load_model(llama).params, saved("llama_tied")[2].params)
    _rewrite(llama, lambda arrays: arrays["lm_head.weight"].__iadd__(1))
    one_line(lambda: load_model(llama), "tie_word_embeddings", "lm_head.weight differs")


def test_dropped_arrays_do_not_decide_the_dtype(tmp_path):
    config = CONFIGS["llama"]
    save_model(tmp_path / "out", config, random_params(config, dtype=jnp.bfloat16), format="hf")

    def old(arrays):
        arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    _rewrite(tmp_path / "out", old)
    assert load_model(tmp_path / "out").config.param_dtype == jnp.bfloat16
    _rewrite(tmp_path / "out", lambda arrays: arrays.update(counter=np.ones(1, np.int64)))
    one_line(lambda: load_model(tmp_path / "out"), "1 array unknown: counter")

    def quantise(arrays):
        del arrays["counter"]
        arrays["model.norm.weight"] = np.ones(16, np.int64)

    _rewrite(tmp_path / "out", quantise)
    one_line(lambda: load_model(tmp_path / "out"), "model.norm.weight has dtype I64, but quantised")


def test_every_difference_is_named_in_one_line(copy):
    directory = copy("llama")

    def spoil(arrays):
        for i in range(2):
            del arrays[f"model.layers.{i}.mlp.up_proj.weight"]
        arrays["model.norm.weight"] = np.ones(17, np.float32)
        arrays["model.layers.0.self_attn.q_proj.bias"] = np.ones(4, np.float32)

    _rewrite(directory, spoil)
    one_line(
        lambda: load_model(directory),
        directory,
        "2 arrays missing: model.layers.*.mlp.up_proj.weight",
        "1 array of a wrong shape: model.norm.weight is (17,) but should be (16,)",
        "1 array unknown: model.layers.0.self_attn.q_proj.bias",
        "config.json",
    )


def test_another_architecture(copy):
    directory = copy("llama")
    path = directory / "config.json"
    original = path.read_text()

    def told(*parts, **changes):
        path.write_text(original)
        edit_json(path, **changes)
        one_line(lambda: load_model(directory), path, *parts)

    told("model_type='mamba'", "t5gemma2, llama, qwen2", "gemma3_text", model_type="mamba")
    told("LlamaForSequenceClassification", architectures=["LlamaForSequenceClassification"])
    told("hidden_act='gelu'", "'silu'", hidden_act="gelu")
    told("attention_bias=True", attention_bias=True)
    told("vocab_size=None must be a number", vocab_size=...)
    told("vocab_size=0", vocab_size=0)
    told("hidden_size=16.5 must be a whole number", hidden_size=16.5)
    told("hidden_size=nan must be finite", hidden_size=float("nan"))
    told("model_type=['llama']", model_type=["llama"])
    told("architectures='LlamaForCausalLM' must be a list", architectures="LlamaForCausalLM")
    told("num_hidden_layers='x' must be a number", num_hidden_layers="x")
    told("num_hidden_layers=[2] must be a number", num_hidden_layers=[2])
    told("num_hidden_layers=None must be a number", num_hidden_layers=None)
    told("num_hidden_layers=-1 must be a whole number >= 1", num_hidden_layers=-1)
    told("hidden_size=1000", "must be finite", hidden_size=10**400)
    told("rms_norm_eps=-1e-05 must be above 0", rms_norm_eps=-1e-5)
    told("rope_theta=0 must be above 0", rope_theta=0, rope_parameters={"rope_theta": 0})
    told("num_kv_heads=3", num_key_value_heads=3)
    told("quantization_config is set", quantization_config={"quant_method": "fp8"})
    path.write_text(original)
    edit_json(path, quantization_config=None)
    assert load_model(directory).params
    path.write_text(original)
    edit_json(path, model_type="gemma2", architectures=["Gemma2ForCausalLM"], hidden_act=...)
    one_line(lambda: load_model(directory), "post_feedforward_layernorm")
    path.write_text(original[:-9])
    one_line(lambda: load_model(directory), path, "not readable as JSON")
    path.unlink()
    one_line(lambda: load_model(directory), path, "missing")
    # The arrays with a configuration of one's own.
    assert load_model(directory, config=CONFIGS["llama"].replace(num_kv_heads=4)).params

    t5 = copy("t5_v1_0")
    edit_json(t5 / "config.json", feed_forward_proj="gelu")
    one_line(lambda: load_model(t5), "feed_forward_proj='gelu'", "gated-gelu")
    for name, value in (
        ("relative_attention_num_buckets", 1),
        ("relative_attention_max_distance", 16),
        ("decoder_start_token_id", -2),
        ("d_model", "16"),
        ("tie_word_embeddings", "no"),
    ):
        shutil.copy(saved("t5_v1_0")[0] / "config.json", t5)
        edit_json(t5 / "config.json", **{name: value})
        one_line(lambda: load_model(t5), t5 / "config.json", f"{name}={value!r} must be")
    shutil.copy(saved("t5_v1_0")[0] / "config.json", t5)
    edit_json(t5 / "config.json", decoder_start_token_id=48)
    one_line(lambda: load_model(t5), t5 / "config.json", "decoder_start_token=48 must be a token")
    gemma = copy("gemma2")
    edit_json(gemma / "config.json", layer_types=["full_attention"] * 2)
    one_line(lambda: load_model(gemma), "layer_types")
    edit_json(gemma / "config.json", num_hidden_layers=10**3)
    one_line(lambda: load_model(gemma), "layer_types")
    edit_json(gemma / "config.json", num_hidden_layers=10**9)
    for _ in range(2):  # whatever the other fields say
        one_line(lambda: load_model(gemma), "num_hidden_layers=1000000000 must be at most 1000")
        edit_json(gemma / "config.json", layer_types=...)
    edit_json(gemma / "config.json", num_hidden_layers=2, hidden_size=2 * 10**9, head_dim=10**9)
    one_line(lambda: load_model(gemma), gemma, "hidden_size=2000000000 must be at most 1048576")
    edit_json(gemma / "config.json", hidden_size=10**6, head_dim=8)
    one_line(lambda: load_model(gemma), gemma, "is (48, 16) but should be (48, 1000000)")
    edit_json(gemma / "config.json", hidden_size=16, sliding_window=None)
    one_line(lambda: load_model(gemma), "sliding_window=None must be a number")


def test_damaged_files(copy, tmp_path):
    directory = copy("gemma2")
    file = directory / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-100], whole[:5], whole[:300], b"", b"junk" * 100):
        file.write_bytes(damaged)
        one_line(lambda: load_model(directory), file, "cut short or damaged")
    arrays = {"model.norm.weight": np.ones(16, np.int8)}
    safetensors.numpy.save_file(arrays, file)
    one_line(lambda: load_model(directory), "quantised")
    file.unlink()
    one_line(lambda: load_model(directory), directory, "neither model.safetensors nor")
    (directory / "pytorch_model.bin").touch()
    one_line(lambda: load_model(directory), "pytorch_model.bin", "save_pretrained")
    one_line(lambda: load_model(tmp_path / "absent"), "absent: no such directory")
    one_line(lambda: load_model(directory / "config.json"), "a file", directory)
    (tmp_path / "empty").mkdir()
    one_line(lambda: load_model(tmp_path / "empty"), "no checkpoint", "checkpoint_<step>")
    one_line(lambda: load_model(directory, config="x.gin"), "x.gin", "T5X")


def test_bfloat16_files_of_transformers(tmp_path):
    """The arrays as torch wrote them, not only as our own writer does."""
    model = save_random("llama", tmp_path).to(torch.bfloat16)
    model.save_pretrained(str(tmp_path))
    loaded = load_model(tmp_path)
    assert loaded.config.dtype == ml_dtypes.bfloat16
    kernel = loaded.params["decoder"]["layers_1"]["mlp"]["wo"]["kernel"]
    theirs = model.model.layers[1].mlp.down_proj.weight.detach().float().numpy().T
    np.testing.assert_array_equal(np.asarray(kernel.astype(jnp.float32)), theirs)


@pytest.mark.parametrize("which", ["drafter", "verifier"])
def test_a_trained_pair(which):
    """A real checkpoint: gated gelu, and a tied head without scaling."""
    directory = shared("models", "multi30k-ende", which)
    loaded = load_model(directory)
    model = transformers.T5ForConditionalGeneration.from_pretrained(str(directory)).eval()
    _assert_close(logits(loaded.model, loaded.params), _their_logits(model, loaded.config))
    assert loaded.config.tie_embeddings
    assert not loaded.config.scale_tied_logits
    assert loaded.special_ids.eos == (1,)
    tokenizer = load_tokenizer(directory)
    theirs = transformers.T5Tokenizer.from_pretrained(str(directory))
    text = "Ein kleiner Test, 3 Hunde!"
    assert tokenizer.encode(text) == theirs.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == theirs.decode(
        theirs.encode(text), skip_special_tokens=True
    )
    assert tokenizer.vocab_size <= loaded.config.vocab_size


_SIZES = {"vocab_size": 384, "embed_dim": 64, "num_heads": 4, "head_dim": 16, "mlp_dim": 128}
_LISTED = {
    "t5v11": T5Config(**_SIZES, num_encoder_layers=2, num_decoder_layers=2, tie_embeddings=True),
    "flan_draft": T5Config(
        **_SIZES, num_encoder_layers=1, num_decoder_layers=1, tie_embeddings=True
    ),
    "llama": LlamaConfig(**_SIZES, num_layers=2, num_kv_heads=2),
    "llama_tied": LlamaConfig(**_SIZES, num_layers=2, num_kv_heads=2, tie_embeddings=True),
    "gemma2": Gemma2Config(**_SIZES, num_layers=2, num_kv_heads=2, sliding_window=8),
}


@pytest.mark.parametrize(("file", "config"), _LISTED.items())
def test_published_names(file, config):
    """Every parameter has a name and a shape in the lists that real models have."""
    listed = {}
    for line in shared("fixtures", "hf", f"{file}_params.txt").read_text().splitlines():
        name, shape, _ = line.split("\t")
        listed[name] = tuple(int(n) for n in shape.strip("()").split(",") if n.strip())
    ours = {}
    for path, leaf in flatten(model_from_config(config).abstract_params()).items():
        rule = family_of(config).hf_name(path)
        ours[rule.hf] = leaf.shape[::-1] if rule.transposed else leaf.shape
    assert ours == listed
