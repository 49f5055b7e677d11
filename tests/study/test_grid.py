"""Settings of a grid: which combinations there are, and what is refused."""

import pytest

from specjax.decoding import TokenCascade
from specjax.rules import ALL_RULES, Chow
from specjax.study import Grid, Setting, grid
from specjax.text import parts
from specjax.types import traced_dataclass


def settings(methods, **axes):
    return Grid(methods=methods, **axes).settings()


def test_all_that_goes_together_is_there_once():
    made = settings(
        {"Lossless": None, "OPT({})": (0.1, 0.2), "TokenCascade(rule=Chow({}))": (0.3,)},
        temperatures=(1.0, 0.0),
        max_drafts=(2, 5),
        stopping={None: None, "Confidence({})": (0.4,)},
        verifications=("Block", "Token"),
    )
    assert len(set(made)) == len(made)
    at_one = [one for one in made if one.temperature == 1.0]
    assert len(made) == 2 * len(at_one)
    assert [one.method for one in at_one[:2]] == ["VerifierAlone", "DrafterAlone"]
    by_rule = {rule: [one for one in at_one[2:] if one.rule.startswith(rule)] for rule in RULES}
    assert len(by_rule["Lossless"]) == 2 * 2 * 2  # lengths, policies, verifications
    assert len(by_rule["OPT"]) == 2 * 8
    # It has none of these.
    assert by_rule["Chow"] == [Setting(rule="Chow(0.3)", method="TokenCascade")]
    assert {one.stopping for one in by_rule["OPT"]} == {None, "Confidence(0.4)"}


RULES = ("Lossless", "OPT", "Chow")


def test_further_arguments_stand_in_the_names():
    made = settings(
        {"BiLDCascade(rule=FallbackRollback(Chow(0.2), BiLD({})), limit=4)": (1.0, 2.0)}
    )[2:]
    assert [one.strength for one in made] == [1.0, 2.0]
    assert {one.method for one in made} == {"BiLDCascade(limit=4)"}
    assert {one.curve for one in made} == {made[0].curve}


def test_a_registered_rule_is_a_rule_and_a_registered_cascade_a_method(monkeypatch):
    monkeypatch.setattr(parts, "PARTS", {**parts.PARTS})
    monkeypatch.setattr(grid, "PARTS", parts.PARTS)
    parts.register_part(traced_dataclass(type("MyRule", (Chow,), {})))
    parts.register_part(type("MyCascade", (TokenCascade,), {}))
    made = settings({"MyRule({})": 0.1, "MyCascade(rule=MyRule({}))": 0.3})[2:]
    assert [(one.rule, one.method) for one in made] == [
        ("MyRule(0.1)", None),
        ("MyRule(0.3)", "MyCascade"),
    ]


def test_a_policy_may_have_longer_drafts():
    made = settings(
        {"OPT({})": 0.1},
        max_drafts=(2, 5),
        stopping={None: None, "Confidence({})": 0.4},
        longest=12,
        min_draft=1,
    )[2:]
    assert [(one.longest, one.stopping, one.min_draft) for one in made] == [
        (2, None, 0),
        (5, None, 0),
        (12, "Confidence(0.4)", 1),
    ]


def test_drafters_are_models_and_drafting_is_a_plan():
    made = settings(
        {"Lossless": None, "TokenCascade(rule=Chow({}))": 0.3},
        drafters=(None, "small"),
        drafting=(None, "Lookup", "Lookup(min_match=3)"),
    )
    alone = [one.drafter for one in made if one.method == "DrafterAlone"]
    assert alone == ["drafter", "small"]
    drafts = [(one.drafter, one.drafting) for one in made if one.method is None]
    # Copies alone need no drafter.
    assert sorted(drafts, key=str) == [
        ("drafter", "Lookup"),
        ("drafter", "Lookup(min_match=3)"),
        ("drafter", None),
        ("small", "Lookup(min_match=3)"),
        ("small", None),
    ]
    cascades = [one.drafter for one in made if one.method == "TokenCascade"]
    assert cascades == ["drafter", "small"]


