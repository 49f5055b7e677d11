"""Which settings are measured, and which is chosen, where the truth is known."""

import dataclasses
import math
from typing import ClassVar

import pytest

from specjax.errors import UserError
from specjax.study.choose import (
    DO_NOT_DRAFT,
    DRAFT,
    NOT_MET,
    Judge,
    Search,
    answer,
    promising,
)
from specjax.study.expect import Expected
from specjax.study.measure import Measuring, MeasuringError, Scores
from specjax.study.points import COMPARED, HELD_OUT
from specjax.text.setting import Setting
from tests.study.synthetic import ALONE, BOOTSTRAP, LOSSLESS, SETTINGS, TRUTH, World, world_of

SEEDS = 30
LIMITS = ({"max_loss": 3.0}, {"max_latency": 0.55}, {"max_nats": 0.1})


def searched(limits, seed=0, settings=SETTINGS, world=None, quality="bleu", **others):
    world = world or World(seed, **others)
    judge = Judge(Search(**limits), ALONE, quality, BOOTSTRAP)
    scored = {setting: world.look(setting, COMPARED) for setting in (ALONE, *settings)}
    return answer(world.look, scored, judge, world.parts)


def chosen(results):
    return None if results["setting"] is None else Setting(**results["setting"])


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_what_is_chosen_keeps_the_limits_on_texts_it_has_not_seen(limits):
    met, gains = [], []
    for seed in range(SEEDS):
        results = searched(limits, world=world_of(seed))
        if results["answer"] == NOT_MET:
            continue
        met.append(results["held_out"]["met"])
        gains.append(1.0 / TRUTH[chosen(results)][1])
    assert len(met) >= 0.8 * SEEDS and sum(met) >= 0.9 * len(met)
    assert sum(gains) / len(gains) > 1.3  # and it is no timid choice


def test_every_measured_setting_is_considered():
    results = searched({"max_nats": 0.1})
    assert results["answer"] == DRAFT and results["texts"] == 200
    within = {x["setting"]: x["limits"]["max_nats"]["within"] for x in results["considered"]}
    assert within.keys() == {setting.described() for setting in TRUTH}
    assert within[LOSSLESS.described()] and within[results["described"]]
    assert within[Setting(rule="OPT(0.8)").described()] is False


def test_by_law_a_lossless_setting_is_as_good():
    results = searched({"max_loss": 0.0})
    assert results["answer"] == DRAFT and chosen(results) == LOSSLESS
    limit = results["held_out"]["limits"]["max_loss"]
    assert limit["by_law"] and limit["met"] and limit["within"]
    # Without a quality only lossless settings keep a bound on it.
    for limits in ({"max_nats": 0.0}, {"max_loss": 0.0}):
        assert chosen(searched(limits, quality=None)) == LOSSLESS


def test_which_rules_keep_a_bound_on_nats_by_their_law():
    search = Search(max_nats=0.05, max_loss=0.0, max_latency=0.9)
    surely = ("Lossless", "KLBall(0.05)", "KLBall(0.01)")
    for rule in (*surely, "KLBall(0.06)", "KLPrice(0.01)", "Lossy(0.01)"):
        setting = Setting(rule=rule)
        assert search.holds_by_law("max_nats", setting) == (rule in surely)
        # Only the lossless rule has the verifier's quality.
        assert search.holds_by_law("max_loss", setting) == (rule == "Lossless")
        assert not search.holds_by_law("max_latency", setting)


def test_a_bound_on_nats_adds_the_best_rule_that_surely_keeps_it():
    grid = [ALONE, LOSSLESS, Setting(max_draft=3), Setting(rule="Lossy(0.4)")]
    search = Search(max_nats=0.05, max_latency=0.9)
    added = search.with_balls(grid)[len(grid) :]
    assert added == [Setting(rule="KLBall(0.05)"), Setting(rule="KLBall(0.05)", max_draft=3)]
    for other in (Search(), Search(max_loss=3.0), Search(max_nats=0.0)):
        assert other.with_balls(grid) == grid
    cold = [ALONE, Setting(temperature=0.0)]
    assert search.with_balls(cold) == cold
    assert search.with_balls([*grid, added[0]]) == [*grid, *added]


class Scaled(World):
    """All drafts have this relative latency, with its relative noise, in each part of the texts."""

    latencies: ClassVar[dict[str, float]] = {}

    def look(self, setting, part):
        scores = super().look(setting, part)
        if setting == ALONE:
            return scores
        figures, again = dict(scores.figures), dict(scores.resampled)
        share = self.latencies[part] / figures["relative_latency"]["value"]
        again["relative_latency"] = share * again["relative_latency"]
        ends = {
            name: share * figures["relative_latency"][name] for name in ("value", "low", "high")
        }
        figures["relative_latency"] = {**figures["relative_latency"], **ends}
        return Scores(figures, again)


@pytest.mark.parametrize(
    ("chosen_by", "held_out", "rows", "why"),
    [
        (1.4, 1.4, 200, "no other setting that keeps the limits is faster"),
        (0.99, 0.99, 16, "this may be chance"),
        (0.7, 1.0, 200, "on held-out texts: its lead may be chance"),
    ],
)
def test_what_is_not_shown_to_be_faster_is_not_chosen(chosen_by, held_out, rows, why):
    world = Scaled(0, rows=(rows, rows))
    world.latencies = {COMPARED: chosen_by, HELD_OUT: held_out}
    results = searched({"max_loss": 0.0}, world=world, settings=[LOSSLESS])
    assert results["answer"] == DO_NOT_DRAFT and chosen(results) == ALONE
    assert why in results["why"]
    assert results["held_out"]["figures"] == results["held_out"]["verifier"]
    assert searched({"max_loss": 0.0}, settings=[])["answer"] == DO_NOT_DRAFT


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"max_latency": 0.2}, "OPT(0.8), Block, G=5, T=1 comes closest to MAX_LATENCY=0.2: it"),
        ({"max_latency": 0.3, "max_nats": 0.02}, "comes closest to MAX_LATENCY=0.3: it has"),
    ],
)
def test_it_says_which_setting_comes_closest(limits, why):
    results = searched(limits, 3)
    assert results["answer"] == NOT_MET and why in results["why"]
    assert results["setting"] is None and results["held_out"] is None


