"""Kills `specjax infer` at random moments and compares the outcome with an undisturbed run.

    python tests/cli/kill_infer.py --kills 20

A child process decodes a file with a tiny pair. It is killed (SIGKILL) after a random number of
rows, or a random while after its start, or when all rows are there and the file is being put in
order. After the last kill a child runs to the
end. Its predictions must equal the undisturbed run's byte for byte, its metrics too (but for the
timings).
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = 400


class Run:
    """What a child needs, in one temporary directory."""

    def __init__(self, directory: Path) -> None:
        from tests import tiny_pair

        self.directory = directory
        self.pair = tiny_pair.write_pair(directory / "pair")
        self.input = directory / "input.txt"
        self.input.write_text("".join(f"{s}\n" for s in tiny_pair.sentences(ROWS)))

    def start(self, output: Path) -> subprocess.Popen:
        from tests.xla_flags import quick_flags

        # One device, as a user has; programs from the disk, so that most of the time is decoding.
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": quick_flags(1),
            "PYTHONPATH": str(ROOT),
            "JAX_ENABLE_COMPILATION_CACHE": "true",
            "JAX_COMPILATION_CACHE_DIR": str(self.directory / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        settings = {
            "INPUT": self.input,
            "OUTPUT_DIR": output,
            "VERIFIER": self.pair["verifier"],
            "DRAFTER": self.pair["drafter"],
            "MAX_NEW_TOKENS": 32,
            "MAX_DRAFT": 3,
            "BATCH_SIZE": 4,
            "BUCKETS": "(16, 24)",
        }
        return subprocess.Popen(
            [sys.executable, "-m", "specjax", "infer"]
            + [f"--gin_file={ROOT / 'gin_configs/runs/infer.gin'}"]
            + [f"--gin.{name}={value}" for name, value in settings.items()],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def finish(self, output: Path) -> float:
        begin = time.monotonic()
        child = self.start(output)
        _, errors = child.communicate()
        assert child.returncode == 0, errors.decode()
        return time.monotonic() - begin


def written(output: Path) -> int:
    path = output / "predictions.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_at_random(
    run: Run, output: Path, rng: random.Random, moment: str, seconds: float
) -> int | None:
    """Starts a child and kills it; returns how many rows were there, or None if it had ended."""
    begin = time.monotonic()
    before = written(output)
    child = run.start(output)
    if moment != "time":
        target = ROWS if moment == "end" else min(before + rng.randint(1, ROWS // 4), ROWS - 1)
        while written(output) < target and child.poll() is None:
            time.sleep(0.001)
        time.sleep(rng.random() * 0.005)
    else:
        time.sleep(max(0.0, rng.uniform(0.5, 1.1) * seconds - (time.monotonic() - begin)))
    ended = child.poll() is not None
    if not ended:
        child.send_signal(signal.SIGKILL)
    _, errors = child.communicate()
    assert not ended or child.returncode == 0, errors.decode()
    return None if ended else written(output)


def compare(output: Path, expected: Path) -> None:
    name = "predictions.jsonl"
    ours, theirs = ((path / name).read_bytes() for path in (output, expected))
    ids = [json.loads(line)["id"] for line in ours.splitlines()]
    assert ids == list(range(ROWS)), "a row is lost or doubled"
    assert ours == theirs, f"{name} differs"
    metrics = [json.loads((path / "metrics.json").read_text()) for path in (output, expected)]
    for each in metrics:
        each.pop("this_process")
    assert metrics[0] == metrics[1]


def run(kills: int, seed: int) -> dict:
    """Returns what happened; raises AssertionError where the outcomes differ."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as temporary:
        setting = Run(Path(temporary))
        undisturbed = Path(temporary, "undisturbed")
        seconds = setting.finish(undisturbed) / 2  # half of it is compiling
        if kills > 2:
            seconds = setting.finish(Path(temporary, "again"))
        moments: list[int] = []
        runs, torn = 1, 0
        output = Path(temporary, "disturbed0")
        while len(moments) < kills:
            moment = ("rows", "time", "rows", "end")[len(moments) % 4]
            rows = kill_at_random(setting, output, rng, moment, seconds)
            if rows is not None:
                moments.append(rows)
                path = output / "predictions.jsonl"
                torn += path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
            # A run that has come near its end begins anew, until all kills are done.
            if rows is None or (rows > ROWS - ROWS // 8 and len(moments) < kills):
                setting.finish(output)
                compare(output, undisturbed)
                output = Path(temporary, f"disturbed{runs}")
                runs += 1
        setting.finish(output)
        compare(output, undisturbed)
    return {"kills": kills, "runs": runs, "rows": ROWS, "killed_after": moments, "torn": torn}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(json.dumps(run(arguments.kills, arguments.seed)))
