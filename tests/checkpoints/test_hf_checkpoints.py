"""Hugging Face directories, written by transformers and by us, read by us and by transformers."""

import functools
import json
import shutil

import jax
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
    tokens,
)

from specjax.checkpoints import hf, load_model, save_model
from specjax.checkpoints.arrays import flatten
from specjax.checkpoints.loading import read_config
from specjax.models import FAMILIES, model_from_config
from specjax.tokenizers.model_files import SpecialIds
from specjax.writing import CHECKSUMS_NAME
from tests.models.hf_models import DECODER_SIZES, LLAMA3, T5_CONFIGS, made


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


@pytest.mark.parametrize("name", T5_CONFIGS)
def test_logits_agree_with_transformers(name):
    """Of two T5s; `tests/models` has every family."""
    _, theirs, loaded = saved(name)
    _assert_close(logits(loaded.model, loaded.params), theirs)
    assert loaded.format == "hf"
    assert loaded.config.param_dtype == loaded.config.dtype == jnp.float32


def test_t5_head_is_decided_by_the_arrays(copy):
    """transformers 5 says tied for every T5; 4.x says untied in another field."""
    directory, theirs, loaded = saved("t5_v1_1")
    assert json.loads((directory / "config.json").read_text())["tie_word_embeddings"] is True
    assert not loaded.config.tie_embeddings
    for name, scaled in (("t5_v1_1_tied", False), ("t5_v1_0", True)):
        config = saved(name)[2].config
        assert (config.tie_embeddings, config.scale_tied_logits) == (True, scaled)
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
    edit_json(untied / "config.json", scale_decoder_outputs=True)
    one_line(lambda: load_model(untied), "config.json", "scale_decoder_outputs", "differs from")


def test_a_tied_t5_head_says_whether_it_scales(copy):
    directory = copy("t5_v1_0")
    file = directory / "config.json"
    edit_json(file, scale_decoder_outputs=None)
    assert not transformers.T5Config.from_pretrained(directory).scale_decoder_outputs
    assert not read_config(directory).scale_tied_logits
    # In 4.x: no lm_head.weight, no scale_decoder_outputs.
    edit_json(file, scale_decoder_outputs=..., tie_word_embeddings=True)
    assert load_model(directory).config == saved("t5_v1_0")[2].config
    # 4.x says untied, and the head is not there.
    edit_json(file, tie_word_embeddings=False)
    one_line(lambda: load_model(directory), "1 array missing: lm_head.weight")
    # Both flags at odds, and no head: it cannot differ.
    edit_json(file, scale_decoder_outputs=True)
    told = one_line(
        lambda: load_model(directory), "lm_head.weight is absent", "to true if the head"
    )
    assert "differs" not in told


def test_rope_parameters_of_4_and_5(copy):
    """5.x nests the base in `rope_parameters`; 4.x has `rope_theta` and `rope_scaling`."""
    _, theirs, loaded = saved("llama3")
    directory = copy("llama3")
    file = directory / "config.json"
    old = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    scaling = {**old, "type": old["rope_type"], "rope_type": None}
    edit_json(file, rope_parameters=..., rope_theta=500.0, rope_scaling=scaling)
    again = load_model(directory)
    assert again.config == loaded.config
    _assert_close(logits(again.model, again.params), theirs)
    edit_json(file, rope_scaling=None)
    plain = read_config(directory)
    assert (plain.rope_theta, plain.rope_scaling) == (500.0, None)
    for kind, parts in (
        ("yarn", ["max_position_embeddings=None must be a number"]),
        ("dynamic", ["rope_type='dynamic'", "'llama3'"]),
    ):
        scaling = {"type": kind, "factor": 2.0}
        edit_json(file, rope_scaling=scaling, max_position_embeddings=...)
        one_line(lambda: read_config(directory), *parts)


