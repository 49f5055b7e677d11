"""Scores of given outputs are the log-probabilities that decoding gave them."""

import json

import numpy as np
import pytest

import specjax
from specjax.types import Sampling
from tests import tiny_pair

PROMPTS = ["Ann has 3 apples and buys 2.", "How many has she?", "3 + 4"]


@pytest.fixture(scope="module")
def decoder():
    # Neither the rule nor the sampling changes scores.
    return specjax.Decoder(
        tiny_pair.llamas(), rule=specjax.rules.OPT(0.2), sampling=Sampling(0.0),
        max_new_tokens=12, batch_size=6,
    )  # fmt: skip


def test_a_result_is_scored_as_it_was_decoded(decoder):
    drawn = Sampling(0.7, top_k=20)
    result = decoder(PROMPTS, sampling=drawn, num_samples=2, log_probs=True, seed=2)
    repeated = [PROMPTS[row.index] for row in result]
    scores = decoder.score(repeated, result, sampling=drawn)
    for found, row in zip(scores.log_probs, result, strict=True):
        np.testing.assert_allclose(found, row.log_probs_processed, atol=2e-5)
    totals = [float(row.info.log_prob_processed) for row in result]
    own = decoder.score(repeated, result)  # under the model itself
    for found, row in zip(own.log_probs, result, strict=True):
        np.testing.assert_allclose(found, row.log_probs, atol=2e-5)
    np.testing.assert_allclose(scores.totals, totals, rtol=1e-5)
    assert scores.ranked() == sorted(range(6), key=lambda i: -totals[i])
    lengths = [len(row.log_probs) for row in result]
    np.testing.assert_allclose(np.log(scores.perplexities), -scores.totals / lengths)


def test_texts_end_and_tokens_do_not(decoder):
    words = decoder.tokenizer
    tokens = words.encode("She has 5.", add_special_tokens=False)
    whole = decoder.score(PROMPTS[:1], ["She has 5."])
    assert len(whole.log_probs[0]) == len(tokens) + 1
    part = decoder.score(PROMPTS[:1], [tokens])
    np.testing.assert_allclose(part.log_probs[0], whole.log_probs[0][:-1], atol=1e-5)
    assert whole.prompt_log_probs is None
    assert not np.allclose(
        part.totals, decoder.score(PROMPTS[:1], [tokens], sampling=Sampling(2.0)).totals
    )


def test_prompts_are_scored_in_the_same_pass(decoder):
    outputs = ["5", "She has 5.", " 7 of them"]
    scores = decoder.score(PROMPTS, outputs, prompt_log_probs=True)
    plain = decoder.score(PROMPTS, outputs)
    for i, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(scores.log_probs[i], plain.log_probs[i], atol=1e-4)
        tokens = decoder.encode(prompt)
        want = decoder.score([tokens[:1]], [tokens[1:]]).log_probs[0]
        assert len(want) == len(tokens) - 1
        np.testing.assert_allclose(scores.prompt_log_probs[i], want, atol=1e-4)


@pytest.mark.parametrize("of_prompts", [False, True])
def test_the_most_probable_tokens_are_there(decoder, of_prompts):
    result = decoder(PROMPTS)  # greedy under a rule that keeps the drafter's tokens too
    outputs = [row.tokens for row in result]
    options = {"prompt_log_probs": of_prompts, "sampling": Sampling(0.7)}
    scores = decoder.score(PROMPTS, outputs, top_log_probs=3, **options)
    assert decoder.score(PROMPTS, outputs, **options).top is None
    whole = decoder.score(PROMPTS, outputs, top_log_probs=decoder.tokenizer.vocab_size, **options)
    for tokens, chosen, top, every in zip(
        outputs, scores.log_probs, scores.top, whole.top, strict=True
    ):
        assert top.tokens.shape == top.log_probs.shape == (len(tokens), 3)
        np.testing.assert_array_equal(top.tokens, every.tokens[:, :3])
        assert (np.diff(every.log_probs) <= 0.0).all()
        np.testing.assert_allclose(np.exp(every.log_probs).sum(axis=1), 1.0, atol=1e-4)
        found = every.log_probs[every.tokens == tokens[:, None]]
        np.testing.assert_allclose(found, chosen, atol=1e-6)


def test_a_call_gives_the_most_probable_tokens_of_its_rows(decoder):
    options = {"sampling": Sampling(1.5), "num_samples": 3, "best_of": 2}
    result, plain = (decoder(PROMPTS, **options, **more) for more in ({"top_log_probs": 4}, {}))
    assert result.texts == plain.texts and plain[0].top is None
    repeated = [PROMPTS[row.index] for row in result]
    # Under the model itself: at temperature 1, whatever the call's sampling.
    for row, top in zip(result, decoder.score(repeated, plain, top_log_probs=4).top, strict=True):
        np.testing.assert_array_equal(row.top.tokens, top.tokens)
        np.testing.assert_array_equal(row.top.log_probs, top.log_probs)
        assert len(top.tokens) == int(row.info.emitted)
    (made, *_) = json.loads(json.dumps(result.to_dicts(), allow_nan=False))
    assert made["top_tokens"] == result[0].top.tokens.tolist()
    assert len(made["top_log_probs"][0]) == 4 and "top_tokens" not in plain[0].to_dict()


def test_a_row_with_nan_has_no_most_probable_tokens():
    good = tiny_pair.tabular(1)
    broken = specjax.TextModel(good.model, good.params + np.float32(np.nan), good.tokenizer)
    decoder = specjax.Decoder(specjax.Pair(drafter=broken, verifier=good), buckets=(16,))
    with pytest.warns(UserWarning, match="drafter gave NaN"):
        assert decoder(["hello"], top_log_probs=2)[0].top is None
    alone = specjax.Decoder(good, max_new_tokens=4, buckets=(16,))
    assert alone(["hello"], top_log_probs=2)[0].top.tokens.shape == (4, 2)


def test_a_translator_has_no_scores_of_prompts():
    translator = specjax.Decoder(specjax.load_pair().verifier)
    assert len(translator.score(["A man."], ["Ein Mann."]).log_probs) == 1
    with pytest.raises(ValueError, match="prompt_log_probs must be False, because .*verifier is"):
        translator.score(["A man."], ["Ein Mann."], prompt_log_probs=True)
