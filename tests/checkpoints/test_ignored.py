"""What lies beside the weights and is not applied is told, once and in one line."""

import json
import shutil
import warnings

import pytest
from checkpoint_helpers import assert_same, edit_json, one_line

import specjax
from specjax import processors
from specjax.checkpoints import load_model
from specjax.checkpoints.loading import read_config
from specjax.text import load_text_model
from tests import tiny_pair

ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "base/of-it", "r": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_pair.write_pair(tmp_path_factory.mktemp("pair"))["verifier"]


def told(call):
    """The warnings of a call, as a user sees them: equal ones of a line once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        result = call()
    return result, [str(one.message) for one in caught]


def test_an_adapter_beside_the_weights_is_told(model, tmp_path):
    place = shutil.copytree(model, tmp_path / "model")
    (place / "adapter_config.json").write_text(json.dumps(ADAPTER))
    (place / "adapter_model.safetensors").write_bytes(b"not even read")
    for load in (load_model, load_text_model):
        loaded, found = told(lambda load=load: load(place))
        assert found == [
            f"{place}: the PEFT adapter (adapter_config.json) is ignored: merge it with peft "
            "(merge_and_unload, then save_pretrained), and load the merged model"
        ]
        assert_same(loaded.params, load_model(model).params)
    assert told(lambda: read_config(place))[1] == []


@pytest.mark.parametrize(
    ("file", "has_config"), [("adapter_model.safetensors", True), ("adapter_model.bin", False)]
)
def test_an_adapter_alone_is_no_model(model, tmp_path, file, has_config):
    place = shutil.copytree(model, tmp_path / "adapter")
    (place / "specjax_checksums.json").unlink()
    (place / "model.safetensors").rename(place / file)
    (place / "adapter_config.json").write_text(json.dumps(ADAPTER))
    if not has_config:
        (place / "config.json").unlink()
        for tokenizer in (*place.glob("spiece*"), *place.glob("tokenizer*")):
            tokenizer.unlink()
    for load in (load_model, read_config, load_text_model):
        one_line(
            lambda load=load: load(place),
            f"{place} is a PEFT adapter of 'base/of-it', not a model: merge it with peft",
        )


# What a file says, and the processors that do the same.
SETTINGS = {
    "repetition_penalty": (1.1, "RepetitionPenalty(1.1, over='output')"),
    "no_repeat_ngram_size": (3, "NoRepeatNgram(3, over='output')"),
    "suppress_tokens": ([3, 4], "SuppressTokens([3, 4])"),
    "begin_suppress_tokens": ([5], "SuppressTokens([5], first=1)"),
    "forced_bos_token_id": (6, "ForcedTokens({0: 6})"),
    "min_new_tokens": (2, "MinNewTokens(2)"),
    "min_p": (0.05, "MinP(0.05)"),
    "typical_p": (0.9, "TypicalP(0.9)"),
    "epsilon_cutoff": (0.001, "EpsilonCutoff(0.001)"),
    "eta_cutoff": (0.002, "EtaCutoff(0.002)"),
    "bad_words_ids": ([[3], [4, 5]], None),
    "sequence_bias": ([[[3], -1.0]], None),
    "encoder_repetition_penalty": (1.2, None),
    "encoder_no_repeat_ngram_size": (2, None),
    "exponential_decay_length_penalty": ([5, 1.1], None),
    "forced_eos_token_id": (1, None),
    "min_length": (4, None),
    "guidance_scale": (1.5, None),
    "num_beams": (4, None),
    "penalty_alpha": (0.6, None),
    "stop_strings": (["\n"], None),
}
NEUTRAL = {
    "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": [], "min_length": 0,
    "forced_bos_token_id": None, "min_p": None, "typical_p": 1, "epsilon_cutoff": 0.0,
    "bad_words_ids": None, "num_beams": 1, "guidance_scale": None, "temperature": 0.6,
    "top_k": 50, "top_p": 0.9, "do_sample": True, "max_length": 20, "eos_token_id": 1,
}  # fmt: skip


def warnings_of(place, **options):
    """Of a Decoder with these options, alike of a call with them and of an engine."""
    plain, lines = told(lambda: specjax.Decoder(load_text_model(place)))
    assert lines == []
    decoder = specjax.Decoder(plain.models, **options)
    calls = [lambda: decoder.rows([[3]]), lambda: plain.rows([[3]], **options)]
    first, second, third = (told(x)[1] for x in (*calls, lambda: decoder.engine(prompt_length=8)))
    assert first == second == third
    return first


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_a_generation_are_told(model, tmp_path, name):
    place = shutil.copytree(model, tmp_path / "model")
    file = place / "generation_config.json"
    value, processor = SETTINGS[name]
    edit_json(file, **{**NEUTRAL, name: value})
    (line,) = warnings_of(place)
    assert line.startswith(f"{file}: {name}={value!r}: not applied; ") and "\n" not in line
    if processor is None:
        assert line.endswith("; no processor does the same")
    else:
        assert line.endswith(f"; give processors=({processor},)")
        given = eval(line.rpartition("give processors=")[2], vars(processors))
        assert warnings_of(place, processors=given) == []
        assert warnings_of(place, sampling=specjax.Sampling(1.0, processors=given)) == []
        assert warnings_of(place, processors=(processors.PresencePenalty(0.5),)) == [line]


def test_several_settings_are_one_line_and_usual_ones_none(model, tmp_path):
    place = shutil.copytree(model, tmp_path / "model")
    file = place / "generation_config.json"
    edit_json(file, **NEUTRAL)
    assert warnings_of(place) == []
    edit_json(file, repetition_penalty=1.05, suppress_tokens=list(range(90)), num_beams=2)
    listed = "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16..."
    (line,) = warnings_of(place)
    assert line == (
        f"{file}: repetition_penalty=1.05, suppress_tokens={listed}, num_beams=2: not applied; "
        f"give processors=(RepetitionPenalty(1.05, over='output'), SuppressTokens({[*range(90)]}),)"
    )
    (line,) = warnings_of(place, processors=(processors.RepetitionPenalty(1.2),))
    assert line == (
        f"{file}: suppress_tokens={listed}, num_beams=2: not applied; give "
        f"processors=(SuppressTokens({[*range(90)]}),)"
    )
    for odd in ("1.05", {"a": [1]}, [[]], ["3"], True):
        edit_json(file, **dict.fromkeys(SETTINGS, odd))
        (line,) = warnings_of(place)
        assert line.endswith("; no processor does the same")
