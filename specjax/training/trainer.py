"""The trainer: steps, checkpoints, resumption and evaluation of any `Task`."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.runs.run_directory import RunDirectory
from specjax.training.checkpoint_store import (
    CHECKPOINTS_NAME,
    DAMAGED_NAME,
    CheckpointStore,
    chosen,
)
from specjax.training.environment import ENVIRONMENTS_NAME, check_environment
from specjax.training.fingerprint import describe, digest
from specjax.training.log import METRICS_NAME, Log
from specjax.training.progress import Progress, Window, say, warn_of_warmup
from specjax.training.step import (
    TrainState,
    init_state,
    make_eval_step,
    make_train_step,
    root_key,
)
from specjax.training.task import Task
from specjax.training.trainer_config import TrainerConfig
from specjax.training.training_data import Phases, TrainingData
from specjax.types import Params

CONFIG_NAME = "train_config.json"


class TrainResult(NamedTuple):
    """What a finished run gives.

    Attributes:
      step: the step of the best checkpoint.
      validation_loss: its mean loss per item, in nats for language models.
      params: its parameters (their running average, if one is kept).
      figures: all that was measured of it, by the names in the log.
    """

    step: int
    validation_loss: float
    params: Params
    figures: Mapping[str, float]


def train(
    config: TrainerConfig,
    task: Task,
    data: TrainingData,
    *,
    output_dir: str | os.PathLike[str] | RunDirectory,
    constants: Any = None,
    init_params: Params | None = None,
    evaluate: Callable[[Params], Mapping[str, float]] | None = None,
    notes: Mapping[str, Any] | None = None,
    on_start: Callable[[RunDirectory], None] | None = None,
) -> TrainResult:
    """Trains a task's parameters, or continues the run that `output_dir` holds.

    A run that was killed at any moment and started again ends with the same parameters, to the
    bit, as one that was not (in the same environment with the same number of devices): the order of
    the data and the steps' keys follow from the seed and the step. A start that is refused for its
    arguments leaves nothing behind that would bind the next.

    Args:
      config: the trainer's settings.
      task: the loss and the parameters.
      data: batches to train on and to validate with.
      output_dir: holds the checkpoints (the two latest and the best), the configuration, the
        environments and `metrics.jsonl`; a path, or an open `RunDirectory` (see `run_directory`).
      constants: a pytree of arrays that the task reads and nothing changes, such as a teacher's
        parameters.
      init_params: parameters to start from; by default the task's initialisers draw them.
      evaluate: called at each checkpoint with the parameters on one device; its figures are
        logged. `config.choose_by` may name one of them without its `validation_`.
      notes: further JSON values that determine the run, such as the arguments of `data.grow`.
      on_start: called with the `RunDirectory` once all checks are passed, before the long work.

    Returns:
      A `TrainResult`.

    Raises:
      OSError: `output_dir` cannot be written, has files that no run made, or another process
        trains in it.
      TypeError: a value of the wrong type.
      ValueError: a value outside its range, an `output_dir` that holds another run or one of other
        random streams or whose checkpoints are all damaged, a loss that is no longer finite, or
        no figure that `choose_by` names.
    """
    # Whatever refuses a first start comes before the claim.
    devices, expected = config.devices(), _float32_params(task)
    init_params = None if init_params is None else _fitting(init_params, expected)
    arrays = {"init_params": init_params, "constants": constants}
    record = {
        "task": describe(task),
        "optimizer": describe(config.optimizer),
        "ema_decay": float(config.ema_decay),
        "seed": config.seed,
        "choose_by": config.choose_by,
        "training": data.training.describe(),
        "validation": data.validation.describe(),
        **{name: None if tree is None else digest(tree) for name, tree in arrays.items()},
        **(notes or {}),
    }
    # Pinned like the generator: it decides what a generator draws.
    with (
        _opened(output_dir) as run,
        jax.threefry_partitionable(True),
    ):
        run.claim(record)
        store = CheckpointStore(run, config.choose_by)
        try:
            _check_resumption(config, run, store.latest_step or 0)
            if on_start is not None:
                on_start(run)
            if data.grow is not None:
                data = dataclasses.replace(data, training=data.grow(), grow=None)
            return _Run(config, task, data, run, store, constants, evaluate, devices).train(
                init_params
            )
        finally:
            store.close()


def run_directory(path: str | os.PathLike[str], makes: Sequence[str] = ()) -> RunDirectory:
    """The directory of a training run.

    Args:
      path: the directory.
      makes: further names that the run may write.

    Returns:
      A `RunDirectory`, to be opened with `with`.
    """
    names = (CHECKPOINTS_NAME, DAMAGED_NAME, ENVIRONMENTS_NAME, METRICS_NAME, *makes)
    return RunDirectory(path, config_name=CONFIG_NAME, makes=names)


def _opened(
    place: str | os.PathLike[str] | RunDirectory,
) -> contextlib.AbstractContextManager[RunDirectory]:
    return (
        contextlib.nullcontext(place) if isinstance(place, RunDirectory) else run_directory(place)
    )


def _check_resumption(config: TrainerConfig, run: RunDirectory, step: int) -> None:
    """Makes sure that the run can go on from its latest checkpoint."""
    if step > config.num_steps:
        raise ValueError(
            f"num_steps={config.num_steps}: the run in {run.path} has done {step} updates; "
            "give at least as many, or another output_dir"
        )
    check_environment(run, step, allow_other_streams=config.allow_other_streams)


def _float32_params(task: Task) -> Params:
    """The shapes of the parameters."""
    shapes = jax.eval_shape(task.init, root_key(0))
    for leaf in jax.tree.leaves(shapes):
        if leaf.dtype != np.float32:
            raise ValueError(
                f"param_dtype={leaf.dtype}: small updates would be lost to rounding; train "
                "float32 parameters (dtype=bfloat16 computes in bfloat16)"
            )
    return shapes


def _fitting(params: Params, expected: Params) -> Params:
    """Parameters to start from, in the task's dtypes."""
    if jax.tree.map(np.shape, params) != jax.tree.map(lambda like: like.shape, expected):
        raise ValueError(
            "the parameters to start from do not have the network's names and shapes; use the "
            "configuration they were trained with"
        )
    return jax.tree.map(lambda x, like: jax.numpy.asarray(x, like.dtype), params, expected)


