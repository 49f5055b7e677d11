"""Kills a command at random moments, often two processes of it at a time, and starts it again.

    python -m tests.fuzzing.kills infer --kills 40

A child that ends by itself must have done its work, or been refused by one line. At the end one
runs undisturbed, and what it leaves must equal, bit for bit, what a run leaves that nobody
disturbs; a killed child's unfinished files must be gone. `interrupted` stops a command that runs in
this process.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from tests import tiny_pair
from tests.xla_flags import quick_flags

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def interrupted(monkeypatch: Any, kind: type, method: str, call: int = 0) -> Iterator[None]:
    """Interrupts in the place of a call of a method, from 1; with 0, after the first call."""
    unpatched, calls = getattr(kind, method), 0

    def stop(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls != call:
            unpatched(*args)
        if calls == call or not call:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kind, method, stop)
        yield


class Command:
    """A command with its settings, in one temporary directory."""

    words: tuple[str, ...] = ()
    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.given = {**self.settings, **self.prepare()}

    def prepare(self) -> dict[str, Any]:
        """Writes what the command reads; returns the settings that name it."""
        raise NotImplementedError

    def start(
        self,
        output: Path,
        *words: str,
        devices: int = 1,
        program: tuple[str, ...] = ("-m", "specjax"),
        **others: object,
    ) -> subprocess.Popen:
        # Programs from the disk, so that most of the time is work.
        environment = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": quick_flags(devices),
            "PYTHONPATH": str(ROOT),
            "JAX_ENABLE_COMPILATION_CACHE": "true",
            "JAX_COMPILATION_CACHE_DIR": str(self.directory / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        settings = {"OUTPUT_DIR": output, **self.given, **others}
        return subprocess.Popen(
            [sys.executable, *program, *self.words, *words]
            + [f"--gin.{name}={value}" for name, value in settings.items()],
            env={**os.environ, **environment},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def undisturbed(self, output: Path) -> None:
        """Runs from a beginning to an end, or finds the end."""
        finish(self.start(output), "is not empty")

    finish = undisturbed

    def several(self, output: Path, count: int) -> list[subprocess.Popen]:
        return [self.start(output) for _ in range(count)]

    def progress(self, output: Path) -> float | None:
        """Which share of the work is there; None if only the end shows."""
        return None

    def wait(
        self, output: Path, children: list[subprocess.Popen], rng: random.Random, seconds: float
    ) -> None:
        """Waits for a moment of the run, which takes so many seconds."""
        share = self.progress(output)
        if share is None or share == 1.0 or rng.random() < 0.25:
            time.sleep(rng.uniform(0.1, 1.1) * seconds * (1.6 if len(children) > 1 else 1.0))
            return
        target = 1.0 if rng.random() < 0.25 else min(share + rng.random() / 4, 1.0)
        while (self.progress(output) or 0.0) < target and at_work(children):
            time.sleep(0.002)
        time.sleep(rng.random() * 0.02)

    def kill(self, children: list[subprocess.Popen], rng: random.Random) -> int:
        """Kills the children; returns how many were at work, and asserts how the others ended."""
        killed = 0
        for child in children:
            if child.poll() is None:
                child.kill()
                killed += 1
            _, told = child.communicate()
            lines = [line for line in told.splitlines() if line]
            if child.returncode == 2:
                assert "another process" in lines[-1] or "is not empty" in lines[-1], lines
                assert not any("Traceback" in line for line in lines), lines
            else:
                assert child.returncode in (0, -9), lines
        return killed

    def outcome(self, output: Path) -> Any:
        """What does not depend on measured times."""
        raise NotImplementedError


def at_work(children: list[subprocess.Popen]) -> bool:
    return any(child.poll() is None for child in children)


def finish(child: subprocess.Popen, *allowed: str) -> tuple[str, str]:
    """What it printed, and told; asserts that it succeeded, or told one of `allowed`."""
    printed, told = child.communicate()
    assert child.returncode == 0 or any(text in told for text in allowed), told
    return printed, told


def names(output: Path) -> list[str]:
    return sorted(str(path.relative_to(output)) for path in output.rglob("*") if path.is_file())


class Infer(Command):
    """Decodes 400 rows with a tiny pair."""

    words = ("infer",)
    settings: ClassVar[dict[str, Any]] = {
        "MAX_NEW_TOKENS": 32,
        "MAX_DRAFT": 3,
        "BATCH_SIZE": 4,
        "BUCKETS": "(16, 24)",
    }
    rows = 400

    def prepare(self) -> dict[str, Any]:
        pair = tiny_pair.write_pair(self.directory / "pair")
        source = self.directory / "input.txt"
        source.write_text("".join(f"{text}\n" for text in tiny_pair.sentences(self.rows)))
        return {"INPUT": source, **{name.upper(): path for name, path in pair.items()}}

    def written(self, output: Path) -> int:
        path = output / "predictions.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def progress(self, output: Path) -> float:
        return self.written(output) / self.rows

    def outcome(self, output: Path) -> Any:
        metrics = json.loads((output / "metrics.json").read_text())
        metrics.pop("this_process")
        return (output / "predictions.jsonl").read_bytes(), metrics, names(output)


class Hosts(Infer):
    """The same in two processes, as one program; when one is killed, the other must end."""

    settings: ClassVar[dict[str, Any]] = {
        "MAX_NEW_TOKENS": 16,
        "MAX_DRAFT": 2,
        "BATCH_SIZE": 8,
        "BUCKETS": "(16,)",
        "MESH_DATA": 4,
        "MESH_MODEL": 2,
    }
    devices = 8

    def __init__(self, directory: Path, rows: int = 500) -> None:
        self.rows = rows
        super().__init__(directory)

    def undisturbed(self, output: Path) -> None:
        """Of a single process with all devices."""
        finish(self.start(output, devices=self.devices))

    def both(self, output: Path, **others: Any) -> list[subprocess.Popen]:
        """Starts both; `others` are settings of the second one alone."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        words = ["--process_count", "2", "--coordinator_address", address, "--process_index"]
        first = self.start(output, *words, "0", devices=self.devices // 2)
        return [first, self.start(output, *words, "1", devices=self.devices // 2, **others)]

    def several(self, output: Path, count: int) -> list[subprocess.Popen]:
        return self.both(output)

    def finish(self, output: Path) -> None:
        for child in self.both(output):
            finish(child)

    def wait(
        self, output: Path, children: list[subprocess.Popen], rng: random.Random, seconds: float
    ) -> None:
        target = min(self.progress(output) + rng.random() / 8, 7 / 8)
        while self.progress(output) < target and at_work(children):
            time.sleep(0.01)

    def kill(self, children: list[subprocess.Popen], rng: random.Random) -> int:
        assert all(child.poll() is None for child in children), "it ended by itself"
        index = rng.randrange(2)
        children[index].kill()
        children[index].communicate()
        check_lost(children[1 - index])
        return 1


def check_lost(child: subprocess.Popen) -> None:
    """Asserts that a process which lost the other says so, or that XLA ended it with a stack."""
    _, told = child.communicate(timeout=300)
    assert child.returncode not in (0, 2), "it went on alone"
    assert "lost another process" in told or "coordination service" in told, told


class Train(Command):
    """Trains a vocabulary and a tiny network with samples of a teacher, and of its own."""

    words = ("train", "--gin_file=runs/train.gin", "--gin_file=tests/cli/tiny_train.gin")
    settings: ClassVar[dict[str, Any]] = {
        "NUM_STEPS": 45,
        "TEACHER_SAMPLES": 1,
        "DISTILLATION_WEIGHT": 1.0,
        "ON_POLICY_SHARE": 0.5,
        "REFRESH_EVERY": 10,
        "CHOOSE_BY": "accepted_greedy",
        "T5Config.dropout_rate": 0.1,
        "TrainerConfig.checkpoint_every": 3,
        "TrainerConfig.log_every": 1,
    }

    def prepare(self) -> dict[str, Any]:
        import jax

        from specjax.checkpoints import save_model
        from specjax.models import Seq2SeqLM, T5Config
        from specjax.training.vocabulary import write_vocabulary

        texts = tiny_pair.sentences(132, longest=5)
        for name, part in (("train", texts[:120]), ("validation", texts[120:])):
            (self.directory / f"{name}.tsv").write_text("".join(f"{t}\t{t}\n" for t in part))
        words, teacher = self.directory / "vocabulary", self.directory / "teacher"
        write_vocabulary(words, None, texts[:120], vocab_size=40, model_type="unigram")
        config = T5Config(
            vocab_size=40, embed_dim=16, num_heads=1, head_dim=16, mlp_dim=16,
            num_encoder_layers=1, num_decoder_layers=1,
        )  # fmt: skip
        params = Seq2SeqLM(config).init(jax.random.key(0))
        save_model(teacher, config, params, format="hf", tokenizer_from=words)
        return {"DATA_DIR": self.directory, "TEACHER": teacher}

    def rows(self, output: Path) -> list[dict]:
        """The log's whole lines, without timings."""
        path = output / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [{k: v for k, v in row.items() if k != "items_per_second"} for row in found]

    def progress(self, output: Path) -> float:
        step = max((row["step"] for row in self.rows(output)), default=0)
        return step / self.settings["NUM_STEPS"]

    def outcome(self, output: Path) -> Any:
        """Every file's content: the checkpoints' arrays, the log's rows, hashes of the rest."""
        import jax
        import numpy as np
        import orbax.checkpoint as ocp

        found: dict[str, Any] = {"metrics.jsonl": self.rows(output)}
        for step in (output / "checkpoints").iterdir():
            if not step.name.isdecimal():
                continue  # of a save that was killed
            tree = ocp.StandardCheckpointer().restore(step / "default")
            for name, leaf in jax.tree_util.tree_leaves_with_path(tree):
                array = np.asarray(leaf)
                key = f"checkpoints/{step.name}{jax.tree_util.keystr(name)}"
                found[key] = (array.dtype.str, array.shape, array.tobytes())
        for name in names(output):
            # runs.jsonl lists every process with its time: it differs by design.
            if not name.startswith(("checkpoints/", "metrics.jsonl", "runs.", ".")):
                content = (output / name).read_bytes().replace(str(output).encode(), b"OUTPUT_DIR")
                found[name] = hashlib.sha256(content).hexdigest()
        return found


class TrainHead(Command):
    """Labels 240 prompts of a tiny pair, and trains a head on them."""

    words = ("train", "head")
    settings: ClassVar[dict[str, Any]] = {
        "MAX_NEW_TOKENS": 24,
        "Labelling.shard_rows": 16,
        "EPOCHS": 6,
        "BLOCKS": 1,
    }
    models = ("drafter", "verifier")
    kept = ("head_data", "acceptance_head", "results.json")

    def prepare(self) -> dict[str, Any]:
        paths = tiny_pair.write_pair(self.directory / "models")
        texts = self.directory / "texts.txt"
        texts.write_text("\n".join(tiny_pair.sentences(240)) + "\n")
        given = {name.upper(): paths[name] for name in self.models}
        return {**given, "TRAIN": texts, "VALIDATION": texts}

    def outcome(self, output: Path) -> Any:
        files = [f for name in self.kept for f in (output / name, *(output / name).glob("*"))]
        content = {str(f.relative_to(output)): f.read_bytes() for f in files if f.is_file()}
        return sorted(path.name for path in output.iterdir()), content


class TrainDrafter(TrainHead):
    """A tiny verifier writes texts for 240 prompts, and a draft head learns from them."""

    words = ("train", "drafter")
    settings: ClassVar[dict[str, Any]] = {
        "MAX_NEW_TOKENS": 24,
        "VerifierTexts.shard_rows": 16,
        "NUM_STEPS": 40,
        "WARMUP_STEPS": 4,
        "MAX_DRAFT": 2,
        "TrainerConfig.checkpoint_every": 5,
    }
    models = ("verifier",)
    kept = ("samples", "drafter", "results.json")


class Convert(Command):
    """Converts a T5 of 40 MB to another format."""

    words = ("convert",)

    def prepare(self) -> dict[str, Any]:
        import jax

        from specjax.checkpoints import save_model
        from specjax.models import Seq2SeqLM, T5Config

        config = T5Config(
            vocab_size=8000, embed_dim=512, num_heads=4, head_dim=64, mlp_dim=512,
            num_encoder_layers=2, num_decoder_layers=2,
        )  # fmt: skip
        params = Seq2SeqLM(config).init(jax.random.key(0))
        save_model(self.directory / "source", config, params, format="hf")
        return {}

    def start(self, output: Path, *words: str, **options: Any) -> subprocess.Popen:
        # Every child writes the same format, and each output another.
        form = ("hf", "orbax", "t5x")[sum(output.name.encode()) % 3]
        command = [*self.words, str(self.directory / "source"), str(output), "--to", form]
        return subprocess.Popen(
            [sys.executable, "-m", "specjax", *command],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def outcome(self, output: Path) -> Any:
        from specjax.checkpoints import load_model
        from specjax.fingerprints import digest

        unfinished = [path.name for path in output.parent.glob(f".{output.name}.*")]
        return digest(load_model(output).params), unfinished


class Compare(Command):
    """Measures a grid of four settings and the models alone, on eight texts."""

    words: tuple[str, ...] = ("compare", "--full")
    settings: ClassVar[dict[str, Any]] = {
        "TARGETS_FIELD": 1,
        "METHODS": "{'OPT({})': (0.1, 0.4), 'Lossy({})': (0.2, 0.6)}",
        "METRICS": "('chrf',)",
        "MAX_DRAFTS": "(2,)",
        "NUM_SAMPLES": 2,
        "BATCH_SIZE": 4,
        "LATENCY_LIMIT": 2,
        "REPEATS": 1,
        "MAX_NEW_TOKENS": 8,
        "RESAMPLES": 100,
        "BUCKETS": "(16, 24)",
    }

    def prepare(self) -> dict[str, Any]:
        pair = tiny_pair.write_pair(self.directory / "pair")
        table = self.directory / "texts.tsv"
        rows = zip(*(tiny_pair.sentences(8, seed=seed) for seed in (1, 2)), strict=True)
        table.write_text("".join(f"{a}\t{b}\n" for a, b in rows))
        return {"INPUT": table, **{name.upper(): path for name, path in pair.items()}}

    def outcome(self, output: Path) -> Any:
        """The files and all that does not depend on measured times: the texts and their scores."""
        from specjax.study import read_points

        found = read_points(output)
        rows = {key: found.measured(key).rows for key in found.of()}
        timed = ("latency", "seconds", "speedup", "time")
        figures = {
            key: {k: v for k, v in x.figures.items() if not any(word in k for word in timed)}
            for key, x in found.scored().items()
        }
        return names(output), rows, figures


class Limits(Compare):
    """Estimates a grid, and measures until a setting is chosen, which depends on times."""

    words = ("compare",)
    settings: ClassVar[dict[str, Any]] = {**Compare.settings, "MAX_NATS": 9, "CANDIDATES": 2}

    def outcome(self, output: Path) -> Any:
        """The files (but settings' texts and figures), the counts, and that the limits are kept."""
        results = json.loads((output / "results.json").read_text())
        met = [one["met"] for one in results["held_out"]["limits"].values()]
        kept = [name for name in names(output) if not name.startswith(("points/", "quality_"))]
        # The answer depends on times: with an unlucky one it is not to draft.
        return kept, results["estimated"], results["failed"], met


class Evaluate(Command):
    """Scores two runs with many resamples."""

    words = ("evaluate",)
    settings: ClassVar[dict[str, Any]] = {"METRICS": "('chrf', 'rouge_l')", "RESAMPLES": 2000}

    def prepare(self) -> dict[str, Any]:
        texts = tiny_pair.sentences(300)
        runs = [self.directory / f"{name}.jsonl" for name in ("one", "two")]
        for shift, path in enumerate(runs, 1):
            pairs = zip(texts, texts[shift:] + texts[:shift], strict=True)
            rows = ({"inputs": a, "prediction": b, "targets": a} for a, b in pairs)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {"PREDICTIONS": tuple(map(str, runs))}

    def outcome(self, output: Path) -> Any:
        return names(output), (output / "scores.json").read_bytes()


COMMANDS: dict[str, type[Command]] = {
    "infer": Infer,
    "hosts": Hosts,
    "train": Train,
    "train head": TrainHead,
    "train drafter": TrainDrafter,
    "convert": Convert,
    "compare": Compare,
    "limits": Limits,
    "evaluate": Evaluate,
}


def run(name: str, kills: int, seed: int = 1) -> dict[str, Any]:
    """Returns what happened; raises AssertionError where an outcome differs."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        command = COMMANDS[name](directory)
        seconds = 0.0
        for place in ("programs", "undisturbed")[kills == 1 :]:  # the first one compiles
            begun = time.monotonic()
            command.undisturbed(directory / place)
            seconds = time.monotonic() - begun
        expected = command.outcome(directory / "undisturbed")
        killed = starts = runs = 0
        while killed < kills:
            runs += 1
            output = directory / f"disturbed{runs}"
            for _ in range(rng.randint(2, 5)):
                if killed >= kills:
                    break
                children = command.several(output, 1 + starts % 2)
                starts += 1
                command.wait(output, children, rng, seconds)
                killed += command.kill(children, rng)
            command.finish(output)
            assert command.outcome(output) == expected, f"{output} differs"
    return {"command": name, "kills": killed, "starts": starts, "runs": runs}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(json.dumps(run(arguments.command, arguments.kills, arguments.seed)))