def test_where_only_the_latency_is_bounded_the_best_is_chosen():
    results = searched({"max_latency": 0.9}, rows=(8000, 8000))
    best = max(TRUTH[setting][0] for setting in SETTINGS)
    assert results["answer"] == DRAFT and TRUTH[chosen(results)][0] == best


def test_a_lossless_draft_is_better_than_none_where_only_the_latency_is_bounded():
    for seed in range(3):
        results = searched({"max_latency": 3.0}, seed)
        assert results["answer"] == DRAFT and chosen(results) == LOSSLESS
        assert "lossless: its quality is the verifier" in results["why"]
    lossy = [setting for setting in SETTINGS if setting != LOSSLESS]
    assert searched({"max_latency": 3.0}, settings=lossy)["answer"] == DO_NOT_DRAFT


def test_a_choice_that_cannot_be_confirmed_is_told():
    class Broken(World):
        def look(self, setting, part):
            if (setting, part) == (LOSSLESS, HELD_OUT):
                raise MeasuringError(MemoryError("no\nmemory"))
            return super().look(setting, part)

    with pytest.raises(UserError, match=r"failed on the held-out texts: MemoryError: no memory"):
        searched({"max_loss": 0.0}, world=Broken(0), settings=[LOSSLESS])


def test_without_the_verifier_alone_nothing_is_chosen():
    world = World(0)
    judge = Judge(Search(max_nats=0.1), ALONE, "bleu", BOOTSTRAP)
    scored = {LOSSLESS: world.look(LOSSLESS, COMPARED)}
    results = answer(world.look, scored, judge, world.parts)
    assert results["answer"] == NOT_MET and "the verifier alone failed" in results["why"]
    assert results["considered"] == []


def expected(rule, tokens, nats, max_draft=5, **values):
    return Expected(
        setting=Setting(rule=rule, max_draft=max_draft, **values),
        tokens_per_call=tokens,
        nats_per_token=nats,
    )


def estimates():
    found = [Expected(setting=ALONE)]
    found += [expected("Lossless", 1.0 + 0.3 * g, 0.0, g) for g in (2, 4, 6)]
    for i in range(1, 10):
        found.append(expected(f"OPT({i / 10})", 2.6 + 0.1 * i, 0.02 * i))
        found.append(expected(f"TokenV3({i / 10})", 2.55 + 0.1 * i, 0.02 * i))
    return [*found, expected("TokenV3(0.95)", 2.0, 0.5)]


def test_promising_settings_are_spread_over_divergence_rules_and_drafts():
    known = estimates()
    taken = promising(known, 8)
    assert len(taken) == 8 and taken[0].is_lossless
    rules = [setting.rule.partition("(")[0] for setting in taken]
    assert min(rules.count("OPT"), rules.count("TokenV3")) >= 3
    strengths = [setting.strength for setting in taken if not setting.is_lossless]
    assert strengths == sorted(strengths) and strengths[-1] >= 0.8
    # Fewer tokens at more nats than another strength of its rule.
    assert Setting(rule="TokenV3(0.95)") not in promising(known, 99)
    assert len(promising(known, 99)) == len(known) - 2
    assert promising(known, 1)[0].is_lossless
    assert promising([Expected(setting=ALONE)], 3) == []
    # With a bound on nats they keep it, about.
    nats = {one.setting: one.nats_per_token for one in known}
    taken = promising(known, 6, 0.05)
    assert len(taken) == 6 and all(nats[setting] <= 0.075 for setting in taken)
    assert all(setting.is_lossless for setting in promising(known, 6, 0.0))


def test_endless_divergences_leave_several_strengths():
    """As at temperature 0, where all lossy settings have them."""
    endless = [
        one if one.setting.is_lossless else dataclasses.replace(one, nats_per_token=math.inf)
        for one in estimates()
    ]
    taken = promising(endless, 12)
    assert len(taken) == 12 and taken[0].is_lossless
    for rule in ("OPT", "TokenV3"):
        assert sum(setting.rule.startswith(rule) for setting in taken) > 3
    # Those that are infinitely far keep no bound.
    assert all(setting.is_lossless for setting in promising(endless, 12, 9.0))


def test_a_wrong_search_is_named():
    for values, message in (
        ({"max_loss": -1.0}, "max_loss must be finite and at least 0"),
        ({"max_nats": math.inf}, "max_nats must be finite and at least 0"),
        ({"max_latency": 0.0}, "max_latency must be finite and above 0"),
        ({"held_out": 1.0}, "held_out must"),
        ({"candidates": 0}, "candidates must be a whole number of at least 1"),
        ({"seed": -1}, "seed must be"),
    ):
        with pytest.raises(UserError, match=message):
            Search(**values)


def test_texts_are_held_out():
    search, how = Search(held_out=0.25), Measuring(metrics=(), latency_limit=60)
    assert search.parts(200, how) == {COMPARED: (0, 150, 60), HELD_OUT: (150, 200, 50)}
    told = "of 4 texts, 1 are held out and 3 are left to choose by; both need at least 2: add"
    with pytest.raises(UserError, match=told):
        search.parts(4, how)
