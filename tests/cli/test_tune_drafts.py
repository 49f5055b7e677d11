"""`specjax tune_drafts` from tiny models and prompts to a file that `specjax infer` takes."""

import json

import pytest

from specjax.cli.main import main
from tests.tiny_pair import SYLLABLES, sentences, write_model, write_pair, write_vocabulary

SETTINGS = {
    "SCREENED": 4,
    "MEASURED": 4,
    "CANDIDATES": 1,
    "MAX_DRAFT": 2,
    "MAX_NEW_TOKENS": 8,
    "BATCH_SIZE": 2,
    "REPEATS": 1,
    "LENIENCES": "(1.0, 2.0)",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    (directory / "prompts.txt").write_text("\n".join(sentences(9)) + "\n", encoding="utf-8")
    write_pair(directory / "pair")
    smaller = write_model(directory / "smaller", "drafter", seed=7)
    write_vocabulary(smaller)
    other = write_model(directory / "other", "drafter", seed=8)
    write_vocabulary(other, [syllable[::-1] for syllable in SYLLABLES])
    return directory


def run(data, output, **bindings):
    pair = {name.upper(): data / "pair" / name for name in ("drafter", "verifier")}
    values = {**SETTINGS, **pair, "INPUT": data / "prompts.txt", "OUTPUT_DIR": output, **bindings}
    return main(["tune_drafts", *(f"--gin.{name}={value}" for name, value in values.items())])


def test_the_result_is_a_table_and_a_file_for_infer(data, tmp_path, capsys):
    output = tmp_path / "out"
    assert run(data, output, DRAFTERS=(str(data / "smaller"),)) == 0
    table, line = capsys.readouterr().out.rsplit("\n", 2)[:2]
    results = json.loads(line)
    assert results == json.loads((output / "results.json").read_text())
    drafts = [row["drafts"] for row in results["measured"]]
    assert drafts[0] == "verifier alone" and len(drafts) == 3 == len(set(drafts))
    assert results["chosen"] in drafts and results["chosen"] in table
    assert results["measured"][0]["measured"] == results["measured"][0]["expected"] == 1.0
    assert list(results["models"]) == ["verifier", "drafter", "drafter_2"]
    for row in results["measured"]:
        assert row["low"] <= row["measured"] <= row["high"]
        assert row["tokens_per_call"] >= 1.0
    found = results["screening"]
    assert set(found["passes"]["drafter"]) == {"1", "2", "3"}
    assert all(0.0 <= rate["rate"] <= 1.0 for rate in found["acceptance"])
    pairs = {(rate["reviewer"], rate["drafter"]) for rate in found["acceptance"]}
    assert len(pairs) == 3
    assert {"config.gin", "runs.jsonl", "tune_config.json"} < {p.name for p in output.iterdir()}
    decoded = tmp_path / "decoded"
    command = ["infer", f"--gin_file={output / 'drafts.gin'}", f"--gin.OUTPUT_DIR={decoded}"]
    assert main([*command, f"--gin.INPUT={data / 'prompts.txt'}"]) == 0
    assert json.loads((decoded / "metrics.json").read_text())["rows"] == 9


WRONG = {
    "few": ({"SCREENED": 6}, "there are 9 prompts, but 6 are screened and 4 measured: add"),
    "interval": ({"MEASURED": 3}, "measured must be at least twice batch_size = 2"),
    "twice": ({"DRAFTERS": "('{data}/smaller', '{data}/smaller')"}, "is the same as drafter_2"),
    "verifier": ({"DRAFTERS": "('{data}/pair/verifier',)"}, "is the same as the verifier"),
    "vocabulary": ({"DRAFTERS": "('{data}/other',)"}, "drafter_2 and verifier have different"),
    "temperature": ({"TEMPERATURE": "-1"}, "temperature must be finite and at least 0, got -1"),
    "words": ({"TEMPERATURE": "'hot'"}, "temperature must be"),
    "draft": ({"MAX_DRAFT": 0}, "max_draft must be a whole number of at least 1, got 0"),
    "lenience": ({"LENIENCES": "(0.5,)"}, "leniences must be finite and at least 1, got 0.5"),
    "levels": ({"LEVELS": 4}, "levels must be 1, 2 or 3, got 4"),
    "path": ({"DRAFTERS": "('{data}/nowhere',)"}, "nowhere"),
    "text": ({"DRAFTERS": "'{data}/smaller'"}, "drafters must be a tuple of directories"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_one_line_before_any_work(data, tmp_path, capsys, name):
    values, told = WRONG[name]
    values = {key: str(value).replace("{data}", str(data)) for key, value in values.items()}
    assert run(data, tmp_path / "out", **values) == 2
    lines = [x for x in capsys.readouterr().err.splitlines() if "warning" not in x]
    assert len(lines) == 1 and told in lines[0], lines
    assert not (tmp_path / "out").exists()
