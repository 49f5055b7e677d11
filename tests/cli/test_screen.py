"""`specjax screen` from a tiny pair and prompts to a table and a file of all settings."""

import json

import pytest

from specjax.cli.main import main
from specjax.tuning import Setting
from tests.tiny_pair import sentences, write_model, write_pair, write_vocabulary

SETTINGS = {
    "SCREENED": 6,
    "MAX_NEW_TOKENS": 8,
    "RULES": "{'lossless': (), 'opt': (0.0, 0.5), 'token_v3': (0.5,)}",
    "MAX_DRAFTS": "(1, 3)",
    "STOPPING": "{'confidence': (0.1,)}",
    "LONGEST": 4,
    "WITH_TIMES": False,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    (directory / "prompts.txt").write_text("\n".join(sentences(7)) + "\n", encoding="utf-8")
    write_pair(directory / "pair")
    write_vocabulary(write_model(directory / "smaller", "drafter", seed=7))
    return directory


def run(data, output, **bindings):
    pair = {name.upper(): data / "pair" / name for name in ("drafter", "verifier")}
    values = {**SETTINGS, **pair, "INPUT": data / "prompts.txt", "OUTPUT_DIR": output, **bindings}
    return main(["screen", *(f"--gin.{name}={value}" for name, value in values.items())])


def rows_of(output):
    return [json.loads(line) for line in (output / "screen.jsonl").read_text().splitlines()]


def test_the_result_is_a_table_and_a_line_for_each_setting(data, tmp_path, capsys):
    output = tmp_path / "out"
    assert run(data, output, DRAFTERS=(str(data / "smaller"),), SHOWN=5) == 0
    table = capsys.readouterr().out.splitlines()
    rows = rows_of(output)
    assert len(rows) == 1 + 2 * 4 * 3 * 2
    assert {row["drafter"] for row in rows} == {"drafter", "drafter_2"}
    settings = {Setting(**{name: row[name] for name in Setting().to_dict()}) for row in rows}
    assert len(settings) == len(rows)
    calls = [row["tokens_per_call"] for row in rows]
    assert calls == sorted(calls, reverse=True) and calls[0] > calls[-1] == 1.0
    assert all(row["speedup"] is None and row["latency"] is None for row in rows)
    assert "tokens_per_call" in table[0] and "speedup" not in table[0]
    assert f"{calls[0]:.4g}" in table[2] and "settings: 49" in table and "shown: 5" in table
    assert len([line for line in table if "Block" in line or "Token" in line]) >= 5
    assert {"config.gin", "runs.jsonl", "screen_config.json"} < {p.name for p in output.iterdir()}


def test_times_tell_latencies(data, tmp_path, capsys):
    output = tmp_path / "out"
    few = {"RULES": "{'lossless': ()}", "MAX_DRAFTS": "(2,)", "STOPPING": "{}"}
    assert run(data, output, WITH_TIMES=True, **few) == 0
    rows = rows_of(output)
    speeds = [row["speedup"] for row in rows]
    assert speeds == sorted(speeds, reverse=True) and 1.0 in speeds and len(rows) == 3
    times = json.loads((output / "times.json").read_text())
    assert set(times["passes"]["verifier"]) >= {"1", "2"} and times["rows"] == 1
    assert "speedup" in capsys.readouterr().out


def test_settings_that_go_too_far_come_last(data, tmp_path, capsys):
    output = tmp_path / "out"
    assert run(data, output, MAX_NATS=0.0, STOPPING="{}") == 0
    nats = [row["nats_per_token"] for row in rows_of(output)]
    exact = [x == 0.0 for x in nats]
    assert exact == sorted(exact, reverse=True) and not all(exact)


NO_MODELS = {"VERIFIER": "nowhere", "DRAFTER": "nowhere"}
WRONG = {
    "few": ({"SCREENED": 8}, "there are 7 prompts, but 8 are screened: add"),
    "rule": ({"RULES": "{'best': (1,)}"}, "rules must be one of Lossless"),
    "strength": ({"RULES": "{'opt': ()}"}, "OPT needs a strength"),
    "policy": ({"STOPPING": "{'online': (0.5,)}"}, "stopping=online learns from earlier rounds"),
    "unknown": ({"STOPPING": "{'costs': (1,)}"}, "stopping must be one of confidence"),
    "head": ({"STOPPING": "{'head': (0.5,)}"}, "the drafter has no acceptance head"),
    "carry": ({"VERIFICATIONS": "('GreedyBlock',)"}, "screen Token or Block"),
    "draft": ({"MAX_DRAFTS": "(0,)"}, "max_drafts must be a whole number of at least 1, got 0"),
    "order": ({"ORDER": "beauty"}, "order must be one of speedup, latency"),
    "times": ({"ORDER": "speedup"}, "order='speedup' needs times"),
    "shown": ({"SHOWN": 0}, "SHOWN must be a whole number of at least 1, got 0"),
    "nats": ({"MAX_NATS": -1}, "max_nats must be at least 0, got -1"),
    "length": ({"MAX_NEW_TOKENS": 0, **NO_MODELS}, "max_new_tokens must be"),
    "counts": ({"TOP_K": 0, **NO_MODELS}, "top_k must be"),
    "nucleus": ({"TOP_P": 2, **NO_MODELS}, "top_p must"),
    "batch": ({"BATCH_SIZE": 0, **NO_MODELS}, "batch_size must be"),
    "stop": ({"STOP": "('',)", **NO_MODELS}, "stop has an empty text"),
    "buckets": ({"BUCKETS": "(9, 3)", **NO_MODELS}, "buckets must be"),
    "budgeted": ({"RULES": "{'Budgeted': (0.1,)}", **NO_MODELS}, "rules cannot have Budgeted"),
    "twice": ({"DRAFTERS": "('{data}/pair/drafter',)"}, "is the same as drafter"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_one_line_before_any_work(data, tmp_path, capsys, name):
    values, told = WRONG[name]
    values = {key: str(value).replace("{data}", str(data)) for key, value in values.items()}
    assert run(data, tmp_path / "out", **values) == 2
    lines = [x for x in capsys.readouterr().err.splitlines() if "warning" not in x]
    assert len(lines) == 1 and told in lines[0], lines
    assert not (tmp_path / "out").exists()
