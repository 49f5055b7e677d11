"""The trainer: steps, checkpoints, resumption and evaluation of any `Task`."""

import contextlib
import dataclasses
import importlib.metadata
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from specjax.checks import PathLike, check_flag, check_number, whole_fields
from specjax.environment import environment
from specjax.errors import UserError
from specjax.fingerprints import digest
from specjax.models import ModelConfig
from specjax.models.families import config_to_dict
from specjax.models.weights import has_stored
from specjax.runs.run_directory import RunDirectory
from specjax.training.checkpoint_store import (
    CHECKPOINTS_NAME,
    METRICS_NAME,
    CheckpointStore,
    choosing_figure,
)
from specjax.training.progress import Progress, say
from specjax.training.step import (
    GENERATOR,
    AdamW,
    TrainState,
    init_state,
    make_eval_step,
    make_train_step,
    root_key,
)
from specjax.training.tasks import Task
from specjax.types import Params
from specjax.writing import append

CONFIG_NAME, RESULTS_NAME = "train_config.json", "results.json"
EXPORT_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Length, updates, reports and checkpoints of a run.

    Attributes:
      num_steps: the number of updates; may be raised to prolong a finished run.
      optimizer: the optimiser and its learning rate.
      ema_decay: the decay of the running average of the parameters, which is evaluated and
        exported, in [0, 1); 0 for none. It starts smaller: min(decay, (1 + step) / (10 + step)).
      seed: the seed of the initial parameters, the order of the data and dropout.
      checkpoint_every: updates between checkpoints; each is evaluated.
      log_every: updates between lines of the log.
      num_devices: devices that share each batch's rows; all of the process's by default.
      allow_other_environment: continue a run on another device or with other versions of packages:
        floats may round differently, and random numbers may differ.
      choose_by: the validation figure that chooses the best checkpoint, the result: "loss" (lowest
        is best), or another figure that is logged as `validation_<choose_by>`, such as "accuracy"
        (highest is best).
      progress: whether to show progress on stderr.
    """

    num_steps: int
    optimizer: AdamW
    ema_decay: float = 0.999
    seed: int = 0
    checkpoint_every: int = 500
    log_every: int = 50
    num_devices: int | None = None
    allow_other_environment: bool = False
    choose_by: str = "loss"
    progress: bool = True

    def __post_init__(self) -> None:
        whole_fields(self, num_steps=1, seed=0, checkpoint_every=1, log_every=1, num_devices=1)
        check_number("ema_decay", self.ema_decay, low=0.0, high=1.0, open_high=True)
        if not isinstance(self.optimizer, AdamW):
            raise UserError(f"`optimizer` must be an AdamW, got {self.optimizer!r}")
        for name in ("allow_other_environment", "progress"):
            check_flag(name, getattr(self, name))

    def devices(self) -> list[jax.Device]:
        devices = jax.devices()
        if self.num_devices is not None and self.num_devices > len(devices):
            raise UserError(
                f"`num_devices` must be at most {len(devices)} (devices of this process), got "
                f"{self.num_devices}"
            )
        return devices[: self.num_devices]


class Batches(Protocol):
    """Batches in an order that depends only on their numbers."""

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches in an epoch."""

    def batch(self, step: int) -> Any:
        """The batch of step `step`: a pytree of arrays with the rows first."""

    def describe(self) -> dict[str, Any]:
        """The settings that determine the batches, as JSON values."""


class Phases(Protocol):
    """Batches that depend on the parameters at the start of each phase of a run.

    A phase must write its results to disk before it returns: a run that is resumed in its middle no
    longer has these parameters. Other settings that determine the batches belong into the run's
    notes.
    """

    @property
    def every(self) -> int:
        """The updates of a phase; the first begins at step 0."""

    def begin(self, batches: Any, step: int, params: Params | None) -> Callable[[int], Any]:
        """Begins a phase, or continues it.

        `step` is its first step. `params` are the parameters that would be evaluated at that step,
        as they are placed; None if the run is past that step. The result makes the batch of a step.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The data of training and validation.

    Attributes:
      training: batches; the devices share the rows of each.
      validation: batches; the checkpoint that is best on them is the result.
      grow: makes the training batches, instead of `training`. It is called after the run is known
        to belong to its directory, so it may take its time. The notes must contain the settings
        that determine it, or `training.describe()`.
      phases: changes the batches, by the parameters of each phase's start.
    """

    training: Batches
    validation: Batches
    grow: Callable[[], Batches] | None = None
    phases: Phases | None = None


