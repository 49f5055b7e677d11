"""Few-shot tasks from end to end: records, prompts, a random Llama, and scores."""

import json
import string

import pytest

from specjax.checkpoints import save_model
from specjax.cli.main import main
from specjax.evaluation import sandbox
from specjax.models import LlamaConfig, model_from_config
from specjax.study import read_points
from tests.cli.infer_command import CONFIGS, rows
from tests.models.tiny import random_params

LETTERS = tuple(string.ascii_lowercase)
SIZES = {"verifier": (32, 2), "drafter": (16, 1)}
FUNCTIONS = [
    {
        "prompt": 'def twice(x):\n    """Two times a number."""\n',
        "entry_point": "twice",
        "test": "def check(f):\n    assert f(4) == 8\n",
        "solution": "    return x + x\n",
    },
    {
        "prompt": 'def last(items):\n    """The item at the end of a list."""\n',
        "entry_point": "last",
        "test": "def check(f):\n    assert f([3, 1]) == 1\n",
        "solution": "    return items[-1]\n",
    },
]
PROGRAMS = [
    {
        "text": f"Write a function that adds {i} to a number.",
        "code": f"def add(x):\n    return x + {i}",
        "test_list": [f"assert add(1) == {1 + i}", f"assert add(0) == {i}"],
        "test_setup_code": "",
    }
    for i in range(4)
]
SUMS = [
    {
        "question": f"Ann has {i} nuts and finds {j}. How many has she?",
        "answer": f"She has {i} + {j} nuts.\n#### {i + j}",
    }
    for i, j in ((2, 3), (1, 1), (4, 6), (7, 5), (9, 2))
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llamas")
    for seed, (name, (width, layers)) in enumerate(SIZES.items()):
        model = model_from_config(LlamaConfig.of(259, width, 2, 1, 8, 32, layers))
        save_model(directory / name, model, random_params(model, seed), format="hf")
        words = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 0}
        (directory / name / "tokenizer_config.json").write_text(json.dumps(words))
    return {name: directory / name for name in SIZES}


def jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def infer(paths, tmp_path, file, **settings):
    few = {"BATCH_SIZE": 2, "MAX_DRAFT": 3, "MAX_NEW_TOKENS": 16, "BUCKETS": "(256, 512)"}
    assert main(command("infer", paths, tmp_path, file, **{**few, **settings})) == 0
    return rows(tmp_path / "out")


QUICK = {"RESAMPLES": 100, "NUM_SAMPLES": 1, "BATCH_SIZE": 1, "LATENCY_LIMIT": 2, "REPEATS": 1}


def command(name, paths, tmp_path, file, **settings):
    """The words of a command on the random Llamas."""
    named = {"VERIFIER": paths["verifier"], "DRAFTER": paths["drafter"]}
    named |= {"OUTPUT_DIR": tmp_path / "out", "MAX_NEW_TOKENS": 12, "BUCKETS": "(512,)"}
    files = [f"--gin_file={CONFIGS / one}" for one in (f"runs/{name}.gin", file)]
    return [name, *files, *(f"--gin.{k}={v}" for k, v in {**named, **settings}.items())]


def evaluate(capsys, *files, **settings):
    capsys.readouterr()
    arguments = [f"--gin_file={file}" for file in files]
    arguments += [f"--gin.{name}={value}" for name, value in settings.items()]
    assert main(["evaluate", "--gin.RESAMPLES=100", *arguments]) == 0
    scores = json.loads(capsys.readouterr().out.splitlines()[-1])
    return {name: m["figures"] for name, m in scores["methods"].items()}


def pass_at_1(capsys, source, output, solutions, tmp_path):
    """That of a run, and of right answers."""
    right = jsonl(tmp_path / "right.jsonl", [{"prediction": text} for text in solutions])
    settings = {"METRICS": "()", "PROBLEMS": source, "SANDBOX": "@Sandbox()"}
    settings |= {"Sandbox.seconds": 60.0, "PREDICTIONS": f"('{output}', '{right}')"}
    figures = evaluate(capsys, **settings)
    return [figures[name]["pass_at_1"]["value"] for name in ("out", "right")]


needs_sandbox = pytest.mark.skipif(sandbox.missing() is not None, reason="no sandbox here")


