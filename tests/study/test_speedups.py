"""Speed-ups have intervals, and the verdict never takes noise for a gain."""

import math

import numpy as np
import pytest

from specjax.evaluation import Bootstrap
from specjax.evaluation.bootstrap import Interval
from specjax.study import Setting
from specjax.study.measure import Scores, Times
from specjax.study.speedups import conclusion, recommend, speedup, spread
from specjax.text.draft_length import RoundCost

# Passes over six tokens cost 1.1, a drafter's 0.2: a round of 2.8 tokens takes 2.1 passes.
COST = RoundCost(5, 5, 0.2, 1.1, 2.8)


def times(seconds, tokens=None, passes=None):
    """Of one sample."""
    seconds = np.atleast_2d(np.asarray(seconds, np.float64))[None]
    emitted = np.full(seconds.shape[-1], 10) if tokens is None else tokens
    counts = np.zeros(seconds.shape[-1], int) if passes is None else passes
    return Times(seconds, np.atleast_2d(emitted), np.atleast_2d(counts))


LOSS, UNSURE = (0.5, 0.4, 0.6), (0.96, 0.7, 1.4)


@pytest.mark.parametrize(
    ("gains", "first"),
    [
        ([(1.21, 1.15, 1.27), LOSS], "Fastest at no loss: A, 1.21x [1.15, 1.27] the speed of"),
        # A may be faster still, but B surely gains.
        ([(1.3, 0.9, 1.6), (1.25, 1.2, 1.3)], "Fastest at no loss: B, 1.25x [1.2, 1.3] the"),
        ([(1.21, 0.95, 1.5), LOSS], "No gain at no loss is shown: A has 1.21x [0.95, 1.5] the"),
        ([(1.1, 1.0, 1.2)], "No gain at no loss is shown: A has 1.1x [1, 1.2] the"),
        ([(0.9, 0.8, 1.0)], "No gain at no loss is shown: A has 0.9x [0.8, 1] the"),
        # A is surely slower, but B may gain.
        ([(0.97, 0.95, 0.99), UNSURE], "No gain at no loss is shown: B has 0.96x [0.7, 1.4] the"),
        ([LOSS, (0.75, 0.71, 0.8)], "Drafting does not pay here: the best lossless setting, B, is"),
    ],
)
def test_the_first_sentence_is_the_verdict(gains, first):
    lossless = {name: Interval(*gain, 0.02) for name, gain in zip("AB", gains, strict=False)}
    text = conclusion(lossless, cost=COST)
    assert text.startswith(first)
    assert ("Why: " in text) == (not first.startswith("Fastest"))
    assert "Drafting 5 tokens at c = 0.2" in text and "disturbed" not in text
    assert ("Try more." in conclusion(lossless, why="Try more.")) == ("Why: " in text)
    # The same work took other times, so c and r are doubtful too.
    text = conclusion({"A": Interval(*LOSS, 0.02)}, cost=COST, why="Try more.", spread=1.3)
    assert "differ by a factor of 1.3 between turns" in text
    assert "Why" not in text and "Drafting 5" not in text and "Try" not in text


@pytest.mark.parametrize(
    ("gain", "tokens", "told"),
    [
        ((1.3, 1.2, 1.4), 2.6, "Fastest at no loss: A, 1.3x [1.2, 1.4]"),
        # A pass of copied drafts takes as long as one of a token, and may seem to take less.
        ((2.04, 1.9, 2.2), 2.0, "Fastest at no loss: A, 2.04x [1.9, 2.2]"),
        ((1.03, 0.9, 1.2), 1.0, "No gain at no loss is shown: A has 1.03x [0.9, 1.2]"),
        ((0.5, 0.4, 0.6), 1.1, "Drafting does not pay here"),
        # These cannot be.
        ((2.16, 1.2, 3.9), 1.7, "No gain at no loss is shown: the measured speed-up of A, [1.2, 3"),
        ((2.16, 2.0, 2.3), 1.7, "No gain at no loss is shown: the measured speed-up of A, [2, 2.3"),
        ((1.3, 0.9, 1.9), 1.1, "No gain at no loss is shown: the measured speed-up of A, [0.9, 1"),
        ((9.0, 0.0, math.inf), 6.0, "No gain at no loss is shown: the measured speed-up of A, [0,"),
    ],
)
def test_a_verdict_claims_no_more_than_the_tokens_of_a_pass(gain, tokens, told):
    text = conclusion({"A": Interval(*gain, 0.02)}, most={"A": tokens}, cost=COST, why="Try more.")
    assert text.startswith(told)
    cannot_be = gain[0] > 1.1 * tokens
    assert ("Other work disturbed this measurement. Repeat" in text) == cannot_be
    assert (f"A round yields {tokens:.3g} times the tokens" in text) == (not cannot_be)
    if cannot_be:
        assert f"{gain[0]}" not in text and "passes" not in text and "Try" not in text
    elif gain[0] > tokens:
        assert "takes about as long." in text
    else:
        assert f"takes {tokens / gain[0]:.3g} times as long." in text


