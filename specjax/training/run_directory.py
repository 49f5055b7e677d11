"""What a training run keeps on disk: its checkpoints and its log."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from specjax.runs.output_directory import write_atomically
from specjax.training.step import TrainState

CONFIG_NAME = "train_config.json"
METRICS_NAME = "metrics.jsonl"


class RunDirectory:
    """The checkpoints (the latest and the best) and the log of one training run.

    What a killed save left is removed at once: the caller must have the directory to itself.

    Args:
      path: the directory.
    """

    def __init__(self, path: Path):
        self.path = path
        policy = preservation_policy.AnyPreservationPolicy(
            [
                preservation_policy.LatestN(n=1),
                preservation_policy.BestN(get_metric_fn=_score, n=1),
            ]
        )
        # Synchronous: on CPU an asynchronous save would read buffers that the next step reuses.
        self._manager = ocp.CheckpointManager(
            self.path / "checkpoints",
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policy,
                best_fn=_score,
                cleanup_tmp_directories=True,
                enable_async_checkpointing=False,
            ),
        )

    def close(self) -> None:
        """Releases the checkpoint manager."""
        self._manager.close()

    @property
    def latest_step(self) -> int | None:
        """The step of the latest checkpoint, or None."""
        return self._manager.latest_step()

    @property
    def best_step(self) -> int | None:
        """The step of the checkpoint with the lowest validation loss, or None."""
        return self._manager.best_step()

    def save(self, state: TrainState, validation_loss: float) -> None:
        """Writes a checkpoint, atomically; returns when it is on disk."""
        step = int(state.step)
        metrics = {"validation_loss": validation_loss}
        self._manager.save(step, args=ocp.args.StandardSave(state), metrics=metrics, force=True)
        self._manager.wait_until_finished()

    def restore(self, like: TrainState, step: int) -> TrainState:
        """Reads the checkpoint of `step`, placed as the arrays of `like` are."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        restored = self._manager.restore(step, args=ocp.args.StandardRestore(abstract))
        # Orbax's arrays may share memory with its buffers; donation needs them for itself.
        return jax.tree.map(lambda x: x.copy(), restored)

    def validation_loss(self, step: int) -> float:
        """The validation loss recorded with a checkpoint."""
        return float(self._manager.metrics(step)["validation_loss"])

    def open_log(self, step: int) -> None:
        """Drops what the log tells of later steps than `step`, and a torn last line."""
        path = self.path / METRICS_NAME
        if path.exists():
            kept = [json.dumps(row) for row in _read_log(path) if row["step"] <= step]
            write_atomically(path, "".join(line + "\n" for line in kept).encode())

    def log(self, row: Mapping[str, Any]) -> None:
        """Appends one line to the log."""
        with open(self.path / METRICS_NAME, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _score(metrics: Mapping[str, float]) -> float:
    # Higher is better.
    return -metrics["validation_loss"]


def _read_log(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text("utf-8").split("\n"):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        yield row