@pytest.mark.exhaustive
@needs_sandbox
def test_functions_are_gone_on_with(paths, tmp_path, capsys):
    source = jsonl(tmp_path / "problems.jsonl", FUNCTIONS)
    found = infer(paths, tmp_path, "prompts/human_eval.gin", INPUT=source, TEMPERATURE=1.0)
    assert [row["inputs"] for row in found] == [one["prompt"] for one in FUNCTIONS]
    solutions = [one["solution"] for one in FUNCTIONS]
    assert pass_at_1(capsys, source, tmp_path / "out", solutions, tmp_path) == [0.0, 100.0]


@needs_sandbox
def test_programs_are_written_after_solved_ones(paths, tmp_path, capsys):
    source = jsonl(tmp_path / "test.jsonl", PROGRAMS[2:])
    examples = jsonl(tmp_path / "prompt.jsonl", PROGRAMS[:2])
    file = "papers/faster_cascades/task_gemma_mbpp.gin"
    asked = {"INPUT": source, "EXAMPLES": examples, "SHOTS": 2, "SHOTS_SEED": None}
    found = infer(paths, tmp_path, file, **asked)
    shots = [
        f"Task: {one['text']}\nTests:\n{one['test_list'][0]}\n{one['test_list'][1]}\nProgram:\n"
        for one in PROGRAMS
    ]
    solved = [f"{shots[i]}{PROGRAMS[i]['code']}\nEnd of the program.\n\n" for i in (0, 1)]
    assert [row["inputs"] for row in found] == ["".join([*solved, shots[i]]) for i in (2, 3)]
    solutions = [one["code"] for one in PROGRAMS[2:]]
    assert pass_at_1(capsys, source, tmp_path / "out", solutions, tmp_path) == [0.0, 100.0]


@pytest.mark.exhaustive
def test_sums_stop_at_a_text_and_answer_a_number(paths, tmp_path, capsys):
    source = jsonl(tmp_path / "test.jsonl", SUMS)
    file = "prompts/gsm8k.gin"
    asked = {"INPUT": source, "EXAMPLES": source, "SHOTS": 2, "LIMIT": 4, "MAX_NEW_TOKENS": 24}
    asked |= {"STOP": str(LETTERS), "TEMPERATURE": 1.0}
    found = infer(paths, tmp_path, file, **asked)
    assert len(found) == 4
    for row in found:
        assert row["inputs"].count("Question:") == 3 and row["inputs"].endswith("\nAnswer:")
        *shots, own = row["inputs"].split("\n\n")
        assert own not in "".join(shots)  # no input is its own example
        (reference,) = row["targets"]
        assert reference in [one["answer"] for one in SUMS]
        assert not set(LETTERS) & set(row["prediction"])
        assert (row["ended_by"] == "stop") == bool(set(LETTERS) & set(decoded(row["tokens"])))
    metrics = json.loads((tmp_path / "out/metrics.json").read_text())
    assert metrics["ended_by_stop"] == sum(row["ended_by"] == "stop" for row in found) > 0
    # One file says all of the task.
    scores = evaluate(capsys, file, PREDICTIONS=tmp_path / "out")["out"]
    assert scores["numeric_accuracy"]["value"] == 0.0 and "exact_match" not in scores
    # The references as outputs, and one that is another number.
    outputs = [*(row["targets"][0] for row in found[:3]), "It is 1.\n#### 1"]
    targets = [row["targets"] for row in found]
    pairs = zip(outputs, targets, strict=True)
    mixed = [{"prediction": output, "targets": several} for output, several in pairs]
    settings = {"PREDICTIONS": jsonl(tmp_path / "own.jsonl", mixed), "ANSWER": "@AnswerAfter()"}
    settings |= {"AnswerAfter.marker": "####", "METRICS": "('numeric_accuracy', 'exact_match')"}
    plain = evaluate(capsys, **settings)["own"]
    assert plain["numeric_accuracy"]["value"] == 75.0 and plain["exact_match"]["value"] == 0.0
    both = evaluate(capsys, REFERENCE_ANSWER="@AnswerAfter()", **settings)["own"]
    assert both["exact_match"]["value"] == 75.0


