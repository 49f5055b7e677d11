"""Acceptance rates and copies along texts, against numbers counted one by one."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drafting, testing
from specjax.drafting import Bigram
from specjax.study.drafting_plans import Plan
from specjax.study.known_rates import Law, judgements, known_rates
from specjax.text import Lookup, TextModel
from specjax.text.teacher_forcing import KnownTexts
from specjax.tokenizers import ByteTokenizer
from specjax.types import Sampling

VOCAB = 259
LENIENCE = 3.0
NAMES = ("verifier", "drafter", "small")
COPIED = Lookup()
PLANS = [
    Plan(("drafter",), ((4,),)),
    Plan(("small",), ((4,),)),
    Plan(("drafter", "small"), ((4, 0), (0, 3))),
    Plan(("drafter", "small"), ((4, 0), (0, 3)), lenience=LENIENCE),
    Plan((), ((4,),), COPIED),
    Plan(("drafter",), ((4, 0), (0, 3)), COPIED, lenience=LENIENCE),
    Plan(("drafter",), ((4,),), COPIED, min_match=2, max_copy=4),
]


@pytest.fixture(scope="module")
def tables():
    # Few tokens are likely, so that texts repeat themselves.
    base = testing.random_table(1, VOCAB, 1, scale=1.0)
    base[:, 100:104] += 9.0
    noise = [testing.random_table(i, VOCAB, 1, scale=0.7 * i) for i in range(3)]
    return [base + 0.0 * noise[0], base + noise[1], base + noise[2]]


@pytest.fixture(scope="module")
def models(tables):
    words = ByteTokenizer()
    made = [TextModel(testing.TabularModel(VOCAB, 1), jnp.asarray(t), words) for t in tables]
    return dict(zip(NAMES, made, strict=True))


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(100, 104, n).astype(np.int32) for n in (3, 7, 5)]
    texts = [rng.integers(100, 104, n).astype(np.int32) for n in (9, 4)]
    texts.append(np.tile(np.asarray([103, 100, 102], np.int32), 4))
    return prompts, texts


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def laws(tables, rows, temperature):
    """Of each model at each position: the distribution, in the order of the rows."""
    found = []
    for prompt, text in zip(*rows, strict=True):
        before = [prompt[-1], *text[:-1]]
        for token in before:
            if temperature:
                found.append([softmax(t[token] / temperature) for t in tables])
            else:
                found.append([np.eye(VOCAB)[t[token].argmax()] for t in tables])
    return np.asarray(found)


@pytest.fixture(scope="module")
def sampled(models, rows):
    return known_rates(models, KnownTexts(*rows), Sampling(0.8), PLANS)


def test_rates_are_those_of_the_distributions(sampled, tables, rows):
    found = laws(tables, rows, 0.8)
    rates = sampled.rates
    assert set(rates) == {one for plan in PLANS for one in judgements(plan)}
    for reviewer, drafter in ((0, 1), (0, 2), (1, 2)):
        p, q = found[:, reviewer], found[:, drafter]
        want = np.minimum(p, q).sum(-1).mean()
        assert rates[NAMES[reviewer], Law(NAMES[drafter]), 1.0] == pytest.approx(want, abs=1e-5)
    want = np.minimum(LENIENCE * found[:, 1], found[:, 2]).sum(-1).mean()
    assert rates["drafter", Law("small"), LENIENCE] == pytest.approx(want, abs=1e-5)
    assert want > rates["drafter", Law("small"), 1.0]


def test_the_rate_of_a_lenient_level_is_that_of_its_own_law(sampled, tables, rows):
    found = laws(tables, rows, 0.8)
    rule = drafting.lenience(LENIENCE)
    pi = [np.asarray(rule(jnp.float32(q), jnp.float32(p))) for _, p, q in found]
    want = np.minimum(found[:, 0], pi).sum(-1).mean()
    law = Law("drafter", "small", LENIENCE)
    assert sampled.rates["verifier", law, 1.0] == pytest.approx(want, abs=1e-5)
    assert want != pytest.approx(sampled.rates["verifier", Law("drafter"), 1.0], abs=1e-3)


def test_at_temperature_0_a_rate_says_how_often_two_agree(models, tables, rows):
    found = known_rates(models, KnownTexts(*rows), Sampling(0.0), PLANS[:3])
    best = laws(tables, rows, 0.0).argmax(-1)
    for (reviewer, law, _), rate in found.rates.items():
        want = np.mean(best[:, NAMES.index(reviewer)] == best[:, NAMES.index(law.name)])
        assert rate == pytest.approx(want, abs=1e-6)
    assert len(found.rates) == 3 and len(set(map(float, found.rates.values()))) > 1


def test_copies_are_what_lookup_proposes(sampled, tables, rows):
    """Position by position with a naive search, as `LookupDrafter` is described."""
    copies = sampled.copies[COPIED]
    p = laws(tables, rows, 0.8)[:, 0]
    place, stands, seen = 0, np.zeros(4), np.zeros(4)
    for prompt, text in zip(*rows, strict=True):
        for t in range(len(text)):
            context = [*prompt, *text[:t]]
            length, chain = naive(context, 4)
            own = 0
            while own < len(chain) and t + own < len(text) and chain[own] == text[t + own]:
                own += 1
            assert copies.matched[place] == length
            assert copies.drafted[place] == len(chain)
            assert copies.on_text[place] == own
            for k in range(min(own + 1, len(chain))):
                if t + k < len(text):
                    seen[k] += 1
                    stands[k] += p[place + k, chain[k]]
            place += 1
    assert place == len(copies.drafted) and copies.on_text.max() > 1
    want = stands / np.maximum(seen, 1)
    np.testing.assert_allclose(sampled.rates["verifier", COPIED, 1.0], want, atol=1e-5)
    assert copies.offsets.tolist() == [0, 9, 13, 25]


def naive(context, longest):
    """The length of the longest ending that occurs earlier, and what follows it there first."""
    for length in range(len(context) - 1, 0, -1):
        for end in range(length, len(context)):
            if context[end - length : end] == context[-length:]:
                return length, context[end : end + longest]
    return 0, []


def test_a_table_goes_on_where_nothing_is_copied(models, rows):
    table = np.full(VOCAB, -1, np.int32)
    table[100] = 101
    longer = Lookup(bigram=Bigram(table, models["verifier"].tokenizer.fingerprint))
    asked = [Plan((), ((2,),), COPIED), Plan((), ((2,),), longer)]
    found = known_rates(models, KnownTexts(*rows), Sampling(), asked).copies
    assert found[longer].drafted.sum() > found[COPIED].drafted.sum()
    np.testing.assert_array_equal(found[longer].matched, found[COPIED].matched)


def test_rows_that_are_read_apart_give_the_same(models, rows, sampled, monkeypatch):
    monkeypatch.setattr("specjax.text.teacher_forcing._ENTRIES", 1)
    apart = known_rates(models, KnownTexts(*rows), Sampling(0.8), PLANS)
    assert apart.rates.keys() == sampled.rates.keys()
    for key, rate in sampled.rates.items():
        np.testing.assert_allclose(apart.rates[key], rate, atol=1e-6)
    for name in ("matched", "drafted", "on_text", "offsets"):
        mine, theirs = (getattr(x.copies[COPIED], name) for x in (apart, sampled))
        np.testing.assert_array_equal(mine, theirs)
