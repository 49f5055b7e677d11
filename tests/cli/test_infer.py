import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drafting, rules
from specjax.cli import gin_config, infer
from specjax.cli.main import main
from specjax.text import setting
from specjax.text.passes import costs_file
from specjax.types import Sampling
from tests import tiny_pair
from tests.cli.infer_command import TEXTS, arguments, rows, write, write_cut
from tests.variants import variants


def test_rows_are_the_decoders_in_the_order_of_the_input(paths, done):
    pair = specjax.load_pair(**paths)
    decoder = specjax.Decoder(
        pair, max_draft=3, max_new_tokens=12, batch_size=4, buckets=(16, 24), sampling=Sampling(1.0)
    )
    result = decoder(TEXTS, seed=0)
    found = rows(done[1])
    assert [row["id"] for row in found] == list(range(len(TEXTS)))
    assert [row["inputs"] for row in found] == TEXTS
    assert [row["prediction"] for row in found] == result.texts
    assert [row["tokens"] for row in found] == [tokens.tolist() for tokens in result.tokens]
    assert [row["ended_by"] == "eos" for row in found] == result.ended.tolist()
    totals = result.info.per_row
    sums = [row["log_prob_processed"] for row in found]
    np.testing.assert_allclose(sums, totals.log_prob_processed, rtol=1e-6)
    assert [row["info"]["accepted"] for row in found] == totals.accepted.tolist()
    metrics = json.loads((done[1] / "metrics.json").read_text())
    assert metrics["tokens_per_verifier_call"] == result.info.tokens_per_verifier_call
    assert metrics["acceptance_rate"] == result.info.acceptance_rate
    assert metrics["rows"] == len(TEXTS) and metrics["failed"] == 0
    assert metrics["acceptance"] == result.acceptance.to_dict()


def test_a_verifier_without_a_drafter_decodes_alone(paths, done, tmp_path, capsys):
    given = {"MAX_NEW_TOKENS": 4, "BUCKETS": "(16, 24)"}
    for name, more in (("alone", {}), ("named", {"METHOD": "VerifierAlone"})):
        options = {"INPUT": done[0], "OUTPUT_DIR": tmp_path / name, **given, **more}
        words = [f"--gin.{key}={value}" for key, value in options.items()]
        assert main(["infer", f"--gin.VERIFIER={paths['verifier']}", *words]) == 0
        is_told = 'DRAFTING="Lookup()" drafts without a second model' in capsys.readouterr().err
        assert is_told == (name == "alone")
    alone, named = (rows(tmp_path / name) for name in ("alone", "named"))
    assert [row["tokens"] for row in alone] == [row["tokens"] for row in named]


@pytest.mark.parametrize("seed", range(3))
def test_a_run_cut_anywhere_is_completed_to_the_same_bytes(paths, done, tmp_path, seed):
    source, output = done
    whole = write_cut(output, tmp_path, seed)
    for name in ("predictions.jsonl", "metrics.json"):  # killed while it wrote these
        (tmp_path / f".{name}.unfinished").write_bytes(b"half")
    assert main(arguments(paths, source, tmp_path)) == 0
    assert (tmp_path / "predictions.jsonl").read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.gin", "infer_config.json", "metrics.json", "predictions.jsonl",
        "runs.jsonl",
    ]  # fmt: skip