def test_rope_parameters_and_rope_scaling_in_one_file(copy):
    """transformers takes `rope_scaling`; a base that it would leave out is refused."""
    directory = copy("llama3")
    file = directory / "config.json"
    scaling = {**LLAMA3, "factor": 4.0}
    no_base = {k: v for k, v in scaling.items() if k != "rope_theta"}
    plain = {"rope_type": "default", "rope_theta": 500.0}
    for fields in (
        {"rope_parameters": plain, "rope_scaling": scaling},
        {"rope_parameters": LLAMA3, "rope_scaling": scaling},
        {"rope_parameters": plain, "rope_scaling": no_base, "rope_theta": 500.0},
        {"rope_parameters": LLAMA3, "rope_scaling": {}},
    ):
        edit_json(file, **{"rope_theta": ..., **fields})
        config = read_config(directory)
        assert config.rope_scaling.factor == (4.0 if fields["rope_scaling"] else 8.0)
        assert config.rope_theta == 500.0
        theirs = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(directory))
        frequencies = theirs.model.rotary_emb.inv_freq.numpy()
        np.testing.assert_allclose(config.style.layers[0].rope, frequencies, rtol=1e-6)
    differs = "rope_scaling, which has priority, has 10000.0"
    long = {"rope_scaling": ..., "original_max_position_embeddings": 32}
    for parameters, more, parts in (
        (plain, {"rope_scaling": no_base}, ["rope_parameters has rope_theta=500.0", differs]),
        ([1], {}, ["rope_parameters=[1] must be an object"]),
        (LLAMA3, long, ["original_max_position_embeddings=32 differs from 64"]),
    ):
        edit_json(file, rope_parameters=parameters, **more)
        one_line(lambda: read_config(directory), file, *parts)


def test_generation_config_says_what_the_decoder_reads_first(copy):
    directory = copy("t5_v1_0")
    generation = directory / "generation_config.json"
    edit_json(directory / "config.json", decoder_start_token_id=3)
    edit_json(generation, decoder_start_token_id=7)
    model = transformers.T5ForConditionalGeneration.from_pretrained(str(directory))
    first = int(model.generate(torch.tensor([[4, 5]]), max_new_tokens=1)[0, 0])
    loaded = load_model(directory)
    assert loaded.config.decoder_start_token == loaded.special_ids.decoder_start == first == 7
    # The arrays with a configuration of one's own: that one decides.
    given = loaded.config.replace(decoder_start_token=5)
    assert read_config(directory, given).decoder_start_token == 5
    edit_json(generation, decoder_start_token_id=...)
    assert read_config(directory).decoder_start_token == 3
    edit_json(generation, decoder_start_token_id=48)
    one_line(lambda: load_model(directory), generation.name, directory, "decoder_start_token=48")


@pytest.mark.parametrize(
    ("name", "field", "theirs", "value"),
    [
        ("llama", "embed_dim", "hidden_size", 18),
        ("gemma2", "embed_dim", "hidden_size", 18),
        ("gemma2", "query_pre_attn_scalar", "query_pre_attn_scalar", 7.5),
    ],
)
def test_what_transformers_5_refuses_to_read_is_not_written(name, field, theirs, value, tmp_path):
    kind = {"llama": transformers.LlamaConfig, "gemma2": transformers.Gemma2Config}[name]
    with pytest.raises(Exception, match="multiple of the number|query_pre_attn_scalar"):
        kind(**{**DECODER_SIZES, theirs: value})
    config = CONFIGS[name].replace(**{field: value})
    params = random_params(config)
    one_line(
        lambda: save_model(tmp_path / "hf", config, params, format="hf"),
        *(f"{field}={value} must be", "transformers 5", "convert it to orbax"),
    )
    assert save_model(tmp_path / "orbax", config, params)