class TrainResult(NamedTuple):
    """The result of a finished run.

    Attributes:
      step: the step of the best checkpoint.
      validation_loss: its mean loss per item, in nats for language models.
      params: its parameters (their running average, if one is kept).
      figures: all its figures, by the names in the log.
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
    output_dir: PathLike | RunDirectory,
    constants: Any = None,
    init_params: Params | None = None,
    evaluate: Callable[[Params], Mapping[str, float]] | None = None,
    notes: Mapping[str, Any] | None = None,
    on_start: Callable[[RunDirectory], None] | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> TrainResult:
    """Trains a task's parameters, or continues the run in `output_dir`.

    A run that is interrupted at any moment and started again ends with the same parameters, to the
    bit, as an uninterrupted run (in the same environment with the same number of devices): the
    order of the data and the steps' keys follow from the seed and the step. A start with invalid
    arguments leaves nothing behind.

    Args:
      config: the trainer's settings.
      task: the loss and the parameters.
      data: batches to train on and to validate with.
      output_dir: gets the checkpoints (the two latest and the best), the configuration and
        `metrics.jsonl`; a path, or an open `RunDirectory` (see `run_directory`).
      constants: a pytree of arrays that the task reads and does not change, such as a teacher's
        parameters; or a function that makes it, called after `data.grow`, for which the notes must
        contain what determines it.
      init_params: initial parameters; by default drawn by the task's initialisers.
      evaluate: called at each checkpoint with the parameters as they are placed; its figures are
        logged. `config.choose_by` may name one of them without its `validation_`.
      notes: further JSON values that determine the run, such as the arguments of `data.grow`.
      on_start: called with the `RunDirectory` after all checks, before the long work.
      mesh: the mesh that the constants lie on, whose axis `data` shares each batch's rows; by
        default one of `config.num_devices`, each of which gets all constants.

    Raises:
      OSError: `output_dir` cannot be written, has files that no run made, or another process
        trains in it.
      UserError: the `output_dir` of another run or another environment, or with a damaged
        checkpoint, or a loss that is not finite.
    """
    # Invalid arguments must raise before the claim.
    config.devices()
    shapes = jax.eval_shape(task.init, root_key(0))
    for leaf in jax.tree.leaves(shapes):
        if leaf.dtype != np.float32:
            raise UserError(
                f"param_dtype={leaf.dtype}: small updates would be lost to rounding; train "
                "float32 parameters (dtype=bfloat16 computes in bfloat16)"
            )
    init_params = None if init_params is None else _fitting(init_params, shapes)
    later = callable(constants)
    arrays = {"init_params": init_params, "constants": None if later else constants}
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
    opened: contextlib.AbstractContextManager[RunDirectory] = (
        contextlib.nullcontext(output_dir)
        if isinstance(output_dir, RunDirectory)
        else run_directory(output_dir)
    )
    # The partitionable threefry is fixed like the generator: it changes the generator's numbers.
    with opened as run, jax.threefry_partitionable(True):
        record["environment"] = training_environment()
        run.claim(record, allow_other_environment=config.allow_other_environment)
        with contextlib.closing(CheckpointStore(run, config.choose_by)) as store:
            if (done := store.manager.latest_step() or 0) > config.num_steps:
                raise UserError(
                    f"num_steps={config.num_steps}: the run in {run.path} has already done {done} "
                    "updates; give at least as many, or another output_dir"
                )
            if on_start is not None:
                on_start(run)
            if data.grow is not None:
                data = dataclasses.replace(data, training=data.grow(), grow=None)
            constants = constants() if later else constants
            return _train(config, task, data, run, store, constants, init_params, evaluate, mesh)


def run_directory(path: PathLike, makes: Sequence[str] = ()) -> RunDirectory:
    """The directory of a training run, to be opened with `with`; it may make more names."""
    names = (CHECKPOINTS_NAME, METRICS_NAME, *makes)
    return RunDirectory(path, config_name=CONFIG_NAME, makes=names)


def check_choices(recipe: Any, choices: Mapping[str, Sequence[str | None]]) -> None:
    """Raises UserError unless each of these fields is one of its values."""
    for name, values in choices.items():
        if getattr(recipe, name) not in values:
            raise UserError(
                f"`{name}` must be one of {', '.join(filter(None, values))}, got "
                f"{getattr(recipe, name)!r}"
            )


def check_sources(run: RunDirectory, sources: Mapping[str, Any]) -> None:
    """Raises UserError for a model or a file, by its name, that the run would replace."""
    for name, path in sources.items():
        if path is not None and run.makes(path):
            raise UserError(
                f"{name}={path} is an output of the run in output_dir={run.path}: choose another "
                "output_dir, or copy it to another place"
            )


def describe(value: Any) -> Any:
    """Returns a frozen configuration as JSON values, each with the name of its class."""
    if isinstance(value, ModelConfig):
        return config_to_dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"class": type(value).__name__, **fields}
    return json.loads(json.dumps(value))


def training_environment() -> dict[str, Any]:
    """Returns what a run's random numbers and rounding depend on, as JSON values."""
    versions = {name: importlib.metadata.version(name) for name in ("flax", "optax", "numpy")}
    common = environment()
    return {**common, "versions": {**common["versions"], **versions}, "generator": GENERATOR}


def _fitting(params: Params, shapes: Params) -> Params:
    """Initial parameters, in the task's dtypes."""
    if has_stored(params):
        raise UserError(
            "the initial parameters are quantised, which cannot be trained: load the model "
            "without weights='int8'"
        )
    if jax.tree.map(np.shape, params) != jax.tree.map(lambda like: like.shape, shapes):
        raise UserError(
            "the initial parameters do not have the network's names and shapes; use the "
            "configuration they were trained with"
        )
    return jax.tree.map(lambda x, like: jax.numpy.asarray(x, like.dtype), params, shapes)


