"""The figures: what is drawn, and that it can be told apart without colours."""

import math

import numpy as np

from specjax.evaluation import Bootstrap
from specjax.study import Setting, plots
from specjax.study.expect import Expected
from specjax.study.measure import Scores

VERIFIER, DRAFTER = Setting(method="VerifierAlone"), Setting(method="DrafterAlone")
BOOTSTRAP = Bootstrap()


def scores(quality, **figures):
    made = {"bleu": quality, **figures}
    return Scores({k: {"value": v, "low": v, "high": v, "error": 0.0} for k, v in made.items()}, {})


def setting(rule, strength, **others):
    return Setting(rule=f"{rule}({strength})", **others)


SCORED = {
    VERIFIER: scores(30.0, relative_latency=1.0),
    DRAFTER: scores(20.0, relative_latency=0.2),
    setting("OPT", 0.1): scores(29.0, relative_latency=0.9, nats_per_token=0.1),
    setting("OPT", 0.3): scores(25.0, relative_latency=0.6, nats_per_token=None),
    setting("Lossy", 0.3): scores(24.0, relative_latency=0.8, nats_per_token=None),
    setting("Chow", 0.3, method="TokenCascade"): scores(22.0, relative_latency=0.4),
}


def drawn(file="quality_latency", scored=SCORED):
    (axis,) = plots.figure(scored, file, "bleu", BOOTSTRAP).axes
    handles, labels = axis.get_legend_handles_labels()
    return axis, dict(zip(labels, handles, strict=True))


def test_methods_references_and_the_front_are_in_the_legend():
    axis, handles = drawn()
    # What all points with drafts share, such as G=5, is not told.
    methods = ["OPT", "Lossy", "TokenCascade, Chow"]
    assert set(handles) == {*methods, "verifier alone", "drafter alone", "Pareto front"}
    shown = [text.get_text() for text in axis.figure.legends[0].get_texts()]
    assert shown[:3] == methods and len(shown) == 6
    assert handles["OPT"].lines[0].get_xydata().tolist() == [[0.9, 29.0], [0.6, 25.0]]
    assert set(handles["verifier alone"].get_ydata()) == {30.0}
    assert set(handles["drafter alone"].get_ydata()) == {20.0}
    front = handles["Pareto front"].get_xydata().tolist()
    assert front == [[0.4, 22.0], [0.6, 25.0], [0.9, 29.0]]  # not the lossy one
    assert "latency" in axis.get_xlabel() and axis.get_ylabel() == "bleu"


def test_the_drafter_alone_defers_nothing():
    """Though its figures do not say so: it beats what defers more and is worse."""
    alone = {VERIFIER: scores(30.0, deferrals_per_token=1.0), DRAFTER: SCORED[DRAFTER]}
    few, fewer = (
        {setting("OPT", a): scores(y, deferrals_per_token=a)} for a, y in ((0.2, 25.0), (0.1, 19.0))
    )
    _, handles = drawn("quality_deferrals", {**alone, **few, **fewer})
    assert handles["Pareto front"].get_xydata().tolist() == [[0.2, 25.0]]


def test_curves_differ_in_grey():
    many = {
        setting("OPT", 0.1, max_draft=i + 1): scores(1.0 + i, relative_latency=0.5)
        for i in range(24)
    }
    _, handles = drawn(scored=many)
    lines = [handles[f"OPT, G={i + 1}"].lines[0] for i in range(24)]
    assert len({line.get_marker() for line in lines[:13]}) == 13
    assert len({(line.get_marker(), line.get_linestyle()) for line in lines}) == 24
    assert lines[0].get_linestyle() != lines[1].get_linestyle()
    grey = [np.dot(line.get_color()[:3], (0.2126, 0.7152, 0.0722)) for line in lines]
    assert all(np.diff(grey) > 0.0) and grey[-1] < 0.85


def test_a_point_without_a_figure_is_left_out():
    _, handles = drawn("quality_nats")
    assert "Lossy" not in handles and "OPT" in handles
    assert handles["OPT"].lines[0].get_xydata().tolist() == [[0.1, 29.0]]
    assert plots.figure(SCORED, "quality_rejections", "bleu", BOOTSTRAP) is None
    figures = {name: plots.figure(SCORED, name, "bleu", BOOTSTRAP) for name in plots.PLOTS}
    assert {name for name, found in figures.items() if found} == {"quality_latency", "quality_nats"}
    assert set(plots.files_of("quality_nats", figures["quality_nats"])) == {
        f"quality_nats.{kind}" for kind in ("png", "pdf")
    }


def test_an_outlier_is_named_and_does_not_squeeze_the_others():
    far = {setting("TokenV3", 0.9): scores(30.0, relative_latency=17.0)}
    axis, plain = drawn(scored={**SCORED, **far})[0], drawn()[0]
    assert axis.get_xlim()[1] < 2.0 and plain.get_xlim()[1] < 2.0
    assert [text.get_text() for text in axis.texts] == ["1 further right, up to 17"]
    assert not plain.texts


def test_there_is_a_panel_for_each_temperature():
    greedy = {
        setting("OPT", 0.1, temperature=0.0): scores(28.0, relative_latency=0.7),
        setting("Chow", 0.1, temperature=0.0): scores(27.0, relative_latency=0.7),
    }
    figure = plots.figure({**SCORED, **greedy}, "quality_latency", "bleu", BOOTSTRAP)
    assert [axis.get_title() for axis in figure.axes] == ["temperature 0", "temperature 1"]
    colours = []
    for axis in figure.axes:
        handles, labels = axis.get_legend_handles_labels()
        colours.append(handles[labels.index("OPT")].lines[0].get_color())
    assert colours[0] == colours[1]


def test_without_points_nothing_is_drawn():
    for scored in ({}, {VERIFIER: SCORED[VERIFIER]}):
        assert not any(plots.figure(scored, name, "bleu", BOOTSTRAP) for name in plots.PLOTS)


def estimates(**rules):
    return {
        one: Expected(setting=one, acceptance=accepted, nats_per_token=nats)
        for rule, points in rules.items()
        for strength, nats, accepted in points
        for one in [setting(rule, strength)]
    }


def test_the_figure_of_acceptance_has_the_frontier_as_a_line():
    line = estimates(KLPrice=[(0.1, 0.01, 0.6), (1.0, 0.1, 0.8), (20.0, 0.5, 1.0)])
    points = estimates(Lossy=[(0.2, 0.02, 0.6), (0.5, 0.2, 0.8)], Mixture=[(0.5, math.inf, 0.9)])
    # The same rule with other drafts is the same point.
    again = Setting(rule="Lossy(0.2)", max_draft=3)
    points[again] = Expected(setting=again, acceptance=0.6, nats_per_token=0.02)
    drawn = plots.acceptance_figure(points, line)
    (axis,) = drawn.axes
    shown = {one.get_label(): one.get_xydata().tolist() for one in axis.get_lines()}
    assert shown["frontier"] == [[0.01, 0.6], [0.1, 0.8], [0.5, 1.0]]
    assert shown["Lossy"] == [[0.02, 0.6], [0.2, 0.8]]
    # A rule with impossible tokens has no place in it.
    assert set(shown) == {"frontier", "Lossy"}
    files = plots.files_of("acceptance_nats", drawn)
    assert set(files) == {f"acceptance_nats.{x}" for x in plots.KINDS}
    assert plots.files_of("acceptance_nats", plots.acceptance_figure(points, {})) == {}
