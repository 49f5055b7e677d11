"""`specjax compare` from gin files to settings, tables and figures."""

import json
from itertools import chain

import pytest

from specjax.cli import compare, gin_config
from specjax.cli.main import main
from specjax.drafting import Costs
from specjax.study import Setting, read_points
from tests import tiny_pair
from tests.study.world import lines

# A policy that reads an acceptance head, which this drafter lacks.
FAILS = "Survival(HeadEstimate, 0.5)"
SETTINGS = {
    "METHODS": "{'OPT({})': (0.1, 0.4)}",
    "STOPPING": f"(None, '{FAILS}')",
    "METRICS": "('chrf',)",
    "MAX_DRAFTS": "(2,)",
    "NUM_SAMPLES": 2,
    "BATCH_SIZE": 4,
    "LATENCY_LIMIT": 4,
    "REPEATS": 1,
    "MAX_NEW_TOKENS": 8,
    "RESAMPLES": 100,
    "TARGETS_FIELD": 1,
    "BUCKETS": "(16, 24)",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    tiny_pair.write_pair(directory / "pair")
    texts, references = (tiny_pair.sentences(8, seed=seed) for seed in (1, 2))
    rows = zip(texts, references, strict=True)
    (directory / "texts.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in rows))
    (directory / "texts.txt").write_text("".join(f"{a}\n" for a in texts))
    (directory / "references.txt").write_text("".join(f"{a}\n" for a in references))
    return directory


def arguments(data, output, *flags, **settings):
    pair = {name.upper(): data / "pair" / name for name in ("verifier", "drafter")}
    values = {**SETTINGS, **pair, "INPUT": data / "texts.tsv", "OUTPUT_DIR": output, **settings}
    given = [f"--gin.{name.replace('__', '.')}={value}" for name, value in values.items()]
    return ["compare", *flags, *given]


def run(data, output, *flags, **settings):
    return main(arguments(data, output, *flags or ["--full"], **settings))


@pytest.fixture(scope="module")
def done(data, tmp_path_factory):
    output = tmp_path_factory.mktemp("compare") / "out"
    return output, run(data, output)


def test_settings_are_measured_tabulated_and_drawn(data, done, capsys):
    output, status = done
    assert status == 3  # some failed
    records = lines(output)
    told = [(r["method"], r["rule"], r["stopping"], r["max_draft"], r["status"]) for r in records]
    assert told == [
        ("VerifierAlone", "Lossless", None, None, "done"),
        ("DrafterAlone", "Lossless", None, None, "done"),
        (None, "OPT(0.1)", None, 2, "done"),
        (None, "OPT(0.1)", FAILS, 2, "failed"),
        (None, "OPT(0.4)", None, 2, "done"),
        (None, "OPT(0.4)", FAILS, 2, "failed"),
    ]
    assert "head" in records[-1]["error"]
    assert records[4]["process"]["compiled"] == 0  # another strength
    made = {path.name for path in output.iterdir()}
    assert made >= {"config.gin", "runs.jsonl", "results.json", "quality_latency.png", "best.csv"}
    assert "'OPT({})': (0.1, 0.4)" in (output / "config.gin").read_text()
    # Started again, it measures nothing, tries what has failed, and prints all.
    assert run(data, output) == 3
    captured = capsys.readouterr()
    table, line = captured.out.rsplit("\n", 2)[:2]
    assert json.loads(line) == json.loads((output / "results.json").read_text())
    assert "latency_reduction" in table and "drafter alone" in table
    # It ends with a verdict, and the verifier alone is what decodes at no loss.
    told = "No lossless setting with drafts was measured at temperature 1."
    assert told in table.splitlines()[-1]
    (verdict,) = json.loads(line)["verdicts"]
    assert verdict["recommended"] == "verifier alone, T=1"
    assert Setting(**verdict["setting"]) == Setting(method="VerifierAlone")
    assert "4 of 6 settings were measured before" in captured.err
    assert "specjax compare: 2 of 6 settings failed: OPT(0.1), " in captured.err.splitlines()[-1]
    assert [r for r in lines(output) if r["status"] == "done"] == [
        r for r in records if r["status"] == "done"
    ]


def test_the_names_of_a_setting_are_those_of_infer(data, done, tmp_path):
    output, _ = done
    values = lines(output)[2]["values"]
    names = Setting().to_dict().keys() - {"drafter"}
    settings = {name.upper(): repr(values[name]) for name in names}
    settings |= {name.upper(): data / "pair" / name for name in ("verifier", "drafter")}
    settings |= {name: SETTINGS[name] for name in ("MAX_NEW_TOKENS", "BATCH_SIZE", "BUCKETS")}
    settings |= {"INPUT": data / "texts.txt", "OUTPUT_DIR": tmp_path / "out", "SEED": 1}
    given = [f"--gin.{name}={value}" for name, value in settings.items()]
    assert main(["infer", *given]) == 0
    decoded = (tmp_path / "out/predictions.jsonl").read_text().splitlines()
    (point,) = (p for p in read_points(output).of() if p.rule == "OPT(0.1)" and not p.stopping)
    measured = read_points(output).measured(point).rows[1]
    assert [json.loads(line)["tokens"] for line in decoded] == [row["tokens"] for row in measured]


def test_the_references_may_be_in_a_file_of_their_own(data, done, capsys):
    output, _ = done
    settings = {"TARGETS_FIELD": None, "REFERENCES": data / "references.txt"}
    assert run(data, output, INPUT=data / "texts.txt", **settings) == 3  # the same run
    assert "settings were measured before" in capsys.readouterr().err


def test_quick_is_a_first_look(data, tmp_path, monkeypatch):
    found = []

    def stop(models, texts, measuring, options, prompts, one_bucket):
        found.extend((measuring, one_bucket))
        raise ValueError("seen")

    monkeypatch.setattr("specjax.study.comparison._bench", stop)
    command = [
        word
        for word in arguments(data, tmp_path / "out", "--quick")
        if not word.startswith(("--gin.NUM_SAMPLES", "--gin.LATENCY_LIMIT"))
    ]
    assert main([*command, "--gin.REPEATS=2"]) == 1  # an error that is none of specjax
    how, one_bucket = found
    assert one_bucket and (how.num_samples, how.latency_limit, how.repeats) == (1, 8, 2)
    assert gin_config.value_of("LIMIT/macro.value") == 32


def test_estimates_need_no_references_and_decode_nothing(data, tmp_path, capsys):
    output = tmp_path / "out"
    asked = {
        "TARGETS_FIELD": None,
        "METHODS": "{'Lossless': None, 'OPT({})': (0.1, 1.0), 'Diff({})': 1.0}",
    }
    asked |= {"STOPPING": "(None,)", "ESTIMATE_LIMIT": 64}
    assert run(data, output, "--estimate", **asked) == 0
    captured = capsys.readouterr()
    assert "timing" not in captured.err and "references" not in captured.err
    assert "measuring" not in captured.err
    assert "next: the same command without --estimate measures" in captured.err.splitlines()[-1]
    assert "ESTIMATE_LIMIT=64: estimating from all 8 texts" in captured.err
    results = json.loads(captured.out.splitlines()[-1])
    assert results["estimated"] == 6 and results["done"] == 0
    told = [row["setting"] for row in results["best"]]
    # The front, both models and Lossless.
    assert {"verifier alone, T=1", "drafter alone, T=1", "Lossless, Block, G=2, T=1"} <= set(told)
    assert len(told) == len(set(told))
    records = lines(output)
    assert {record["status"] for record in records} == {"estimated"}
    assert all(record["expected"]["nats_per_token"] is not None for record in records)


def test_lengths_are_chosen_by_estimates_and_measured_passes(data, tmp_path, capsys, monkeypatch):
    """And are not chosen again where the comparison goes on."""
    asked = []

    def measured(pair, rows, widths, prompt_length, with_alone):
        asked.append((rows, widths))
        assert prompt_length == 7 and with_alone
        times = tuple(1.0 + 0.1 * width for width in widths)
        return Costs(tuple(rows), tuple(widths), (0.01,), (times,), pair=pair.fingerprint)

    monkeypatch.setattr("specjax.study.comparison.measure_costs", measured)
    output = tmp_path / "out"
    settings = {
        "METHODS": "{'Lossless': None, 'OPT({})': (0.1, 0.9)}",
        "MAX_DRAFTS": "None",
        "STOPPING": "(None, 'Confidence(0.4)')",
        "DRAFTING": "(None, 'Lookup()')",
        "TEMPERATURES": "(0, 1)",
    }
    assert run(data, output, "--estimate", **settings) == 0
    out, _ = capsys.readouterr()
    results = json.loads((output / "results.json").read_text())
    assert len(results["lengths"]) == 6 and asked == [((1,), (1, 2, 4, 8, 11))]
    known = [x for x in lines(output) if x["method"] is None]
    left = {}
    for x in known:
        if x["stopping"] is None and x["drafting"] is None:
            name = f"{x['rule']}, Block, T={x['temperature']:g}"
            left.setdefault(name, []).append(x["max_draft"])
    for one in results["lengths"]:
        name, length, why = one["setting"], one["max_draft"], one["why"]
        assert left.pop(name, []) == ([length] if length else [])
        assert why.startswith(f"G = {length}: ")
        assert (f"{name}: {why}" in out) == one["lossless"] == name.startswith("Lossless")
    assert not left
    # OPT(0.9) keeps what the drafter writes, so longer drafts pay.
    chosen = {one["setting"]: one["max_draft"] for one in results["lengths"]}
    assert chosen["OPT(0.9), Block, T=1"] > chosen["Lossless, Block, T=1"]
    # With a policy, and for copies, none is: they have the usual one.
    others = {x["max_draft"] for x in known if x["stopping"] or x["drafting"]}
    assert others == {None}
    assert run(data, output, "--estimate", **settings) == 0 and len(asked) == 1
    assert run(data, tmp_path / "other", "--full", **settings) == 2
    assert "MAX_DRAFTS=None needs estimates: leave out --full" in capsys.readouterr().err


def test_by_default_what_is_estimated_as_best_is_measured(data, tmp_path, capsys):
    output = tmp_path / "out"
    asked = {
        "METHODS": "{'Lossless': None, 'OPT({})': 0.1, 'TokenCascade(rule=Chow({}))': 0.3}",
        "CANDIDATES": 1,
    }
    asked |= {"STOPPING": "(None,)", "NUM_SAMPLES": 1, "LATENCY_LIMIT": 2, "BUCKETS": "(24,)"}
    assert run(data, output, "--gin_file=runs/compare.gin", **asked) == 0
    captured = capsys.readouterr()
    assert (
        "1 of 5 settings cannot be estimated, only measured; the first is TokenCascade"
        in captured.err
    )
    status = {record["setting"]: record["status"] for record in lines(output)}
    assert list(status.values()).count("done") == 4  # the models, Lossless and the cascade
    assert status["OPT(0.1), Block, G=2, T=1"] == "estimated"
    results = json.loads(captured.out.splitlines()[-1])
    assert results["estimated"] == 4
    (verdict,) = results["verdicts"]
    assert "Lossless, Block, G=2, T=1" in verdict["text"] and verdict["text"] in captured.out
    assert "infer with `verdicts[0].setting` in results.json" in captured.err
    # A run that goes on takes the same settings.
    assert run(data, output, "--gin_file=runs/compare.gin", **asked) == 0
    captured = capsys.readouterr()
    assert "4 of 4 settings were measured before" in captured.err
    assert "the verifier decodes" not in captured.err


LIMITS = {
    "MAX_LOSS": 90,
    "MAX_NATS": 9,
    "METHODS": "{'Lossless': None, 'OPT({})': (0.2, 0.4)}",
    "STOPPING": "(None,)",
    "CANDIDATES": 3,
    "ESTIMATE_LIMIT": 2,
    "NUM_SAMPLES": 1,
    "MAX_NEW_TOKENS": 6,
    "BUCKETS": "(24,)",
}


@pytest.mark.exhaustive
def test_limits_are_kept_on_texts_the_choice_has_not_seen(data, tmp_path, capsys):
    output = tmp_path / "out"
    start = ["--gin_file=runs/compare.gin"]
    assert run(data, output, *start, **LIMITS) == 0
    results = json.loads((output / "results.json").read_text())
    # With the verifier alone and a KLBall beside the lossless setting.
    assert results["texts"] == 4 and len(results["considered"]) == 4
    assert results["answer"] in ("draft", "do not draft")
    held_out = results["held_out"]
    assert held_out["texts"] == 4 and held_out["met"]
    assert [limit["met"] for limit in held_out["limits"].values()] == [True, True]
    # Each text is in one part.
    parts, key = ("texts", "held out"), Setting(method="VerifierAlone")
    rows = [read_points(output).measured(key, part).rows[0] for part in parts]
    ids = [[row["id"] for row in of_part] for of_part in rows]
    assert [len(part) for part in ids] == [4, 4] and {*chain(*ids)} == {*range(8)}
    out, told = capsys.readouterr()
    assert "limits: MAX_LOSS=90 MAX_NATS=9" in out and "infer with `setting` in results" in told
    assert Setting(**results["setting"]).described() == results["described"]
    # Other limits choose from what was measured.
    assert run(data, output, *start, **{**LIMITS, "MAX_LOSS": 89}) == 0
    assert "settings were measured before" in capsys.readouterr().err
    assert json.loads((output / "results.json").read_text())["limits"]["max_loss"] == 89
    # Other texts to choose by want another directory.
    assert run(data, output, *start, **{**LIMITS, "HELD_OUT": 0.25}) == 2
    assert "another configuration" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "shown"), [(None, True), ("do not draft", True), ("draft", False)]
)
def test_the_end_says_why_drafting_does_not_pay(answer, shown):
    verdict = {"recommended": "verifier alone, T=0", "text": "Drafting does not pay here."}
    results = {
        "best": [{"setting": "Lossless, T=0"}],
        "table_2": [],
        "verdicts": [verdict],
        "estimated": 1,
        "done": 2,
        "quality": None,
    }
    if answer is not None:
        results |= {"limits": {}, "answer": answer, "described": "verifier alone, T=0"}
        results |= {"why": "no other is faster", "considered": [], "held_out": None}
    assert (verdict["text"] in compare.tables(results)) == shown


DRAFTS = ("Tree(depth=2, width=2)", "Tree(depth=2, width=2, beam=1)")


@pytest.mark.exhaustive
def test_trees_are_measured(data, tmp_path, capsys):
    asked = {"METHODS": "('Lossless',)", "STOPPING": "(None,)", "DRAFTING": DRAFTS}
    asked |= {"ESTIMATE_LIMIT": 4, "TEMPERATURES": "(0.0,)"}
    assert run(data, tmp_path / "out", "--gin_file=runs/compare.gin", **asked) == 0
    assert "is not a chain of one drafter" in capsys.readouterr().err
    trees = [x for x in lines(tmp_path / "out") if x["verification"] == "Traversal"]
    assert {x["drafting"] for x in trees} == {*DRAFTS}
    for tree in trees:
        assert tree["status"] == "done"
        assert tree["figures"]["tokens_per_verifier_call"]["value"] > 1.0
