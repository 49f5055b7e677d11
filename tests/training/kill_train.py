"""Kills a training run at random moments and compares the outcome with an undisturbed one.

    python tests/training/kill_train.py --kills 20

A child process trains the copy task. It is killed (SIGKILL) a random while after its log has
reached a random step: in the middle of a step, of an evaluation, of a checkpoint being written.
After the last kill a child runs to the end. Its parameters, optimiser state, running average and
log (without its timings) must equal the undisturbed run's bit for bit.
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

import numpy as np

STEPS = 60
CHILD = """
import sys
from specjax.training import train
from tests.training.toy import train_arguments
train(**train_arguments(sys.argv[1], num_steps=int(sys.argv[2]), checkpoint_every=3, log_every=1))
"""


def start(directory: Path) -> subprocess.Popen:
    root = Path(__file__).parents[2]
    # One device, as a user has; the tests' eight would only take longer.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root), "XLA_FLAGS": ""}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(directory), str(STEPS)], env=environment, cwd=root
    )


def rows(directory: Path) -> list[dict]:
    """The log's whole lines, without timings."""
    path = directory / "metrics.jsonl"
    found = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if line.endswith("\n"):
            row = json.loads(line)
            row.pop("target_tokens_per_second", None)
            found.append(row)
    return found


def last_step(directory: Path) -> int:
    return max((row["step"] for row in rows(directory)), default=0)


def final_state(directory: Path) -> dict[str, np.ndarray]:
    """All arrays of the last checkpoint, by name."""
    import jax
    import orbax.checkpoint as ocp

    path = directory / "checkpoints" / str(STEPS) / "default"
    tree = ocp.StandardCheckpointer().restore(path)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(name): np.asarray(leaf) for name, leaf in leaves}


def kill_at_random(directory: Path, rng: random.Random) -> int:
    """Starts a child and kills it; returns the last step that its log told."""
    done = last_step(directory)
    # Not too far, so that all kills find a run that is still going.
    target = rng.randint(done + 1, min(done + 12, STEPS - 1))
    child = start(directory)
    while last_step(directory) < target and child.poll() is None:
        time.sleep(0.002)
    time.sleep(rng.random() * 0.05)
    if child.poll() is not None:
        raise AssertionError(f"the child ended by itself with status {child.returncode}")
    child.send_signal(signal.SIGKILL)
    child.wait()
    return last_step(directory)


def run(kills: int, seed: int) -> dict:
    """Returns what happened; raises AssertionError where the outcomes differ."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as temporary:
        undisturbed, disturbed = Path(temporary, "undisturbed"), Path(temporary, "disturbed")
        assert start(undisturbed).wait() == 0
        expected, expected_rows = final_state(undisturbed), rows(undisturbed)
        done = 0
        moments: list[int] = []
        rounds = 0
        while done < kills:
            # A run that has come near its end begins anew, until all kills are done.
            if last_step(disturbed) > STEPS - 12:
                compare(finish(disturbed), expected, rows(disturbed), expected_rows)
                disturbed = Path(temporary, f"disturbed{done}")
                rounds += 1
            moments.append(kill_at_random(disturbed, rng))
            done += 1
        compare(finish(disturbed), expected, rows(disturbed), expected_rows)
    return {"kills": kills, "runs": rounds + 1, "arrays": len(expected), "killed_after": moments}


def finish(directory: Path) -> dict[str, np.ndarray]:
    assert start(directory).wait() == 0
    return final_state(directory)


def compare(got: dict, expected: dict, got_rows: list, expected_rows: list) -> None:
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert array.dtype == got[name].dtype, name
        assert array.tobytes() == got[name].tobytes(), f"{name} differs"
    assert got_rows == expected_rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(json.dumps(run(arguments.kills, arguments.seed)))
