"""Every field of a config.json, changed: refused by name, or read as transformers reads it."""

import contextlib
import json
import warnings

import numpy as np
import pytest
import torch
import transformers

from specjax.checkpoints import load_model
from tests.models.hf_models import save_random
from tests.models.tiny import error, quick_jit
from tests.variants import variants

# Names in `HF_CONFIGS`.
FAMILIES = (
    "t5_v1_1", "mt5", "umt5", "t5gemma", "t5gemma2", "llama", "qwen2", "qwen3", "mistral", "olmo2",
    "smollm3", "phi3", "gemma", "gemma2", "gemma3",
)  # fmt: skip
# Not about the network; and `dtype`, which the arrays decide.
OTHERS = {"architectures", "dtype", "id2label", "label2id", "transformers_version"}
LENGTHS, INPUT, OUTPUT = (20, 13), 20, 12


# Our names of fields.
OURS = {
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "hidden_size": "embed_dim",
    "num_hidden_layers": "layers",
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
