"""The command `specjax infer` with a tiny pair, for tests."""

import json
from pathlib import Path

import numpy as np

from tests import tiny_pair

CONFIGS = Path(__file__).parents[2] / "gin_configs"
TEXTS = tiny_pair.sentences(11, seed=4)
SETTINGS = {"MAX_NEW_TOKENS": 12, "BATCH_SIZE": 4, "MAX_DRAFT": 3, "BUCKETS": "(16, 24)"}


def arguments(paths, source, output, **settings):
    bindings = {
        "VERIFIER": paths["verifier"],
        "DRAFTER": paths["drafter"],
        "INPUT": source,
        "OUTPUT_DIR": output,
        **SETTINGS,
        **{name.replace("__", "."): value for name, value in settings.items()},
    }
    return [
        "infer",
        f"--gin_file={CONFIGS / 'runs/infer.gin'}",
        *(f"--gin.{name}={value}" for name, value in bindings.items()),
    ]


def write(directory, texts, name="input.txt"):
    path = directory / name
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def rows(output):
    return [json.loads(line) for line in (output / "predictions.jsonl").read_text().splitlines()]


def write_cut(output, directory, seed):
    """Writes a run that was cut: rows in any order, as they finish, and the last of them torn."""
    rng = np.random.default_rng(seed)
    whole = (output / "predictions.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    written = b"".join(lines[i] for i in rng.permutation(len(lines)))
    (directory / "infer_config.json").write_bytes((output / "infer_config.json").read_bytes())
    (directory / "predictions.jsonl").write_bytes(written[: rng.integers(len(written))])
    return whole
