"""Costs are checked; files of costs are read back, or refused."""

import dataclasses
import json

import pytest

from specjax.drafting import Costs, read_costs

COSTS = Costs(
    rows=(1, 5),
    widths=(1, 2, 4),
    draft=(1.0, 3.0),
    verifier=((10.0, 12.0, 20.0), (30.0, 32.0, 40.0)),
    machine="this",
    pair="a+b",
    temperatures=(0.0, 1.0),
    acceptance=(0.8, 0.6),
    alone=(9.0, 28.0),
)


def _written(path, **changes):
    path.write_text(json.dumps({**COSTS.to_dict(), "note": "left alone", **changes}))
    return path


def test_other_widths_lie_between_and_beyond():
    found = COSTS.at_widths((1, 3, 6))
    assert found.widths == (1, 3, 6) and found.draft == COSTS.draft
    between, slope = (12 + 20) / 2, (20 - 12) / 2
    assert found.verifier[0] == pytest.approx((10.0, between, 20 + 2 * slope))


def test_costs_may_be_static():
    assert hash(COSTS) == hash(dataclasses.replace(COSTS))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rows", (), "rows must be a tuple of whole numbers that increases"),
        ("rows", (5, 1), "increases from at least 1, got"),
        ("rows", (0, 1), "increases from at least 1, got"),
        ("rows", (1, 2**63), "increases from at least 1, got"),
        ("rows", 5, "increases from at least 1, got 5"),
        ("widths", (1, 2, 2), "widths must be a tuple of whole numbers that increases"),
        ("widths", (1.0, 2.0, 4.0), "widths must be a tuple of whole numbers"),
        ("draft", (1.0,), "draft must be a tuple of 2 seconds, one for each of rows"),
        ("draft", (1.0, "2"), "draft must be a tuple of 2 seconds"),
        ("draft", (1.0, -1.0), "draft must be a tuple of 2 seconds"),
        ("draft", (1.0, 10**400), "draft must be a tuple of 2 seconds"),
        ("draft", None, "draft must be a tuple of 2 seconds"),
        ("verifier", (5, 5), "verifier must be a tuple of 2 tuples of 3 seconds"),
        ("alone", 5, "alone must be .* a tuple of 2 seconds above 0"),
        ("draft", (1.0, float("nan")), "draft must be a tuple of 2 seconds"),
        ("verifier", ((1.0, 2.0, 3.0),), "verifier must be a tuple of 2 tuples of 3 seconds"),
        ("verifier", ((1.0, 2.0, 3.0), (1.0, 2.0)), "verifier must be a tuple of 2 tuples"),
        ("machine", None, "machine must be a string, got None"),
        ("verifier", ((1.0, 2.0, 3.0), (0.0, 2.0, 3.0)), "tuples of 3 seconds above 0"),
        ("alone", (1.0,), "alone must be .* a tuple of 2 seconds above 0, one for each of rows"),
        ("alone", (0.0, 1.0), "alone must be .* a tuple of 2 seconds above 0"),
        ("temperatures", (1.0, 0.0), "temperatures must be a tuple that increases from 0"),
        ("temperatures", (-1.0, 0.0), "temperatures must be a tuple that increases from 0"),
        *(
            ("temperatures", value, "temperatures must be a tuple that increases from 0")
            for value in (5, None, {}, "x", True, -1, 2**63, float("nan"))
        ),
        ("acceptance", 5, "acceptance must be a tuple of 2 rates"),
        ("acceptance", (0.8,), "acceptance must be a tuple of 2 rates"),
        ("acceptance", (0.8, 1.5), "acceptance must be a tuple of 2 rates in .0, 1."),
    ],
)
def test_what_is_no_cost_is_refused_in_code_and_in_a_file(tmp_path, field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(COSTS, **{field: value})
    path = _written(tmp_path / "costs.json", **{field: value})
    with pytest.raises(
        ValueError, match=f"costs.json: .*{message}.*: measure it with specjax bench"
    ):
        read_costs(path)


def test_a_file_is_read_back(tmp_path):
    assert read_costs(_written(tmp_path / "costs.json")) == COSTS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "costs.json is not a JSON file"),
        (b"\xff\xfe\x00", "costs.json is not a JSON file"),
        ("[]", "costs.json is not a file of costs"),
        ('{"rows": [1]}', "costs.json is not a file of costs"),
        ('{"format": 1}', "has the format 1, but this version reads 2"),
        ('{"format": 2, "rows": [1]}', "costs.json lacks 'widths'"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "costs.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=f"{message}.*: measure it with specjax bench --costs"):
        read_costs(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent.json cannot be read"):
        read_costs(tmp_path / "absent.json")


def test_what_is_shown_is_short_and_tells_costs_apart():
    other = dataclasses.replace(COSTS, draft=(1.0, 3.5))
    assert repr(COSTS) == repr(dataclasses.replace(COSTS)) != repr(other)
    assert "12.0" not in repr(COSTS)
