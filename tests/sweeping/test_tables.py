"""Table 2 and the front, on points by hand."""

import numpy as np
import pytest

from specjax.evaluation import Bootstrap
from specjax.sweeping import Point, Scores, best_quality, curves, least_cost, pareto, table_2

COST = np.array([1.2, 0.8, 0.5])
QUALITY = np.array([30.0, 28.0, 20.0])


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (30.0, 1.2),  # the first point itself
        (29.0, 1.0),  # half of the way to the second
        (28.0, 0.8),
        (24.0, 0.65),  # half of the way from the second to the third
        (10.0, 0.5),  # all are better: the cheapest
        (31.0, np.nan),  # none is
    ],
)
def test_the_least_cost_is_between_neighbours(wanted, expected):
    np.testing.assert_allclose(least_cost(COST, QUALITY, wanted), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("most", "expected"), [(1.2, 30.0), (1.0, 29.0), (0.8, 28.0), (0.65, 24.0), (0.4, np.nan)]
)
def test_the_best_quality_is_between_neighbours(most, expected):
    np.testing.assert_allclose(best_quality(COST, QUALITY, most), expected, rtol=1e-12)


def test_a_curve_need_not_fall_and_resamples_have_a_quality_each():
    # Up and down again: the quality 5 is passed twice, at 1.5 and at 2.75.
    cost, quality = np.array([1.0, 2.0, 3.0, 0.9]), np.array([0.0, 10.0, 3.0, 4.0])
    assert least_cost(cost, quality, 5.0) == pytest.approx(1.5)
    assert least_cost(cost, quality, 3.5) == pytest.approx(0.9)  # the last point alone is cheaper
    again = np.stack([cost, cost + 1.0])
    found = least_cost(again, np.stack([quality, quality]), np.array([5.0, 20.0]))
    np.testing.assert_allclose(found, [1.5, np.nan])


def test_one_point_is_a_curve():
    one = np.array([0.7]), np.array([25.0])
    assert least_cost(*one, 25.0) == 0.7 and np.isnan(least_cost(*one, 25.1))
    assert best_quality(*one, 1.0) == 25.0 and np.isnan(best_quality(*one, 0.5))


def test_the_front_is_what_nothing_beats():
    cost, quality = [1.0, 2.0, 2.0, 3.0, 0.5], [5.0, 6.0, 7.0, 7.0, 1.0]
    assert pareto(cost, quality).tolist() == [True, False, True, False, True]
    assert pareto([1.0, 1.0], [2.0, 2.0]).all()  # equals beat nothing


def scores(latency, quality, spread=0.0):
    """Figures whose resamples are the value, and the value plus and minus a spread."""
    made = {"relative_latency": latency, "bleu": quality}
    figures = {name: {"value": x, "low": x, "high": x, "error": 0.0} for name, x in made.items()}
    moved = {"relative_latency": [0.0] * 3, "bleu": [-spread, 0.0, spread]}
    return Scores(figures, {name: x + np.array(moved[name]) for name, x in made.items()})


def point(strength, method="opt", **others):
    return Point(method=method, strength=strength, max_draft=5, **others)


VERIFIER = Point(method="verifier_alone")


def test_table_2_by_hand():
    scored = {
        VERIFIER: scores(1.0, 29.0),
        point(0.2): scores(0.8, 28.0),
        point(0.0): scores(1.2, 30.0),  # out of order
        point(0.4): scores(0.5, 20.0),
        point(0.1, "lossy"): scores(1.5, 25.0),
        point(0.1, temperature=0.0): scores(1.0, 1.0),  # no verifier at this temperature
    }
    opt, lossy = table_2(scored, "bleu", Bootstrap())
    assert opt["curve"]["method"] == "opt" and opt["points"] == 3
    assert opt["latency_reduction"]["value"] == pytest.approx(1.0)  # half-way from 1.2 to 0.8
    assert opt["best_quality"]["value"] == pytest.approx(29.0)
    assert opt["matched"] == opt["within"] == 1.0
    # Of the points themselves 0.0 alone is as good, and it is slower.
    assert opt["measured_strength"] == 0.0
    assert opt["measured_reduction"]["value"] == pytest.approx(1 / 1.2)
    assert lossy["latency_reduction"]["value"] is None and lossy["matched"] == 0.0
    assert lossy["best_quality"]["value"] is None and lossy["within"] == 0.0
    assert lossy["measured_reduction"] == dict.fromkeys(("value", "low", "high", "error"))
    assert lossy["measured_strength"] is None


def test_intervals_are_of_the_same_on_resamples():
    scored = {
        VERIFIER: scores(1.0, 29.0),
        point(0.0): scores(1.2, 30.0, spread=1.5),
        point(0.2): scores(0.8, 28.0, spread=1.5),
    }
    (row,) = table_2(scored, "bleu", Bootstrap())
    # Resampled by -1.5 no point is as good; by +1.5 the cheaper one is.
    assert row["matched"] == pytest.approx(2 / 3)
    assert row["latency_reduction"]["low"] == pytest.approx(1.0)
    assert row["latency_reduction"]["high"] == pytest.approx(1 / 0.8)
    assert row["best_quality"]["low"] == pytest.approx(27.5)
    # 28 is not shown to be below 29. The interval is of that point's latency.
    assert row["measured_strength"] == 0.2
    known = scored[point(0.2)]
    known.resampled["relative_latency"] = np.array([0.7, 0.8, 0.9])
    (row,) = table_2(scored, "bleu", Bootstrap())
    found = [row["measured_reduction"][name] for name in ("low", "value", "high")]
    assert found == pytest.approx([1 / 0.9, 1 / 0.8, 1 / 0.7])


def test_curves_are_told_apart_by_all_but_the_strength():
    asked = [point(0.2), point(0.1), point(0.1, drafter="small"), VERIFIER, point(0.1, "lossy")]
    found = curves(asked)
    assert [len(points) for points in found.values()] == [2, 1, 1]
    assert [p.strength for p in found[point(None)]] == [0.1, 0.2]
