"""The arguments with which `specjax infer` decodes like a setting, from any working directory."""

import ast
import dataclasses
import os
import types

import jax.numpy as jnp
import pytest

from specjax.cli import gin_config, infer
from specjax.study.infer_names import Prompting, infer_names
from specjax.text.setting import Setting

PLACES = {"verifier": "/models/large", "drafter": "/models/small", "tiny": "models/tiny"}
MODELS = {name: types.SimpleNamespace(name=place) for name, place in PLACES.items()}


def names(drafting, **prompts):
    return infer_names(Setting(drafting=drafting), MODELS, {}, Prompting(**prompts))


def test_models_and_tables_of_drafts_have_full_paths():
    plan = "Cascade(((2, 1), (0, 1)), models=('drafter', {!r}))"
    found = names(plan.format("tiny"))
    tiny = os.path.abspath("models/tiny")
    assert found["DRAFTING"] == repr(plan.format(tiny))
    found = names(f"Branches(({plan.format('tiny')}, Lookup()))")
    assert repr(tiny) in ast.literal_eval(found["DRAFTING"])
    found = names(plan.format("~/tiny"), dtype="bfloat16")
    home = os.path.expanduser("~/tiny")
    assert found["DRAFTING"] == repr(plan.format(home))
    assert found["DTYPE"] == "'bfloat16'"  # of all models
    found = names("Cascade(((2, 1), (0, 1)), ('drafter',), Lookup(bigram='table'))")
    assert f"bigram={os.path.abspath('table')!r}" in ast.literal_eval(found["DRAFTING"])
    for table in ("'built-in'", "'built-in:gsm8k/bigram'"):
        assert names(f"Lookup(bigram={table})")["DRAFTING"] == repr(f"Lookup(bigram={table})")


SETTINGS = [
    Setting(rule="Budgeted(OPT(0.5), 0.1)", temperature=0.5, top_k=3),
    Setting(rule="FallbackRollback(Chow(0.4), BiLD(2.0))", method="BiLDCascade(limit=4)"),
    Setting(stopping="Survival(OnlineEstimate(shared=True), 0.6)", max_draft=12, min_draft=2),
    Setting(drafting="Cascade(((4, 0), (0, 3)), rules=(Lossy(0.1),), last=Lookup(3))"),
    Setting(drafting="Branches((Cascade(((3, 2), (0, 3)), last=Lookup()), Lookup()))"),
    Setting(drafting="Tree(parents=(0, 0, 1), children='top')", verification="Walk"),
    Setting(drafting="Branches(('drafter', Lookup(copies=2)))", processors=("MinP(0.05)",)),
    Setting(method="VerifierAlone", top_p=0.9),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.described())
def test_the_names_make_an_equal_setting_in_gin(setting):
    infer.register()
    written = infer_names(setting, MODELS, {}, Prompting())
    bindings = [f"{name}={value}" for name, value in written.items()]
    gin_config.configure(["runs/infer.gin"], [*bindings, "INPUT=-", "OUTPUT_DIR=-"], [])
    made = gin_config.value_of("make_decoder.setting")
    for name in ("rule", "stopping", "verification", "drafting", "method"):
        assert repr(made.part(name)) == repr(setting.part(name))
    assert dataclasses.replace(made, drafting=setting.drafting) == setting


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
    for form in ("int8", {"drafter": "int8"}):
        assert names(None, weights=form)["WEIGHTS"] == repr(form)