def test_a_run_leaves_a_record_of_how_it_was_started(paths, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, TEXTS)
    argv = arguments(paths, "input.txt", "out", SEED=3)
    assert main(argv) == 0
    told = capsys.readouterr()
    assert f"wrote {len(TEXTS)} predictions to {tmp_path}/out/predictions.jsonl" in told.err
    assert f"totals to {tmp_path}/out/metrics.json" in told.err
    assert re.search(r"\nspecjax: mean acceptance length \d\.\d\d, draft acceptance", told.err)
    assert len(told.out.splitlines()) == 1
    config = (tmp_path / "out/config.gin").read_text()
    assert "infer.seed = %SEED" in config and "\nSEED = 3\n" in config
    (run,) = map(json.loads, (tmp_path / "out/runs.jsonl").read_text().splitlines())
    assert run["command"].startswith("specjax infer --gin_file=")
    assert run["command"].endswith("--gin.SEED=3")
    assert run["working_directory"] == str(tmp_path)
    assert run["paths"] == {
        "source": str(tmp_path / "input.txt"), "output_dir": str(tmp_path / "out")
    }  # fmt: skip
    assert {"specjax", "jax", "jaxlib"} <= run["versions"].keys()
    # The saved configuration alone continues the run, whose record then tells of both processes.
    assert main(["infer", f"--gin_file={tmp_path}/out/config.gin"]) == 0
    assert len((tmp_path / "out/runs.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "out/config.gin").read_text() == config


def test_the_shipped_recipe_is_read_in_any_directory(paths, done, tmp_path, monkeypatch):
    """Without `--gin_file`, and with recipes named as they are in the package."""
    source, output = done
    monkeypatch.chdir(tmp_path)
    for name, files in (("a", []), ("b", ["--gin_file=runs/infer.gin"])):
        options = [
            option
            for option in arguments(paths, source, name)
            if not option.startswith("--gin_file")
        ]
        assert main([*options, *files]) == 0
        name = f"{name}/predictions.jsonl"
        assert (tmp_path / name).read_bytes() == (output / "predictions.jsonl").read_bytes()


def test_speed_is_told_with_and_without_compilation(paths, tmp_path, capsys):
    source = write(tmp_path, TEXTS[:5])
    # A length that no other test decodes, so that something is compiled.
    settings = {"METHOD": "VerifierAlone", "MAX_NEW_TOKENS": 13}
    assert main(arguments(paths, source, tmp_path / "out", **settings)) == 0
    found = json.loads((tmp_path / "out/metrics.json").read_text())
    own, emitted = found["this_process"], found["emitted"]
    assert 0 < own["compile_seconds"] < own["seconds"]
    assert own["tokens_per_second"] == pytest.approx(emitted / own["seconds"])
    without = emitted / (own["seconds"] - own["compile_seconds"])
    assert own["tokens_per_second_without_compilation"] == pytest.approx(without)
    # The second run of the same shapes compiles nothing large.
    assert main(arguments(paths, source, tmp_path / "again", **settings)) == 0
    again = json.loads((tmp_path / "again/metrics.json").read_text())["this_process"]
    assert again["compile_seconds"] < own["compile_seconds"] / 4


def test_inputs_that_cannot_be_decoded_are_told_and_the_others_come_out(paths, tmp_path, capsys):
    texts = [TEXTS[0], "ba" * 50_000, TEXTS[1], "ba " * 30, " ", ""]
    source = write(tmp_path, texts)
    assert main(arguments(paths, source, tmp_path / "out")) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "cannot be decoded" in line]
    assert len(told) == 1
    assert f"4 of 6 inputs cannot be decoded: {source}:2 has" in told[0]
    found = rows(tmp_path / "out")
    assert [row["prediction"] is None for row in found] == [False, True, False, True, True, True]
    assert f"{source}:4 has" in found[3]["error"] and "longest bucket holds 24" in found[3]["error"]
    assert f"{source}:5 is empty" in found[4]["error"]
    assert json.loads((tmp_path / "out/metrics.json").read_text())["failed"] == 4
    # The others are what they are without them.
    alone = write(tmp_path, [TEXTS[0], "ki", TEXTS[1]], "alone.txt")
    assert main(arguments(paths, alone, tmp_path / "alone")) == 0
    assert [rows(tmp_path / "alone")[i]["tokens"] for i in (0, 2)] == [
        found[i]["tokens"] for i in (0, 2)
    ]
    # A run of them that was cut short is completed to the same bytes.
    path = tmp_path / "out/predictions.jsonl"
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[i] for i in (3, 2, 1))[:-5])
    assert main(arguments(paths, source, tmp_path / "out")) == 0
    assert path.read_bytes() == whole


def test_tsv_and_jsonl_carry_references_and_one_row_is_enough(paths, tmp_path):
    tsv = tmp_path / "input.tsv"
    tsv.write_text("name\tsource\nre ference\tba de\n")
    argv = arguments(
        paths, tsv, tmp_path / "tsv", INPUTS_FIELD="source", TARGETS_FIELD="name", MAX_DRAFT=1
    )
    assert main(argv) == 0
    jsonl = tmp_path / "input.jsonl"
    jsonl.write_text('{"source": "ba de", "name": "re ference"}\n')
    argv = arguments(
        paths, jsonl, tmp_path / "jsonl", INPUTS_FIELD="source", TARGETS_FIELD="name", MAX_DRAFT=1
    )
    assert main(argv) == 0
    assert rows(tmp_path / "tsv") == rows(tmp_path / "jsonl")
    assert rows(tmp_path / "tsv")[0]["targets"] == "re ference"