class _Run:
    """The jitted steps, the batches and the devices of one run."""

    def __init__(
        self,
        config: TrainerConfig,
        task: Task,
        data: TrainingData,
        run: RunDirectory,
        store: CheckpointStore,
        constants: Any,
        evaluate: Callable[[Params], Mapping[str, float]] | None,
        devices: list[jax.Device],
    ):
        mesh = jax.sharding.Mesh(np.asarray(devices), ("data",))
        self._replicated = jax.sharding.NamedSharding(mesh, jax.P())
        self._by_row = jax.sharding.NamedSharding(mesh, jax.P("data"))
        self._config, self._task, self._data = config, task, data
        self._run, self._store = run, store
        self._step = make_train_step(
            task, config.optimizer, seed=config.seed, ema_decay=config.ema_decay
        )
        self._eval_step = make_eval_step(task)
        self._constants = jax.device_put(constants, self._replicated)
        self._evaluate, self._first_device = evaluate, devices[0]

    def train(self, init_params: Params | None) -> TrainResult:
        """Trains up to `num_steps` and returns the best checkpoint."""
        config, store = self._config, self._store
        state, step = self._start(init_params)
        self._training_log = Log(self._run, step)
        first = step + 1
        progress = Progress(
            config.num_steps, step, items=self._task.item_name, enabled=config.progress
        )
        window = Window()
        batch_of: Callable[[int], Any] = self._data.training.batch
        phases = self._data.phases
        try:
            while step < config.num_steps:
                if phases is not None and (step + 1 == first or step % phases.every == 0):
                    batch_of = self._begin_phase(phases, step, state)
                    window.forget_past()
                batch = jax.device_put(batch_of(step), self._by_row)
                state, metrics = self._step(state, self._constants, batch)
                step += 1
                window.add(metrics)
                if step == first:
                    window.forget_past()
                if progress.update():
                    progress.tell(*window.latest())
                at_checkpoint = step % config.checkpoint_every == 0 or step == config.num_steps
                if step % config.log_every == 0 or at_checkpoint:
                    self._log(step, window.close())
                if at_checkpoint:
                    self._checkpoint(step, state)
                    window.close()  # the time that an evaluation took is none of training's
        finally:
            progress.close()
        best = store.best_step
        assert best is not None  # a checkpoint was written at num_steps, or there was one
        params, figures = store.restore(state, best).best_params, store.figures(best)
        return TrainResult(best, figures["validation_loss"], params, figures)

    def _begin_phase(self, phases: Phases, step: int, state: TrainState) -> Callable[[int], Any]:
        """The batches of the phase that `step` is in."""
        start = step - step % phases.every
        params = None
        if step == start:
            params = jax.device_put(state.best_params, self._first_device)
        return phases.begin(self._data.training, start, params)

    def _start(self, init_params: Params | None) -> tuple[TrainState, int]:
        """The state of the latest checkpoint or a fresh one, and its step."""
        config, store = self._config, self._store
        if init_params is None:
            init_params = self._task.init(root_key(config.seed))
        state = init_state(init_params, config.optimizer, config.ema_decay)
        state = jax.device_put(state, self._replicated)
        step = store.latest_step or 0
        if config.progress:
            warn_of_warmup(config.optimizer.schedule, config.num_steps)
            size = sum(leaf.size for leaf in jax.tree.leaves(init_params))
            begun = f"from step {step:,} of" if step else "for"
            say(
                f"training {size:,} parameters {begun} {config.num_steps:,} steps, "
                f"{self._data.training.batches_per_epoch:,} batches per epoch; the first step of "
                "each batch shape compiles"
            )
        if step:
            state = store.restore(state, step)
        return state, step

    def _log(self, step: int, means: dict[str, Any]) -> None:
        self._check_finite("loss", means["loss"], step)
        self._training_log.add(
            {
                "step": step,
                "epoch": step / self._data.training.batches_per_epoch,
                "learning_rate": float(self._config.optimizer.schedule(step - 1)),
                **means,
            }
        )

    def _checkpoint(self, step: int, state: TrainState) -> None:
        """Evaluates, logs and saves."""
        figures = self._validate(state)
        # The last update has been seen by no training loss yet.
        self._check_finite("validation loss", figures["loss"], step)
        row = {f"validation_{name}": value for name, value in figures.items()}
        if self._evaluate is not None:
            row |= self._evaluate(jax.device_put(state.best_params, self._first_device))
        self._check_finite(*chosen(row, self._config.choose_by), step)
        self._training_log.add({"step": step, **row})
        if self._config.progress:
            told = ", ".join(f"{k.replace('_', ' ')} {v:.4f}" for k, v in row.items())
            say(f"step {step:,}: {told}")
        self._store.save(state, row)

    def _check_finite(self, name: str, value: float, step: int) -> None:
        if not math.isfinite(value):
            raise ValueError(
                f"the {name} is {value} at step {step}; lower the learning rate in another "
                f"output_dir (the last good checkpoint of {self._run.path} is step "
                f"{self._store.latest_step})"
            )

    def _validate(self, state: TrainState) -> dict[str, float]:
        """Means over the validation data."""
        sums: dict[str, float] = {}
        counts: dict[str, int] = {}
        for batch in self._data.validation.epoch():
            placed = jax.device_put(batch, self._by_row)
            totals = self._eval_step(state.best_params, self._constants, placed)
            for name, total in jax.device_get(dict(totals)).items():
                sums[name] = sums.get(name, 0.0) + float(total.sum)
                counts[name] = counts.get(name, 0) + int(total.items)
        return {name: sums[name] / max(counts[name], 1) for name in sums}