@pytest.mark.parametrize("name", ["t5_tied_unscaled", "mt5_tied_unscaled", "llama_tied"])
def test_transformers_reads_what_we_write(name, tmp_path):
    """What no model of transformers' own is; `tests/models` saves those of every family again."""
    config, params = CONFIGS[name], random_params(CONFIGS[name])
    save_model(tmp_path / "out", config, params, format="hf")
    kind = "AutoModelForSeq2SeqLM" if "t5" in name else "AutoModelForCausalLM"
    model, report = getattr(transformers, kind).from_pretrained(
        str(tmp_path / "out"), attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[f"{x}_keys"] for x in ("missing", "unexpected", "mismatched"))
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

    def rounded(*dtypes):
        return jax.tree.map(lambda x: functools.reduce(jnp.astype, dtypes, x), loaded.params)

    half = load_model(directory, dtype="bfloat16")
    assert half.config.dtype == half.config.param_dtype == jnp.bfloat16
    assert_same(half.params, rounded(jnp.bfloat16))
    # A bfloat16 checkpoint stays bfloat16, a float16 one becomes float32, exactly.
    for disk, kept in (("bfloat16", jnp.bfloat16), ("float16", jnp.float32)):
        save_model(tmp_path / disk, loaded.model, loaded.params, format="hf", dtype=disk)
        again = load_model(tmp_path / disk)
        assert again.config.param_dtype == again.config.dtype == kept
        assert_same(again.params, rounded(disk, kept))


def test_sharded_files_with_an_index(tmp_path):
    config, params = CONFIGS["llama"], random_params(CONFIGS["llama"])
    float32 = np.dtype(np.float32)
    ids = SpecialIds()
    hf.write_hf(tmp_path, config, flatten(params), ids=ids, dtype=float32, shard_bytes=9000)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    assert_same(load_model(tmp_path).params, params)
    # transformers agrees that these are all arrays.
    _, report = transformers.LlamaForCausalLM.from_pretrained(
        str(tmp_path), output_loading_info=True
    )
    assert not report["missing_keys"]
    content = shards[1].read_bytes()
    shards[1].unlink()
    one_line(lambda: load_model(tmp_path), shards[1], "missing", "index.json")
    shards[1].write_bytes(content)
    edit_json(tmp_path / hf.INDEX, weight_map={"x": shards[0].name})
    one_line(lambda: load_model(tmp_path), "arrays missing")
    for wrong in ({}, {"x": None}, {"x": []}, [], None, 5, True, "x"):
        edit_json(tmp_path / hf.INDEX, weight_map=wrong)
        one_line(lambda: load_model(tmp_path), hf.INDEX, "no weight_map of file names")


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


