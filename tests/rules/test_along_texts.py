"""Rules along texts of the built-in pairs: bounds at every position, and the frontier."""

import functools
import itertools
import json

import numpy as np
import pytest

import specjax
from specjax import rules
from specjax.study.expect import laws_of_models
from specjax.text.directories import built_in_pair
from specjax.text.teacher_forcing import batches, written
from specjax.types import Sampling
from tests.rules.exact import apply, divergence, tuned_at
from tests.tables import RULES

pytestmark = pytest.mark.exhaustive
PAIRS = ("multi30k_ende", "gsm8k")
TEXTS = 1000


def prompts_of(name):
    if name == "gsm8k":
        lines = (built_in_pair(name) / "samples.jsonl").read_text().splitlines()
        return [json.loads(line)["question"] for line in lines]
    lines = (built_in_pair(name) / "samples.tsv").read_text().splitlines()
    return [line.split("\t")[0] for line in lines[1:]]


@functools.cache
def texts_of(name):
    """Texts that the verifier draws at temperature 1."""
    pair = specjax.load_pair(name)
    decoder = specjax.Decoder(pair.verifier, max_new_tokens=24, batch_size=50, sampling=Sampling())
    encoded = [decoder.tokenizer.encode(text) for text in prompts_of(name)]
    every = list(itertools.islice(itertools.cycle(map(np.asarray, encoded)), TEXTS))
    return pair, written(decoder, every, seed=0)


def laws_along_texts(name, count=TEXTS):
    """q and p `[M, V]` at all positions of some texts, batch by batch."""
    pair, texts = texts_of(name)
    first = texts._replace(prompts=texts.prompts[:count], outputs=texts.outputs[:count])
    for _, rows in batches(first, 20):
        models = (pair.drafter, pair.verifier)
        drafter, verifier = laws_of_models(models, rows, Sampling(), (False, False))
        yield tuple(np.asarray(laws.probs)[rows.real] for laws in (drafter, verifier))


@pytest.mark.parametrize("name", PAIRS)
def test_kl_ball_is_within_its_bound_along_a_thousand_texts(name):
    seen = used = beyond = 0
    for q, p in laws_along_texts(name):
        size = -(-len(q) // 512) * 512  # few sizes are compiled
        padded = [np.resize(x, (size, x.shape[1])) for x in (q, p)]
        for nats in (1e-3, 0.05):
            spent = divergence(apply(rules.KLBall(nats), *padded)[: len(q)], p)
            assert (spent <= nats).all()
            used += (spent > 0.99 * nats).sum()
        # The control: Cactus's number is no bound.
        beyond += (divergence(apply(rules.Cactus(0.05), *padded)[: len(q)], p) > 0.05).sum()
        seen += len(q)
    assert seen > 10 * TEXTS and used > 0.2 * seen and beyond > 0.05 * seen


@pytest.mark.parametrize("name", PAIRS)
def test_no_rule_beats_lossy_tuned_along_texts(name):
    q, p = (np.concatenate(x)[:256] for x in zip(*laws_along_texts(name, 20), strict=True))
    above = 0
    for rule in RULES.values():
        pi = apply(rule, q, p)
        nats = divergence(pi, p)
        tuned, accepted = tuned_at(np.minimum(pi, q, dtype=np.float64).sum(1), q, p)
        beyond = np.minimum(pi, q, dtype=np.float64).sum(1) > accepted + 1e-5
        saved = (nats - divergence(tuned, p))[~beyond]
        # A change of the acceptance by float32's rounding is worth as many nats.
        assert (saved > -5e-5).all(), (rule, saved.min())
        above += (saved > 1e-2).sum()
    assert above > 1000
