"""The frontier of acceptance, its figure, and what a demand on nats per token adds."""

import math

import pytest

from specjax.study import plots
from specjax.study.demand import Clause, Demand
from specjax.study.expect import Expected
from specjax.study.frontier import PRICES, drawn_points, frontier_of, with_balls
from specjax.text.setting import Setting

ALONE = Setting(method="VerifierAlone")
LOSSLESS = Setting()


def test_each_sampling_and_drafter_has_a_frontier():
    settings = [ALONE, LOSSLESS, Setting(rule="OPT(0.1)"), Setting(rule="OPT(0.2)", max_draft=3)]
    line = frontier_of(settings)
    assert [setting.strength for setting in line] == list(PRICES)
    assert {setting.rule.split("(")[0] for setting in line} == {"KLPrice"}
    assert frontier_of([ALONE, LOSSLESS]) == []
    assert frontier_of([Setting(rule="OPT(0.1)", temperature=0.0)]) == []
    more = [*settings, Setting(rule="OPT(0.1)", drafter="small"), Setting(rule="OPT(0.1)", top_k=5)]
    assert len(frontier_of(more)) == 3 * len(PRICES)


def test_a_demand_on_nats_adds_the_best_rule_that_surely_meets_it():
    grid = [ALONE, LOSSLESS, Setting(max_draft=3), Setting(rule="Lossy(0.4)")]
    demand = Demand.of("nats per token <= 0.05 and latency <= 0.9 of the verifier")
    added = with_balls(grid, demand)[len(grid) :]
    assert added == [Setting(rule="KLBall(0.05)"), Setting(rule="KLBall(0.05)", max_draft=3)]
    for other in (None, Demand.of("quality >= 3"), Demand.of("nats per token <= 0")):
        assert with_balls(grid, other) == grid
    cold = [ALONE, Setting(temperature=0.0)]
    assert with_balls(cold, demand) == cold
    assert with_balls([*grid, added[0]], demand) == [*grid, *added]


@pytest.mark.parametrize(
    ("rule", "surely"),
    [
        ("Lossless", True),
        ("KLBall(0.05)", True),
        ("KLBall(0.01)", True),
        ("KLBall(0.06)", False),
        ("KLPrice(0.01)", False),
        ("Lossy(0.01)", False),
    ],
)
def test_which_rules_meet_a_bound_on_nats_by_their_law(rule, surely):
    clause = Clause("nats_per_token", 0.05)
    assert clause.holds_by_law(Setting(rule=rule)) == surely
    # Only the lossless rule has the verifier's quality.
    equal = Clause("difference", 0.0)
    assert equal.holds_by_law(Setting(rule=rule)) == (rule == "Lossless")


def estimates(**rules):
    found = {}
    for rule, points in rules.items():
        for strength, nats, accepted in points:
            setting = Setting(rule=f"{rule}({strength})")
            found[setting] = Expected(setting=setting, acceptance=accepted, nats_per_token=nats)
    return found


def test_the_figure_has_the_frontier_as_a_line():
    line = estimates(KLPrice=[(0.1, 0.01, 0.6), (1.0, 0.1, 0.8), (20.0, 0.5, 1.0)])
    points = estimates(Lossy=[(0.2, 0.02, 0.6), (0.5, 0.2, 0.8)], Mixture=[(0.5, math.inf, 0.9)])
    drawn = plots.acceptance_figure(points, line)
    (axis,) = drawn.axes
    shown = {one.get_label(): one.get_xydata().tolist() for one in axis.get_lines()}
    assert shown["frontier"] == [[0.01, 0.6], [0.1, 0.8], [0.5, 1.0]]
    assert shown["Lossy"] == [[0.02, 0.6], [0.2, 0.8]]
    # A rule with impossible tokens has no place in it.
    assert set(shown) == {"frontier", "Lossy"}
    assert set(plots.draw_acceptance(points, line)) == {f"acceptance_nats.{x}" for x in plots.KINDS}
    assert plots.draw_acceptance(points, {}) == {}


def test_settings_with_the_same_rule_are_one_point():
    found = {}
    for setting in (Setting(rule="OPT(0.1)"), Setting(rule="OPT(0.1)", max_draft=3), ALONE):
        found[setting] = Expected(setting=setting, acceptance=0.5)
    assert [x.setting for x in drawn_points(found)] == [Setting(rule="OPT(0.1)")]