def test_each_kind_of_drafts_has_the_verifications_that_fit():
    axes = {"drafting": (None, "Tree(depth=2, width=2)"), "max_drafts": (2, 5)}
    made = settings(("lossless",), **axes)[2:]
    assert [(one.drafting, one.to_dict()["verification"], one.longest) for one in made] == [
        (None, "Block", 2),
        (None, "Block", 5),
        ("Tree(depth=2, width=2)", "Traversal", None),
    ]
    made = settings(("lossless",), verifications=("Token", "Walk", None), **axes)[2:]
    found = {(one.drafting is None, one.to_dict()["verification"]) for one in made}
    assert found == {(True, "Token"), (True, "Block"), (False, "Walk"), (False, "Traversal")}


def test_without_methods_there_is_every_rule():
    rules = {one.rule.partition("(")[0] for one in settings(None, processors=["MinP(0.05)"])}
    assert rules == {kind.__name__ for kind in ALL_RULES}


def test_a_whole_strength_is_one_setting_however_it_is_written():
    one, same = (settings({"OPT({})": (x, 0.2)}, stopping={"Confidence({})": x}) for x in (0, 0.0))
    assert [each.key for each in one] == [each.key for each in same]
    assert len(settings({"OPT({})": (0, 0.0)})) == 3


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"methods": {}}, "methods is empty"),
        ({"methods": {"OPT({})": ("a",)}}, r"methods: OPT\({}\) must be a number, got 'a'"),
        ({"methods": {"OPT({})": {"ALPHA": 1}}}, r"values of OPT\({}\) must be numbers, got"),
        ({"methods": {"Lossless": (0.1,)}}, "Lossless takes no number, got 0.1"),
        ({"methods": {"OPT({})": ()}}, r"OPT\({}\) has no numbers"),
        ({"methods": ("OPT({})",)}, r"OPT\({}\) needs a number for {}"),
        ({"methods": ("never",)}, "methods must be one of Lossless, "),
        ({"methods": (3,)}, r"methods must be texts such as 'OPT\({}\)', got 3"),
        ({"temperatures": (-1.0,)}, "temperature must be finite and at least 0"),
        ({"max_drafts": (0,)}, "max_draft must be a whole number of at least 1"),
        (
            {"longest": 0, "stopping": {"Confidence({})": 0.4}},
            "max_draft must be a whole number of",
        ),
        ({"verifications": ("Blok",)}, "=.Blok.: there is no such name; did you mean Block?"),
        (
            {"verifications": ("Block",), "drafting": ("Tree(depth=2, width=2)",)},
            r"none of verifications=\('Block',\) can verify the trees of drafting='Tree",
        ),
        ({"verifications": ("Walk",)}, "can verify the chains of drafting=None: add None"),
        ({"stopping": {None: 0.3}}, "None takes no number"),
        ({"stopping": ("sure",)}, "must be one of"),
        ({"processors": "MinP(0.05)"}, "processors must be a tuple such as .*MinP"),
        ({"processors": 3}, "processors must be a tuple such as .*MinP"),
    ],
)
def test_what_is_no_grid_is_refused(axes, message):
    with pytest.raises(ValueError, match=message):
        settings(**{"methods": {"OPT({})": 0.1}, **axes})


def test_parts_that_do_not_fit_are_left_out_and_a_value_that_never_fits_is_an_error():
    found = Grid(
        methods={"Lossy({})": 0.2, "Chow({})": 0.3},
        verifications=("Block", "GreedyBlock"),
        stopping={None: None, "Confidence({})": 0.4},
        drafting=(None, "Lookup()"),
    ).settings()
    kinds = {
        (x.rule, x.to_dict()["verification"], x.stopping, x.drafting)
        for x in found
        if not x.is_alone
    }  # fmt: skip
    # No carry with drafts of any length, no confidence of what is copied.
    assert kinds == {
        ("Lossy(0.2)", "Block", None, None),
        ("Lossy(0.2)", "GreedyBlock", None, None),
        ("Lossy(0.2)", "Block", "Confidence(0.4)", None),
        ("Lossy(0.2)", "Block", None, "Lookup"),
        ("Chow(0.3)", "Block", None, None),
        ("Chow(0.3)", "GreedyBlock", None, None),
        ("Chow(0.3)", "Block", "Confidence(0.4)", None),
    }
    with pytest.raises(ValueError, match=r"rule='Chow\(0.3\)'.* cannot be combined"):
        Grid(methods={"Lossy({})": 0.2, "Chow({})": 0.3}, drafting=("Lookup()",))
