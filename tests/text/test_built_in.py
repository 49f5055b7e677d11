"""What comes with the package: two pairs, each with tables, samples and names."""

import json

import numpy as np
import pytest

import specjax
from specjax import partitioning, rules
from specjax.data.examples import read_examples
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


def test_names_and_paths():
    path = real_path("built-in:gsm8k/drafter_small")
    assert path == PAIRS / "gsm8k" / "drafter_small"
    assert portable_path(path) == "built-in:gsm8k/drafter_small"
    assert portable_path("built-in:gsm8k/bigram") == "built-in:gsm8k/bigram"
    assert real_path("gsm8k/drafter") == "gsm8k/drafter"
    assert portable_path("/x/y") == "/x/y"
    assert real_path("built-in:smollm2/head") == PAIRS / "smollm2" / "head"
    single = specjax.load_pair(verifier="built-in:gsm8k/verifier")
    assert [*single.named] == ["verifier"]
    assert type(specjax.Decoder(single).method).__name__ == "Autoregressive"
    assert specjax.Decoder(single, drafting="Lookup()", max_draft=4).method.max_draft == 4
    no_part = "no such part of gsm8k: choose from bigram, drafter"
    for refused, message in (
        *((lambda x=x: real_path(f"built-in:gsm8k{x}"), no_part) for x in ("", "/", "/README.md")),
        (lambda: real_path("built-in:x/drafter"), "no built-in pair 'x', only gsm8k, multi30k_e"),
        (lambda: single.drafter, "there is no drafter, only verifier: load both"),
    ):
        with pytest.raises(ValueError, match=message):
            refused()


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


@pytest.mark.exhaustive
def test_rows_do_not_depend_on_their_surroundings():
    """Alone, in a batch, padded, and over a mesh: rounding parts one row in thousands."""
    pair, (path,) = specjax.load_pair(), built_in_pair("multi30k_ende").glob("samples.*")
    texts = [example.inputs for example in read_examples(path, inputs_field="en")][:8]
    # Half of the rows greedy, half drawn: their decisions have other margins.
    warm = np.array([0.0, 1.0] * 4, np.float32)
    options = {"rule": rules.OPT(0.1), "max_draft": 4, "max_new_tokens": 24, "batch_size": 8}

    def decode(order, models=pair, bucket=48):
        decoder = specjax.Decoder(models, buckets=(bucket,), **options)
        asked = {"sampling": Sampling(warm[order]), "ids": order, "seed": 1}
        found = decoder([texts[i] for i in order], **asked).texts
        return dict(zip(order, found, strict=True))

    mesh = specjax.load_pair(mesh=partitioning.make_mesh(data=4, model=2))
    others = [decode([3, 0, 7, 6, 1, 5, 2, 4]), decode([*range(8)], mesh)]
    others += [decode([i], bucket=64) for i in range(8)]
    together = decode([*range(8)])
    assert len({i for one in others for i, text in one.items() if text != together[i]}) <= 1
