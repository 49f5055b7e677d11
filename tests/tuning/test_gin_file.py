"""What was chosen, read back by `specjax infer`: it builds the very decoder that was measured."""

import dataclasses

import gin
import pytest

from specjax import load_text_model, text
from specjax.cli import gin_config, infer
from specjax.data import FewShot
from specjax.text.built_in import PAIRS
from specjax.tuning import ALONE, DEFAULT_RULES, Hierarchy, Setting, gin_text, setting_text
from specjax.tuning.gin_file import portable_names, prompt_names, task_of_all
from tests import tiny_pair

NAMES = ("verifier", "drafter", "level_2")
DRAWN = {"temperature": 0.5, "top_k": 7}
OPTIONS = {"temperature": 0.5, "top_k": 7, "top_p": None, "batch_size": 3, "max_new_tokens": 9}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    found = tiny_pair.write_pair(directory)
    smaller = tiny_pair.write_model(directory / "smaller", "drafter", seed=7)
    tiny_pair.write_vocabulary(smaller)
    return {"verifier": found["verifier"], "drafter": found["drafter"], "level_2": smaller}


@pytest.fixture(scope="module")
def models(paths):
    return [load_text_model(path) for path in paths.values()]


CHOICES = {
    "alone": ALONE,
    "one": Hierarchy((1,), ((4,),)),
    "another": Hierarchy((2,), ((3,),)),
    "copies": Hierarchy((), ((6,),), "text"),
    "copies first": Hierarchy((1,), ((4,),), "text", min_match=2, max_copy=7),
    "with copies": Hierarchy((1,), ((3, 2), (0, 2)), "text", lenience=2.0),
    "two": Hierarchy((1, 2), ((3, 1), (0, 2)), lenience=4.0),
    "three": Hierarchy((1, 2), ((2, 0, 2), (0, 2, 0), (0, 0, 4)), "text"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_infer_takes_what_was_chosen(paths, models, tmp_path, name):
    chosen = CHOICES[name]
    settings = {key.upper(): value for key, value in OPTIONS.items()}
    told = {key: str(path) for key, path in paths.items()}
    file = tmp_path / "drafts.gin"
    file.write_text(gin_text(chosen, "it was fast", told, settings, None, file))
    infer.register()
    gin_config.configure([str(file)], ["INPUT=captions.txt", "OUTPUT_DIR=run"])
    found = gin_config.call(text.Decoder).describe()
    want = chosen.decoder(NAMES, models, None, **OPTIONS)
    assert found == want.describe()
    assert found["max_new_tokens"] == 9 and found["temperature"] == 0.5
    assert f"# {chosen.described(NAMES)}: it was fast." in file.read_text()


STOPPED = {"max_draft": 7, "verification": "Token"}
SETTINGS = [
    Setting(max_draft=0, **DRAWN),
    Setting(stopping="confidence", threshold=0.3, **STOPPED),
    Setting(rule="OPT", strength=0.3, stopping="entropy", threshold=0.8, **STOPPED, **DRAWN),
    Setting(stopping="chance", threshold=0.6, **STOPPED),
    Setting(stopping="online", threshold=0.6, **STOPPED),
    *(
        Setting(rule=rule, strength=strengths[0] if strengths else None, max_draft=3)
        for rule, strengths in DEFAULT_RULES.items()
    ),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.described())
def test_infer_takes_a_setting(paths, models, tmp_path, setting):
    options = {"batch_size": 3, "max_new_tokens": 9, "buckets": (24,)}
    told = {key: str(path) for key, path in paths.items()}
    file = tmp_path / "tuned.gin"
    settings = {key.upper(): value for key, value in options.items()}
    file.write_text(setting_text(setting, "it was fast", told, settings, file))
    infer.register()
    gin_config.configure([str(file)], ["INPUT=captions.txt", "OUTPUT_DIR=run"])
    found = gin_config.call(text.Decoder).describe()
    want = setting.decoder(dict(zip(paths, models, strict=True)), **options)
    assert found == want.describe()
    assert f"# {setting.described()}: it was fast." in file.read_text()


def test_a_setting_may_have_another_drafter(paths, tmp_path):
    told = {key: str(path) for key, path in paths.items()}
    lines = setting_text(Setting(drafter="level_2"), "why", told, {}, "f").splitlines()
    assert f"DRAFTER = {told['level_2']!r}" in lines and "VERIFICATION = @Block()" in lines
    alone = setting_text(Setting(max_draft=0), "why", told, {}, "f").splitlines()
    assert f"DRAFTER = {told['drafter']!r}" in alone


def test_the_prompts_of_a_task_are_made_again(tmp_path):
    task = FewShot(
        prompt="@{user}: {q}\nA:", answer=" {a}", examples="@solved.jsonl", shots=2,
        separator="%\n", instruction="%INPUT",
    )  # fmt: skip
    file = tmp_path / "tuned.gin"
    names = prompt_names(False, "beginning", task)
    assert "CHAT" not in names and prompt_names(True, None, None) == {"CHAT": True}
    paths = {"verifier": "built-in:gsm8k/verifier", "drafter": "built-in:gsm8k/drafter"}
    file.write_text(setting_text(Setting(max_draft=0), "why", paths, names, file))
    infer.register()
    gin_config.configure([str(file)], ["INPUT=questions.jsonl", "OUTPUT_DIR=run"])
    assert gin_config.call(FewShot) == task
    assert gin.query_parameter("TRUNCATE/macro.value") == "beginning"


def test_the_file_is_for_inputs_without_answers_and_for_any_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    task = FewShot(
        prompt="{q}", answer="{a}", shots=1, references="a", examples="x.jsonl", num_inputs=3
    )
    found = task_of_all(task)
    assert found == FewShot(prompt="{q}", answer="{a}", shots=1, examples=str(tmp_path / "x.jsonl"))
    kept = dataclasses.replace(task, examples="seqio:sums")
    assert task_of_all(kept).examples == "seqio:sums" and task_of_all(None) is None
    named = {"TOKENIZER": "tok", "DTYPE": None}
    assert portable_names(named) == {"TOKENIZER": str(tmp_path / "tok"), "DTYPE": None}


def test_a_built_in_pair_has_a_name_and_no_paths():
    built_in = {name: str(PAIRS / "gsm8k" / name) for name in ("verifier", "drafter")}
    lines = gin_text(CHOICES["with copies"], "why", built_in, {}, "built-in", "f").splitlines()
    named = {f"{name.upper()} = 'built-in:gsm8k/{name}'" for name in built_in}
    assert named | {"BIGRAM = None"} <= set(lines)
    table = Hierarchy((), ((6,),), "bigram")
    assert "BIGRAM = 'built-in'" in gin_text(table, "why", built_in, {}, "built-in", "f")
