"""Table 2, the front and CSV, on settings by hand."""

import csv
import io

import numpy as np
import pytest

from specjax.evaluation import Bootstrap
from specjax.study import Setting
from specjax.study.expect import Expected
from specjax.study.measure import Scores
from specjax.study.tables import (
    best_quality,
    best_rows,
    csv_text,
    estimated_rows,
    flat_rows,
    front,
    least_cost,
    pareto,
    table_2,
    table_2_rows,
)

COST = np.array([1.2, 0.8, 0.5])
QUALITY = np.array([30.0, 28.0, 20.0])


def test_curves_are_linear_between_neighbours():
    # The first point, half of the way to the second, the second, half of the way to the third, the
    # cheapest of what is better, and none.
    costs = {30.0: 1.2, 29.0: 1.0, 28.0: 0.8, 24.0: 0.65, 10.0: 0.5, 31.0: np.nan}
    found = [float(least_cost(COST, QUALITY, wanted)) for wanted in costs]
    np.testing.assert_allclose(found, [*costs.values()], rtol=1e-12)
    qualities = {1.2: 30.0, 1.0: 29.0, 0.8: 28.0, 0.65: 24.0, 0.4: np.nan}
    found = [float(best_quality(COST, QUALITY, most)) for most in qualities]
    np.testing.assert_allclose(found, [*qualities.values()], rtol=1e-12)
    one = np.array([0.7]), np.array([25.0])  # a point is a curve
    assert least_cost(*one, 25.0) == 0.7 and np.isnan(least_cost(*one, 25.1))
    assert best_quality(*one, 1.0) == 25.0 and np.isnan(best_quality(*one, 0.5))


def test_a_curve_need_not_fall_and_resamples_have_a_quality_each():
    # Up and down again: the quality 5 is passed twice, at 1.5 and at 2.75.
    cost, quality = np.array([1.0, 2.0, 3.0, 0.9]), np.array([0.0, 10.0, 3.0, 4.0])
    assert least_cost(cost, quality, 5.0) == pytest.approx(1.5)
    assert least_cost(cost, quality, 3.5) == pytest.approx(0.9)  # the last point alone is cheaper
    again = np.stack([cost, cost + 1.0])
    found = least_cost(again, np.stack([quality, quality]), np.array([5.0, 20.0]))
    np.testing.assert_allclose(found, [1.5, np.nan])


def test_the_front_is_what_nothing_beats():
    cost, quality = [1.0, 2.0, 2.0, 3.0, 0.5], [5.0, 6.0, 7.0, 7.0, 1.0]
    assert pareto(cost, quality).tolist() == [True, False, True, False, True]
    assert pareto([1.0, 1.0], [2.0, 2.0]).all()  # equals beat nothing


def scores(latency, quality, spread=0.0, **others):
    """Figures whose resamples are the value, and the value plus and minus a spread."""
    made = {"relative_latency": latency, "bleu": quality, **others}
    figures = {name: {"value": x, "low": x, "high": x, "error": 0.0} for name, x in made.items()}
    moved = {"bleu": [-spread, 0.0, spread]}
    again = {name: x + np.array(moved.get(name, [0.0] * 3)) for name, x in made.items()}
    return Scores(figures, again)


def setting(strength, rule="OPT", **others):
    return Setting(rule=f"{rule}({strength})", **others)


VERIFIER, DRAFTER = Setting(method="VerifierAlone"), Setting(method="DrafterAlone")


def test_table_2_by_hand():
    scored = {
        VERIFIER: scores(1.0, 29.0),
        setting(0.2): scores(0.8, 28.0),
        setting(0.0): scores(1.2, 30.0),  # out of order
        setting(0.4): scores(0.5, 20.0),
        setting(0.1, "Lossy"): scores(1.5, 25.0),
        setting(0.1, temperature=0.0): scores(1.0, 1.0),  # no verifier at this temperature
    }
    opt, lossy = table_2(scored, "bleu", Bootstrap())
    assert opt["method"] == "OPT" and opt["settings"] == 3
    assert opt["latency_reduction"]["value"] == pytest.approx(1.0)  # half-way from 1.2 to 0.8
    assert opt["best_quality"]["value"] == pytest.approx(29.0)
    assert opt["matched"] == opt["within"] == 1.0
    # Of the settings themselves 0.0 alone is as good, and it is slower.
    assert opt["measured_strength"] == 0.0
    assert opt["measured_reduction"]["value"] == pytest.approx(1 / 1.2)
    assert lossy["latency_reduction"]["value"] is None and lossy["matched"] == 0.0
    assert lossy["best_quality"]["value"] is None and lossy["within"] == 0.0
    assert lossy["measured_reduction"] == dict.fromkeys(("value", "low", "high", "error"))
    assert lossy["measured_strength"] is None


def test_a_lossless_method_is_matched_by_law():
    scored = {
        VERIFIER: scores(1.0, 3.1, spread=3.1),  # 1 of 32 answers
        Setting(): scores(0.5, 0.0),  # 0 of 32
        setting(0.2): scores(0.5, 0.0),
    }
    lossless, opt = table_2(scored, "bleu", Bootstrap())
    assert lossless["by_law"] and lossless["matched"] == 1.0
    assert lossless["latency_reduction"]["value"] == pytest.approx(2.0)
    assert lossless["measured_reduction"]["value"] == pytest.approx(2.0)
    assert opt["matched"] < 1.0 and opt["latency_reduction"]["value"] is None
    assert table_2_rows([lossless, opt], "bleu")[0]["matched"] == "lossless"