@pytest.mark.exhaustive
@needs_sandbox
def test_a_comparison_scores_answers_and_programs(paths, tmp_path, capsys):
    """Few-shot prompts, stop strings, extracted answers and pass@1, as the commands alone do."""
    source = jsonl(tmp_path / "test.jsonl", PROGRAMS[2:])
    examples = jsonl(tmp_path / "prompt.jsonl", PROGRAMS[:2])
    names = ("pass_at_1", "exact_match", "answer_f1", "numeric_accuracy")
    asked = {"INPUT": source, "EXAMPLES": examples, "SHOTS": 2, "SHOTS_SEED": None} | QUICK
    asked |= {"METHODS": "{'OPT({})': 0.2}", "METRICS": names, "STOP": LETTERS}
    asked |= {"ANSWER": "@AnswerAfter()", "AnswerAfter.marker": "' '", "MAX_NEW_TOKENS": 24}
    asked |= {"PROBLEMS": source, "SANDBOX": "@Sandbox()", "Sandbox.seconds": 60.0}
    file = "papers/faster_cascades/task_gemma_mbpp.gin"
    assert main([*command("compare", paths, tmp_path, file, **asked), "--full"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert results["quality"] == "pass_at_1" and results["done"] == 3
    record = json.loads((tmp_path / "out/points.jsonl").read_text().splitlines()[-1])
    assert record["values"]["rule"] == "OPT(0.2)" and set(record["over_verifier"]) == set(names)
    points = read_points(tmp_path / "out")
    (found,) = points.measured(next(one for one in points.of() if one.strength == 0.2)).rows
    assert all(row["inputs"].count("Task: ") == 3 for row in found)
    assert "stop" in [row["ended_by"] for row in found]
    # `infer` with the same task decodes the same prompts to the same texts.
    asked = {name: asked[name] for name in ("INPUT", "EXAMPLES", "SHOTS", "SHOTS_SEED", "STOP")}
    asked |= {"OUTPUT_DIR": tmp_path / "again", "BATCH_SIZE": 1, "RULE": "OPT(0.2)"}
    asked |= {"MAX_DRAFT": record["max_draft"], "MAX_NEW_TOKENS": 24}
    assert main(command("infer", paths, tmp_path, file, **asked)) == 0
    assert [(r["inputs"], r["tokens"]) for r in rows(tmp_path / "again")] == [
        (r["inputs"], r["tokens"]) for r in found
    ]
    own = jsonl(tmp_path / "own.jsonl", found)
    alone = {"PREDICTIONS": own, "METRICS": names, "PROBLEMS": source}
    alone |= {"ANSWER": "@AnswerAfter()", "AnswerAfter.marker": "' '"}
    alone |= {"SANDBOX": "@Sandbox()", "Sandbox.seconds": 60.0, "RESAMPLES": 100}
    (figures,) = evaluate(capsys, **alone).values()
    for name in names:
        assert figures[name] == record["figures"][name]


def test_estimates_take_few_shot_prompts(paths, tmp_path, capsys):
    source = jsonl(tmp_path / "test.jsonl", SUMS)
    asked = {"INPUT": source, "EXAMPLES": source, "SHOTS": 2, "LIMIT": 4, "BUCKETS": "(64,)"}
    asked |= {"METHODS": "{'Lossless': None}", "MAX_DRAFTS": "(2,)", "METRICS": "()"}
    asked |= {"ESTIMATE_LIMIT": 2, "STOP": str(LETTERS)}
    file = "papers/faster_cascades/task_gemma_gsm8k.gin"
    assert main([*command("compare", paths, tmp_path, file, **asked), "--estimate"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert results["estimated"] == 3 and results["done"] == 0
    refused = command("compare", paths, tmp_path, file, **{**asked, "TRUNCATE": None})
    refused += [f"--gin.OUTPUT_DIR={tmp_path / 'other'}", "--estimate"]
    assert main(refused) == 2
    assert "the longest bucket holds 64" in capsys.readouterr().err


def decoded(tokens):
    return bytes(i - 3 for i in tokens if i >= 3).decode(errors="ignore")


def test_long_prompts_are_cut_where_it_is_said(paths, tmp_path, capsys):
    source = jsonl(tmp_path / "a.jsonl", [{"en": "b" + 300 * "c" + "d", "de": "x"}])
    file = "papers/faster_cascades/task_t5_wmt.gin"
    (row,) = infer(paths, tmp_path, file, INPUT=source, BUCKETS="(64,)")
    assert row["prediction"] is not None and row["targets"] == ["x"]
    assert "1 of 1 inputs cannot" not in capsys.readouterr().err
