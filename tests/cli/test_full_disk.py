"""A full disk ends each command with one line, and costs nothing that was written before."""

import json
import os
import subprocess
import sys

import pytest

from specjax.checkpoints import load_model
from specjax.cli.main import main
from tests import tiny_pair
from tests.cli.test_train_directory import command, content, run
from tests.xla_flags import quick_flags

# No file may grow beyond a size: the system refuses it as it refuses a full disk.
COMMAND = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
from specjax.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


def fails(size, argv, *parts):
    """Runs a command in a process of its own: Orbax's other writes fail after the first one."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, str(size), *argv],
        capture_output=True,
        text=True,
        check=False,
        # The very environment in which `run` trains, but for the devices.
        env={
            **os.environ,
            "XLA_FLAGS": quick_flags(1),
            "JAX_ENABLE_COMPILATION_CACHE": "false",
        },
    )
    assert done.returncode == 2, done.stderr
    notes = ("compiling", "specjax: models: ")
    lines = [x for x in done.stderr.splitlines() if not any(note in x for note in notes)]
    assert len(lines) == 1, "\n".join(lines)
    for part in (*parts, "(File too large): free some space"):
        assert part in lines[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [200, 30_000])
def test_training(data, tmp_path, size):
    fails(size, command(data, tmp_path, "NUM_STEPS=2"), "earlier files are kept")
    assert not (tmp_path / "model").exists()
    assert run(data, tmp_path, "NUM_STEPS=2") == 0
    before = content(tmp_path)
    fails(30_000, command(data, tmp_path, "NUM_STEPS=4"), str(tmp_path))
    assert content(tmp_path / "model") == {
        name.removeprefix("model/"): data
        for name, data in before.items()
        if name.startswith("model/")
    }
    assert run(data, tmp_path, "NUM_STEPS=4") == 0
    assert json.loads((tmp_path / "results.json").read_text())["step"] == 4


@pytest.mark.parametrize("form", ["hf", "orbax", "t5x"])
def test_converting(tmp_path, form):
    source = tiny_pair.write_model(tmp_path / "source", "verifier")
    argv = ["convert", str(source), str(tmp_path / "out"), "--to", form]
    fails(3_000, argv, str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert main(argv) == 0
    assert load_model(tmp_path / "out").format == form