def _train(
    config: TrainerConfig,
    task: Task,
    data: TrainingData,
    run: RunDirectory,
    store: CheckpointStore,
    constants: Any,
    init_params: Params | None,
    evaluate: Callable[[Params], Mapping[str, float]] | None,
    mesh: jax.sharding.Mesh | None,
) -> TrainResult:
    # Where parameters are evaluated.
    place: Any = config.devices()[0]
    if mesh is None:
        mesh = jax.sharding.Mesh(np.asarray(config.devices()), ("data",))
        constants = jax.device_put(constants, jax.NamedSharding(mesh, jax.P()))
    else:
        place = jax.NamedSharding(mesh, jax.P())
    by_row = jax.NamedSharding(mesh, jax.P("data"))
    options = {"seed": config.seed, "ema_decay": config.ema_decay}
    update, evaluation = make_train_step(task, config.optimizer, **options), make_eval_step(task)
    phases, per_epoch = data.phases, data.training.batches_per_epoch

    def log(step: int, row: Mapping[str, Any]) -> None:
        run.keep()
        append(run.own(METRICS_NAME), (json.dumps({"step": step, **row}) + "\n").encode())

    def check_finite(name: str, value: float, step: int) -> None:
        if not math.isfinite(value):
            raise UserError(
                f"the {name} is {value} at step {step}; lower the learning rate in another "
                f"output_dir (the last good checkpoint of {run.path} is step "
                f"{store.manager.latest_step()})"
            )

    def checkpoint(step: int, state: TrainState) -> None:
        """Evaluates, logs and saves."""
        totals: dict[str, Any] = {}
        for number in range(data.validation.batches_per_epoch):
            batch = jax.device_put(data.validation.batch(number), by_row)
            figures = jax.device_get(evaluation(state.best_params, constants, batch))
            for name, total in dict(figures).items():
                sums, items = totals.get(name, (0.0, 0))
                totals[name] = sums + float(total.sum), items + int(total.items)
        row = {f"validation_{name}": x / max(items, 1) for name, (x, items) in totals.items()}
        # No training loss has seen the last update yet.
        check_finite("validation loss", row["validation_loss"], step)
        if evaluate is not None:
            row |= evaluate(jax.device_put(state.best_params, place))
        check_finite(*choosing_figure(row, config.choose_by), step)
        log(step, row)
        if config.progress:
            shown = ", ".join(f"{k.replace('_', ' ')} {v:.4f}" for k, v in row.items())
            say(f"step {step:,}: {shown}")
        store.save(state, row)

    # No name keeps the first parameters, which `init_state` copies.
    given = task.init(root_key(config.seed)) if init_params is None else init_params
    state = init_state(given, config.optimizer, config.ema_decay)
    del given
    state = jax.device_put(state, jax.NamedSharding(mesh, jax.P()))
    first = step = store.manager.latest_step() or 0
    if config.progress:
        if config.optimizer.warmup_steps > config.num_steps:
            say(
                f"warning: the warm-up takes {config.optimizer.warmup_steps:,} steps, but the run "
                f"ends after {config.num_steps:,}, before the learning rate has reached its peak; "
                "lower WARMUP_STEPS, or raise NUM_STEPS"
            )
        size = sum(leaf.size for leaf in jax.tree.leaves(state.best_params))
        say(
            f"training {size:,} parameters {f'from step {step:,} of' if step else 'for'} "
            f"{config.num_steps:,} steps, {per_epoch:,} batches per epoch; the first step of each "
            "batch shape compiles"
        )
    if step:
        state = store.restore(state, step)
    run.write(METRICS_NAME, store.log(step) if step else b"")
    progress = Progress(config.num_steps, step, items=task.item_name, enabled=config.progress)
    batch_of: Callable[[int], Any] = data.training.batch
    with contextlib.closing(progress):
        while step < config.num_steps:
            if phases is not None and (step == first or step % phases.every == 0):
                start = step - step % phases.every
                at_start = jax.device_put(state.best_params, place) if step == start else None
                batch_of = phases.begin(data.training, start, at_start)
                del at_start
            state, metrics = update(state, constants, jax.device_put(batch_of(step), by_row))
            step += 1
            progress.add(metrics)
            at_checkpoint = step % config.checkpoint_every == 0 or step == config.num_steps
            if step % config.log_every == 0 or at_checkpoint:
                means = progress.means(step)
                check_finite("loss", means["loss"], step)
                rate = float(config.optimizer.rate(step - 1))
                log(step, {"epoch": step / per_epoch, "learning_rate": rate, **means})
            if at_checkpoint:
                checkpoint(step, state)
                progress.restart()
    best = store.manager.best_step()
    assert best is not None  # a checkpoint exists, at num_steps at the latest
    figures: dict[str, float] = dict(store.manager.metrics(best))
    best_params = store.restore(state, best).best_params
    return TrainResult(best, figures["validation_loss"], best_params, figures)
