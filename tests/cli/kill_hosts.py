"""Kills one of two processes of `specjax infer` at random moments, and starts it again.

    python tests/cli/kill_hosts.py --kills 10

Two processes of four virtual devices each decode a file with a tiny pair, as one program. When one
is killed, the other must end by itself. At the end the rows must equal, byte for byte, those of a
single process with all devices that nobody disturbs.
"""

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = 500
DEVICES = 8


class Run:
    """What the children need, in one temporary directory."""

    def __init__(self, directory: Path, rows: int) -> None:
        from tests import tiny_pair

        self.directory, self.rows = directory, rows
        self.pair = tiny_pair.write_pair(directory / "pair")
        self.input = directory / "input.txt"
        self.input.write_text("".join(f"{s}\n" for s in tiny_pair.sentences(rows)))

    def start(
        self,
        output: Path,
        words: list[str],
        devices: int,
        program: tuple[str, ...] = ("-m", "specjax"),
        **other: object,
    ) -> subprocess.Popen:
        from tests.xla_flags import quick_flags

        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": quick_flags(devices),
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
            "MAX_NEW_TOKENS": 16,
            "MAX_DRAFT": 2,
            "BATCH_SIZE": 8,
            "BUCKETS": "(16,)",
            "MESH_DATA": 4,
            "MESH_MODEL": 2,
            **other,
        }
        return subprocess.Popen(
            [sys.executable, *program, "infer", *words]
            + [f"--gin.{name}={value}" for name, value in settings.items()],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def alone(self, output: Path) -> None:
        finish(self.start(output, [], DEVICES))

    def both(self, output: Path, **others: object) -> list[subprocess.Popen]:
        """Starts both; `others` are settings of the second one alone."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        words = ["--process_count", "2", "--coordinator_address", address, "--process_index"]
        first = self.start(output, [*words, "0"], DEVICES // 2)
        return [first, self.start(output, [*words, "1"], DEVICES // 2, **others)]

    def written(self, output: Path) -> int:
        path = output / "predictions.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0


def finish(child: subprocess.Popen) -> tuple[str, str]:
    """What it printed, and told."""
    printed, told = child.communicate()
    assert child.returncode == 0, told
    return printed, told


def check_told(told: str) -> None:
    """Asserts that a process which lost the other says so, or that XLA ended it with a stack."""
    assert "lost another process" in told or "coordination service" in told, told


def kill_one(run: Run, output: Path, children: list[subprocess.Popen], rng: random.Random) -> int:
    """Kills one of two when some more rows are there; returns how many there were."""
    target = run.written(output) + rng.randint(0, run.rows // 8)
    while run.written(output) < min(target, run.rows - 1):
        if all(child.poll() is not None for child in children):
            break
        time.sleep(0.01)
    running = [i for i, child in enumerate(children) if child.poll() is None]
    if not running:
        return run.written(output)
    index = rng.choice(running)
    children[index].kill()
    children[index].communicate()
    _, told = children[1 - index].communicate(timeout=300)
    assert children[1 - index].returncode != 0, "it went on alone"
    check_told(told)
    children[:] = run.both(output)
    return run.written(output)


def compare(output: Path, expected: Path) -> None:
    ours, theirs = ((path / "predictions.jsonl").read_bytes() for path in (output, expected))
    assert ours == theirs, "predictions.jsonl differs"
    metrics = [json.loads((path / "metrics.json").read_text()) for path in (output, expected)]
    for one in metrics:
        one.pop("this_process")
    assert metrics[0] == metrics[1]


def run(kills: int, seed: int, rows: int = ROWS) -> dict:
    """Returns what happened; raises AssertionError where the outcomes differ."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as temporary:
        setting = Run(Path(temporary), rows)
        undisturbed = Path(temporary, "undisturbed")
        setting.alone(undisturbed)
        moments: list[int] = []
        runs = 0
        while not runs or len(moments) < kills:
            output = Path(temporary, f"disturbed{runs}")
            children = setting.both(output)
            while len(moments) < kills and setting.written(output) < rows * 7 // 8:
                moments.append(kill_one(setting, output, children, rng))
            for child in children:
                finish(child)
            compare(output, undisturbed)
            runs += 1
    return {"kills": len(moments), "runs": runs, "rows": rows, "killed_at": moments}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(json.dumps(run(arguments.kills, arguments.seed, arguments.rows)))