def test_passes_that_allow_less_than_the_calls_show_were_slowed():
    for gain, slowed in (
        ((1.3, 1.2, 1.4), False),
        ((1.5, 1.4, 1.6), True),
        ((1.5, 1.3, 1.8), False),
    ):
        text = conclusion({"A": Interval(*gain, 0.02)}, cost=COST)  # its ideal is 1.33
        told = [words in text for words in ("allow only 1.33x", "Drafting 5 tokens")]
        assert told == [slowed, not slowed]
    # A setting that can be is named before one that cannot.
    gains = {"A": Interval(2.5, 2.4, 2.6, 0.02), "B": Interval(1.3, 1.2, 1.4, 0.02)}
    text = conclusion(gains, most={"A": 1.5, "B": 2.6})
    assert text.startswith("Fastest at no loss: B, 1.3x [1.2, 1.4]")
    assert "takes 2 times as long. Other work disturbed" in text


def test_an_interval_of_exact_ratios_is_a_point():
    found = speedup(times([[1.0, 2.0, 3.0]]), times([[1.5, 3.0, 4.5]]))
    np.testing.assert_allclose(found[:3], 1.5, rtol=1e-12)
    # Per token: half the tokens in half of the time is the same speed.
    half = speedup(times([[0.5, 1.0, 1.5]], [5, 5, 5]), times([[1.0, 2.0, 3.0]]))
    np.testing.assert_allclose(half[:3], 1.0, rtol=1e-12)
    # One chunk has no interval, and so no gain.
    found = speedup(times([[1.0]]), times([[3.0]]))
    assert found.value == 3.0 and (found.low, found.high) == (0.0, np.inf)
    assert conclusion({"A": found}).startswith("No gain at no loss is shown")


def test_intervals_cover_the_true_ratio_and_call_equals_faster_seldom():
    random = np.random.default_rng(0)
    covered, gains = [], 0
    for _ in range(400):
        own, other = random.lognormal(0.0, 0.2, (2, 3, 6))
        found = speedup(times(own), times(other))
        covered.append(found.low <= 1.0 <= found.high)
        gains += found.low > 1.0
    assert np.mean(covered) > 0.92 and gains < 20


@pytest.mark.parametrize(
    ("runs", "steady"),
    [
        ([[[[1.0, 9.0], [1.0, 9.0]]]], True),  # texts differ, turns do not
        ([[[[1.0, 9.0]]]], True),  # a single turn
        ([[[[1.0, 9.0], [2.0, 9.0], [1.0, 18.0]]]], False),
        # Samples are different texts.
        ([[[[1.0, 9.0]], [[2.0, 5.0]], [[3.0, 7.0]]]], True),
        ([[[[1.0, 9.0]] * 2, [[2.0, 5.0]] * 2]], True),
        ([[[[1.0, 9.0], [2.0, 9.0], [1.0, 18.0]], [[3.0, 3.0], [6.0, 3.0], [3.0, 6.0]]]], False),
        # The verifier alone in turns with several settings.
        ([[[[1.0, 9.0]], [[2.0, 5.0]]], [[[1.0, 9.0]], [[2.0, 5.0]]]], True),
        ([[[[1.0, 9.0]], [[2.0, 5.0]]], [[[2.0, 18.0]], [[4.0, 10.0]]]], False),
    ],
)
def test_the_spread_of_the_same_work(runs, steady):
    """Each run has `[s, r, c]` seconds."""
    several = [np.asarray(seconds) for seconds in runs]
    found = spread([Times(x, *2 * (np.full((x.shape[0], x.shape[2]), 10),)) for x in several])
    assert found == 1.0 if steady else found > 1.15


