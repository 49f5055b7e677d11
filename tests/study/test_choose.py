"""Which settings are measured, and which is chosen, where the truth is known."""

import dataclasses
import itertools
import math

import pytest

from specjax.errors import UserError
from specjax.study.choose import (
    DO_NOT_DRAFT,
    DRAFT,
    HELD_OUT,
    NOT_MET,
    Judge,
    Search,
    answer,
    promising,
)
from specjax.study.expect import Expected
from specjax.study.measure import Measuring, MeasuringError
from specjax.text.setting import Setting
from tests.study.synthetic import ALONE, BOOTSTRAP, LOSSLESS, SETTINGS, TRUTH, World, world_of

SEEDS = 30
LIMITS = ({"max_loss": 3.0}, {"max_latency": 0.55}, {"max_nats": 0.1})


def searched(limits, seed=0, settings=SETTINGS, world=None, quality="bleu", **others):
    world = world or World(seed, **others)
    judge = Judge(Search(**limits), ALONE, quality, BOOTSTRAP)
    results, choice = answer(world.look, settings, judge, world.parts)
    return world, choice, results


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_what_is_chosen_keeps_the_limits_on_texts_it_has_not_seen(limits):
    met, gains = [], []
    for seed in range(SEEDS):
        _, choice, results = searched(limits, world=world_of(seed))
        if choice.answer == NOT_MET:
            continue
        met.append(results["held_out"]["met"])
        gains.append(1.0 / TRUTH[choice.setting][1])
    assert len(met) >= 0.8 * SEEDS and sum(met) >= 0.9 * len(met)
    assert sum(gains) / len(gains) > 1.3  # and it is no timid choice


def test_without_intervals_limits_are_missed():
    """The negative control: the same search that believes every figure."""
    missed = 0
    for seed in range(SEEDS):
        world = world_of(seed)
        judge = Judge(Search(max_loss=3.0), ALONE, "bleu", BOOTSTRAP)
        names = list(world.parts)[:-1]
        found = {setting: world.look(setting, names) for setting in TRUTH}
        loss = {
            x: judge.verdict(x, one, found[ALONE])["max_loss"]["value"] for x, one in found.items()
        }
        good = [x for x in found if loss[x] <= 3.0]
        fastest = min(good, key=lambda x: found[x].value("relative_latency"))
        held_out = (world.look(x, [HELD_OUT]).value("bleu") for x in (ALONE, fastest))
        verifier, own = held_out
        missed += verifier - own > 3.0
    assert missed > 0.25 * SEEDS


def test_more_texts_allow_a_faster_choice():
    speeds = []
    for rows in ((10, 20, 40, 40), (1000, 2000, 4000, 4000)):
        _, choice, _ = searched({"max_loss": 4.0}, 1, rows=rows)
        speeds.append(0.0 if choice.setting is None else 1.0 / TRUTH[choice.setting][1])
    assert speeds[0] < speeds[1]
    assert speeds[1] == pytest.approx(1.0 / TRUTH[Setting(rule="OPT(0.2)")][1])


def test_rounds_halve_the_settings_and_look_at_more_texts():
    world, choice, results = searched({"max_nats": 0.1})
    assert choice.answer == DRAFT
    rounds = [{x["setting"]: x for x in one["settings"]} for one in results["rounds"]]
    sizes = [len(one) - 1 for one in rounds]
    assert sizes[0] == 9 and all(b <= math.ceil(a / 2) for a, b in itertools.pairwise(sizes))
    assert [one["texts"] for one in results["rounds"]] == [50, 100, 200]
    assert all(ALONE.described() in one for one in rounds)
    # What is shown to miss the limit does not go on.
    gone = Setting(rule="OPT(0.8)").described()
    assert rounds[0][gone]["limits"]["max_nats"]["within"] is False and gone not in rounds[1]
    assert len(world.looked) == sum(map(len, rounds)) + 2


def test_by_law_a_lossless_setting_is_as_good():
    _, choice, results = searched({"max_loss": 0.0})
    assert choice.answer == DRAFT and choice.setting == LOSSLESS
    limit = results["held_out"]["limits"]["max_loss"]
    assert limit["by_law"] and limit["met"] and limit["within"]
    assert searched({"max_nats": 0.0})[1].setting == LOSSLESS


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
def test_which_rules_keep_a_bound_on_nats_by_their_law(rule, surely):
    search = Search(max_nats=0.05, max_loss=0.0, max_latency=0.9)
    assert search.holds_by_law("max_nats", Setting(rule=rule)) == surely
    # Only the lossless rule has the verifier's quality.
    assert search.holds_by_law("max_loss", Setting(rule=rule)) == (rule == "Lossless")
    assert not search.holds_by_law("max_latency", Setting(rule=rule))


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
    """All drafts have this relative latency, and its relative noise."""

    relative = 1.0

    def _of(self, setting, rows):
        scores = super()._of(setting, rows)
        if setting != ALONE:
            figure = scores.figures["relative_latency"]
            share = self.relative / figure["value"]
            for name in ("value", "low", "high"):
                figure[name] *= share
            scores.resampled["relative_latency"] *= share
        return scores


def test_do_not_draft_where_nothing_is_faster():
    class Slow(Scaled):
        relative = 1.4

    _, choice, _ = searched({"max_loss": 0.0}, world=Slow(0), settings=[LOSSLESS])
    assert choice.answer == DO_NOT_DRAFT and choice.setting == ALONE
    assert "no other setting that keeps the limits is faster" in choice.why
    assert searched({"max_loss": 0.0}, settings=[])[1].answer == DO_NOT_DRAFT


