"""The arguments with which `specjax infer` decodes like a setting, from any working directory."""

import os
import types

import jax.numpy as jnp
import pytest

from specjax.study.infer_names import Prompting, infer_names
from specjax.text.setting import Setting

PLACES = {"verifier": "/models/large", "drafter": "/models/small", "tiny": "models/tiny"}
MODELS = {name: types.SimpleNamespace(name=place) for name, place in PLACES.items()}


def names(drafting, **prompts):
    return infer_names(Setting(drafting=drafting), MODELS, {}, Prompting(**prompts))


def test_models_and_tables_of_drafts_have_full_paths():
    found = names("Cascade(((2, 1), (0, 1)), ('drafter', 'tiny'))")
    tiny = os.path.abspath("models/tiny")
    assert found["drafting/Cascade.models"] == repr(("drafter", tiny))
    assert "drafting/Cascade.dtype" not in found
    found = names("Cascade(((2, 1), (0, 1)), ('drafter', '~/tiny'))", dtype="bfloat16")
    home = os.path.expanduser("~/tiny")
    assert found["drafting/Cascade.models"] == repr(("drafter", home))
    assert found["drafting/Cascade.dtype"] == found["DTYPE"] == "'bfloat16'"
    found = names("Cascade(((2, 1), (0, 1)), ('drafter',), Lookup(bigram='table'))")
    assert found["drafting/last/Lookup.bigram"] == repr(os.path.abspath("table"))
    for table in ("None", "'built-in'", "'built-in:gsm8k/bigram'"):
        assert names(f"Lookup(bigram={table})")["drafting/Lookup.bigram"] == table


@pytest.mark.parametrize(
    ("drafter", "path"),
    [("drafter", "/models/small"), ("tiny", os.path.abspath("models/tiny")), ("/other", "/other")],
)
def test_a_drafter_has_its_own_path_though_it_is_not_loaded(drafter, path):
    setting = Setting(drafter=drafter)
    assert infer_names(setting, MODELS, {}, Prompting())["DRAFTER"] == repr(path)


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, jnp.dtype("bfloat16")])
def test_a_dtype_has_its_name(dtype):
    assert names(None, dtype=dtype)["DTYPE"] == "'bfloat16'"
    assert names(None)["DTYPE"] == "None"


def test_the_form_of_the_weights_is_kept():
    assert names(None)["WEIGHTS"] == "None"
    plan = "Cascade(((2, 1), (0, 1)), ('drafter', 'tiny'))"
    assert "drafting/Cascade.weights" not in names(plan)
    for form in ("int8", {"drafter": "int8"}):
        found = names(plan, weights=form)
        assert found["WEIGHTS"] == found["drafting/Cascade.weights"] == repr(form)
