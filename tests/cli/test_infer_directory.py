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
from specjax.writing import CHECKSUMS_NAME
from tests.cli.infer_command import TEXTS, arguments, rows, write


def test_a_second_process_is_kept_out(paths, done, capsys):
    source, output = done
    with (output / ".specjax.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(arguments(paths, source, output)) == 2
    assert "is used by another process" in capsys.readouterr().err


def copy_of(output, directory, predictions):
    (directory / "infer_config.json").write_bytes((output / "infer_config.json").read_bytes())
    (directory / "predictions.jsonl").write_bytes(predictions)


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


def test_another_configuration_or_input_is_refused(paths, done, tmp_path, capsys):
    source, output = done
    before = (output / "predictions.jsonl").read_bytes()
    other = write(tmp_path, [*TEXTS[:-1], "ba"])
    settings = {"SEED": 1, "RULE": "OPT(0.2)", "NUM_SAMPLES": 2}
    both = f"(VERIFIER: {paths['verifier']} there, {paths['drafter']} here, temperature: 1.0 there"
    for argv, texts in (
        (
            arguments(paths, source, output, **settings),
            ("num_samples: ", "rule: 'Lossless()' there", "seed: 0 there, 1 here"),
        ),
        (arguments(paths, other, output), ("input: ",)),
        (arguments(paths, source, output, VERIFIER=paths["drafter"], TEMPERATURE=0.5), (both,)),
    ):
        assert main(argv) == 2
        message = capsys.readouterr().err.lower()  # gin's names are in capitals
        assert all(text.lower() in message for text in texts)
        assert "another configuration" in message
    assert (output / "predictions.jsonl").read_bytes() == before
