"""Traced dataclasses, and checks of the values that users give."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checks import check_path, checked, require, whole_number
from specjax.types import traced_dataclass


@traced_dataclass
class Strength:
    strength: object

    def __post_init__(self):
        object.__setattr__(self, "strength", checked("strength", self.strength, low=0.0, high=1.0))


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


def test_the_bad_row_is_named():
    with pytest.raises(ValueError, match=r"got 3.0 in row 1"):
        checked("strength", [0.5, 3.0], low=0.0, high=1.0)


@pytest.mark.parametrize("bad", [float("nan"), -1e-9, 1.0])
def test_open_and_closed_ends(bad):
    with pytest.raises(ValueError, match="strength"):
        checked("strength", bad, low=0.0, high=1.0, open_high=True)


def test_a_value_that_rounds_to_the_excluded_end_is_refused():
    with pytest.raises(ValueError, match="strength"):
        checked("strength", 1.0 - 1e-12, low=0.0, high=1.0, open_high=True)


@pytest.mark.parametrize("bad", ["0.5", None, [0.1, "x"], True])
def test_values_that_are_not_numbers_are_refused(bad):
    with pytest.raises(ValueError, match="strength must be a number"):
        checked("strength", bad)


def test_whole_numbers():
    assert checked("top_k", 5.0, low=1, dtype=np.int32).dtype == np.int32
    with pytest.raises(ValueError, match="top_k must be a whole number"):
        checked("top_k", 2.5, low=1, dtype=np.int32)


def test_leaves_have_names_and_a_readable_form():
    ((path, _),) = jax.tree_util.tree_leaves_with_path(Strength(0.25))
    assert jax.tree_util.keystr(path) == ".strength"
    assert repr(Strength(0.25)) == "Strength(strength=0.25)"


@pytest.mark.parametrize("bad", [2**33 + 2, 2**31, 1e10, np.inf])
def test_a_number_too_large_for_its_dtype_is_shown_as_given(bad):
    with pytest.raises(ValueError, match="top_k must be a whole number of at least 1") as error:
        checked("top_k", bad, low=1, dtype=np.int32)
    assert str(bad) in str(error.value)
    with pytest.raises(ValueError, match="^strength must be small enough for float32, got 1e.39$"):
        checked("strength", 1e39)


@pytest.mark.parametrize("bad", [[], [[0.1], [0.2]]])
def test_other_shapes_are_refused(bad):
    with pytest.raises(ValueError, match="strength must be a number or one number per row"):
        checked("strength", bad)


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


@pytest.mark.parametrize(
    ("value", "span", "message"),
    [
        (np.nan, {}, "x must be a number, not NaN, got nan"),
        (-1, {"low": 0.0}, "x must be at least 0, got -1"),
        (0, {"low": 0.0, "open_low": True}, "x must be above 0, got 0"),
        (np.inf, {"low": 0.0, "open_high": True}, "x must be finite and at least 0, got inf"),
        (2, {"high": 1.0, "open_high": True}, "x must be below 1, got 2"),
        (0, {"low": 1, "dtype": np.int32}, "x must be a whole number of at least 1, got 0"),
        (4, {"low": 0, "high": 3, "dtype": np.int32}, "x must be a whole number in [0, 3], got 4"),
    ],
)
def test_a_range_without_an_end_is_told_in_words(value, span, message):
    with pytest.raises(ValueError) as error:
        checked("x", value, **span)
    assert str(error.value) == message


@pytest.mark.parametrize("bad", [[1, 2], [1, [2]], {"a": 1}, [[1]], None, "1"])
def test_one_whole_number_is_no_list(bad):
    assert whole_number("x", 1e3, low=1) == 1000
    with pytest.raises(ValueError, match="^x must be (a single whole|a) number"):
        whole_number("x", bad, low=1)


@pytest.mark.parametrize("path", ["a\0b", pathlib.Path("a\0b")])
def test_no_path_has_a_nul(path):
    with pytest.raises(ValueError, match="path=.*a.x00b.* has a NUL"):
        check_path(path, "path=")


@pytest.mark.parametrize(("path", "remedy"), [(5, "digits in quotes"), (None, "give a text or a")])
def test_the_remedy_for_what_is_no_path_fits(path, remedy):
    with pytest.raises(ValueError, match=f"path={path} must be a path: .*{remedy}"):
        check_path(path, "path=")