ALONE = Setting(method="VerifierAlone")
LOSSLESS, OPT, LOSSY = Setting(), Setting(rule="OPT(0.1)"), Setting(rule="Lossy(0.4)")


def scores(bleu):
    """Figures whose resamples differ from others' by a constant."""
    values = {"bleu": bleu, "tokens_per_verifier_call": 2.8}
    figures = {name: {"value": x, "low": x, "high": x, "error": 0.0} for name, x in values.items()}
    return Scores(figures, {"bleu": (bleu or 0.0) + np.linspace(-1.0, 1.0, 101)})


def turns(faster, noise, passes=4):
    """Times of four chunks whose speed-ups lie around this one, and of the verifier alone."""
    each = faster * np.exp(noise * np.array([-1.0, 1.0, -1.0, 1.0]))
    return times(1.0 / each, passes=[passes] * 4), times(np.ones(4), passes=[10] * 4)


def recommended(faster, bleu=None):
    """Of settings with a speed-up and its noise; the verifier has a BLEU of 30."""
    faster = {ALONE: (1.0, 0.0), **faster}
    scored = {setting: scores((bleu or {}).get(setting, 30.0)) for setting in faster}
    pairs = {setting: turns(*one) for setting, one in faster.items()}
    return recommend(scored, pairs, bleu and "bleu", Bootstrap(resamples=100))


@pytest.mark.parametrize(
    ("faster", "noise", "setting", "told"),
    [
        (
            1.2,
            0.05,
            LOSSLESS,
            "Fastest at no loss at temperature 1: Lossless, Block, G=5, T=1, 1.2",
        ),
        (1.2, 0.3, ALONE, "No gain at no loss is shown"),
        (0.8, 0.05, ALONE, "specjax bench says why"),
    ],
)
def test_a_comparison_recommends_what_is_surely_faster_at_no_loss(faster, noise, setting, told):
    measured = {LOSSLESS: (faster, noise), OPT: (1.5, 0.05), LOSSY: (1.4, 0.05)}
    found, text = recommended(measured, {OPT: 20.0, LOSSY: 30.5})
    assert "A round yields 2.5 times the tokens" in text
    assert found == setting and told in text
    # OPT is faster, but its texts are shown to be worse.
    assert "not shown to be worse: Lossy(0.4), Block, G=5, T=1, 1.4x" in text
    assert "OPT" not in text


def test_the_same_quality_is_not_worse():
    for bleu, is_named in ((30.5, True), (30.0, True), (29.5, False), (None, False)):
        _, text = recommended({LOSSY: (1.4, 0.05)}, {LOSSY: bleu})
        assert ("not shown to be worse: Lossy(0.4)" in text) == is_named


@pytest.mark.parametrize("chunks", [1, 4])
def test_noise_is_no_gain(chunks):
    """Four lossless settings as fast as the verifier alone, with noise of 3 %."""
    random, gains = np.random.default_rng(0), 0
    scored = dict.fromkeys([ALONE, *(Setting(max_draft=n) for n in range(2, 6))], scores(30.0))
    for _ in range(60):
        pairs = {x: tuple(map(times, random.lognormal(0.0, 0.03, (2, 1, chunks)))) for x in scored}
        setting, text = recommend(scored, pairs, None, Bootstrap(resamples=100))
        gains += text.startswith("Fastest at no loss")
        assert (setting == ALONE) == (not text.startswith("Fastest"))
    assert gains <= 6


def test_what_cannot_be_is_not_recommended():
    """Eight passes for ten tokens allow 1.25 times."""
    measured = {LOSSLESS: (2.0, 0.05, 8), LOSSY: (2.1, 0.05, 8)}
    setting, text = recommended(measured, {LOSSY: 30.5})
    assert setting == ALONE and "Repeat it on a quiet machine." in text
    assert text.startswith("No gain at no loss is shown") and "Lossy" not in text


def test_without_drafts_there_is_still_a_verdict():
    _, text = recommended({})
    assert text == "No lossless setting with drafts was measured at temperature 1."
