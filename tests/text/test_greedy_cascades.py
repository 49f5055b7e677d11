"""Both built-in pairs: the greedy output is the verifier's own, whatever drafts."""

import dataclasses
import gzip
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import specjax
from specjax import rules
from specjax.text.directories import built_in_pair
from specjax.types import Sampling

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
SHAPES = {
    "multi30k_ende": {"max_new_tokens": 48, "batch_size": 4, "buckets": (64,)},
    "gsm8k": {"max_new_tokens": 128, "batch_size": 4, "buckets": (256,)},
}
PLANS = {
    "copies below the drafter": specjax.Cascade(lengths=((3, 2), (0, 3)), last=specjax.Lookup()),
    "two models, lenient": specjax.Cascade(
        lengths=((4, 0), (0, 3)), models=("drafter", "small"), lenience=3.0
    ),
    "two models and copies, rules": specjax.Cascade(
        lengths=((2, 1, 1), (0, 2, 1), (0, 0, 4)),
        models=("drafter", "small"),
        rules=(rules.TokenV3(0.7), rules.TokenV3(0.5)),  # a copy has no confidence
        last=specjax.Lookup(bigram="built-in"),
    ),
}


def models(name):
    """The pair, and a drafter below its own: the small one, or the own one with noise."""
    pair = specjax.load_pair(name)
    directory = built_in_pair(name) / "drafter_small"
    if directory.is_dir():
        small = specjax.load_text_model(directory)
    else:
        keys = iter(jax.random.split(jax.random.key(0), 500))
        worse = jax.tree.map(
            lambda x: x + 0.1 * jnp.std(x) * jax.random.normal(next(keys), x.shape, x.dtype),
            pair.drafter.params,
        )
        small = dataclasses.replace(pair.drafter, params=worse, head=None, name="noisy")
    return specjax.Models(verifier=pair.verifier, drafter=pair.drafter, small=small)


def prompts(name):
    """100 of the data that the pair was made for."""
    if name == "gsm8k":
        path = DATA / "gsm8k" / "test.jsonl"
    else:
        path = DATA / "multi30k" / "test_2016_flickr.en.gz"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    if name == "gsm8k":
        return [json.loads(line)["question"] for line in path.read_text().splitlines()[:100]]
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [next(file).rstrip("\n") for _ in range(100)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", list(SHAPES))
def test_no_hierarchy_changes_a_greedy_output(name):
    given, shape, asked = models(name), {**SHAPES[name], "sampling": Sampling(0.0)}, prompts(name)
    expected = specjax.Decoder(given.verifier, **shape)(asked).tokens
    for plan in PLANS.values():
        found = specjax.Decoder(given, drafting=plan, **shape)(asked)
        assert [list(row) for row in found.tokens] == [list(row) for row in expected]
        # Not because nothing was drafted.
        assert found.info.tokens_per_verifier_call > 1.2
    # The control: under a rule at the top, texts do change.
    lossy = specjax.Decoder(
        given, drafting=PLANS["two models, lenient"], rule=rules.OPT(0.9), **shape
    )
    assert [list(row) for row in lossy(asked).tokens] != [list(row) for row in expected]
