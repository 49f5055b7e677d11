"""Settings: plain values with names that are those of the parts and of the gin files."""

import re

import pytest

from specjax import drafting, rules
from specjax.cli.gin_config import SHIPPED
from specjax.tuning import RULES, ScreenGrid, Setting


def test_a_setting_is_hashable_and_goes_through_json():
    one = Setting(rule="token_v3", strength=0.3, stopping="Entropy", threshold=1, max_draft=9)
    assert one.rule == "TokenV3" and one.stopping == "entropy" and one.verification == "Block"
    assert one in {Setting(**one.to_dict())}
    assert isinstance(one.make_rule(), rules.TokenV3)
    assert float(one.make_rule().alpha) == pytest.approx(0.3)
    assert one.make_stopping() == drafting.Entropy(1.0)
    assert "TokenV3(0.3)" in one.described() and "entropy(1)" in one.described()


def test_names_are_those_of_the_method_files():
    """`methods/opt.gin` decodes under the rule that `Setting(rule='opt')` means."""
    named = {}
    for file in (SHIPPED / "methods").glob("*.gin"):
        if found := re.search(r"^Decoder\.rule = @(\w+)\(\)", file.read_text(), re.M):
            named[file.stem] = found[1]
    known = {stem: rule for stem, rule in named.items() if stem.replace("_", "") == rule.lower()}
    del known["budgeted"]  # which holds another rule
    assert set(known.values()) == set(RULES)
    for stem, rule in known.items():
        given = None if rule == "Lossless" else 0.5
        assert Setting(rule=stem, strength=given).rule == rule


WRONG = {
    "rule": ({"rule": "best"}, ValueError, "rule must be one of Lossless, .*, got 'best'"),
    "kind": ({"rule": 3}, TypeError, "rule must be a name such as 'Lossless', got 3"),
    "no strength": ({"rule": "opt"}, ValueError, "OPT needs a strength"),
    "strength": ({"strength": 0.5}, ValueError, "Lossless has no strength: leave out strength=0.5"),
    "range": ({"rule": "lossy", "strength": 1.0}, ValueError, r"alpha must lie in \[0, 1\)"),
    "nan": ({"rule": "opt", "strength": float("nan")}, ValueError, "strength must be"),
    "threshold": ({"stopping": "confidence"}, ValueError, "confidence needs a threshold"),
    "policy": ({"stopping": "costs"}, ValueError, "stopping must be one of confidence, entropy"),
    "draft": ({"max_draft": -1}, ValueError, "max_draft must be a whole number of at least 0"),
    "alone": ({"max_draft": 0, "rule": "opt", "strength": 0.1}, ValueError, "verifier alone"),
    "top_k": ({"top_k": 0}, ValueError, "top_k must be"),
    "model": ({"drafter": None}, TypeError, "drafter must be the name of a model"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name):
    values, kind, told = WRONG[name]
    with pytest.raises(kind, match=told):
        Setting(**values)


def test_a_grid_lists_each_combination_once():
    grid = ScreenGrid(
        rules={"lossless": (), "opt": (0.1, 0.2)},
        temperatures=(0.0, 1.0),
        max_drafts=(2, 2, 5),
        stopping={"confidence": (0.3, 0.5)},
        longest=9,
        verifications=("block", "Token", "Block"),
    )
    settings = grid.settings(["drafter", "drafter_2"])
    assert len(settings) == len(set(settings)) == 2 * (1 + 2 * 3 * 4 * 2)
    assert settings[0] == Setting(max_draft=0, temperature=0.0)
    assert {one.max_draft for one in settings if one.stopping} == {9}
    assert ScreenGrid(**grid.to_dict()) == grid


def test_the_usual_grid_has_hundreds_and_all_rules():
    settings = ScreenGrid().settings()
    assert len(settings) > 300 and {one.rule for one in settings} == set(RULES)


WRONG_GRIDS = {
    "rules": ({"rules": 3}, TypeError, "rules must be a dict such as"),
    "one": ({"rules": {"opt": 0.1}}, TypeError, r"rules\['opt'\] must be a tuple"),
    "twice": ({"rules": {"opt": (1,), "OPT": (2,)}}, ValueError, "rules has OPT twice"),
    "drafts": ({"max_drafts": (0,)}, ValueError, "max_drafts must be a whole number of at least 1"),
    "nothing": ({"max_drafts": ()}, ValueError, "max_drafts or stopping must have"),
    "text": ({"verifications": "Token"}, TypeError, "verifications must be a tuple"),
    "heat": ({"temperatures": ("hot",)}, TypeError, "temperature must be"),
}


@pytest.mark.parametrize("name", WRONG_GRIDS)
def test_what_is_wrong_in_a_grid_is_named(name):
    values, kind, told = WRONG_GRIDS[name]
    with pytest.raises(kind, match=told):
        ScreenGrid(**values)
