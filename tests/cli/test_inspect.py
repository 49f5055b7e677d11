"""`specjax inspect`: what one model is, and what two need."""

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from specjax.checkpoints import load_model, save_model
from specjax.cli.main import main
from specjax.models import PRESETS, LlamaConfig, model_from_config
from specjax.types import Prompts
from tests import tiny_pair
from tests.models.tiny import random_params

PAIRS = Path(__file__).parents[2] / "gin_configs" / "pairs"


def inspected(capsys, *words, status=0):
    assert main(["inspect", *map(str, words), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_figures_are_those_of_the_loaded_models(paths, capsys):
    values = inspected(capsys, paths["verifier"], paths["drafter"], "--memory", "1")
    small, large = values["models"]  # the smaller first
    for name, summary in (("drafter", small), ("verifier", large)):
        loaded = load_model(paths[name], dtype="bfloat16")
        leaves = [np.asarray(x) for x in jax.tree.leaves(loaded.params)]
        assert summary["parameters"] == sum(x.size for x in leaves)
        assert summary["bytes_in_memory"] == sum(x.nbytes for x in leaves)
        cache = loaded.model.prefill(
            loaded.params, Prompts(np.full((1, 2), 5, np.int32), np.array([2], np.int32)), 1_000
        ).cache
        entries = sum(x.nbytes for x in [*cache.keys, *cache.values])
        assert summary["cache_bytes_per_row_and_1000_tokens"] == entries
        assert summary["bytes_on_disk"] == {"F32": 2 * summary["bytes_in_memory"]}
        assert summary["eos"] == {"1": "</s>"} and not summary["chat_template"]
    assert values["pair"] is True and 0 < values["c"] < 1
    # So many rows fill the memory.
    rows = values["batches"]["1024"]
    per_row = sum(s["cache_bytes_per_row_and_1000_tokens"] for s in (small, large)) * 1.024
    used = rows * per_row + sum(s["bytes_in_memory"] for s in (small, large))
    assert 0.89e9 < used <= 0.9e9


def test_it_is_printed_as_a_table(paths, capsys):
    assert main(["inspect", str(paths["drafter"]), str(paths["verifier"])]) == 0
    out = capsys.readouterr().out
    assert re.search(r"family +T5 \(hf\)", out) and "a pair: " in out and "c = 0." in out
    assert "at an acceptance of 0.70" in out and "specjax bench measures" in out


def test_what_is_no_pair_is_explained(paths, tmp_path, capsys):
    other = shutil.copytree(paths["drafter"], tmp_path / "other")
    tiny_pair.write_vocabulary(other, ["sa", "te", "wi", "xo"])
    two = (other, paths["verifier"])
    values = inspected(capsys, *two, status=2)
    assert "have different tokenizers" in values["pair"] and "max_draft" not in values
    assert main(["inspect", *map(str, two)]) == 2
    assert "not a pair: " in capsys.readouterr().out
    (other / "spiece.model").unlink()
    assert "has no tokenizer" in inspected(capsys, *two, status=2)["pair"]
    assert inspected(capsys, other)["models"][0]["tokens"] is None


def test_published_sizes_need_no_files(capsys):
    values = inspected(capsys, "qwen3_8b", "qwen3_0.6b", "--memory", "80")
    assert [summary["parameters"] for summary in values["models"]] == [596_049_920, 8_190_735_360]
    assert values["pair"] is None and round(values["c"], 3) == 0.079
    # Keys and values of 28 and 36 layers, 8 heads of 128, in bfloat16.
    row = 1_024 * 4 * 8 * 128 * (28 + 36)
    assert values["batches"]["1024"] == int((72e9 - 2 * (596_049_920 + 8_190_735_360)) // row)
    [sizes] = inspected(capsys, "gemma4_e2b")["models"]
    # 12 layers with heads of 256 make keys and values, 3 with heads of 512; 20 make none.
    assert sizes["cache_bytes_per_row_and_1000_tokens"] == 2 * 1_000 * (12 * 256 + 3 * 512) * 2
    # a = 0.7: (1 - a^6) / (1 - a) tokens for 1 + 5 c passes.
    assert values["max_draft"] == 5
    assert "2.94 tokens a round for 1.39 passes of the verifier, 2.11x" in values["why"]
    unsure = inspected(capsys, "t5_v1_1_base", "t5_v1_1_small", "--acceptance", "0.2")
    assert unsure["max_draft"] == 0 and "no draft pays; the best is G = 1" in unsure["why"]
    assert main(["inspect", "qwen3_8b", "qwen3_0.6b", "--acceptance", "1.5"]) == 2
    assert "--acceptance must lie in [0, 1], got 1.5" in capsys.readouterr().err
    assert main(["inspect", "qwen3_8b"]) == 0
    out = capsys.readouterr().out
    assert "8,190,735,360" in out and "on disk" not in out


def test_arrays_are_not_read(paths, tmp_path, capsys, monkeypatch):
    from specjax.checkpoints.hf import SafetensorsReader

    loaded = load_model(paths["drafter"])
    save_model(tmp_path / "m", loaded.model, loaded.params, tokenizer_from=paths["drafter"])
    config = LlamaConfig.of(24, 8, 2, 2, 4, 8, 1)
    params = random_params(model_from_config(config))
    save_model(tmp_path / "hf", config, params, format="hf", tokenizer_from=paths["drafter"])
    monkeypatch.setattr(SafetensorsReader, "read", lambda *_: pytest.fail("read"))
    assert inspected(capsys, tmp_path / "m")["models"][0]["format"] == "orbax"
    # With a head of its own, which needs no comparison with the embedding.
    assert inspected(capsys, tmp_path / "hf")["models"][0]["format"] == "hf"


def test_the_sizes_of_shipped_pairs_are_known():
    named = re.findall(r"_SIZE = '(.*)'", "".join(f.read_text() for f in PAIRS.glob("*.gin")))
    assert len(named) > 20 and set(named) <= set(PRESETS)
