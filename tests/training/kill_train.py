"""Kills `specjax train` at random moments and compares the outcome with an undisturbed run.

    python tests/training/kill_train.py --kills 20

The run trains a vocabulary, draws samples from a teacher, trains, draws samples of its own in each
phase, exports the model that its teacher accepts most of, and scores it.
It is killed (SIGKILL) at any time before its first step, a random while after its log has reached
a random step (in the middle of a step, of an evaluation, of a checkpoint being written), or after
the last step, while the model is exported and scored. At the end a child runs undisturbed. All
files (arrays of the checkpoints, samples, tokenizer, exported model, scores, the log without its
timings) must then equal those of a run that was never killed, bit for bit.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STEPS = 45
SYLLABLES = ["ba", "de", "ki", "lo", "mu", "na", "po", "ri"]
BINDINGS = {
    "NUM_STEPS": STEPS,
    "TEACHER_SAMPLES": 1,
    "DISTILLATION_WEIGHT": 1.0,
    "ON_POLICY_SHARE": 0.5,
    "REFRESH_EVERY": 10,
    "CHOOSE_BY": "accepted_greedy",
    "T5Config.dropout_rate": 0.1,
    "TrainerConfig.checkpoint_every": 3,
    "TrainerConfig.log_every": 1,
}


def prepare(directory: Path) -> None:
    """Writes texts to copy, and a teacher."""
    import jax

    from specjax.checkpoints import save_model
    from specjax.models import Seq2SeqLM, T5Config
    from specjax.training.vocabulary import write_vocabulary

    rng = random.Random(0)
    texts = [" ".join(rng.choices(SYLLABLES, k=rng.randint(1, 5))) for _ in range(132)]
    for name, part in (("train", texts[:120]), ("validation", texts[120:])):
        (directory / f"{name}.tsv").write_text("".join(f"{t}\t{t}\n" for t in part))
    options = {"vocab_size": 40, "model_type": "unigram"}
    write_vocabulary(directory / "vocabulary", None, texts[:120], **options)
    config = T5Config(
        vocab_size=40, embed_dim=16, num_heads=1, head_dim=16, mlp_dim=16,
        num_encoder_layers=1, num_decoder_layers=1,
    )  # fmt: skip
    save_model(
        directory / "teacher", config, Seq2SeqLM(config).init(jax.random.key(0)), format="hf",
        tokenizer_from=directory / "vocabulary",
    )  # fmt: skip


def start(data: Path, output: Path, **options: Any) -> subprocess.Popen:
    bindings = {**BINDINGS, "DATA_DIR": data, "OUTPUT_DIR": output, "TEACHER": data / "teacher"}
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(data / "programs"),
        # One device, as a user has; the tests' eight would only take longer.
        "XLA_FLAGS": "",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "specjax", "train"]
    command += ["--gin_file=gin_configs/runs/train.gin", "--gin_file=tests/cli/tiny_train.gin"]
    command += [f"--gin.{name}={value}" for name, value in bindings.items()]
    options = {"stdout": subprocess.DEVNULL, **options}
    return subprocess.Popen(command, env=environment, cwd=ROOT, **options)


def rows(output: Path) -> list[dict]:
    """The log's whole lines, without timings."""
    path = output / "metrics.jsonl"
    found = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if line.endswith("\n"):
            row = json.loads(line)
            row.pop("items_per_second", None)
            found.append(row)
    return found


def last_step(output: Path) -> int:
    return max((row["step"] for row in rows(output)), default=0)


def outcome(output: Path) -> dict[str, object]:
    """Every file's content: the checkpoints' arrays, the log's rows, hashes of the rest."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    found: dict[str, object] = {"metrics.jsonl": rows(output)}
    for step in (output / "checkpoints").iterdir():
        if not step.name.isdecimal():
            continue  # of a save that was killed
        tree = ocp.StandardCheckpointer().restore(step / "default")
        for name, leaf in jax.tree_util.tree_leaves_with_path(tree):
            array = np.asarray(leaf)
            key = f"checkpoints/{step.name}{jax.tree_util.keystr(name)}"
            found[key] = (array.dtype.str, array.shape, array.tobytes())
    for path in sorted(output.rglob("*")):
        name = str(path.relative_to(output))
        # runs.jsonl lists every process with its time: it differs by design.
        if path.is_file() and not name.startswith(("checkpoints/", "metrics.jsonl", "runs.", ".")):
            content = path.read_bytes()
            if name == "config.gin":
                content = content.replace(str(output).encode(), b"OUTPUT_DIR")
            found[name] = hashlib.sha256(content).hexdigest()
    return found


def compare(got: dict, expected: dict) -> None:
    assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
    differing = [name for name, value in expected.items() if got[name] != value]
    assert not differing, f"{differing} differ"


class Undisturbed:
    """A run that nobody kills: its outcome, and how long it takes before and after its steps."""

    def __init__(self, data: Path, output: Path):
        child, begun = start(data, output), time.monotonic()
        first = last = None
        while child.poll() is None:
            step, now = last_step(output), time.monotonic()
            first = now if step and first is None else first
            last = now if step == STEPS and last is None else last
            time.sleep(0.005)
        assert child.returncode == 0
        assert first is not None
        assert last is not None
        self.head, self.tail = first - begun, time.monotonic() - last
        self.outcome = outcome(output)


def kill_at_random(data: Path, output: Path, rng: random.Random, whole: Undisturbed) -> int | None:
    """Starts a child and kills it; returns the last step that its log told, None if it ended."""
    done = last_step(output)
    if done == 0 and rng.random() < 0.4:
        target, wait = 0, rng.random() * whole.head
    else:
        target = min(done + rng.randint(1, 15), STEPS)
        wait = rng.random() * (0.05 if target < STEPS else whole.tail)
    child = start(data, output)
    try:
        while last_step(output) < target and child.poll() is None:
            time.sleep(0.002)
        if done == STEPS:
            # The log already tells all: nothing to wait for but the process's own start.
            wait += whole.head
        time.sleep(wait)
        if child.poll() is not None:
            assert child.returncode == 0, f"the child ended with status {child.returncode}"
            return None
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    return last_step(output)


def run(kills: int, seed: int) -> dict:
    """Returns what happened; raises AssertionError where the outcomes differ."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary)
        prepare(data)
        whole = Undisturbed(data, data / "undisturbed")
        moments: list[int] = []
        runs = 0
        while len(moments) < kills:
            runs += 1
            output = data / f"disturbed{runs}"
            moment: int | None = 0
            while moment is not None and len(moments) < kills:
                moment = kill_at_random(data, output, rng, whole)
                moments += [] if moment is None else [moment]
            if moment is not None:
                assert start(data, output).wait() == 0
            compare(outcome(output), whole.outcome)
    return {"kills": kills, "runs": runs, "compared": len(whole.outcome), "killed_after": moments}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    print(json.dumps(run(arguments.kills, arguments.seed)))