def test_a_chat_has_options(paths, tmp_path):
    source, chats = write(tmp_path, TEXTS[:2]), {}
    for loud in (True, False):
        place = shutil.copytree(paths["verifier"], tmp_path / str(loud))
        condition = "true" if loud else "enable_loud"
        (place / "chat_template.jinja").write_text(
            "{{ messages[0].content }}{% if " + condition + " %} ba{% endif %}"
        )
        chats[loud] = {**paths, "verifier": place}
    runs = {}
    for name, loud, chat in (
        ("always", True, True),
        ("asked", False, {"enable_loud": True}),
        ("not asked", False, True),
        ("nothing", False, {}),
    ):
        argv = arguments(chats[loud], source, tmp_path / name, CHAT=chat, TEMPERATURE=0.0)
        assert main(argv) == 0
        runs[name] = [row["tokens"] for row in rows(tmp_path / name)]
    assert runs["always"] == runs["asked"] != runs["not asked"] == runs["nothing"]
    # Options are part of the run.
    argv = arguments(chats[False], source, tmp_path / "asked", CHAT=True, TEMPERATURE=0.0)
    assert main(argv) == 2


def test_half_a_surrogate_pair_is_no_text_but_may_be_a_reference(paths, tmp_path):
    source = tmp_path / "input.jsonl"
    source.write_text(
        '{"inputs": "ba", "targets": "\\ud800"}\n{"inputs": "\\ud800", "targets": ""}\n'
    )
    for _ in range(2):
        argv = arguments(paths, source, tmp_path / "out", TARGETS_FIELD="targets")
        assert main(argv) == 0
        first, second = rows(tmp_path / "out")
        assert first["targets"] == "\ud800" and first["prediction"] is not None
        assert "input.jsonl:2 has half a surrogate pair" in second["error"]


def decoder_of(paths, *bindings):
    infer.register()
    given = {"INPUT": "x", "OUTPUT_DIR": "y", **{k.upper(): v for k, v in paths.items()}}
    names = [f"{k}={v}" for k, v in given.items()]
    gin_config.configure(["runs/infer.gin"], [*names, *bindings])
    infer.check_values()
    return gin_config.call_part(infer.make_decoder)


@pytest.mark.parametrize("name", ["verifier", "drafter"])
def test_a_model_alone_needs_no_other(paths, name):
    alone = {name: paths[name]}
    # What the method does not use may stay in the files: a baseline changes METHOD alone.
    more = ["RULE=OPT(0.2)", "MAX_DRAFT=3", "STOPPING=Confidence(0.4)"]
    decoder = decoder_of(alone, f"METHOD={name}_alone", *more)
    assert decoder.models.name == str(paths[name]) and decoder.method.max_draft == 0
    (other,) = {"verifier", "drafter"} - {name}
    with pytest.raises(ValueError, match=f"{name.upper()} is given without {other.upper()}: give"):
        decoder_of(alone, f"METHOD={other}_alone")
    if name == "verifier":
        assert decoder_of(alone).method.max_draft == 0
        return
    with pytest.raises(ValueError, match=f"{name.upper()} is given without {other.upper()}: give"):
        decoder_of(alone)


def test_copies_need_no_drafter(paths):
    decoder = decoder_of({"verifier": paths["verifier"]}, "DRAFTING=Lookup()", "MAX_DRAFT=10")
    assert type(decoder.method.drafter) is drafting.Lookup
    assert decoder.method.max_draft == 10


CASCADES = {
    "TokenCascade": {"METHOD": "TokenCascade", "RULE": "Chow(0.3)"},
    "BiLDCascade": {"METHOD": "BiLDCascade", "RULE": "FallbackRollback(Chow(0.4), BiLD(2.0))"},
    "OracleCascade": {"METHOD": "OracleCascade", "RULE": "Diff(0.1)"},
    "SequenceCascade": {"METHOD": "SequenceCascade", "RULE": "SequenceChow(0.9)"},
}


