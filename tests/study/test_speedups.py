"""Speed-ups have intervals, and the verdict never takes noise for a gain."""

import numpy as np
import pytest

from specjax.evaluation import Bootstrap, Interval
from specjax.study import Setting
from specjax.study.measure import Times
from specjax.study.scores import Scores
from specjax.study.speedups import RoundCost, conclusion, recommend, speedup, spread

# Passes over six tokens cost 2.1, a drafter's 0.2: a round of 2.8 tokens takes 3.1 passes.
SLOW = RoundCost(5, 0.2, 2.1, 2.8)


def times(seconds, tokens=None):
    """Of one sample."""
    seconds = np.atleast_2d(np.asarray(seconds, np.float64))[None]
    emitted = np.full(seconds.shape[-1], 10) if tokens is None else tokens
    return Times(seconds, np.atleast_2d(emitted))


@pytest.mark.parametrize(
    ("name", "gain", "first"),
    [
        ("a gain", (1.21, 1.15, 1.27), "Fastest at no loss: A, 1.21x [1.15, 1.27] the speed of"),
        ("noise", (1.21, 0.95, 1.5), "No gain at no loss is shown: the best lossless setting, A,"),
        ("a loss", (0.75, 0.71, 0.8), "Drafting does not pay here: the best lossless setting, A,"),
        ("touches 1", (1.1, 1.0, 1.2), "No gain at no loss is shown: "),
    ],
)
def test_the_first_sentence_is_the_verdict(name, gain, first):
    worse = Interval(0.5, 0.4, 3.0, 0.1)
    text = conclusion({"B": worse, "A": Interval(*gain, 0.02)}, cost=SLOW)
    assert text.startswith(first)
    assert ("Why: " in text) == (name != "a gain")
    assert "disturbed" not in text
    # The same work took other times, so c and r are doubtful too.
    text = conclusion({"A": worse}, cost=SLOW, spread=1.3)
    assert "differ by a factor of 1.3 between turns" in text and "Why" not in text


@pytest.mark.parametrize(
    ("cost", "remedy"),
    [
        # 2.8 tokens in 5 x 0.2 + 2.1 passes; at r = 1 in 2 passes.
        (SLOW, "r = 2.1 (a verifier's pass over 6 tokens) takes 3.1 passes"),
        (
            SLOW,
            "a larger verifier or a GPU or TPU has it, the passes would allow 1.4x",
        ),
        (
            RoundCost(5, 0.5, 1.2, 2.8),
            "With a much cheaper drafter (c near 0) the passes would allow 2.3x",
        ),
        (RoundCost(5, 0.3, 1.5, 1.1), "A drafter that agrees more often would help"),
        (RoundCost(5, 0.05, 1.1, 2.8), "The passes allow 2.1x; calls and prompts, or other work"),
    ],
)
def test_the_reason_names_what_would_help(cost, remedy):
    assert remedy in cost.why()


def test_an_interval_of_exact_ratios_is_a_point():
    found = speedup(times([[1.0, 2.0, 3.0]]), times([[1.5, 3.0, 4.5]]))
    np.testing.assert_allclose(found[:3], 1.5, rtol=1e-12)
    # Per token: half the tokens in half of the time is the same speed.
    half = speedup(times([[0.5, 1.0, 1.5]], [5, 5, 5]), times([[1.0, 2.0, 3.0]]))
    np.testing.assert_allclose(half[:3], 1.0, rtol=1e-12)


def test_intervals_cover_the_true_ratio_and_call_equals_faster_seldom():
    random = np.random.default_rng(0)
    covered, gains = [], 0
    for _ in range(400):
        own, other = random.lognormal(0.0, 0.2, (2, 3, 6))
        found = speedup(times(own), times(other))
        covered.append(found.low <= 1.0 <= found.high)
        gains += found.low > 1.0
    assert np.mean(covered) > 0.92 and gains < 20


def test_one_chunk_has_no_interval_and_so_no_gain():
    found = speedup(times([[1.0]]), times([[3.0]]))
    assert found.value == 3.0 and (found.low, found.high) == (0.0, np.inf)
    assert conclusion({"A": found}).startswith("No gain at no loss is shown")


def test_the_spread_of_the_same_work():
    assert spread([times([[1.0, 9.0], [1.0, 9.0]])]) == 1.0  # texts differ, turns do not
    assert spread([times([[1.0, 9.0]])]) == 1.0
    assert spread([times([[1.0, 9.0], [2.0, 9.0], [1.0, 18.0]])]) > 1.15


ALONE = Setting(method="VerifierAlone")
LOSSLESS, OPT, LOSSY = Setting(), Setting(rule="OPT(0.1)"), Setting(rule="Lossy(0.4)")


def scores(faster, noise, bleu=30.0, calls=2.8):
    """Figures whose resamples lie around the speed-up."""
    again = 1.0 / (faster + noise * np.linspace(-1.0, 1.0, 101))
    values = {"relative_latency": 1.0 / faster, "bleu": bleu, "tokens_per_verifier_call": calls}
    figures = {name: {"value": x, "low": x, "high": x, "error": 0.0} for name, x in values.items()}
    return Scores(figures, {"relative_latency": again, "bleu": bleu + np.linspace(-1, 1, 101)})


TIMES = {
    "steps": {"verifier": 2.0},
    "tables": [
        {"reviewer": "verifier", "drafter": "drafter", "widths": [1, 2, 4, 6],
         "draft": [0.4], "verifier": [[2.0, 2.4, 3.0, 4.2]]}
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("faster", "noise", "setting", "told"),
    [
        (
            1.2,
            0.1,
            LOSSLESS,
            "Fastest at no loss at temperature 1: Lossless, Block, G=5, T=1, 1.2x",
        ),
        (1.2, 0.3, ALONE, "No gain at no loss is shown"),
        (0.8, 0.1, ALONE, "at c = 0.2 (a drafter's pass) and checking them at r = 2.1"),
    ],
)
def test_a_comparison_recommends_what_is_surely_faster_at_no_loss(faster, noise, setting, told):
    scored = {ALONE: scores(1.0, 0.0, calls=1.0), LOSSLESS: scores(faster, noise)}
    scored |= {OPT: scores(1.5, 0.1, bleu=20.0), LOSSY: scores(1.4, 0.1, bleu=30.5)}
    found = recommend(scored, "bleu", Bootstrap(resamples=100), TIMES)
    assert found.setting == setting and told in found.text
    # OPT is faster, but its texts are shown to be worse.
    assert "not shown to be worse: Lossy(0.4), Block, G=5, T=1, 1.4x" in found.text
    assert "OPT" not in found.text


def test_without_drafts_or_times_there_is_still_a_verdict():
    text = recommend({ALONE: scores(1.0, 0.0)}, None, Bootstrap(resamples=100)).text
    assert text == "No lossless setting with drafts was measured at temperature 1."
    scored = {ALONE: scores(1.0, 0.0), LOSSLESS: scores(0.9, 0.01)}
    assert "Why" not in recommend(scored, None, Bootstrap(resamples=100)).text
