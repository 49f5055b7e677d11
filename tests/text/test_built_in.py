"""What comes with the package: two pairs, each with tables, samples and names."""

import json

import numpy as np
import pytest

import specjax
from specjax.models import CausalLM, Seq2SeqLM
from specjax.text.directories import PAIRS, built_in_pair, built_in_pairs, portable_path, real_path
from specjax.types import Sampling

KINDS = {"gsm8k": CausalLM, "multi30k_ende": Seq2SeqLM}


def test_the_pairs():
    assert built_in_pairs() == tuple(KINDS)
    for name in KINDS:
        files = [path for path in built_in_pair(name).rglob("*") if path.is_file()]
        limit = 10e6 if name == "gsm8k" else 22e6  # with the smaller drafter of the demo
        assert sum(path.stat().st_size for path in files) < limit
        assert {"README.md", "model.safetensors", "bigram.safetensors"} <= {p.name for p in files}


def test_a_single_model_decodes_alone_or_drafts_for_itself():
    single = specjax.load_pair(verifier="built-in:gsm8k/verifier")
    assert [*single.named] == ["verifier"]
    assert type(specjax.Decoder(single).method).__name__ == "Autoregressive"
    copies = specjax.Decoder(single, drafting="Lookup()", max_draft=4)
    assert copies.method.max_draft == 4
    with pytest.raises(specjax.UserError, match="there is no drafter, only verifier: load both"):
        single.drafter  # noqa: B018


def test_names_and_paths():
    path = real_path("built-in:gsm8k/drafter_small")
    assert path == PAIRS / "gsm8k" / "drafter_small"
    assert portable_path(path) == "built-in:gsm8k/drafter_small"
    assert portable_path("built-in:gsm8k/bigram") == "built-in:gsm8k/bigram"
    assert real_path("gsm8k/drafter") == "gsm8k/drafter"
    assert portable_path("/x/y") == "/x/y"
    assert real_path("built-in:smollm2/head") == PAIRS / "smollm2" / "head"
    for wrong in ("built-in:gsm8k", "built-in:gsm8k/", "built-in:gsm8k/README.md"):
        with pytest.raises(ValueError, match="no such part of gsm8k: choose from bigram, drafter"):
            real_path(wrong)
    with pytest.raises(ValueError, match="no built-in pair 'x', only gsm8k, multi30k_ende"):
        real_path("built-in:x/drafter")


@pytest.mark.exhaustive
def test_the_pair_of_llamas_decodes():
    """Every part of it, by its name; greedily all write the verifier's text."""
    pair = specjax.load_pair("gsm8k")
    assert isinstance(pair.verifier.model, CausalLM) and isinstance(pair.drafter.model, CausalLM)
    lines = (built_in_pair("gsm8k") / "samples.jsonl").read_text().splitlines()
    prompt = json.loads(lines[0])["question"]
    shape = {"max_new_tokens": 48, "buckets": (64,), "sampling": Sampling(0.0), "batch_size": 1}
    alone = specjax.Decoder(pair.verifier, **shape)
    [row] = alone([prompt])
    expected, words = row.text, alone.tokenizer
    assert expected[0] == " " != words.decode(row.tokens.tolist())[0]
    assert words.decode([*words.encode(prompt), *row.tokens.tolist()]) == prompt + expected
    assert pair.verifier.continues_prompts and not specjax.load_pair().verifier.continues_prompts
    plan = specjax.drafting.Cascade(
        lengths=((2, 1, 1), (0, 2, 0), (0, 0, 3)),
        models=("drafter", "built-in:gsm8k/drafter_small"),
        last=specjax.drafting.Lookup(bigram="built-in"),
    )
    found = specjax.Decoder(pair, drafting=plan, **shape)([prompt])
    assert found.texts == [expected] and "<<" in expected
    assert found.info.tokens_per_verifier_call > 1.5
    assert set(found[0].info.calls) == {"verifier", "drafter", "level_2"}


@pytest.mark.parametrize("name", list(KINDS))
def test_the_table_of_the_pair_that_decodes_is_taken(name):
    verifier = specjax.load_pair(name).verifier
    tables = [
        specjax.Decoder(verifier, drafting=specjax.drafting.Lookup(bigram=path)).params.drafter
        for path in ("built-in", f"built-in:{name}/bigram")
    ]
    assert np.array_equal(*tables) and np.mean(np.asarray(tables[0]) >= 0) > 0.5