@pytest.mark.parametrize("name", variants(CASCADES, "TokenCascade"))
def test_cascades_decode_files(paths, tmp_path, name, capsys):
    source, output = write(tmp_path, TEXTS), tmp_path / "out"
    settings = {**CASCADES[name], "MAX_DRAFT": None}
    assert main(arguments(paths, source, output, **settings)) == 0
    whole = (output / "predictions.jsonl").read_bytes()
    found = rows(output)
    assert len(found) == len(TEXTS) and all(row["info"]["emitted"] for row in found)
    metrics = json.loads(capsys.readouterr().out.splitlines()[-1])
    for count in ("deferrals", "rollbacks", "drafter_calls", "verifier_calls", "emitted"):
        assert metrics[count] == sum(row["info"][count] for row in found)
    assert metrics["drafter_calls"] > 0 and metrics["deferrals"] > 0
    # Cut in the middle of a row, it is completed to the same bytes.
    (output / "predictions.jsonl").write_bytes(whole[: len(whole) // 2])
    assert main(arguments(paths, source, output, **settings)) == 0
    assert (output / "predictions.jsonl").read_bytes() == whole


def written_costs(directory, pair):
    costs = drafting.Costs((1, 16), (1, 13), (1.0, 1.0), ((2.0, 3.0),) * 2, pair=pair.fingerprint)
    path = directory / "costs.json"
    path.write_bytes(costs_file(costs))
    return path


def test_a_policy_goes_with_a_rule(paths, tmp_path):
    given = ["RULE=OPT(0.2)", "MAX_DRAFT=12"]
    decoder = decoder_of(paths, *given, "STOPPING=Survival(OnlineEstimate(), 0.6)")
    assert type(decoder.rule) is rules.OPT and decoder.method.max_draft == 12
    assert type(decoder.method.drafter.stopping) is drafting.Survival
    costs = written_costs(tmp_path, specjax.load_pair(**paths))
    decoder = decoder_of(paths, *given, "STOPPING=CostAware()", f"COSTS={costs}")
    assert type(decoder.method.drafter.stopping) is drafting.CostAware
    assert decoder.costs is None  # not measured
    with pytest.raises(ValueError, match="the drafter has no acceptance head"):
        decoder_of(paths, *given, "STOPPING=Survival(HeadEstimate(), 0.7)")


def test_cascades_go_with_a_rule_a_policy_and_a_third_model(paths, tmp_path):
    plan = "DRAFTING=Cascade(((3, 2), (0, 3)), ('drafter',), Lookup())"
    decoder = decoder_of(paths, plan, "RULE=TokenV3(0.5)")
    stages = decoder.method.drafter.drafters
    assert type(decoder.rule) is rules.TokenV3 and decoder.method.max_draft == 3 + 3 + 2
    assert [type(part) for part in stages] == [drafting.cascades.VerticalCascade, drafting.Lookup]
    third = tiny_pair.write_model(tmp_path / "third", "drafter", seed=9)
    tiny_pair.write_vocabulary(third)
    models = f"('drafter', '{third}')"
    plan = f"DRAFTING=Cascade(((3, 0), (0, 2)), {models}, rules=(OPT(0.4), None))"
    policy = ["RULE=OPT(0.2)", "STOPPING=Confidence(0.4)", "DTYPE=bfloat16"]
    decoder = decoder_of(paths, plan, *policy)
    drafter, params = decoder.method.drafter, decoder.params
    assert float(params.rule.strength) == np.float32(0.2)
    assert type(params.drafter.rule) is rules.OPT
    assert float(params.drafter.rule.strength) == np.float32(0.4)
    assert type(drafter.drafter.stopping) is drafting.Confidence
    assert drafter.model_names == ("drafter", "level_2")
    # DTYPE is that of all three.
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(params.drafter) if leaf.ndim > 1}
    assert dtypes == {jnp.dtype("bfloat16")}
    plan = f"DRAFTING=Branches((Cascade(((3, 0), (0, 2)), {models}), Lookup()))"
    decoder = decoder_of(paths, plan, "DTYPE=bfloat16")
    assert {*decoder.method.drafter.model_names} >= {"drafter", "level_2"}
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(decoder.params.drafter) if leaf.ndim > 1}
    assert dtypes == {jnp.dtype("bfloat16")}


def test_costs_are_measured_once(paths, tmp_path, monkeypatch, capsys):
    """A start that goes on reads what the first one measured: other costs, other drafts."""
    source, settings = write(tmp_path, TEXTS[:3]), {"MAX_DRAFT": 2, "BATCH_SIZE": 2}
    settings |= {"MAX_NEW_TOKENS": 6, "STOPPING": "CostAware()"}
    argv = arguments(paths, source, tmp_path / "out", **settings)
    # Real times would depend on the machine.
    pair = specjax.load_pair(**paths)
    measured = drafting.Costs((1, 2), (1, 2, 3), (0.1, 0.1), ((1.0, 1.1, 1.2),) * 2)
    measured = dataclasses.replace(measured, pair=pair.fingerprint)
    monkeypatch.setattr(setting, "measure_costs", lambda *_, **__: measured)
    assert main(argv) == 0
    assert drafting.read_costs(tmp_path / "out/costs.json") == measured
    lines = (tmp_path / "out/predictions.jsonl").read_bytes()
    (tmp_path / "out/predictions.jsonl").write_bytes(lines[: lines.index(b"\n") + 1])

    def unwanted(*_, **__):
        raise AssertionError("measured twice")

    monkeypatch.setattr(setting, "measure_costs", unwanted)
    assert main(argv) == 0
    assert (tmp_path / "out/predictions.jsonl").read_bytes() == lines
    # Another method is told so, and not that it cannot take costs that nobody has given.
    capsys.readouterr()
    for other in (argv[:-1], [*argv, "--gin.BATCH_SIZE=1"]):
        assert main(other) == 2
        assert "has a run of another configuration" in capsys.readouterr().err


