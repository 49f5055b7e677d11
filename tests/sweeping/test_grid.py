"""Points of a grid: which combinations there are, and what is refused."""

import dataclasses
import json

import pytest

from specjax.sweeping import Grid, Point


class Known:
    """Methods: opt and lossless draft, token_cascade does not; copies is a plan."""

    def main_name(self, kind, key):
        names = {"opt": "ALPHA", "token_cascade": "ALPHA", "confidence": "THRESHOLD"}
        if key not in (*names, "lossless", "copies", "small"):
            raise ValueError(f"{kind}: {key}: no such file")
        return {**names, "copies": "MIN_MATCH"}.get(key)

    def is_plan(self, drafter):
        return drafter == "copies"

    def takes(self, method, drafter):
        if method == "token_cascade":
            return frozenset()
        return frozenset(("max_draft", "verification", "stopping"))


def points(methods, **axes):
    return Grid(methods=methods, **axes).points(Known())


def test_all_that_goes_together_is_there_once():
    made = points(
        {"lossless": None, "opt": (0.1, 0.2), "token_cascade": (0.3,)},
        temperatures=(1.0, 0.0),
        max_drafts=(2, 5),
        stopping={None: None, "confidence": (0.4,)},
        verifications=("Block", "Token"),
    )
    assert len(set(made)) == len(made)
    at_one = [p for p in made if p.temperature == 1.0]
    assert len(made) == 2 * len(at_one)
    assert [p.method for p in at_one[:2]] == ["verifier_alone", "drafter_alone"]
    by_method = {name: [p for p in at_one if p.method == name] for name in ("lossless", "opt")}
    assert len(by_method["lossless"]) == 2 * 2 * 2  # lengths, policies, verifications
    assert len(by_method["opt"]) == 2 * 8
    (cascade,) = [p for p in at_one if p.method == "token_cascade"]  # it has none of these
    assert cascade == Point(method="token_cascade", strength=0.3)
    adaptive = {(p.stopping, p.threshold) for p in by_method["opt"]}
    assert adaptive == {(None, None), ("confidence", 0.4)}


def test_names_beside_the_strength_and_a_files_own_length():
    made = points(
        {"opt": {"ALPHA": (0.1, 0.2), "BETA": ("@Mean()", None)}},
        max_drafts=(2, 5),
        stopping={"confidence": {"THRESHOLD": 0.4, "MAX_DRAFT": 12}},
    )[2:]
    assert {(p.strength, p.names) for p in made} == {
        (alpha, (("BETA", beta),)) for alpha in (0.1, 0.2) for beta in ("@Mean()", None)
    }
    assert {p.max_draft for p in made} == {12} and len(made) == 4


def test_drafters_are_models_or_plans():
    made = points(
        {"opt": 0.1, "token_cascade": 0.3},
        drafters={None: None, "small": None, "copies": (2, 3)},
    )
    alone = [p.drafter for p in made if p.method == "drafter_alone"]
    assert alone == [None, "small"]
    assert [(p.drafter, p.names) for p in made if p.method == "opt"] == [
        (None, ()),
        ("small", ()),
        ("copies", (("MIN_MATCH", 2),)),
        ("copies", (("MIN_MATCH", 3),)),
    ]
    # Copies are drafts, and a token cascade has none.
    assert [p.drafter for p in made if p.method == "token_cascade"] == [None, "small"]


def test_a_point_is_json_values_and_a_name_of_its_own():
    one = Point(method="a/b.gin", strength=0.2, names=(("LIMIT", 3),))
    assert Point.of({**one.to_dict(), "figures": {}}) == one
    other = dataclasses.replace(one, names=(("LIMIT", 4),))
    assert one.key != other.key and "/" not in one.key
    told = one.described()
    assert "0.2" in told and "LIMIT=3" in told
    assert "0.2" not in one.curve.described()


def test_a_whole_strength_is_one_point_however_it_is_written():
    one, same = (points({"opt": (x, 0.2)}, stopping={"confidence": x}) for x in (0, 0.0))
    assert [p.key for p in one] == [p.key for p in same]
    told = Point.of({**one[2].to_dict(), "strength": 0, "temperature": 1, "threshold": 0})
    assert told.key == one[2].key and '"strength": 0.0' in json.dumps(told.to_dict())
    # What was measured keeps its name.
    assert Point(method="opt", strength=0.2, max_draft=5).key == "opt-600144a60191"


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"methods": "opt"}, "methods must be a tuple of names or a dict, got 'opt'"),
        ({"methods": {}}, "methods is empty"),
        ({"methods": {"opt": ("a",)}}, "opt: ALPHA must be a number, got 'a'"),
        ({"methods": {"lossless": (0.1,)}}, "lossless has no strength"),
        ({"methods": {"opt": ()}}, "opt must have names with values"),
        ({"methods": {"opt": (0.1, 0.1)}}, r"opt\(0.1\) .* is there twice"),
        ({"methods": {"opt": (0, 0.0)}}, r"opt\(0\) .* is there twice"),
        ({"methods": ("opt", "opt")}, "methods has a value twice"),
        ({"methods": ("never",)}, "never: no such file"),
        ({"methods": ("verifier_alone",)}, "verifier_alone is always measured"),
        ({"methods": (3,)}, "methods must be names, got 3"),
        ({"temperatures": (-1.0,)}, "temperatures must be finite and at least 0"),
        ({"temperatures": 1.0}, "temperatures must be a tuple"),
        ({"max_drafts": (0,)}, "max_drafts must be a whole number of at least 1"),
        ({"verifications": ("Blok",)}, "verifications must be among Token, Block, GreedyBlock"),
        ({"stopping": {None: 0.3}}, "None takes no value"),
        ({"stopping": {"confidence": {"THRESHOLD": [[1]]}}}, "must be a number, a text or None"),
    ],
)
def test_what_is_no_grid_is_refused(axes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        points(**{"methods": ("opt",), **axes})
