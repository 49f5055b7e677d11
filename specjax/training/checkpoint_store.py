"""The checkpoints of a training run, each verified when it is read."""

import os
import shutil
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from specjax.checkpoints.orbax import quiet, quiet_writes
from specjax.errors import UserError
from specjax.runs.run_directory import RunDirectory
from specjax.training.progress import say
from specjax.training.step import TrainState
from specjax.writing import (
    CHECKSUMS_NAME,
    find_damage,
    naming_failures,
    remove_proven,
    set_aside,
    write_checksums,
)

CHECKPOINTS_NAME, METRICS_NAME = "checkpoints", "metrics.jsonl"
# Receives old checkpoints, so that an interrupted deletion leaves nothing that looks like a
# damaged checkpoint.
_DELETED = "deleted"


class CheckpointStore:
    """The checkpoints (the two latest and the best) of a training run.

    Each checkpoint has the log up to its step, and checksums of its files, with the run's
    fingerprint and its step. A store with a checkpoint that is damaged, or of another run or step,
    does not open. An incomplete checkpoint, of an interrupted save, is set aside. Orbax's `manager`
    tells the latest and the best step, and the figures of a step.
    """

    def __init__(self, run: RunDirectory, choose_by: str):
        def score(metrics: Mapping[str, Any]) -> float:  # higher is better
            value = float(choosing_figure(metrics, choose_by)[1])
            return -value if choose_by == "loss" else value

        self._run = run
        self.path = run.path
        self._check()
        policy = preservation_policy.AnyPreservationPolicy(
            [
                preservation_policy.LatestN(n=2),  # the second as a fallback
                preservation_policy.BestN(get_metric_fn=score, n=1),
            ]
        )
        # Synchronous: on CPU an asynchronous save would read buffers that the next step reuses.
        self.manager = ocp.CheckpointManager(
            run.own(CHECKPOINTS_NAME),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policy,
                best_fn=score,
                todelete_subdir=_DELETED,
                cleanup_tmp_directories=True,
                enable_async_checkpointing=False,
            ),
        )

    def close(self) -> None:
        self.manager.close()

    def save(self, state: TrainState, figures: Mapping[str, float]) -> None:
        """Writes a checkpoint, atomically; returns when it is on disk."""
        step = int(state.step)
        place = self.path / CHECKPOINTS_NAME / str(step)
        self._run.keep()
        with naming_failures(place), quiet_writes():
            self.manager.save(
                step, args=ocp.args.StandardSave(state), metrics=dict(figures), force=True
            )
            self.manager.wait_until_finished()
            shutil.copyfile(self.path / METRICS_NAME, place / METRICS_NAME)
            write_checksums(place, owner=self._owner(step))
        self._empty_deleted()

    def restore(self, like: TrainState, step: int) -> TrainState:
        """Reads the checkpoint of `step`, placed like the arrays of `like`."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        with quiet():
            restored = self.manager.restore(step, args=ocp.args.StandardRestore(abstract))
        # Orbax's arrays may share memory with its buffers, but donated arrays must not.
        return jax.tree.map(lambda x: x.copy(), restored)

    def log(self, step: int) -> bytes:
        """The log up to a checkpoint."""
        return (self.path / CHECKPOINTS_NAME / str(step) / METRICS_NAME).read_bytes()

    def _owner(self, step: int) -> dict[str, Any]:
        return {**self._run.owner, "step": step}

    def _empty_deleted(self) -> None:
        place = self.path / CHECKPOINTS_NAME / _DELETED
        for path in () if place.is_symlink() else place.glob("*"):
            if path.name.isdecimal():
                remove_proven(path, owner=self._owner(int(path.name)))
        remove_proven(place, owner={})
        if os.path.lexists(place):  # Orbax would overwrite it
            say(f"warning: {place} has files that are not this run's: now {set_aside(place)}")

    def _check(self) -> None:
        # Before Orbax opens them: it trusts all files, and reports damage in 500 lines.
        self._empty_deleted()
        place = self.path / CHECKPOINTS_NAME
        names = {path.name for path in place.glob("*") if path.name.isdecimal()}
        steps = sorted(step for step in map(int, names) if str(step) in names)
        # A save without checksums was interrupted.
        if steps and not (place / str(steps[-1]) / CHECKSUMS_NAME).is_file():
            step = steps.pop()
            now = set_aside(place / str(step))
            say(
                f"warning: the checkpoint of step {step:,} in {place} has no checksums, as after "
                f"an interrupted save: it is not used, and is now {now}"
            )
        for step in steps:
            if why := find_damage(place / str(step), owner=self._owner(step)):
                raise UserError(
                    f"{place / str(step)} cannot be read ({why}): put a copy of it there, or "
                    "delete it, to continue from the latest of the others"
                )


def choosing_figure(figures: Mapping[str, Any], choose_by: str) -> tuple[str, float]:
    """The figure that chooses the best checkpoint."""
    prefix = "validation_"
    name = f"{prefix}{choose_by}"
    if name not in figures:
        measured = [key.removeprefix(prefix) for key in figures if key.startswith(prefix)]
        raise UserError(
            f"choose_by={choose_by!r} is not measured in this run: choose one of "
            f"{', '.join(measured)}"
        )
    return name.replace("_", " "), figures[name]
