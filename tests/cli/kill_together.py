"""Kills a command at random moments, often two processes of it at a time.

    python tests/cli/kill_together.py infer --kills 40

One or two children work in the same output directory until all are killed (SIGKILL) after a random
while. A child that ends by itself must have done its work, or been refused by one line. At the end
a child runs undisturbed, and what it leaves must equal, bit for bit, what a run leaves that nobody
disturbs; a killed child's unfinished files must be gone.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).parents[2]


class Infer:
    """Decodes 400 rows with a tiny pair."""

    def __init__(self, directory: Path) -> None:
        from tests.cli import kill_infer

        self._run = kill_infer.Run(directory)

    def start(self, output: Path) -> subprocess.Popen:
        return self._run.start(output)

    def outcome(self, output: Path) -> Any:
        metrics = json.loads((output / "metrics.json").read_text())
        metrics.pop("this_process")
        names = sorted(path.name for path in output.iterdir())
        return (output / "predictions.jsonl").read_bytes(), metrics, names


class Train:
    """Trains a vocabulary and a tiny network with samples of a teacher."""

    def __init__(self, directory: Path) -> None:
        from tests.training import kill_train

        self._module = kill_train
        self._data = directory
        kill_train.prepare(directory)

    def start(self, output: Path) -> subprocess.Popen:
        return self._module.start(self._data, output, stderr=subprocess.PIPE)

    def outcome(self, output: Path) -> Any:
        return self._module.outcome(output)


class Convert:
    """Converts a T5 of 40 MB to another format."""

    def __init__(self, directory: Path) -> None:
        import jax

        from specjax.checkpoints import save_model
        from specjax.models import Seq2SeqLM, T5Config

        config = T5Config(
            vocab_size=8000, embed_dim=512, num_heads=4, head_dim=64, mlp_dim=512,
            num_encoder_layers=2, num_decoder_layers=2,
        )  # fmt: skip
        self._source = directory / "source"
        save_model(self._source, config, Seq2SeqLM(config).init(jax.random.key(0)), format="hf")

    def start(self, output: Path) -> subprocess.Popen:
        # Every child writes the same format, and each output another.
        form = ("hf", "orbax", "t5x")[sum(output.name.encode()) % 3]
        return _start(["convert", str(self._source), str(output), "--to", form])

    def outcome(self, output: Path) -> Any:
        from specjax.checkpoints import load_model
        from specjax.fingerprints import digest

        unfinished = [path.name for path in output.parent.glob(f".{output.name}.*")]
        return digest(load_model(output).params), unfinished


class Compare:
    """Measures a grid of four settings and the models alone, on eight texts."""

    flags: tuple[str, ...] = ("--full",)
    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, directory: Path) -> None:
        from tests import tiny_pair

        pair = tiny_pair.write_pair(directory / "pair")
        texts, references = (tiny_pair.sentences(8, seed=seed) for seed in (1, 2))
        self._directory, table = directory, directory / "texts.tsv"
        rows = zip(texts, references, strict=True)
        table.write_text("".join(f"{a}\t{b}\n" for a, b in rows))
        given = {
            **{name.upper(): path for name, path in pair.items()},
            "INPUT": table,
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
            **self.settings,
        }
        self._words = [*self.flags, *(f"--gin.{name}={value}" for name, value in given.items())]

    def start(self, output: Path) -> subprocess.Popen:
        return _start(["compare", *self._words, f"--gin.OUTPUT_DIR={output}"], self._directory)

    def outcome(self, output: Path) -> Any:
        """The files and all that does not depend on measured times: the texts and their scores."""
        from specjax.study import read_points

        found = read_points(output)
        rows = {key: found.measured(key).rows for key in found.of()}
        figures = {
            key: {name: x for name, x in scores.figures.items() if not _is_time(name)}
            for key, scores in found.scored().items()
        }
        return _names(output), rows, figures


class Limits(Compare):
    """Estimates a grid, and measures until a setting is chosen, which depends on times."""

    flags = ()
    settings: ClassVar[dict[str, Any]] = {"MAX_NATS": 9, "CANDIDATES": 2}

    def outcome(self, output: Path) -> Any:
        """The files (but settings' texts and figures), the counts, and that the limits are kept."""
        results = json.loads((output / "results.json").read_text())
        met = [one["met"] for one in results["held_out"]["limits"].values()]
        names = [name for name in _names(output) if not name.startswith(("points/", "quality_"))]
        # The answer depends on times: with an unlucky one it is not to draft.
        return names, results["estimated"], results["failed"], met


class Evaluate:
    """Scores two runs with many resamples."""

    def __init__(self, directory: Path) -> None:
        from tests import tiny_pair

        self._directory, texts = directory, tiny_pair.sentences(300)
        self._runs = [directory / f"{name}.jsonl" for name in ("one", "two")]
        for shift, path in enumerate(self._runs, 1):
            pairs = zip(texts, texts[shift:] + texts[:shift], strict=True)
            rows = ({"inputs": a, "prediction": b, "targets": a} for a, b in pairs)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def start(self, output: Path) -> subprocess.Popen:
        runs = str(tuple(map(str, self._runs)))
        settings = {"PREDICTIONS": runs, "METRICS": "('chrf', 'rouge_l')", "RESAMPLES": 2000}
        given = [f"--gin.{name}={value}" for name, value in settings.items()]
        return _start(["evaluate", *given, f"--gin.OUTPUT_DIR={output}"], self._directory)

    def outcome(self, output: Path) -> Any:
        return _names(output), (output / "scores.json").read_bytes()


class TrainHead:
    """Labels 240 prompts of a tiny pair, and trains a head on them."""

    words = ("train", "head")
    settings: ClassVar[dict[str, Any]] = {"Labelling.shard_rows": 16, "EPOCHS": 6, "BLOCKS": 1}
    models = ("drafter", "verifier")
    kept = ("head_data", "acceptance_head", "results.json")

    def __init__(self, directory: Path) -> None:
        from tests import tiny_pair

        paths = tiny_pair.write_pair(directory / "models")
        self._models = {name.upper(): paths[name] for name in self.models}
        self._texts = directory / "texts.txt"
        self._texts.write_text("\n".join(tiny_pair.sentences(240, 0)) + "\n", encoding="utf-8")

    def start(self, output: Path) -> subprocess.Popen:
        settings = {
            **self._models,
            "TRAIN": self._texts,
            "VALIDATION": self._texts,
            "OUTPUT_DIR": output,
            "MAX_NEW_TOKENS": 24,
            **self.settings,
        }
        return _start([*self.words, *(f"--gin.{name}={x}" for name, x in settings.items())])

    def outcome(self, output: Path) -> Any:
        kept = self.kept
        files = [file for name in kept for file in (output / name, *(output / name).glob("*"))]
        names = sorted(path.name for path in output.iterdir())
        return names, {str(f.relative_to(output)): f.read_bytes() for f in files if f.is_file()}


class TrainDrafter(TrainHead):
    """A tiny verifier writes texts for 240 prompts, and a draft head learns from them."""

    words = ("train", "drafter")
    settings: ClassVar[dict[str, Any]] = {
        "VerifierTexts.shard_rows": 16,
        "NUM_STEPS": 40,
        "WARMUP_STEPS": 4,
        "MAX_DRAFT": 2,
        "TrainerConfig.checkpoint_every": 5,
    }
    models = ("verifier",)
    kept = ("samples", "drafter", "results.json")


def _start(command: list[str], programs: Path | None = None) -> subprocess.Popen:
    from tests.xla_flags import quick_flags

    environment = {"XLA_FLAGS": ""}
    if programs is not None:  # compiled programs from the disk, so that most of the time is work
        environment = {
            "XLA_FLAGS": quick_flags(1),
            "JAX_ENABLE_COMPILATION_CACHE": "true",
            "JAX_COMPILATION_CACHE_DIR": str(programs / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
    return subprocess.Popen(
        [sys.executable, "-m", "specjax", *command],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **environment},
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def _names(output: Path) -> list[str]:
    return sorted(str(path.relative_to(output)) for path in output.rglob("*") if path.is_file())


def _is_time(name: str) -> bool:
    return any(word in name for word in ("latency", "seconds", "speedup", "time"))


COMMANDS: dict[str, Callable[[Path], Any]] = {
    "infer": Infer,
    "train": Train,
    "train_head": TrainHead,
    "train_drafter": TrainDrafter,
    "convert": Convert,
    "compare": Compare,
    "limits": Limits,
    "evaluate": Evaluate,
}


def check_ended(children: list[subprocess.Popen]) -> int:
    """Kills the children; returns how many were at work, and asserts how the others ended."""
    killed = 0
    for child in children:
        if child.poll() is None:
            child.kill()
            killed += 1
        _, told = child.communicate()
        lines = [line for line in told.decode().splitlines() if line]
        if child.returncode == 2:
            assert "another process" in lines[-1] or "is not empty" in lines[-1], lines
            assert not any("Traceback" in line for line in lines), lines
        else:
            assert child.returncode in (0, -9), lines
    return killed


def run(command: str, kills: int, seed: int) -> dict:
    """Returns what happened; raises AssertionError where an outcome differs."""
    rng = random.Random(seed)
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as temporary:
        setting = COMMANDS[command](Path(temporary))
        seconds = 0.0
        for name in ("programs", "undisturbed"):  # the first one compiles
            begun = time.monotonic()
            child = setting.start(Path(temporary, name))
            _, told = child.communicate()
            assert child.returncode == 0, told.decode()
            seconds = time.monotonic() - begun
        expected = setting.outcome(Path(temporary, "undisturbed"))
        killed = starts = runs = refused = 0
        while killed < kills:
            runs += 1
            output = Path(temporary, f"disturbed{runs}")
            for _ in range(rng.randint(2, 5)):
                starts += 1
                children = [setting.start(output) for _ in range(1 + starts % 2)]
                slower = 1.6 if len(children) > 1 else 1.0  # they share the cores
                time.sleep(rng.uniform(0.1, 1.1) * seconds * slower)
                killed += check_ended(children)
                refused += sum(child.returncode == 2 for child in children)
            child = setting.start(output)
            check_ended_alone(child)
            assert setting.outcome(output) == expected, f"{output} differs"
    return {"command": command, "kills": killed, "starts": starts, "runs": runs, "refused": refused}


def check_ended_alone(child: subprocess.Popen) -> None:
    """Asserts that an undisturbed child completes the run, or finds it completed."""
    _, told = child.communicate()
    assert child.returncode == 0 or b"is not empty" in told, told.decode()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(json.dumps(run(arguments.command, arguments.kills, arguments.seed)))