def test_what_may_be_faster_by_chance_is_not_chosen():
    class Even(Scaled):
        relative = 0.99

    world = Even(1, rows=(8, 16, 16))
    _, choice, _ = searched({"max_loss": 0.0}, world=world, settings=[LOSSLESS])
    assert choice.answer == DO_NOT_DRAFT and "this may be chance" in choice.why


def test_a_lead_that_is_gone_on_unseen_texts_is_not_chosen():
    class Lucky(Scaled):
        relative = 0.7

        def look(self, setting, names):
            self.relative = 1.0 if HELD_OUT in names else 0.7
            return super().look(setting, names)

    _, choice, results = searched({"max_loss": 0.0}, world=Lucky(0), settings=[LOSSLESS])
    assert choice.answer == DO_NOT_DRAFT and choice.setting == ALONE
    assert "on held-out texts: its lead may be chance" in choice.why
    assert results["held_out"]["figures"] == results["held_out"]["verifier"]


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"max_latency": 0.2}, "OPT(0.8), Block, G=5, T=1 comes closest to MAX_LATENCY=0.2: it"),
        ({"max_latency": 0.3, "max_nats": 0.02}, "comes closest to MAX_LATENCY=0.3: it has"),
    ],
)
def test_it_says_which_setting_comes_closest(limits, why):
    _, choice, results = searched(limits, 3)
    assert choice.answer == NOT_MET and choice.setting is None and why in choice.why
    assert results["setting"] is None and results["held_out"] is None


def test_where_only_the_latency_is_bounded_the_best_is_chosen():
    _, choice, _ = searched({"max_latency": 0.9}, rows=(4000, 8000, 8000))
    best = max(TRUTH[setting][0] for setting in SETTINGS)
    assert choice.answer == DRAFT and TRUTH[choice.setting][0] == best


def test_a_lossless_draft_is_better_than_none_where_only_the_latency_is_bounded():
    for seed in range(3):
        _, choice, _ = searched({"max_latency": 3.0}, seed)
        assert choice.answer == DRAFT and choice.setting == LOSSLESS
        assert "lossless: its quality is the verifier" in choice.why
    lossy = [setting for setting in SETTINGS if setting != LOSSLESS]
    assert searched({"max_latency": 3.0}, settings=lossy)[1].answer == DO_NOT_DRAFT


def test_the_fastest_lossless_setting_is_in_the_last_round():
    for seed in range(10):
        rounds = searched({"max_nats": 0.03}, seed, rows=(16, 32, 64, 64))[2]["rounds"]
        for one in rounds:
            assert LOSSLESS.described() in {x["setting"] for x in one["settings"]}


def test_a_setting_that_fails_ends_alone():
    class Broken(World):
        def look(self, setting, names):
            if setting == LOSSLESS:
                raise MeasuringError(MemoryError("no\nmemory"))
            return super().look(setting, names)

    _, choice, results = searched({"max_nats": 0.1}, world=Broken(0))
    assert choice.answer == DRAFT and choice.setting != LOSSLESS
    assert LOSSLESS.described() not in {x["setting"] for x in results["rounds"][0]["settings"]}

    class Full(World):
        def look(self, setting, names):
            if setting == LOSSLESS:
                raise OSError("the disk is full")
            return super().look(setting, names)

    with pytest.raises(OSError, match="the disk is full"):
        searched({"max_nats": 0.1}, world=Full(0), settings=[LOSSLESS])


def test_without_quality_only_lossless_settings_keep_a_bound_on_it():
    for limits in ({"max_nats": 0.0}, {"max_loss": 0.0}):
        assert searched(limits, quality=None)[1].setting == LOSSLESS


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
    taken = promising(estimates(), 8)
    assert len(taken) == 8 and taken[0].is_lossless
    rules = [setting.rule.partition("(")[0] for setting in taken]
    assert min(rules.count("OPT"), rules.count("TokenV3")) >= 3
    strengths = [setting.strength for setting in taken if not setting.is_lossless]
    assert strengths == sorted(strengths) and strengths[-1] >= 0.8
    # Fewer tokens at more nats than another strength of its rule.
    assert Setting(rule="TokenV3(0.95)") not in promising(estimates(), 99)
    assert len(promising(estimates(), 99)) == len(estimates()) - 2
    assert promising(estimates(), 1)[0].is_lossless
    assert promising([Expected(setting=ALONE)], 3) == []


def test_promising_settings_keep_a_bound_on_nats():
    nats = {one.setting: one.nats_per_token for one in estimates()}
    taken = promising(estimates(), 6, 0.05)
    assert len(taken) == 6 and all(nats[setting] <= 0.075 for setting in taken)
    assert all(setting.is_lossless for setting in promising(estimates(), 6, 0.0))


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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_loss": -1.0}, "max_loss must be finite and at least 0"),
        ({"max_nats": math.inf}, "max_nats must be finite and at least 0"),
        ({"max_latency": 0.0}, "max_latency must be finite and above 0"),
        ({"max_loss": "1"}, "max_loss must be"),
        ({"held_out": 1.0}, "held_out must"),
        ({"rounds": 0}, "rounds must be a whole number of at least 1"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_a_wrong_search_is_named(values, message):
    with pytest.raises(UserError, match=message):
        Search(**values)


def test_each_round_has_twice_as_many_texts():
    search, how = Search(rounds=3), Measuring(metrics=(), latency_limit=20)
    parts = search.parts(200, how)
    assert [place[:2] for place in parts.values()] == [(0, 25), (25, 50), (50, 100), (100, 200)]
    assert [timed for *_, timed in parts.values()] == [5, 5, 10, 20]
    with pytest.raises(UserError, match="of 8 texts, 4 are held out"):
        search.parts(8, how)
