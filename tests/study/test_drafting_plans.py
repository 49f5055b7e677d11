"""Ways to draft: each is listed once, and says the same as a setting and in parts."""

import numpy as np
import pytest

from specjax.study.drafting_plans import Plan, cannot_plan, plans
from specjax.text import Lookup
from specjax.text.setting import Setting

PARTS = {
    "one": (Setting(max_draft=4), Plan(("drafter",), ((4,),))),
    "another": (Setting(max_draft=3, drafter="x"), Plan(("x",), ((3,),))),
    "copies": (Setting(drafting="Lookup()", max_draft=6), Plan((), ((6,),), Lookup())),
    "fewer": (Setting(drafting="Lookup(max_copy=2)", max_draft=6), Plan((), ((2,),), Lookup())),
    "copies first": (
        Setting(drafting="Lookup(min_match=2, max_copy=7)", max_draft=4),
        Plan(("drafter",), ((4,),), Lookup(), 2, 7),
    ),
    "with copies": (
        Setting(drafting="Cascade(((3, 2), (0, 2)), ('drafter',), Lookup(), 2.0)"),
        Plan(("drafter",), ((3, 2), (0, 2)), Lookup(), lenience=2.0),
    ),
    "another with copies": (
        Setting(drafting="Cascade(((3, 2), (0, 2)), ('drafter',), Lookup())", drafter="x"),
        Plan(("x",), ((3, 2), (0, 2)), Lookup()),
    ),
    "two": (
        Setting(drafting="Cascade(((3, 1), (0, 2)), ('drafter', 'x'), lenience=4.0)"),
        Plan(("drafter", "x"), ((3, 1), (0, 2)), lenience=4.0),
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_setting_is_taken_to_parts(name):
    setting, plan = PARTS[name]
    assert Plan.of(setting) == plan
    assert setting.drafting is None or cannot_plan(setting) is None
    reviewed = {("verifier", name) for name in plan.models} or {("verifier", None)}
    own = set() if plan.is_single else {(name, None) for name in plan.models}
    assert plan.tables == reviewed | own


def test_plans_are_each_there_once_and_of_the_sizes_asked_for():
    found = plans(("drafter", "x"), max_draft=3, leniences=(1.0, 2.0), levels=3)
    weighed = [Plan.of(one) for one in found]
    assert len(set(found)) == len(set(weighed)) == len(found)
    assert all(one.is_lossless and one.temperature == 1.0 for one in found)
    assert {one.models for one in weighed} == {(), ("drafter",), ("x",), ("drafter", "x")}
    deep = [one for one in weighed if len(one.lengths) == 3]
    assert deep and all(one.copies and one.models == ("drafter", "x") for one in deep)
    for one in weighed:
        assert np.max(one.lengths[0]) <= 3 and one.longest <= 3
        assert one.lenience == 1.0 or any(map(any, one.lengths[1:]))
    kinds = {one.kind for one in weighed}
    assert len(kinds) < len(weighed) / 5
    shallow = plans(("drafter", "x"), max_draft=3, levels=1)
    assert all(len(Plan.of(one).lengths) == 1 for one in shallow)
    table = plans(max_draft=1, levels=1, bigram="built-in")
    assert "Lookup(bigram='built-in')" in {one.drafting for one in table}


WRONG = {
    "levels": ({"levels": 4}, ValueError, "levels must be 1, 2 or 3, got 4"),
    "leniences": ({"leniences": 2.0}, ValueError, "leniences must be a tuple such as"),
    "lenience": ({"leniences": (0.5,)}, ValueError, "leniences must"),
    "drafters": ({"drafters": "small"}, ValueError, r"drafters must be a tuple such as \('small',"),
    "no drafters": ({"drafters": None}, ValueError, r"drafters must be a tuple such as \('drafter"),
    "draft": ({"max_draft": 0}, ValueError, "max_draft must be a whole number of at least 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name):
    values, kind, told = WRONG[name]
    with pytest.raises(kind, match=told):
        plans(**values)
