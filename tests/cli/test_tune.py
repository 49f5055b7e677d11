"""`specjax tune` from gin files to an answer, a report and a file for `specjax infer`."""

import gzip
import importlib
import itertools
import json
import shutil

import pytest

from specjax import load_models, text
from specjax.cli import gin_config, infer
from specjax.cli.main import main
from specjax.tuning import Setting
from tests import tiny_pair

tune = importlib.import_module("specjax.tuning.tune")  # the package has a function of that name

SETTINGS = {
    "DEMAND": "as good as the verifier within 90 and nats per token <= 9",
    "TARGETS_FIELD": 1,
    "METRICS": "('chrf',)",
    "RULES": "{'lossless': (), 'opt': (0.2, 0.4)}",
    "MAX_DRAFTS": "(2,)",
    "CANDIDATES": 3,
    "ROUNDS": 2,
    "SCREENED": 4,
    "SEEDS": 2,
    "BATCH_SIZE": 4,
    "LATENCY_BATCH_SIZE": 4,
    "LATENCY_TEXTS": 8,
    "RESAMPLES": 100,
    "MAX_NEW_TOKENS": 6,
    "BUCKETS": "(24,)",
}


@pytest.fixture(scope="module", autouse=True)
def _all_are_promising():
    """Drafts for a tiny verifier are expected to be slow, and left out, or not: by the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specjax.tuning.halving._LEEWAY", 0.0)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    tiny_pair.write_pair(directory / "pair")
    rows = zip(*(tiny_pair.sentences(32, seed=seed) for seed in (1, 2)), strict=True)
    (directory / "texts.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in rows))
    return directory


def run(data, output, **settings):
    pair = {name.upper(): data / "pair" / name for name in ("verifier", "drafter")}
    values = {**SETTINGS, **pair, "INPUT": data / "texts.tsv", "OUTPUT_DIR": output, **settings}
    return main(["tune", *(f"--gin.{name}={value}" for name, value in values.items())])


def results_of(output):
    return json.loads((output / "results.json").read_text())


@pytest.fixture(scope="module")
def screened():
    """The places of the texts that screening was given, once `done` has run."""
    return []


@pytest.fixture(scope="module")
def done(data, tmp_path_factory, screened):
    output = tmp_path_factory.mktemp("tune") / "out"
    named, screen, encode = {}, tune.screen_prompts, tune.tokens_of

    def encoded(decoder, inputs, name, **how):
        tokens = encode(decoder, inputs, name, **how)
        named[id(tokens)] = int(name.removeprefix("text ")), tokens
        return tokens

    def watched(models, settings, decoders, prompts, *others):
        screened.extend(named[id(tokens)][0] for tokens in prompts)
        return screen(models, settings, decoders, prompts, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "tokens_of", encoded)
        patch.setattr(tune, "screen_prompts", watched)
        assert run(data, output) == 0
    assert len(named) == 32
    return output


def test_the_rounds_the_answer_and_the_held_out_figures_are_told(data, done, screened):
    results = results_of(done)
    sizes = [(one["texts"], len(one["settings"])) for one in results["rounds"]]
    assert sizes == [(8, 4), (16, 3)]  # with the verifier alone
    assert results["answer"] in ("draft", "do not draft")  # likewise
    held_out = results["held_out"]
    assert held_out["texts"] == 16 and held_out["timed"] == 8 and held_out["met"]
    assert {"chrf", "latency", "relative_latency", "nats_per_token"} <= set(held_out["figures"])
    assert [part["met"] for part in held_out["demands"]] == [True, True]
    assert held_out["verifier"]["relative_latency"]["value"] == 1.0
    made = {path.name for path in done.iterdir()}
    assert made >= {"config.gin", "runs.jsonl", "screen.jsonl", "times.json", "tuned.gin"}
    # Each text is in one part, the last of them held out: screening saw none of its texts.
    parts = []
    for path in sorted((done / "measured").glob("alone-*")):
        with gzip.open(path / "seed0.jsonl.gz") as lines:
            parts.append([json.loads(line)["id"] for line in lines])
    assert [len(ids) for ids in parts] == [8, 8, 16]
    assert sorted(itertools.chain(*parts)) == list(range(32))
    assert len(screened) == 4 and not set(screened) & set(parts[-1])


def test_infer_takes_what_was_chosen(data, done):
    infer.register()
    gin_config.configure([str(done / "tuned.gin")], ["INPUT=captions.txt", "OUTPUT_DIR=run"])
    found = gin_config.call(text.Decoder)
    paths = {name: data / "pair" / name for name in ("drafter", "verifier")}
    setting = Setting(**results_of(done)["setting"])
    options = {"max_new_tokens": 6, "buckets": (24,), "batch_size": 4}
    assert found.describe() == setting.decoder(load_models(**paths).named, **options).describe()


def test_a_stopped_run_measures_what_is_missing_alone(data, done, tmp_path, capsys):
    output = tmp_path / "out"
    shutil.copytree(done, output)
    lost = sorted((output / "measured").iterdir())[0]
    kept = {path: path.stat().st_mtime_ns for path in (output / "measured").iterdir()}
    texts = {path.name: path.read_bytes() for path in lost.glob("*.jsonl.gz")}
    shutil.rmtree(lost)
    for name in ("results.json", "tuned.gin"):
        (output / name).unlink()
    assert run(data, output) == 0
    # Whatever times say now, what was measured stays, and texts are the same ones.
    assert {path: path.stat().st_mtime_ns for path in kept if path != lost}.items() <= kept.items()
    assert {path.name: path.read_bytes() for path in lost.glob("*.jsonl.gz")} == texts
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1]) == results_of(output)
    assert "demand: as good as the verifier within 90 and nats per token <= 9" in out


def test_a_demand_that_cannot_be_met_gets_no_file(data, tmp_path, capsys):
    output = tmp_path / "out"
    few = {"RULES": "{'lossless': ()}", "ROUNDS": 1, "SEEDS": 1}
    assert run(data, output, DEMAND="quality >= 101", **few) == 0
    results = results_of(output)
    assert results["answer"] == "cannot be met" and results["gin_file"] is None
    assert results["held_out"] is None and not (output / "tuned.gin").exists()
    out = capsys.readouterr().out
    assert "answer: cannot be met\n" in out and "comes nearest to 'quality >= 101'" in out


NO_MODELS = {"VERIFIER": "nowhere", "DRAFTER": "nowhere"}
WRONG = {
    "demand": ({"DEMAND": "fast"}, "demand must be such as 'quality >= 35'"),
    "no demand": ({"DEMAND": "%gin.REQUIRED"}, "required but not given: DEMAND"),
    "bound": ({"DEMAND": "latency <= 0 s"}, "out of range"),
    "metric": ({"METRICS": "('blue',)"}, "`metrics` must be among"),
    "rule": ({"RULES": "{'best': (1,)}"}, "rules must be one of Lossless"),
    "texts": ({"TEXTS": 5}, "there are 5 texts"),
    "few": ({"ROUNDS": 4}, "there are 32 texts, of which 16 are held out: too few for 8"),
    "screened": ({"SCREENED": 17}, "17 screened; add texts, or lower"),
    "timed": ({"LATENCY_TEXTS": 33}, "there are 32 texts, but latency_texts=33 are timed"),
    "share": ({"HELD_OUT": 1.0}, "held_out must lie in (0, 1), got 1.0"),
    "confidence": ({"CONFIDENCE": 0.4}, "confidence must lie in (0.5, 1), got 0.4"),
    "rounds": ({"ROUNDS": 0}, "rounds must be a whole number of at least 1, got 0"),
    "temperature": ({"TEMPERATURE": -1}, "temperature must be"),
    "references": ({"TARGETS_FIELD": None}, "give the references once"),
    "input": ({"INPUT": "nowhere.tsv"}, "nowhere.tsv: no such file"),
    "model": ({"VERIFIER": "nowhere"}, "nowhere"),
    "carry": ({"VERIFICATIONS": "('GreedyBlock',)"}, "screen Token or Block"),
    "head": ({"STOPPING": "{'head': (0.5,)}"}, "the drafter has no acceptance head"),
    "buckets": ({"BUCKETS": "(0,)", **NO_MODELS}, "buckets"),
    "stop": ({"STOP": "('',)", **NO_MODELS}, "stop has an empty text"),
    "counts": ({"TOP_K": 0, **NO_MODELS}, "top_k must be"),
    "nucleus": ({"TOP_P": 2, **NO_MODELS}, "top_p must"),
    "batch": ({"BATCH_SIZE": 0, **NO_MODELS}, "batch_size must be"),
    "draft": ({"MAX_DRAFTS": "(0,)", **NO_MODELS}, "max_drafts must be"),
    "budgeted": ({"RULES": "{'budgeted': (0.1,)}", **NO_MODELS}, "rules cannot have Budgeted"),
    "length": ({"MAX_NEW_TOKENS": 0, **NO_MODELS}, "max_new_tokens must be"),
    "name": ({"DEMANDS": "3"}, "--gin.DEMANDS: no such name; did you mean DEMAND?"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_one_line_before_any_work(data, tmp_path, capsys, name):
    values, told = WRONG[name]
    assert run(data, tmp_path / "out", **values) == 2
    lines = [x for x in capsys.readouterr().err.splitlines() if "warning" not in x]
    assert len(lines) == 1 and told in lines[0], lines
    assert not (tmp_path / "out").exists()


def test_a_text_that_is_too_long_is_named_by_its_place(data, tmp_path, capsys):
    lines = (data / "texts.tsv").read_text().splitlines()
    lines[5] = 99 * "a man " + lines[5]
    (tmp_path / "long.tsv").write_text("\n".join(lines) + "\n")
    assert run(data, tmp_path / "out", INPUT=tmp_path / "long.tsv", SEED=3) == 2
    error = capsys.readouterr().err
    assert "text 5 has " in error and "the longest bucket holds 24" in error, error


def test_another_demand_wants_another_directory(data, done, capsys):
    assert run(data, done, DEMAND="quality >= 1") == 2
    error = capsys.readouterr().err
    assert "holds a run of another configuration (search.demand:" in error
