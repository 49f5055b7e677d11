"""Every field of a config.json, changed: refused by name, or read as transformers reads it."""

import contextlib
import json
import shutil
import time
import warnings

import numpy as np
import pytest
import torch
import transformers

from specjax.checkpoints import load_model
from specjax.checkpoints.heads import has_mtp, is_draft_head
from specjax.checkpoints.loading import read_config
from specjax.errors import UserError
from specjax.models import FAMILIES as OUR_FAMILIES
from specjax.models.families import config_from_dict, config_to_dict
from tests.models.hf_models import made, save_random
from tests.models.tiny import error, quick_jit
from tests.variants import variants

# Names in `HF_CONFIGS`.
FAMILIES = (
    "t5_v1_1", "mt5", "umt5", "t5gemma", "t5gemma2", "llama", "qwen2", "qwen2_yarn", "qwen3",
    "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "mistral", "mixtral", "olmo2", "olmoe",
    "smollm3", "phi3", "phi3_long", "gpt_oss", "gemma", "gemma2", "gemma3", "gemma4",
    "gemma4_wide", "gemma4_unified",
)  # fmt: skip
# Not about the network; and `dtype`, which the arrays decide.
OTHERS = {"architectures", "dtype", "id2label", "label2id", "transformers_version"}
LENGTHS, INPUT, OUTPUT = (20, 13), 20, 12
# Of these every value is spoilt in every way; of the others counts alone.
WHOLE = ("t5gemma2", "qwen3_5", "gemma4_wide")


# Our names of fields.
OURS = {
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "hidden_size": "embed_dim",
    "num_hidden_layers": "layers",
    "num_local_experts": "num_experts",
    "num_kv_shared_layers": "num_shared_layers",
    "top_k_experts": "num_experts_per_tok",
}


def changed(values):
    """Yields a field, an odd value of it and a copy of `values` with that, for each field."""
    for name, value in values.items():
        if name in OTHERS:
            continue
        for other in odd(value):
            yield name, other, {**values, name: other}
        yield name, None, {key: kept for key, kept in values.items() if key != name}
        if isinstance(value, dict):
            for inner, other, copy in changed(value):
                yield inner, other, {**values, name: copy}


def odd(value):
    """Values in place of a value: of its kind, and of another kind."""
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int):
        return [value + 1, 2 * value + 2, None]
    if isinstance(value, float):
        return [1.5 * value + 0.25, None]
    if isinstance(value, str):
        return ["silu", "odd"]
    if isinstance(value, list):
        return [value[::-1], value[:-1], None]
    if isinstance(value, dict):
        return [{}, None]
    return [True, 3, 0.5, "odd"]


@contextlib.contextmanager
def quiet():
    """Without transformers' warnings."""
    transformers.logging.disable_progress_bar()
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    transformers.logging.set_verbosity(verbosity)


def their_logits(path, tokens, outputs, mask):
    """The logits of transformers; None if it does not read the directory."""
    causal = outputs is None
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForSeq2SeqLM
    batch = {"input_ids": torch.tensor(tokens)}
    if not causal:
        batch |= {
            "attention_mask": torch.tensor(mask),
            "decoder_input_ids": torch.tensor(outputs),
        }
    try:
        with quiet(), torch.no_grad():
            model = kind.from_pretrained(
                str(path), attn_implementation="eager", dtype=torch.float32
            )
            return model.eval()(**batch).logits.numpy()
    except Exception:  # many kinds
        return None


