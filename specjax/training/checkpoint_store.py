"""The checkpoints of a training run, each verified when it is read."""

import shutil
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from specjax.checkpoints.orbax import quiet, quiet_writes
from specjax.checksums import find_damage, has_checksums, write_checksums
from specjax.runs.run_directory import RunDirectory
from specjax.training.progress import say
from specjax.training.step import TrainState
from specjax.writing import naming_failures

CHECKPOINTS_NAME = "checkpoints"
DAMAGED_NAME = "damaged_checkpoints"
_LOSS = "validation_loss"
# Takes checkpoints that are no longer kept: a deletion that is killed leaves nothing that looks
# like a damaged checkpoint.
_DELETED = "deleted"


class CheckpointStore:
    """The checkpoints (the two latest and the best) of one training run.

    Each checkpoint has checksums of its files, which are verified when the store opens. It moves a
    damaged one to `damaged_checkpoints`, so that the run goes on from the one before; the repeated
    updates end with the same bits.

    What a killed save left is removed at once.

    Args:
      run: the run's directory; claimed.

    Raises:
      OSError: a damaged checkpoint cannot be moved.
      ValueError: all checkpoints are damaged.
    """

    def __init__(self, run: RunDirectory):
        self._run = run
        self.path = run.path
        self._set_damaged_aside()
        policy = preservation_policy.AnyPreservationPolicy(
            [
                preservation_policy.LatestN(n=2),  # one to fall back to
                preservation_policy.BestN(get_metric_fn=_score, n=1),
            ]
        )
        # Synchronous: on CPU an asynchronous save would read buffers that the next step reuses.
        self._manager = ocp.CheckpointManager(
            run.own(CHECKPOINTS_NAME),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policy,
                best_fn=_score,
                todelete_subdir=_DELETED,
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
        """Writes a checkpoint, atomically; returns when it is on disk.

        Raises:
          OSError: it cannot be written; the earlier ones stay.
        """
        step = int(state.step)
        metrics = {_LOSS: validation_loss}
        place = self.path / CHECKPOINTS_NAME / str(step)
        self._run.keep()
        with naming_failures(place), quiet_writes():
            self._manager.save(step, args=ocp.args.StandardSave(state), metrics=metrics, force=True)
            self._manager.wait_until_finished()
            write_checksums(place)
        self._empty_deleted()

    def restore(self, like: TrainState, step: int) -> TrainState:
        """Reads the checkpoint of `step`, placed as the arrays of `like` are."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        with quiet():
            restored = self._manager.restore(step, args=ocp.args.StandardRestore(abstract))
        # Orbax's arrays may share memory with its buffers; donation needs them for itself.
        return jax.tree.map(lambda x: x.copy(), restored)

    def validation_loss(self, step: int) -> float:
        """The validation loss recorded with a checkpoint."""
        return float(self._manager.metrics(step)[_LOSS])

    def _empty_deleted(self) -> None:
        shutil.rmtree(self.path / CHECKPOINTS_NAME / _DELETED, ignore_errors=True)

    def _set_damaged_aside(self) -> None:
        # Before Orbax opens them: it trusts what it reads, and tells of damage in 500 lines.
        self._empty_deleted()
        place = self.path / CHECKPOINTS_NAME
        steps = sorted(int(path.name) for path in place.glob("*") if path.name.isdecimal())
        if steps and not has_checksums(place / str(steps[-1])):  # its save was killed
            step = steps.pop()
            shutil.rmtree(place / str(step))
            say(f"warning: the checkpoint of step {step:,} in {place} is incomplete: removed")
        damaged = {step: why for step in steps if (why := find_damage(place / str(step)))}
        if not damaged:
            return
        told = "; ".join(f"step {step:,}: {why}" for step, why in damaged.items())
        sound = [step for step in steps if step not in damaged]
        if not sound:
            raise ValueError(
                f"{place}: no checkpoint can be read ({told}): put a copy of it there, delete it "
                "to train from the start, or choose another output_dir"
            )
        for step in damaged:
            target = self._run.own(DAMAGED_NAME) / str(step)
            with naming_failures(target):
                target.parent.mkdir(exist_ok=True)
                shutil.rmtree(target, ignore_errors=True)
                shutil.move(place / str(step), target)
        say(
            f"warning: damaged checkpoints of {place} ({told}) are now in {DAMAGED_NAME}; the run "
            f"goes on from step {sound[-1]:,}; if the best checkpoint is among them, the result "
            "is the best of the others"
        )


def _score(metrics: Mapping[str, Any]) -> float:
    # Higher is better.
    return -metrics[_LOSS]
