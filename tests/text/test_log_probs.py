"""Log-probabilities are those of float64's log softmax, also far below the most probable token."""

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import decoding, processors, rules, testing
from specjax.drafting import Branches, Lookup, Tree
from specjax.tokenizers import ByteTokenizer
from specjax.types import Sampling
from tests.variants import variants

VOCAB = 32_000
BEST, SECOND, FAR = 40, 41, 42
# The most probable tokens of the verifier; FAR is the drafter's own.
_LOGITS = np.full(VOCAB, -30.0)
_LOGITS[[BEST, SECOND, FAR]] = 2.0, 1.0, 2.0 - 78.0


def own_log_probs(temperature=1.0, top_k=VOCAB):
    """`[V]` float64, of the verifier."""
    logits = _LOGITS / temperature
    logits = np.where(np.sort(_LOGITS)[-top_k] > _LOGITS, -np.inf, logits)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def model(logits):
    table = jnp.asarray(logits, jnp.float32)[None]
    return specjax.TextModel(testing.TabularModel(VOCAB, 0), table, ByteTokenizer())


@pytest.fixture(scope="module")
def pair():
    drafter = np.full(VOCAB, -np.inf)
    drafter[[FAR, SECOND]] = 0.0, -1.0
    return specjax.Pair(drafter=model(drafter), verifier=model(_LOGITS))


METHODS = {
    "chain": {"rule": rules.Chow(1.0), "max_draft": 2},
    "chain of several widths": {"rule": rules.Chow(1.0), "max_draft": 2, "widths": (1, 3)},
    "processed": {  # which changes nothing here
        "rule": rules.Chow(1.0),
        "max_draft": 2,
        "processors": (processors.FrequencyPenalty(0.0),),
    },
    "tree": {"rule": rules.Chow(1.0), "drafting": Tree(depth=2, width=2)},
    "branches": {
        "drafting": Branches(("drafter", Lookup(copies=1))),
        "max_draft": 2,
    },
    "oracle": {"method": decoding.OracleCascade(), "rule": rules.Diff(1.0)},
    "token cascade": {"method": decoding.TokenCascade(2), "rule": rules.Chow(1.0)},
    "bild": {
        "method": decoding.BiLDCascade(2),
        "rule": rules.FallbackRollback(rules.Chow(1.0), rules.BiLD(float("inf"))),
    },
    "sequence cascade": {"method": decoding.SequenceCascade(), "rule": rules.SequenceChow(0.0)},
    "alone": {},
}
SAMPLINGS = {
    "greedy": Sampling(0.0),
    "plain": Sampling(1.0),
    "sharp": Sampling(0.25),
    # One program for both.
    "top_k": Sampling(1.0, top_k=2, top_p=1.0),
    "top_p": Sampling(1.0, top_k=VOCAB, top_p=0.99),
}
CASES = [(name, sampling) for name in METHODS for sampling in SAMPLINGS]
QUICK = [(n, x) for n, x in CASES if not x.startswith("top") or n in ("chain", "tree", "alone")]


@pytest.mark.parametrize("case", variants(CASES, *QUICK), ids=", ".join)
def test_rows_have_the_models_own_log_probabilities(pair, case):
    name, drawn = case[0], SAMPLINGS[case[1]]
    kept = 2 if case[1].startswith("top") else VOCAB
    models = pair.verifier if name == "alone" else pair
    decoder = specjax.Decoder(
        models, **METHODS[name], sampling=drawn, max_new_tokens=6, batch_size=2, buckets=(16,)
    )
    result = decoder([[10], [11, 12]], log_probs=True, top_log_probs=3, seed=3)
    own, seen = own_log_probs(), set()
    processed = own_log_probs(drawn.temperature or 1.0, kept)
    if not drawn.temperature:
        processed = np.where(np.arange(VOCAB) == BEST, 0.0, -np.inf)
    for row in result:
        read = ~np.isnan(row.log_probs)  # cascades do not read all tokens
        assert read.any() or "cascade" in name
        tokens = row.tokens[read]
        np.testing.assert_allclose(row.log_probs[read], own[tokens], rtol=2e-6, atol=2e-6)
        found = row.log_probs_processed[read]
        np.testing.assert_allclose(found, processed[tokens], rtol=2e-6, atol=2e-6)
        np.testing.assert_array_equal(np.isnan(row.log_probs_processed), ~read)
        assert (row.log_probs_target <= 0.0).all() and np.isfinite(row.log_probs_target).all()
        for each in ("log_prob", "log_prob_processed", "log_prob_target"):
            by_token = getattr(row, each.replace("prob", "probs"))
            np.testing.assert_allclose(getattr(row.info, each), by_token.sum(), rtol=1e-6)
        # The same measure as of the alternatives at each place.
        at = row.top.tokens == row.tokens[:, None]
        hit = at.any(axis=1) & read
        np.testing.assert_allclose(row.top.log_probs[at][read[at.any(axis=1)]], row.log_probs[hit])
        seen |= set(tokens.tolist())
    if name in ("chain", "chain of several widths", "processed", "tree", "oracle"):
        assert FAR in seen


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_scores_are_of_float64s_log_softmax(pair, sampling):
    drawn = SAMPLINGS[sampling]
    decoder = specjax.Decoder(pair, buckets=(16,))
    tokens = np.array([FAR, BEST, 7, SECOND])
    filtered = 2 if sampling.startswith("top") else VOCAB
    want = own_log_probs(drawn.temperature or 1.0, filtered)
    scores = decoder.score(
        [[10, FAR, BEST]], [tokens], sampling=drawn, top_log_probs=5, prompt_log_probs=True
    )
    np.testing.assert_allclose(scores.log_probs[0], want[tokens], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(scores.prompt_log_probs[0], want[[FAR, BEST]], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(
        scores.top[0].log_probs, np.tile(np.sort(want)[::-1][:5], (4, 1)), rtol=2e-6, atol=2e-6
    )
    assert (np.isfinite(scores.perplexities) == (filtered == VOCAB)).all()
