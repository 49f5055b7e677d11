"""Several outputs of a prompt: each is the row of a call of its own, from one prefill."""

import numpy as np
import pytest

import specjax
from specjax import partitioning, processors, rules, verification
from specjax.decoding import method as methods
from specjax.types import Sampling
from tests import tiny_pair
from tests.variants import variants

PROMPTS = tiny_pair.sentences(5, seed=3)
SHAPE = {"max_new_tokens": 10, "batch_size": 7, "buckets": (16, 24)}
METHODS = {
    "block": {"rule": rules.OPT(0.2), "max_draft": 2},
    "greedy block": {"verification": verification.GreedyBlock(), "max_draft": 2},
    "processor": {"processors": (processors.FrequencyPenalty(0.8),), "max_draft": 2},
    "copied drafts": {"drafting": specjax.drafting.Lookup(), "max_draft": 3},
    "token cascade": {"method": specjax.decoding.TokenCascade(), "rule": rules.Chow(0.5)},
    "alone": {},
}


@pytest.fixture(scope="module", params=variants(METHODS, "block", "processor", "token cascade"))
def decoder(pair, request):
    models = pair.verifier if request.param in ("alone", "copied drafts") else pair
    return specjax.Decoder(models, **METHODS[request.param], **SHAPE)


@pytest.fixture
def prefilled(monkeypatch):
    """The numbers of prompts of each prefill."""
    counts, init = [], methods.Method.init

    def counted(self, params, prompts, **options):
        counts.append(len(prompts.inputs))
        return init(self, params, prompts, **options)

    monkeypatch.setattr(methods.Method, "init", counted)
    return counts


def _check(rows, expected):
    for row, want in zip(rows, expected, strict=True):
        assert row.text == want.text and row.ended_by == want.ended_by
        np.testing.assert_array_equal(row.tokens, want.tokens)
        np.testing.assert_allclose(row.log_probs, want.log_probs, atol=2e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_sample_is_the_row_of_a_call_with_its_id(decoder, prefilled, temperature):
    options = {"seed": 5, "sampling": Sampling(temperature), "log_probs": True}
    ids = [40, 2, 7, 9, 0]
    found = decoder(PROMPTS, num_samples=3, ids=ids, **options)
    # Seven slots hold the samples of two prompts.
    assert max(prefilled) == 2
    pairs = [(i, j) for i in range(5) for j in range(3)]
    assert [(row.index, row.sample) for row in found] == pairs
    repeated = [PROMPTS[i] for i, _ in pairs]
    _check(found, decoder(repeated, ids=[3 * ids[i] + j for i, j in pairs], **options))
    plain = decoder(PROMPTS, num_samples=3, **options)
    _check(plain, decoder(repeated, **options))
    assert not temperature or len(set(plain.texts)) > 5


def test_options_of_a_prompt_hold_for_its_samples(pair):
    decoder = specjax.Decoder(pair, rule=rules.OPT(0.2), max_draft=2, **SHAPE)
    each = {
        "max_new_tokens": [3, 9, 1, 5, 10],
        "draft_limit": [0, 1, 2, 2, 0],
        "seed": [4, 0, 1, 2, 3],
    }
    strengths, warm = np.array([0.0, 0.1, 0.2, 0.3, 0.4]), np.array([0.0, 1.0, 0.5, 2.0, 1.0])

    def options(count):
        return {
            **{name: np.repeat(values, count) for name, values in each.items()},
            "rule": rules.OPT(np.repeat(strengths, count)),
            "sampling": Sampling(np.repeat(warm, count)),
            "log_probs": True,
        }

    found = decoder(PROMPTS, num_samples=2, **options(1))
    _check(found, decoder([text for text in PROMPTS for _ in range(2)], **options(2)))


def test_a_mesh_gives_the_same_samples():
    def texts(mesh):
        models = specjax.Pair(*(tiny_pair.tabular(seed, mesh=mesh) for seed in (2, 1)))
        decoder = specjax.Decoder(models, max_draft=2, **{**SHAPE, "batch_size": 4})
        return decoder(["one", "two", "three"], num_samples=2, seed=3).texts

    assert texts(partitioning.make_mesh(2, 4)) == texts(None)


@pytest.mark.parametrize("mapped", [True, False])
def test_rows_that_are_done_are_left_out(pair, mapped):
    decoder = specjax.Decoder(pair, rule=rules.OPT(0.2), max_draft=2, **SHAPE)
    options = {"num_samples": 3, "seed": 5, "log_probs": True}
    whole = decoder(PROMPTS, **options)
    for done in ({0, 1, 2, 4, 14}, {3, 7, 11}, set(range(15)) - {8}, set(range(15))):
        known = {i: int(whole[i].info.rounds) for i in done} if mapped else done
        rows = {3 * x.index + x.sample: x for x in decoder.rows(PROMPTS, done=known, **options)}
        assert rows.keys() == set(range(15)) - done
        for i, row in rows.items():
            assert row.text == whole[i].text and row.ended_by == whole[i].ended_by
            np.testing.assert_array_equal(row.log_probs, whole[i].log_probs)


def test_results_have_the_samples_of_each_prompt(pair):
    decoder = specjax.Decoder(pair, max_draft=2, **SHAPE)
    found = decoder(PROMPTS, num_samples=4)
    assert [len(samples) for samples in found.by_prompt()] == [4] * 5
    assert found.by_prompt()[3].texts == found.texts[12:16] and found[13].sample == 1
    assert found[13].to_dict()["sample"] == 1
    best = decoder(PROMPTS, num_samples=4, best_of=2)
    for samples, kept in zip(found.by_prompt(), best.by_prompt(), strict=True):
        order = sorted(samples, key=lambda row: -row.info.log_prob_target)
        assert [row.sample for row in kept] == [row.sample for row in order[:2]]
    assert best.best(3).texts == best.texts
    with pytest.raises(ValueError, match="count must be a whole number of at least 1, got 0"):
        found.best(0)
    assert sorted(decoder.stream(PROMPTS, num_samples=4)) == sorted(
        (row.index, row.text) for row in found
    )


def test_an_engine_drops_all_samples_of_a_request(pair):
    decoder = specjax.Decoder(pair, max_draft=2, **SHAPE)
    want = decoder(PROMPTS, num_samples=2, seed=5).by_prompt()
    engine = decoder.engine(prompt_length=24, rows=3, num_samples=2)
    for text in PROMPTS:
        engine.add(specjax.Request(text, seed=5))
    assert engine.unfinished == 10 and engine.abort(4) and not engine.abort(4)
    first = {(row.index, row.sample): row for row in engine.step()}
    running = next(i for i in (0, 1) if not {(i, 0), (i, 1)} <= first.keys())
    assert engine.abort(running)
    rows = first | tiny_pair.finished_rows(engine)
    left = {(i, j) for i in range(4) if i != running for j in range(2)}
    assert rows.keys() == left | first.keys()
    assert all(row.text == want[i][j].text for (i, j), row in rows.items())