def test_costs_choose_the_length_of_a_run(paths, done, tmp_path, capsys):
    """It is in the record, and a start that goes on chooses it again."""
    pair = specjax.load_pair(**paths)

    def decoded(name, acceptance, **settings):
        costs = drafting.Costs((1, 8), (1, 2, 4), (0.1, 0.1), ((1.0, 1.1, 1.2),) * 2)
        more = {"temperatures": (1.0,), "acceptance": (acceptance,), "pair": pair.fingerprint}
        path = tmp_path / f"{acceptance}.json"
        path.write_bytes(costs_file(dataclasses.replace(costs, **more)))
        output = tmp_path / name
        given = {"MAX_DRAFT": None, "COSTS": path, **settings}
        status = main(arguments(paths, done[0], output, **given))
        return status, capsys.readouterr().err, output

    status, told, output = decoded("out", 0.8)
    assert status == 0 and "specjax: G = 3: at an acceptance of 0.80" in told
    assert json.loads((output / "infer_config.json").read_text())["max_draft"] == 3
    assert [row["tokens"] for row in rows(output)] == [row["tokens"] for row in rows(done[1])]
    whole = (output / "predictions.jsonl").read_bytes()
    (output / "predictions.jsonl").write_bytes(whole[: len(whole) // 2])
    assert decoded("out", 0.8)[0] == 0
    assert (output / "predictions.jsonl").read_bytes() == whole
    status, told, _ = decoded("out", 0.3)
    assert status == 2 and "G = 1: " in told and "has a run of another configuration" in told
    # No draft pays: the run is that of the verifier alone.
    status, told, output = decoded("none", 0.0)
    assert status == 0 and "specjax: G = 0: no draft pays" in told
    alone = tmp_path / "alone"
    assert main(arguments(paths, done[0], alone, METHOD="VerifierAlone")) == 0
    assert (output / "predictions.jsonl").read_bytes() == (alone / "predictions.jsonl").read_bytes()


def test_sources_are_written_and_shown(paths, done, tmp_path, capsys):
    output = tmp_path / "out"
    assert main([*arguments(paths, done[0], output, SOURCES=True)]) == 0
    plain, found = rows(done[1]), rows(output)
    # Without sources the run is as it was.
    own = ("sources", "run", "checksum")
    assert [{k: v for k, v in row.items() if k not in own} for row in found] == [
        {k: v for k, v in row.items() if k not in own} for row in plain
    ]
    assert all(len(row["sources"]) == len(row["tokens"]) for row in found)
    assert {"drafter", "residual"} <= set().union(*(row["sources"] for row in found))
    assert "sources" not in plain[0]
    # A finished run is shown without decoding; --show sets SOURCES.
    told = capsys.readouterr()
    assert "source of" not in told.err
    assert main([*arguments(paths, done[0], output), "--show=3"]) == 0
    told = capsys.readouterr()
    lines = told.err.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("0: "))
    assert [line[:3] for line in lines[first : first + 3]] == ["0: ", "1: ", "2: "]
    assert lines[first + 3].startswith("source of ") and "[residual]" in lines[first + 3]
    assert "\x1b" not in told.err and len(told.out.splitlines()) == 1
    assert re.sub(r"[\[\]<>{}]", "", lines[first]) == f"0: {found[0]['prediction']}"
    assert json.loads(told.out)["this_process"]["rows"] == 0
    # A run without sources is another run.
    assert main(arguments(paths, done[0], output)) == 2
    assert "sources" in capsys.readouterr().err


def test_inputs_without_an_output_are_shown_as_empty(paths, tmp_path, capsys):
    source = write(tmp_path, ["ba de", "", "ki"])
    assert main([*arguments(paths, source, tmp_path / "out"), "--show=2"]) == 0
    assert "\n1: \nsource of " in capsys.readouterr().err
