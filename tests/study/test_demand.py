"""Demands are read from words, and say of figures how far they are on the good side."""

import math

import pytest

from specjax.study.demand import Clause, Demand
from specjax.text.setting import Setting
from tests.study.synthetic import ALONE, LOSSLESS, TRUTH, World

READ = {
    "quality >= 35": Clause("quality", 35.0),
    "Quality ≥ 35.5": Clause("quality", 35.5),
    "latency <= 0.2 seconds": Clause("latency", 0.2),
    "latency<=2e-1s": Clause("latency", 0.2),
    "latency <= 0.7 of the verifier": Clause("relative_latency", 0.7),
    "as good as the verifier": Clause("difference", 0.0),
    "as good as the verifier within 0.5": Clause("difference", -0.5),
    "nats per  token ≤ 0.05": Clause("nats_per_token", 0.05),
    "quality >= 35.12345678": Clause("quality", 35.12345678),
    "as good as the verifier within 0.12345678": Clause("difference", -0.12345678),
}
WRONG = {
    "": "demand must look like",
    "quality <= 35": "demand must look like",
    "quality >= much": "demand must look like",
    "quality >= 1.2.3": "demand must look like",
    "latency <= 0 s": "out of range",
    "latency <= 0.7": "demand must look like",  # seconds, or of the verifier?
    "latency <= 0.7 of the drafter": "demand must look like",
    "nats per token <= -1": "out of range",
    "as good as the verifier within -1": "out of range",
    "quality >= 3 and fast": "demand must look like",
}


@pytest.mark.parametrize("text", READ)
def test_a_demand_is_read_and_told(text):
    (clause,) = Demand.of(text).clauses
    assert clause == READ[text]
    assert Demand.of(clause.described()).clauses == (clause,)


def test_several_demands_are_joined():
    demand = Demand.of("quality >= 30 and latency <= 0.7 of the verifier")
    assert demand.clauses == (Clause("quality", 30.0), Clause("relative_latency", 0.7))
    assert Demand.of(demand.described()) == demand
    assert not demand.wants_quality and Demand.of("latency <= 1 s").wants_quality


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_demand_is_told_in_a_line(text):
    with pytest.raises(ValueError, match=WRONG[text]) as found:
        Demand.of(text)
    assert repr(text) in str(found.value) and "\n" not in str(found.value)
    with pytest.raises(ValueError, match="demand must be a text"):
        Demand.of(3)


@pytest.mark.parametrize(
    "text, slack",
    [
        ("quality >= 40", 50.0 - 1.5 * 4 - 40),
        ("as good as the verifier within 2", 2 - 1.5 * 4),
        ("latency <= 0.06 s", 0.06 - 0.1 * (0.7 - 0.04 * 4)),
        ("latency <= 0.5 of the verifier", 0.5 - (0.7 - 0.04 * 4)),
        ("nats per token <= 0.05", 0.05 - 0.02 * 4),
    ],
)
def test_slack_is_positive_where_the_demand_is_met(text, slack):
    setting = Setting(rule="OPT(0.4)")
    world = World(0, rows=(20_000, 1))
    (clause,) = Demand.of(text).clauses
    found = clause.slack(world.look(setting, 0), world.look(ALONE, 0), "bleu")
    assert found.value == pytest.approx(slack, abs=5.0 * found.error)
    assert found.error < 0.1 and found.resampled.shape == (200,)
    # A figure that is not there meets nothing.
    scores = world.look(setting, 0)
    for values in scores.figures.values():
        values["value"] = None
    assert math.isnan(clause.slack(scores, world.look(ALONE, 0), "bleu").value)
    if "quality" in text:
        assert math.isnan(clause.slack(world.look(setting, 0), scores, None).value)


def test_lossless_settings_meet_some_demands_by_law():
    by_law = {
        text: Demand.of(text).clauses[0].holds_by_law(LOSSLESS)
        for text in ("as good as the verifier", "nats per token <= 0", "quality >= 0")
    }
    assert list(by_law.values()) == [True, True, False]
    lossy = [setting for setting in TRUTH if setting.rule != "Lossless"]
    assert not any(Clause("difference", 0.0).holds_by_law(setting) for setting in lossy)
