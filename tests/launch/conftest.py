"""A checkout whose `launch` scripts see a stand-in for gcloud, Python and specjax."""

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# `PYTHON -m venv .venv` makes this pip and this specjax.
PYTHON = """#!/usr/bin/env bash
[[ $1 == -m ]] || exit 0
mkdir -p .venv/bin
printf '#!/usr/bin/env bash\\necho "$@" >>"$STAND_IN/pip.txt"\\n' >.venv/bin/pip
cp "$STAND_IN/specjax.sh" .venv/bin/specjax
chmod +x .venv/bin/*
"""

# Writes six rows, and goes on after those that are there, as `specjax infer` does; of several
# workers only the first one.
SPECJAX = """#!/usr/bin/env bash
[[ $1 != --version ]] || { echo specjax 0; exit; }
echo "$@" >>"$STAND_IN/specjax.txt"
echo "specjax infer: begun"
env | grep -E '^(SPECJAX|TPU)_' >"$STAND_IN/environment-$(basename "$HOME")" || true
for word in "$@"; do [[ $word != --gin.OUTPUT_DIR=* ]] || out=${word#*=}; done
[[ $HOME != *home-[1-9]* ]] || exit 0
mkdir -p "$out"
echo '{}' >"$out/infer_config.json"
touch "$out/predictions.jsonl"
while (($(wc -l <"$out/predictions.jsonl") < 6)); do
  row=$(wc -l <"$out/predictions.jsonl")
  # A fault of the test: the program ends once with a status, or it waits.
  if [[ $row == 3 && -f $STAND_IN/ends ]]; then
    status=$(<"$STAND_IN/ends")
    rm "$STAND_IN/ends"
    echo "specjax infer: the input is wrong"
    exit "$status"
  fi
  while [[ $row == 3 && -f $STAND_IN/waits ]]; do sleep 0.02; done
  echo "row $row of start $(grep -c . "$STAND_IN/specjax.txt")" >>"$out/predictions.jsonl"
done
"""


@dataclasses.dataclass
class Cloud:
    """The stand-in and the checkout."""

    path: Path
    checkout: Path
    env: dict[str, str]

    def launch(self, *words, **variables):
        """Runs launch/tpu.sh to its end."""
        return subprocess.run(
            [self.checkout / "launch" / "tpu.sh", *words],
            env={**self.env, **variables},
            cwd=self.path,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def set(self, **values):
        """Writes what exists; a list is states of which each look takes one; None is nothing."""
        write(self.path, values)

    def there(self, name):
        """What exists; None for nothing."""
        path = self.path / name
        return path.read_text().strip() if path.exists() else None

    def ready(self, workers=1):
        """A TPU with specjax on it."""
        self.set(node="READY", workers=workers)
        for worker in range(workers):
            home = self.path / f"home-{worker}" / "specjax"
            shutil.copytree(self.checkout, home)
            (home / ".venv" / "bin").mkdir(parents=True)
            script(home / ".venv" / "bin" / "specjax", SPECJAX)

    def faults(self, *faults):
        """What goes wrong, each at the first call that it matches (`always`: at each)."""
        for i, fault in enumerate(faults):
            path = self.path / "faults" / str(i)
            path.mkdir(parents=True)
            write(path, fault)

    def calls(self, match=""):
        """The commands so far that have a text in them."""
        return [line for line in (self.there("calls") or "").splitlines() if match in line]

    def rows(self, place):
        return (self.path / place / "predictions.jsonl").read_text().splitlines()


def write(path, values):
    for name, value in values.items():
        if value is None:
            (path / name).unlink(missing_ok=True)
        else:
            lines = value if isinstance(value, list) else [value]
            (path / name).write_text("".join(f"{line}\n" for line in lines))


def script(path, text):
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture(scope="session")
def checkout(tmp_path_factory):
    """A git checkout of what the scripts need, small enough to be packed often."""
    path = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "launch", path / "launch")
    (path / "gin_configs" / "runs").mkdir(parents=True)
    (path / "gin_configs" / "runs" / "infer.gin").write_text("")
    (path / "constraints.txt").write_text("")
    subprocess.run(["git", "init", "--quiet", path], check=True)
    return path


@pytest.fixture
def cloud(checkout, tmp_path):
    """No TPU yet."""
    path = tmp_path / "cloud"
    binaries = path / "bin"
    binaries.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("gcloud_stand_in.sh"), binaries / "gcloud")
    (binaries / "gcloud").chmod(0o755)
    script(binaries / "python-stand-in", PYTHON)
    (path / "specjax.sh").write_text(SPECJAX)
    env = {
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "HOME": str(path),
        "STAND_IN": str(path),
        "PYTHON": "python-stand-in",
        "RETRY_SECONDS": "0",
        "POLL_SECONDS": "0.05",
        "SYNC_SECONDS": "0.05",
    }
    made = Cloud(path, checkout, env)
    made.set(workers=1, kind="v5litepod-8")
    yield made
    for pid in path.glob("home-*/specjax/runs/*.pid"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(int(pid.read_text()), signal.SIGKILL)
