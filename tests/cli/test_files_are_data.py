"""Every file that a run writes is read as data: nothing in it is imported, evaluated or run.

A module `trap`, which can be imported, leaves a mark; the texts below would import or run it.
"""

import json
import shutil
import sys

import pytest

from specjax.cli.main import main
from specjax.runs.predictions import line_of
from specjax.runs.run_directory import RunDirectory, Store, fingerprint_of, read_config
from specjax.study import Setting, read_points
from specjax.study.points import CONFIG_NAME, MADE, RECORDS
from tests.cli.infer_command import arguments
from tests.study import world
from tests.variants import variants

PARTS = [
    *("trap.Part(1)", "trap", "trap.part", "OPT(trap.part)", "__import__('trap').Part(1)"),
    *("OPT(__import__('trap'))", "Budgeted(trap.Part(1), 0.1)", "(lambda: trap)()"),
]
CODE = [
    "import trap\n@trap.Part()\n%trap.part\n",
    "cos\nsystem\n(S'touch mark'\ntR.",
    "!!python/object/apply:trap.Part [1]\n",
    "{{ cycler.__init__.__globals__.os.system('touch mark') }} {0.__class__} $(touch mark)",
]


@pytest.fixture(autouse=True)
def _trap(tmp_path, monkeypatch):
    (tmp_path / "trap.py").write_text("open('mark', 'w')\npart = 1\ndef Part(*given): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield
    assert "trap" not in sys.modules and not (tmp_path / "mark").exists()


NESTED = "Budgeted(" * 5_000 + "OPT(0.2)" + ", 0.1)" * 5_000


@pytest.mark.parametrize("name", ["RULE", "METHOD", "VERIFICATION", "STOPPING", "DRAFTING"])
@pytest.mark.parametrize("text", [*PARTS, "OPT.__init__", "OPT(**{})", NESTED])
def test_a_text_in_a_gin_file_or_on_the_command_line_is_data(tmp_path, capsys, name, text):
    (tmp_path / "own.gin").write_text(f"{name} = {text!r}\n")
    run = ["--gin.INPUT=in.txt", "--gin.OUTPUT_DIR=out"]
    for words in ([f"--gin.{name}={text}"], ["--gin_file=own.gin"]):
        assert main(["infer", *words, *run]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert name in line and len(line) < 1_000


def poisoned(value, text):
    """The same value with a text in place of each of its texts."""
    if isinstance(value, dict):
        return {key: poisoned(each, text) for key, each in value.items()}
    if isinstance(value, list):
        return [poisoned(each, text) for each in value]
    return text if isinstance(value, str) else value


def poison(path, text, sealed=None):
    """Replaces the texts in a file, or all of a file that is not JSON."""
    if path.suffix == ".gin":
        path.write_text(text)
        return
    values = [poisoned(json.loads(x), text) for x in path.read_text().splitlines() or ["{}"]]
    if sealed is not None:
        path.write_bytes(b"".join(line_of(value, sealed) for value in values))
    else:
        path.write_text("".join(json.dumps(value) + "\n" for value in values))


@pytest.mark.parametrize("text", [PARTS[0], *CODE], ids=range(1 + len(CODE)))
@pytest.mark.parametrize(
    "name", ["predictions.jsonl", "metrics.json", "infer_config.json", "config.gin", "runs.jsonl"]
)
def test_a_run_of_infer_is_resumed_and_scored(paths, done, tmp_path, capsys, name, text):
    source, output = done
    copy = tmp_path / "out"
    shutil.copytree(output, copy)
    configuration = read_config(copy / "infer_config.json")
    path = copy / name
    if name in ("metrics.json", "infer_config.json"):
        path.write_text(json.dumps(poisoned(json.loads(path.read_text()), text)))
    else:
        sealed = fingerprint_of(configuration) if name == "predictions.jsonl" else None
        poison(path, text, sealed)
    refused = []
    for argv in (
        ["evaluate", f"--gin.PREDICTIONS={copy}", "--gin.METRICS=()"],
        arguments(paths, source, copy),
    ):
        status = main(argv)
        told = capsys.readouterr().err
        assert status in (0, 2) and "Traceback" not in told
        if status:
            assert told.splitlines()[-1].startswith(f"specjax {argv[0]}: ")
            refused.append(argv[0])
    assert refused == REFUSED.get(name, [])


# What is not read, or says nothing of the rows, is no reason to refuse them.
REFUSED = {
    "predictions.jsonl": ["infer"],
    "infer_config.json": ["evaluate", "infer"],
}
ASKED = world.settings({"OPT({})": 0.1})


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    output = tmp_path_factory.mktemp("compared") / "out"
    world.run(output, ASKED)
    return output


def with_setting(output, values):
    """Gives the record of one setting other values, sealed as the run seals them."""
    run = RunDirectory(output, config_name=CONFIG_NAME, makes=MADE)
    run.peek()
    store = Store(run, RECORDS)
    key = (ASKED[-1].key, "texts")
    record = store.get(key)
    store.put(
        key, {**record.value, "setting": {**record.value["setting"], **values}}, record.arrays
    )
    return store.path(key).name


@pytest.mark.parametrize("text", variants(PARTS, PARTS[0], PARTS[4]))
@pytest.mark.parametrize("field", ["rule", "verification", "stopping", "drafting", "method"])
def test_a_record_of_a_comparison_names_only_known_parts(compared, tmp_path, capsys, field, text):
    copy = tmp_path / "out"
    shutil.copytree(compared, copy)
    name = with_setting(copy, {field: text})
    for read in (lambda: read_points(copy), lambda: world.run(copy, ASKED)):
        with pytest.raises((ValueError, FileNotFoundError)) as told:
            read()
        assert "\n" not in str(told.value) and name in str(told.value)
    assert main(["evaluate", f"--gin.PREDICTIONS={copy}", "--gin.METRICS=()"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line and field in line


@pytest.mark.parametrize(
    "values",
    [
        {"processors": ["trap.Part(1)"]},
        {"processors": "trap.Part(1)"},
        {"drafter": {"__class__": "trap.Part"}},
        {"__class__": "trap.Part"},
        {"rule": ["OPT(0.2)"]},
        {"temperature": "trap.part"},
        {"max_draft": 1e300},
        {"top_k": [1, 2]},
    ],
    ids=str,
)
def test_values_of_other_types_are_refused_with_the_file(compared, tmp_path, values):
    copy = tmp_path / "out"
    shutil.copytree(compared, copy)
    name = with_setting(copy, values)
    with pytest.raises(ValueError, match=name):
        read_points(copy)


@pytest.mark.parametrize("name", ["points.jsonl", "results.json", "compare_config.json"])
@pytest.mark.parametrize("text", variants([PARTS[0], *CODE], PARTS[0], CODE[1]))
def test_other_files_of_a_comparison_are_no_programs(compared, tmp_path, capsys, name, text):
    copy = tmp_path / "out"
    shutil.copytree(compared, copy)
    path = copy / name
    if name == "points.jsonl":
        poison(path, text)
    else:
        path.write_text(json.dumps(poisoned(json.loads(path.read_text()), text)))
    assert main(["evaluate", f"--gin.PREDICTIONS={copy}", "--gin.METRICS=()"]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err
    if name == "compare_config.json":
        with pytest.raises((ValueError, OSError)):
            world.run(copy, ASKED)
    else:
        world.run(copy, ASKED)
        assert text not in path.read_text()


def test_a_setting_from_a_file_is_the_setting():
    """The control: what is refused above is not refused for its form."""
    assert Setting(**json.loads(json.dumps(ASKED[-1].to_dict()))) == ASKED[-1]
