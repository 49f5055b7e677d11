"""The directory of `specjax infer`: what is refused, what is kept, and what is continued."""

import errno
import fcntl
import io
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax import environment
from specjax.cli.main import main
from specjax.runs import inference
from specjax.writing import CHECKSUMS_NAME, naming_failures
from tests.cli.infer_command import TEXTS, arguments, rows, write


def test_another_configuration_or_input_is_refused(paths, done, tmp_path, capsys):
    source, output = done
    before = (output / "predictions.jsonl").read_bytes()
    other = write(tmp_path, [*TEXTS[:-1], "ba"])
    for argv, what in (
        (arguments(paths, source, output, TEMPERATURE=0.5), "temperature: 1.0 there, 0.5 here"),
        (arguments(paths, source, output, SEED=1), "seed: 0 there, 1 here"),
        (arguments(paths, source, output, RULE="OPT(0.2)"), "rule: 'Lossless()' there"),
        (arguments(paths, other, output), "input: "),
        (
            arguments(paths, source, output, VERIFIER=paths["drafter"]),
            f"(VERIFIER: {paths['verifier']} there, {paths['drafter']} here): choose",
        ),
        (
            arguments(paths, source, output, VERIFIER=paths["drafter"], SEED=1),
            f"{paths['verifier']} there, {paths['drafter']} here, seed: 0 there, 1 here)",
        ),
    ):
        assert main(argv) == 2
        message = capsys.readouterr().err
        assert what in message and "another configuration" in message
    assert (output / "predictions.jsonl").read_bytes() == before


