"""Traced dataclasses, and checks of the values that users give."""

import functools
import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checks import check_number, check_path, in_names, join_names, require, whole_number
from specjax.errors import UserError
from specjax.types import traced_dataclass


@traced_dataclass
class Strength:
    strength: object

    def __post_init__(self):
        object.__setattr__(
            self, "strength", check_number("strength", self.strength, low=0.0, high=1.0)
        )


def test_values_are_checked_only_where_a_user_gives_them():
    strength = Strength(0.5)
    assert isinstance(strength.strength, np.ndarray) and strength.strength.dtype == np.float32
    with pytest.raises(ValueError, match=r"strength must lie in \[0, 1\], got 2"):
        Strength(2)
    # Leaves of a pytree are not checked, because transformations put other values there.
    doubled = jax.tree.map(lambda x: 4 * x, strength)
    assert doubled.strength == 2.0
    assert jax.eval_shape(lambda s: s, strength).strength.shape == ()
    assert jax.tree.map(lambda _: None, strength).strength is None
    assert jax.vmap(lambda s: s.strength + 1.0)(Strength([0.0, 0.5])).shape == (2,)
    assert jax.jit(lambda a: Strength(a).strength)(jnp.float32(7.0)) == 7.0


def test_leaves_have_names_and_a_readable_form():
    ((path, _),) = jax.tree_util.tree_leaves_with_path(Strength(0.25))
    assert jax.tree_util.keystr(path) == ".strength"
    assert repr(Strength(0.25)) == "Strength(strength=0.25)"


def test_require_imports_a_library_or_names_its_extra(monkeypatch):
    assert require("json", "eval") is json
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ImportError) as error:
        require("sacrebleu", "eval")
    assert str(error.value) == (
        "sacrebleu is not installed: run pip install '.[eval]' in the checkout"
    )


def test_a_broken_library_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_library.py").write_text("import a_library_that_is_absent\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"broken_library cannot be imported \(No module named"):
        require("broken_library", "eval")


def test_whole_numbers_may_be_floats():
    assert check_number("x", 5.0, low=1, dtype=np.int32).dtype == np.int32
    assert whole_number("x", 1e3, low=1) == 1000


UNIT = {"low": 0.0, "high": 1.0}
BELOW = {**UNIT, "open_high": True}
WHOLE = {"low": 1, "dtype": np.int32}
NO_NUMBER = "x must be a number, got "
NUMBERS = [
    ([0.5, 3.0], UNIT, "x must lie in [0, 1], got 3.0 in row 1"),
    (float("nan"), BELOW, "x must lie in [0, 1), got nan"),
    (-1e-9, BELOW, "x must lie in [0, 1), got -1e-09"),
    (1.0, BELOW, "x must lie in [0, 1), got 1"),
    (1.0 - 1e-12, BELOW, "x must lie in [0, 1), got 0.999999999999"),  # in float32
    ("0.5", {}, f"{NO_NUMBER}'0.5'"),
    (None, {}, f"{NO_NUMBER}None"),
    ([0.1, "x"], {}, NO_NUMBER),
    (True, {}, f"{NO_NUMBER}True"),
    (2.5, WHOLE, "x must be a whole number of at least 1, got 2.5"),
    *(
        (x, WHOLE, f"x must be a whole number of at least 1 and small enough for int32, got {x}")
        for x in (2**33 + 2, 2**31, 1e10)
    ),
    (np.inf, WHOLE, "x must be a whole number of at least 1, got inf"),
    (1e39, {}, "x must be small enough for float32, got 1e+39"),
    ([], {}, "x must be a number or one number per row"),
    ([[0.1], [0.2]], {}, "x must be a number or one number per row"),
    (np.nan, {}, "x must be a number, not NaN, got nan"),
    (-1, {"low": 0.0}, "x must be at least 0, got -1"),
    (0, {"low": 0.0, "open_low": True}, "x must be above 0, got 0"),
    (np.inf, {"low": 0.0, "open_high": True}, "x must be finite and at least 0, got inf"),
    (2, {"high": 1.0, "open_high": True}, "x must be below 1, got 2"),
    (0, WHOLE, "x must be a whole number of at least 1, got 0"),
    (4, {"low": 0, "high": 3, "dtype": np.int32}, "x must be a whole number in [0, 3], got 4"),
]
REFUSED = [
    *((functools.partial(check_number, "x", x, **span), told) for x, span, told in NUMBERS),
    *(
        (functools.partial(whole_number, "x", x, low=1), "x must be a")
        for x in ([1, 2], [1, [2]], {"a": 1}, [[1]], None, "1")
    ),
    (lambda: check_path("a\0b", "path="), "path='a\\x00b' has a NUL character: remove it"),
    (lambda: check_path(pathlib.Path("a\0b"), "path="), "has a NUL character: remove it"),
    (lambda: check_path(5, "path="), "path=5 must be a path: put a path of digits in quotes"),
    (lambda: check_path(None, "path="), "path=None must be a path: give a text or a pathlib.Path"),
]


def test_a_long_value_is_shortened_and_its_remedy_is_not():
    long = "x" * 1_400_000
    for value in (repr(long), f'"it\'s {long}"', long, f"[{'a, ' * 9_000}]", f"({'b ' * 9_000})"):
        message = str(UserError(f"rule={value} is unknown: write a text such as 'OPT(0.2)'"))
        assert re.fullmatch(
            r"rule=.{60,170} is unknown: write a text such as 'OPT\(0.2\)'", message
        )
    spaced = str(UserError(f"{'y ' * 9_000}is unknown: write a text such as 'OPT(0.2)'"))
    assert len(spaced) < 400 and spaced.endswith("is unknown: write a text such as 'OPT(0.2)'")
    assert str(UserError(spaced)) == spaced
    prose = "the drafter's words are not the verifier's own, " * 9
    for text in (prose, f"'a.' and {prose} and '(b)' too"):
        assert str(UserError(text)) == text
    for part in ("() ", "\\'", "'\\", "[a", "' "):  # a megabyte of any takes no time
        assert len(str(UserError(part * 500_000))) <= 320
    assert join_names(range(4)) == "0, 1, 2, 3" and join_names(range(9_999)).endswith(" more")
    assert len(join_names(range(9_999))) < 180


def test_parameters_get_the_names_of_the_surface_that_was_used():
    names = {"max_draft": "MAX_DRAFT", "rows": "--rows", "stop": "STOP"}
    for text, told in {
        "max_draft must be at least 1": "MAX_DRAFT must be at least 1",
        "choose a smaller max_draft=3 or rows=5": "choose a smaller MAX_DRAFT=3 or --rows=5",
        "rows must be 1, `rows` or --rows=2": "--rows must be 1, `--rows` or --rows=2",
        "4 rows stop here: stop is 3": "4 rows stop here: STOP is 3",
        "Engine.max_draft, my_max_draft": "Engine.max_draft, my_max_draft",
    }.items():
        assert in_names(text, names) == told
    assert in_names("as it is", {}) == "as it is"


@pytest.mark.parametrize(("check", "message"), REFUSED)
def test_what_is_wrong_is_told(check, message):
    with pytest.raises(UserError) as told:
        check()
    assert message in str(told.value) and "\n" not in str(told.value)
