"""The run of `specjax train` that tests/cli/kill_together.py kills, and what it leaves.

The run trains a vocabulary, draws samples from a teacher, trains, draws samples of its own in each
phase, exports the model that its teacher accepts most of, and scores it.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
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