# The bits of each number of safetensors' dtypes, and NumPy's dtype of those that are read.
DTYPES = {
    **{f"{x[0].upper()}{n}": (n, f"{x}{n}") for x in ("int", "uint") for n in (8, 16, 32, 64)},
    **{f"F{n}": (n, f"float{n}") for n in (16, 32, 64)},
    "BF16": (16, ml_dtypes.bfloat16),
    "BOOL": (8, bool),
    "F4": (4, None),
    "C64": (64, None),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ"), (8, None)),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), (6, None)),
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
    if dtype is None:
        message = f"x has dtype {label}, but quantised checkpoints are not supported"
        one_line(lambda: reader.read("x"), tmp_path, message)
        return
    expected = np.frombuffer(data, dtype).reshape(2, 4)
    assert reader.read("x").dtype == reader.specs["x"].dtype == expected.dtype
    np.testing.assert_array_equal(reader.read("x"), expected)


@pytest.mark.parametrize("label", ["I32", "F4"])
def test_an_output_that_is_not_of_floats_is_refused(copy, label):
    directory = copy("t5_v1_1")
    arrays = safetensors.numpy.load_file(directory / hf.SINGLE)
    shape = arrays.pop("lm_head.weight").shape
    safetensors.numpy.save_file(arrays, directory / "rest.safetensors")
    (directory / hf.SINGLE).unlink()
    data = bytes(int(np.prod(shape)) * DTYPES[label][0] // 8)
    _write_array(directory / "aside.safetensors", "lm_head.weight", label, list(shape), data)
    files = {**dict.fromkeys(arrays, "rest.safetensors"), "lm_head.weight": "aside.safetensors"}
    edit_json(directory / hf.INDEX, weight_map=files)
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
    for more in ({}, {"type": "linear"}):
        edit_json(file, rope_scaling={"rope_type": "linear", "factor": 8.0, **more})
        assert read_config(directory).rope_factor == 8.0


@pytest.mark.parametrize(("name", "value"), [("qwen3_5", 1.5), ("gemma4_wide", 2**63)])
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
    config, generation = directory / "config.json", directory / "generation_config.json"

    def found():
        ids = load_model(directory).special_ids
        return ids.eos, ids.pad, ids.bos

    assert found() == ((2,), None, 1)
    edit_json(config, eos_token_id=[7, 8], pad_token_id=-1)
    generation.unlink()
    assert found() == ((7, 8), None, 1)
    edit_json(generation, eos_token_id=[9, 9, 5], pad_token_id=4)
    assert found() == ((9, 5), 4, 1)
    edit_json(generation, eos_token_id=[9, 48])
    one_line(lambda: load_model(directory), directory, "eos_token_id=[9, 48]", "vocab_size=48")


def _rewrite(directory, change):
    """Loads a directory's arrays as a dict, changes it, writes it back."""
    arrays = safetensors.numpy.load_file(directory / "model.safetensors")
    change(arrays)
    arrays = {k: np.ascontiguousarray(v) for k, v in arrays.items()}
    safetensors.numpy.save_file(arrays, directory / "model.safetensors")
    (directory / CHECKSUMS_NAME).unlink(missing_ok=True)  # others write none


def test_known_duplicates_are_dropped(copy):
    directory = copy("t5_v1_0")
    copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    bias = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"

    def duplicate(arrays):
        arrays |= {name: arrays["shared.weight"].copy() for name in copies}
        arrays[bias] = np.zeros((32, 2), np.float32)

    _rewrite(directory, duplicate)
    loaded = load_model(directory)
    assert loaded.config.tie_embeddings
    assert_same(loaded.params, saved("t5_v1_0")[2].params)
    _rewrite(directory, lambda arrays: arrays["decoder.embed_tokens.weight"].__iadd__(1))
    one_line(lambda: load_model(directory), "decoder.embed_tokens.weight (a copy that differs")


def test_old_arrays_of_a_llama_are_dropped(copy):
    directory = copy("llama_tied")

    def old(arrays):
        arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
        for i in range(2):  # they do not decide the dtype
            arrays[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.int64)

    _rewrite(directory, old)
    loaded = load_model(directory)
    assert_same(loaded.params, saved("llama_tied")[2].params)
    _rewrite(directory, lambda arrays: arrays["lm_head.weight"].__iadd__(1))
    one_line(lambda: load_model(directory), "tie_word_embeddings", "lm_head.weight differs")


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


# Changes of a config.json, and what the message says; `tests/models` has every field and type.
WRONG = {
    "llama": [
        ({"model_type": "mamba"}, ["model_type='mamba'", "t5gemma2, llama, qwen2", "gemma3_text"]),
        ({"model_type": ["llama"]}, ["model_type=['llama']"]),
        ({"architectures": ["LlamaForQuestions"]}, ["LlamaForQuestions", "LlamaForCausalLM"]),
        ({"architectures": "LlamaForCausalLM"}, ["architectures='LlamaForCausalLM' must be a l"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "'silu'"]),
        ({"attention_bias": True}, ["attention_bias=True"]),
        ({"vocab_size": ...}, ["vocab_size=None must be a number"]),
        ({"hidden_size": 16.5}, ["hidden_size=16.5 must be a whole number"]),
        ({"hidden_size": float("nan")}, ["hidden_size=nan must be finite"]),
        ({"hidden_size": 10**400}, ["hidden_size=1000", "must be finite"]),
        ({"num_hidden_layers": "x"}, ["num_hidden_layers='x' must be a number"]),
        ({"num_hidden_layers": -1}, ["num_hidden_layers=-1 must be a whole number >= 1"]),
        ({"rms_norm_eps": -1e-5}, ["rms_norm_eps=-1e-05 must be above 0"]),
        ({"rope_theta": 0, "rope_parameters": {"rope_theta": 0}}, ["rope_theta=0 must be above 0"]),
        ({"num_key_value_heads": 3}, ["num_kv_heads=3"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config is set"]),
    ],
    "t5_v1_0": [
        ({"feed_forward_proj": "gelu"}, ["feed_forward_proj='gelu'", "gated-gelu"]),
        ({"relative_attention_num_buckets": 1}, ["relative_attention_num_buckets=1 must be"]),
        ({"relative_attention_max_distance": 16}, ["relative_attention_max_distance=16 must be"]),
        ({"decoder_start_token_id": -2}, ["decoder_start_token_id=-2 must be"]),
        ({"decoder_start_token_id": 48}, ["decoder_start_token=48 must be a token"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings='no' must be"]),
    ],
    "gemma2": [
        ({"layer_types": ["full_attention"] * 2}, ["layer_types"]),
        ({"num_hidden_layers": 10**3}, ["layer_types"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers=1000000000 must be at most 1000"]),
        ({"hidden_size": 2 * 10**9, "head_dim": 10**9}, ["hidden_size=2000000000 must be at most"]),
        ({"sliding_window": None}, ["sliding_window=None must be a number"]),
    ],
}


@pytest.mark.parametrize(
    ("name", "changes", "parts"),
    [(name, *case) for name, cases in WRONG.items() for case in cases],
)
def test_fields_of_another_network_are_refused(copy, name, changes, parts):
    directory = copy(name)
    edit_json(directory / "config.json", **changes)
    one_line(lambda: read_config(directory), directory / "config.json", *parts)


def test_a_configuration_beside_other_arrays(copy):
    directory = copy("llama")
    path = directory / "config.json"
    edit_json(path, quantization_config=None)
    assert load_model(directory).params
    edit_json(path, model_type="gemma2", architectures=["Gemma2ForCausalLM"], hidden_act=...)
    one_line(lambda: load_model(directory), "post_feedforward_layernorm")
    path.write_text(path.read_text()[:-9])
    one_line(lambda: load_model(directory), path, "not readable as JSON")
    path.unlink()
    one_line(lambda: load_model(directory), path, "missing")
    # The arrays with a configuration of one's own.
    assert load_model(directory, config=CONFIGS["llama"].replace(num_kv_heads=4)).params
    gemma = copy("gemma2")
    edit_json(gemma / "config.json", hidden_size=10**6, head_dim=8)
    one_line(lambda: load_model(gemma), gemma, "is (48, 16) but should be (48, 1000000)")


def test_damaged_files(copy, tmp_path):
    directory = copy("gemma2")
    file = directory / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-100], whole[:5], whole[:300], b"", b"junk" * 100):
        file.write_bytes(damaged)
        one_line(lambda: load_model(directory), file, "cut short or damaged")
    file.unlink()
    one_line(lambda: load_model(directory), directory, "neither model.safetensors nor")
    (directory / "pytorch_model.bin").touch()
    (tmp_path / "empty").mkdir()
    for path, options, parts in (
        (directory, {}, ["pytorch_model.bin", "save_pretrained"]),
        (tmp_path / "absent", {}, ["absent: no such directory"]),
        (directory / "config.json", {}, ["a file", directory]),
        (tmp_path / "empty", {}, ["no checkpoint", "checkpoint_<step>"]),
        (directory, {"config": "x.gin"}, ["x.gin", "T5X"]),
    ):
        one_line(lambda path=path, options=options: load_model(path, **options), *parts)