def test_intervals_are_of_the_same_on_resamples():
    scored = {
        VERIFIER: scores(1.0, 29.0),
        setting(0.0): scores(1.2, 30.0, spread=1.5),
        setting(0.2): scores(0.8, 28.0, spread=1.5),
    }
    (row,) = table_2(scored, "bleu", Bootstrap())
    # Resampled by -1.5 no setting is as good; by +1.5 the cheaper one is.
    assert row["matched"] == pytest.approx(2 / 3)
    assert row["latency_reduction"]["low"] == pytest.approx(1.0)
    assert row["latency_reduction"]["high"] == pytest.approx(1 / 0.8)
    assert row["best_quality"]["low"] == pytest.approx(27.5)
    # 28 is not shown to be below 29. The interval is of that setting's latency.
    assert row["measured_strength"] == 0.2
    known = scored[setting(0.2)]
    known.resampled["relative_latency"] = np.array([0.7, 0.8, 0.9])
    (row,) = table_2(scored, "bleu", Bootstrap())
    found = [row["measured_reduction"][name] for name in ("low", "value", "high")]
    assert found == pytest.approx([1 / 0.9, 1 / 0.8, 1 / 0.7])


def test_noise_is_not_on_the_front():
    apart = {
        VERIFIER: scores(1.0, 30.0),
        DRAFTER: scores(0.2, 20.0),
        setting(0.1): scores(0.9, 33.0),
        setting(0.3): scores(0.6, 25.0),
    }

    def on_front(scored):
        return front(scored, "relative_latency", "bleu", Bootstrap())

    # Each is the best for its time; the verifier is slower and worse than OPT(0.1).
    assert on_front(apart) == [DRAFTER, setting(0.1), setting(0.3)]
    # Better by less than resamples move the difference: the fastest is as good.
    noisy = {
        one: Scores(found.figures, {**found.resampled, "bleu": np.array([-9.0, 20.0, 49.0])})
        for one, found in apart.items()
    }
    assert on_front({**noisy, DRAFTER: apart[DRAFTER]}) == [DRAFTER]
    # A lossless setting has the verifier's quality: 33 is by chance.
    assert on_front({VERIFIER: apart[VERIFIER], Setting(): scores(1.2, 33.0)}) == [VERIFIER]
    # What nothing tells apart is on it together.
    again = {"relative_latency": 0.5 + np.array([-0.1, 0.0, 0.1]), "bleu": np.full(3, 20.0)}
    pair = {
        setting(0.1): scores(0.5, 20.0),
        setting(0.2): Scores(scores(0.51, 20.0).figures, again),
    }
    assert on_front(pair) == list(pair)


def test_the_best_are_the_front_both_models_and_lossless():
    scored = {
        VERIFIER: scores(1.0, 30.0, nats_per_token=0.0),
        DRAFTER: scores(0.2, 20.0),
        Setting(): scores(1.1, 30.0, nats_per_token=0.0),
        Setting(max_draft=9): scores(1.2, 30.0, nats_per_token=0.0),
        setting(0.3): scores(0.6, 25.0, nats_per_token=0.2),
        setting(1.0): scores(0.7, 20.0, nats_per_token=0.3),  # the drafter in disguise
    }
    for quality in ("bleu", None):
        rows = best_rows(scored, quality, Bootstrap())
        told = {row["setting"]: row["front"] for row in rows}
        assert list(told)[-1] == DRAFTER.described()
        assert Setting().described() in told and Setting(max_draft=9).described() not in told
        assert told[VERIFIER.described()] == told[setting(0.3).described()] == "yes"
        assert setting(1.0).described() not in told
        assert ("bleu" in rows[0]) == (quality is not None)


def test_tables_are_csv():
    scored = {VERIFIER: scores(1.0, 30.0, nats_per_token=0.0), setting(0.3): scores(0.6, 25.0)}
    estimates = {setting(0.3): Expected(setting=setting(0.3), tokens_per_call=1.5)}
    rows = list(csv.DictReader(io.StringIO(csv_text(flat_rows(scored, estimates)))))
    assert [row["rule"] for row in rows] == ["Lossless", "OPT(0.3)"]
    assert [row["expected_tokens_per_call"] for row in rows] == ["", "1.5"]
    assert rows[1]["bleu"] == "25.0" and rows[1]["nats_per_token"] == ""


def test_estimates_that_hardly_differ_have_one_row():
    def expected(one, tokens, nats):
        return Expected(setting=one, tokens_per_call=tokens, nats_per_token=nats)

    rows = estimated_rows(
        [
            expected(VERIFIER, 1.0, 0.0),
            expected(DRAFTER, 5.0, 0.4),
            expected(Setting(), 2.0, 0.0),
            expected(setting(0.2), 2.5, 0.1),
            expected(setting(0.2, "Diff"), 2.5, 0.1),  # as many tokens, and as far
            expected(setting(1.0), 3.0, 0.4),  # the drafter in disguise
            expected(setting(0.5), 2.4, 0.3),
            expected(setting(0.21), 2.52, 0.101),  # hardly more than OPT(0.2)
            expected(setting(0.3), 2.6, 0.2),
            # Other drafts cost other passes, and have a front of their own.
            expected(Setting(max_draft=9), 4.0, 0.0),
            expected(setting(0.9, max_draft=9), 3.9, 0.1),
        ]
    )
    told = [(row["setting"], row["front"]) for row in rows]
    chains = [Setting(), setting(0.2), setting(0.3), setting(1.0)]
    named = [VERIFIER, DRAFTER, *chains, Setting(max_draft=9)]
    fronts = ["-", "-", "yes", "yes", "yes", "yes", "yes"]
    assert told == list(zip([one.described() for one in named], fronts, strict=True))