@pytest.mark.parametrize("name", variants(FAMILIES, "mt5"))
def test_odd_fields_are_refused_or_read_as_transformers_does(name, tmp_path):
    save_random(name, tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    rng = np.random.default_rng(0)
    tokens, outputs = (rng.integers(3, 48, (2, n)) for n in (INPUT, OUTPUT))
    mask = np.arange(INPUT) < np.array(LENGTHS)[:, None]
    known = {}

    def our_logits(loaded):
        if loaded.config not in known:
            apply = quick_jit(loaded.model.apply)
            if loaded.config.encoder_style is None:
                known[loaded.config] = apply(loaded.params, tokens)
            else:
                known[loaded.config] = apply(loaded.params, tokens, outputs, encoder_mask=mask)
        return known[loaded.config]

    usual = load_model(tmp_path)
    if usual.config.encoder_style is None:
        outputs = None
    expected = their_logits(tmp_path, tokens, outputs, mask)
    assert error(our_logits(usual), expected) <= 2e-5
    wrong, refused, read = [], 0, 0
    for field, value, copy in changed(values):
        file.write_text(json.dumps(copy))
        try:
            loaded = load_model(tmp_path, check_weights=False)
        except ValueError as why:
            refused += 1
            # A wrong size may first show in an array, and an empty object in one of its fields.
            named = any(x in str(why) for x in (field, OURS.get(field, field), "array"))
            if not named and value != {}:
                wrong.append(f"{field}: not named in {str(why)[-150:]}")
            continue
        read += 1
        expected = their_logits(tmp_path, tokens, outputs, mask)
        if expected is None:  # then it must have no meaning here; null means the default
            if loaded.config != usual.config and value is not None:
                wrong.append(f"{field}={value!r}: only transformers refuses it")
        elif not error(our_logits(loaded), expected) <= 2e-5:
            wrong.append(f"{field}={value!r}: other logits")
    assert not wrong, "\n".join(wrong)
    assert min(refused, read) > 20


COUNTS = (10**30, 2**31, -1, 0, [], {}, "8", True, 1.5)
WRONG = (*COUNTS, [5], {"a": 1}, 10**400, float("nan"), None)
READERS = is_draft_head, has_mtp, read_config


def spoilt(values, others):
    """Yields a field, its value, each of `others`, and a copy of `values` with that."""
    for name, value in values.items():
        for other in others:
            yield name, value, other, {**values, name: other}
        if isinstance(value, dict):
            for *inner, copy in spoilt(value, others):
                yield *inner, {**values, name: copy}


def refusal(read, given):
    """The message of a refusal, "" without one; each is one line, and fast."""
    start, message = time.process_time(), ""
    try:
        read(given)
    except UserError as error:
        message = str(error)
        assert "\n" not in message, message
    assert time.process_time() - start < 1
    return message


@pytest.mark.parametrize("name", FAMILIES)
def test_a_value_of_any_type_is_read_or_ends_in_one_line(name, tmp_path):
    shutil.copytree(made(name)[1], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    # Counts that transformers does not write here.
    absent = ("num_key_value_heads", "sliding_window_pattern", "num_decoder_layers")
    values |= {field: None for field in absent if field not in values}
    layers = "num_layers" if "d_model" in values else "num_hidden_layers"
    refused = {}
    for field, usual, value, copy in spoilt(values, WRONG if name in WHOLE else COUNTS):
        file.write_text(json.dumps(copy))
        for read in READERS if name in WHOLE else READERS[-1:]:
            if message := refusal(read, tmp_path):
                refused.setdefault(field, []).append(value)
                named = type(usual) is int or field in absent
                assert field in message or not named, (field, value, message)
    assert "model_type" in refused
    for field in ("vocab_size", layers):
        assert all(value in refused[field] for value in COUNTS), field


@pytest.mark.parametrize("name", OUR_FAMILIES)
def test_impossible_counts_of_our_own_configuration_are_named_at_once(name):
    config = next(iter(OUR_FAMILIES[name].presets.values()))
    values = config_to_dict(config)
    assert config_from_dict(values) == config
    refused = 0
    for field, usual, value, copy in spoilt(values, COUNTS):
        message = refusal(config_from_dict, copy)
        assert not message or field in message or type(usual) is not int, (field, value, message)
        refused += bool(message)
    assert refused > 40
