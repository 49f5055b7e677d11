"""Cascades made of a decoder's models, over a pair whose every distribution is known."""

import json

import numpy as np
import pytest

import specjax
from specjax import rules
from specjax.compilation import count_compilations
from specjax.types import Sampling
from tests import tiny_pair

SHAPE = {"max_new_tokens": 10, "batch_size": 3, "buckets": (32,)}
PROMPTS = tiny_pair.sentences(7, seed=3)
BILD = rules.FallbackRollback(rules.Chow(0.9), rules.BiLD(2.0))


@pytest.fixture(scope="module")
def pair():
    return specjax.Pair(tiny_pair.tabular(1), tiny_pair.tabular(2))


@pytest.fixture(scope="module")
def greedy(pair):
    """The texts of the verifier alone, and of the drafter."""
    models = (pair.verifier, pair.drafter)
    texts = [specjax.Decoder(m, sampling=Sampling(0.0), **SHAPE)(PROMPTS).texts for m in models]
    assert texts[0] != texts[1]
    return texts


ENDS = [
    (specjax.decoding.TokenCascade(), rules.Chow(0.0), rules.Chow(1.0)),
    (specjax.decoding.OracleCascade(), rules.Diff(-np.inf), rules.Diff(np.inf)),
    (specjax.decoding.SequenceCascade(), rules.SequenceChow(0.0), rules.SequenceChow(1.0)),
    (
        specjax.decoding.BiLDCascade(),
        rules.FallbackRollback(rules.Chow(0.0), rules.BiLD(0.0)),
        rules.FallbackRollback(rules.Chow(1.0), rules.BiLD(np.inf)),
    ),
]


@pytest.mark.parametrize(("method", "low", "high"), ENDS, ids=lambda x: type(x).__name__)
def test_the_ends_of_a_strength_are_the_models(pair, greedy, method, low, high):
    """Slots are refilled; another strength compiles nothing, and rows may have their own."""
    decoder = specjax.Decoder(pair, method=method, rule=low, sampling=Sampling(0.0), **SHAPE)
    result = decoder(PROMPTS)
    assert result.texts == greedy[0]
    with count_compilations() as compilations:
        kept = decoder(PROMPTS, rule=high)
    assert compilations.compiled == compilations.read == 0
    assert kept.texts == greedy[1]
    assert not kept.info.per_row.deferrals.any() and not kept.info.per_row.rollbacks.any()
    if not isinstance(method, specjax.decoding.OracleCascade):
        assert not kept.info.per_row.verifier_calls.any()
    # All is the verifier's, whether it writes a token at a time or whole responses.
    np.testing.assert_array_equal(result.info.per_row.deferrals, result.info.per_row.emitted)
    described = decoder.describe()
    assert set(described["models"]) == {"verifier", "drafter"}
    assert described["method"] == type(method).__name__ and described["own_params"] is None
    json.dumps(result.to_dicts(), allow_nan=False)


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        (specjax.decoding.BiLDCascade(limit=4), BILD),
        (specjax.decoding.SequenceCascade(), rules.SequenceChowLog(1.5, rules.Mean())),
    ],
)
def test_rows_are_their_own_whatever_the_slots(pair, method, rule):
    first, second = (
        specjax.Decoder(pair, method=method, rule=rule, **{**SHAPE, "batch_size": rows})
        for rows in (3, 2)
    )
    one, other = first(PROMPTS, seed=4), second(PROMPTS, seed=4)
    assert one.texts == other.texts and len(set(one.texts)) > 4
    for count in ("deferrals", "rollbacks", "verifier_calls", "drafter_calls", "rounds"):
        ours, theirs = (getattr(x.info.per_row, count) for x in (one, other))
        np.testing.assert_array_equal(ours, theirs)
    assert one.info.per_row.deferrals.any()
    # A resumed run decodes only what is missing.
    done = {i: int(one[i].info.rounds) for i in (0, 2, 5)}
    rows = {row.index: row.text for row in first.rows(PROMPTS, seed=4, done=done)}
    assert rows == {i: one.texts[i] for i in (1, 3, 4, 6)}


def test_speculative_and_single_models_count_deferrals_too(pair):
    result = specjax.Decoder(pair, max_draft=3, **SHAPE)(PROMPTS, seed=1)
    rows = result.info.per_row
    np.testing.assert_array_equal(rows.deferrals, rows.verifier_calls)
    rejecting = rows.accepted < rows.drafted
    np.testing.assert_array_equal(rows.rollbacks > 0, rejecting)
    assert (rows.rollbacks <= rows.rounds).all() and rejecting.any()
    alone = specjax.Decoder(pair.verifier, **SHAPE)(PROMPTS[:3]).info.per_row
    np.testing.assert_array_equal(alone.deferrals, alone.emitted)