def test_a_second_process_is_kept_out(paths, done, capsys):
    source, output = done
    with (output / ".specjax.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(arguments(paths, source, output)) == 2
    assert "is used by another process" in capsys.readouterr().err


def copy_of(output, directory, predictions):
    (directory / "infer_config.json").write_bytes((output / "infer_config.json").read_bytes())
    (directory / "predictions.jsonl").write_bytes(predictions)


@pytest.mark.parametrize(
    "line",
    [
        b"[]\n",
        b"\xff\n",
        b'{"id": 0}\n',
        b'{"id": 99, "inputs": "ba", "info": {}}\n',
        b'{"id": 0, "inputs": "another text"}\n',
        b'{"id": 0, "inputs": "%s"}\n' % TEXTS[0].encode(),
        b'{"id": 0, "inputs": "%s", "prediction": null, "error": "?"}\n' % TEXTS[0].encode(),
        b'{"id": -11, "inputs": "%s", "error": "?"}\n' % TEXTS[0].encode(),
        None,  # the first line twice
    ],
)
def test_a_foreign_line_is_refused(paths, done, tmp_path, capsys, line):
    source, output = done
    own = (output / "predictions.jsonl").read_bytes().splitlines(keepends=True)[0]
    copy_of(output, tmp_path, own + (own if line is None else line))
    assert main(arguments(paths, source, tmp_path)) == 2
    message = capsys.readouterr().err
    assert "predictions.jsonl:2: the line is not a row of this run" in message
    assert message.count("\n") == 1


def test_predictions_of_unknown_origin_are_not_taken_over(paths, done, tmp_path, capsys):
    source, output = done
    copy_of(output, tmp_path, (output / "predictions.jsonl").read_bytes())
    config = tmp_path / "infer_config.json"
    for damaged in (b"", b"{", b"[]", b"{}"):
        config.write_bytes(damaged)
        assert main(arguments(paths, source, tmp_path)) == 2
        assert (
            "infer_config.json is damaged, or not the configuration of a run"
            in capsys.readouterr().err
        )
    config.unlink()
    assert main(arguments(paths, source, tmp_path)) == 2
    assert (
        "predictions.jsonl is not a file of this run: choose another OUTPUT_DIR, or move it"
        in capsys.readouterr().err
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["predictions.jsonl"]


def test_the_vocabulary_may_be_the_same_and_the_tokens_not(paths, tmp_path, capsys):
    """Two SentencePiece models of equal pieces and other scores cut texts differently."""
    source = write(tmp_path, TEXTS)
    pair = {}
    for name, path in paths.items():
        pair[name] = tmp_path / name
        shutil.copytree(path, pair[name])
    assert main(arguments(pair, source, tmp_path / "out")) == 0
    for path in pair.values():
        config = {"add_eos_token": False, "tokenizer_class": "LlamaTokenizer"}
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    capsys.readouterr()
    before = specjax.load_pair(**paths).verifier.tokenizer
    after = specjax.load_pair(**pair).verifier.tokenizer
    assert before.fingerprint == after.fingerprint and before.encode("ba") != after.encode("ba")
    assert main(arguments(pair, source, tmp_path / "out")) == 2
    assert "tokens: " in capsys.readouterr().err


@pytest.mark.parametrize("room", [1, 700, 2500])
def test_a_full_disk_is_told_and_the_run_continues_once_there_is_room(
    paths, done, tmp_path, capsys, monkeypatch, room
):
    """The write that reaches the end of the disk is short, and those after it fail."""
    source, output = done
    unpatched = Path.open

    class Disk(io.FileIO):
        def write(self, data):
            left = room - os.fstat(self.fileno()).st_size
            if not left:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data[:left])

    def opened(path, mode="r", *others, **options):
        if (path.name, mode) == ("predictions.jsonl", "ab"):
            return io.BufferedWriter(Disk(path, mode))
        return unpatched(path, mode, *others, **options)

    monkeypatch.setattr(Path, "open", opened)
    assert main(arguments(paths, source, tmp_path)) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "predictions.jsonl cannot be written (No space left on device): free some" in message
    assert (tmp_path / "predictions.jsonl").stat().st_size == room
    monkeypatch.setattr(Path, "open", unpatched)
    assert main(arguments(paths, source, tmp_path)) == 0
    assert (tmp_path / "predictions.jsonl").read_bytes() == (
        output / "predictions.jsonl"
    ).read_bytes()


def test_a_hard_linked_copy_stays_as_it_was(paths, done, tmp_path):
    """As `cp -al` makes it; whichever of the two continues."""
    source, output = done
    run, copy = tmp_path / "run", tmp_path / "copy"
    shutil.copytree(output, run)
    whole = (run / "predictions.jsonl").read_bytes()
    (run / "metrics.json").unlink()
    (run / "predictions.jsonl").write_bytes(whole[: len(whole) // 2])  # ends within a row
    shutil.copytree(run, copy, copy_function=os.link)
    before = contents(copy)
    assert main(arguments(paths, source, run)) == 0
    assert contents(copy) == before
    after = contents(run)
    assert after["predictions.jsonl"] == whole
    assert after["runs.jsonl"].count(b"\n") == before["runs.jsonl"].count(b"\n") + 1
    assert main(arguments(paths, source, copy)) == 0
    assert contents(run) == after
    assert (copy / "predictions.jsonl").read_bytes() == whole


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("name", ["metrics.json", "predictions.jsonl", "config.gin", "runs.jsonl"])
def test_a_directory_in_the_place_of_a_file_is_refused(paths, done, tmp_path, capsys, name):
    source, output = done
    run = shutil.copytree(output, tmp_path / "run")
    (run / name).unlink()
    (run / name).mkdir()
    assert main(arguments(paths, source, run)) == 2
    error = capsys.readouterr().err
    assert f"{run / name} is not a file of this run" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"prediction": "', b'"prediction": "x'),
        (b'"tokens": [', b'"tokens": [3, '),
        (b'"prediction": "', b'"predicted": "'),
        (b', "checksum"', b', "error": "?", "checksum"'),
        (b'"accepted": ', b'"accepted": 1'),
        (b'": "', b'":"'),
    ],
)
def test_an_edited_row_is_refused(paths, done, tmp_path, capsys, old, new):
    source, output = done
    own = (output / "predictions.jsonl").read_bytes()
    first, second, *_ = own.splitlines(keepends=True)
    edited = second.replace(old, new, 1)
    assert edited != second
    copy_of(output, tmp_path, first + edited)
    assert main(arguments(paths, source, tmp_path)) == 2
    message = capsys.readouterr().err
    assert "predictions.jsonl:2: the line is not a row of this run, was changed" in message
    assert (tmp_path / "predictions.jsonl").read_bytes() == first + edited


@pytest.mark.parametrize("end", [b"my notes", b'{"id"x', b'{"text": "mine"}', b"{'"])
def test_an_end_that_is_no_row_is_refused_and_kept(paths, done, tmp_path, capsys, end):
    source, output = done
    before = (output / "predictions.jsonl").read_bytes() + end
    copy_of(output, tmp_path, before)
    assert main(arguments(paths, source, tmp_path)) == 2
    assert ":12: the line is not a row of this run" in capsys.readouterr().err
    assert (tmp_path / "predictions.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["metrics.json", "predictions.jsonl", "config.gin", "runs.jsonl"])
def test_what_is_not_the_runs_own_is_refused_and_kept(paths, done, tmp_path, capsys, name):
    mine = tmp_path / "out" / name
    mine.parent.mkdir()
    mine.write_text("mine")
    assert main(arguments(paths, done[0], mine.parent)) == 2
    assert f"{mine} is not a file of this run" in capsys.readouterr().err
    assert [path.name for path in mine.parent.iterdir()] == [name]
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("name", ["device", "xla_flags"])
def test_another_machine_continues_a_run_only_if_that_is_allowed(
    paths, done, tmp_path, capsys, monkeypatch, name
):
    source, output = done
    copy_of(output, tmp_path, b"")
    monkeypatch.setattr(environment, name, lambda: "another")
    assert main(arguments(paths, source, tmp_path)) == 2
    message = capsys.readouterr().err
    assert f"environment.{name}: " in message and "'another' here" in message
    assert "set allow_other_environment=True" in message
    allowed = {"infer__allow_other_environment": True}
    assert main(arguments(paths, source, tmp_path, **allowed)) == 0
    assert f"warning: continuing the run, although environment.{name}" in capsys.readouterr().err
    assert rows(tmp_path) == rows(output)


def test_weights_that_are_not_finite_are_refused_by_name(paths, done, tmp_path, capsys):
    """Or, where the check is switched off, end the rows by the model's name."""
    for name in ("verifier", "drafter"):
        models = {key: tmp_path / f"{name}-{key}" for key in paths}
        for key, path in paths.items():
            shutil.copytree(path, models[key])
        poison(models[name])
        argv = arguments(models, done[0], tmp_path / name)
        assert main(argv) == 2
        message = capsys.readouterr().err
        assert "logits_dense/kernel has nan at (0, 3): copy the checkpoint again" in message
        assert str(models[name]) in message and message.count("\n") == 1
        assert main([*argv, "--gin.load_models.check_weights=False"]) == 0
        told = capsys.readouterr().err
        assert f"11 of 11 outputs are truncated; the first is 0 ({name} gave NaN" in told
        assert told.count("check the checkpoint") == 1
        found = rows(tmp_path / name)
        metrics = json.loads((tmp_path / name / "metrics.json").read_text())
        assert metrics["ended_by_nan"] == len(found)
        assert {row["ended_by"] for row in found} == {"nan"}
        assert all(name in row["nan"] for row in found)
        capsys.readouterr()


def poison(model):
    """Puts a NaN into the row of token 3 of a model's last product."""
    file = model / "model.safetensors"
    arrays = dict(load_file(file))
    arrays["lm_head.weight"] = arrays["lm_head.weight"].copy()
    arrays["lm_head.weight"][3, 0] = np.nan
    save_file(arrays, file, metadata={"format": "pt"})
    (model / CHECKSUMS_NAME).unlink()


def test_a_flipped_bit_in_the_weights_is_refused(paths, done, tmp_path, capsys):
    model = shutil.copytree(paths["drafter"], tmp_path / "drafter")
    data = bytearray((model / "model.safetensors").read_bytes())
    data[-1000] ^= 1
    (model / "model.safetensors").write_bytes(data)
    argv = arguments({**paths, "drafter": model}, done[0], tmp_path / "out")
    assert main(argv) == 2
    assert "model.safetensors was changed after" in capsys.readouterr().err
    assert main([*argv, "--gin.load_models.check_weights=False"]) == 0


def test_every_start_that_lasts_for_a_row_gets_further(paths, done, tmp_path, capsys, monkeypatch):
    """Though all rows share a plan: those that are written are not decoded again."""
    source, output = done
    appended = inference.append
    room = 0

    def append_once(path, line):
        nonlocal room
        with naming_failures(path):
            if not room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room -= 1
        appended(path, line)

    monkeypatch.setattr(inference, "append", append_once)
    for starts in range(1, len(TEXTS) + 1):
        room = 1
        assert main(arguments(paths, source, tmp_path)) == 2 * (starts < len(TEXTS))
        lines = (tmp_path / "predictions.jsonl").read_bytes().splitlines()
        assert len(lines) == starts
    for name in ("predictions.jsonl", "metrics.json"):
        ours, theirs = ((path / name).read_bytes() for path in (tmp_path, output))
        ours, theirs = (x.split(b'"this_process"')[0] for x in (ours, theirs))
        assert ours == theirs
