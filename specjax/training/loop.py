"""The training loop: from pairs of token sequences to a run directory with a trained network."""

import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import tqdm

from specjax.checks import checked
from specjax.data.batching import Batching, BucketedBatches, TokenPairs
from specjax.models import T5, T5Config
from specjax.runs.output_directory import claim, locked, make_writable
from specjax.training.fingerprint import describe, digest
from specjax.training.optimizer import AdamW
from specjax.training.run_directory import CONFIG_NAME, RunDirectory
from specjax.training.step import (
    Objective,
    StepMetrics,
    TrainState,
    init_state,
    make_eval_step,
    make_train_step,
)
from specjax.types import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher:
    """A network to distil from, with the student's vocabulary.

    Attributes:
      model: the network.
      params: its parameters.
    """

    model: T5
    params: Params

    def describe(self) -> dict[str, Any]:
        """The network, and a hash of its parameters, as JSON values."""
        return {"model": describe(self.model.config), "params": digest(self.params)}


class TrainResult(NamedTuple):
    """What a finished run gives.

    Attributes:
      step: the step of the best checkpoint.
      validation_loss: its cross entropy per target token, in nats.
      params: its parameters (their running average, if one is kept).
    """

    step: int
    validation_loss: float
    params: Params


def train(
    *,
    output_dir: str | os.PathLike[str],
    config: T5Config,
    training_pairs: TokenPairs,
    validation_pairs: TokenPairs,
    optimizer: AdamW,
    num_steps: int,
    objective: Objective | None = None,
    batching: Batching | None = None,
    pad_id: int = 0,
    eos_id: int = 1,
    seed: int = 0,
    checkpoint_every: int = 500,
    log_every: int = 50,
    init_params: Params | None = None,
    teacher: Teacher | None = None,
    augment: Callable[[TokenPairs], TokenPairs] | None = None,
    notes: Mapping[str, Any] | None = None,
    num_devices: int | None = None,
    progress: bool = True,
) -> TrainResult:
    """Trains a T5 by teacher forcing, or continues the run that `output_dir` holds.

    A run that was killed at any moment and started again ends with the same parameters, to the
    bit, as one that was not (on the same machine with the same number of devices): the order of
    the data and the dropout keys follow from the seed and the step. `num_steps` may be raised to
    prolong a finished run. A start that is refused for its arguments leaves nothing behind that
    would bind the next.

    Args:
      output_dir: holds the checkpoints (the latest and the best), the configuration and
        `metrics.jsonl`.
      config: the network.
      training_pairs: pairs of token sequences, each with its end-of-sequence token.
      validation_pairs: likewise; the checkpoint with the lowest loss on them is the result.
      optimizer: the optimiser and its schedule.
      num_steps: updates in all; at least as many as the run has done.
      objective: the loss; by default label smoothing and a running average.
      batching: the shapes of the batches.
      pad_id: pads batches; where the data holds it, it is neither learnt nor attended to.
      eos_id: the end-of-sequence token.
      seed: of the initial parameters, the order of the data and dropout.
      checkpoint_every: updates between checkpoints; each one is evaluated.
      log_every: updates between lines of the log.
      init_params: parameters to start from; by default T5X's initialisers draw them.
      teacher: the network to distil from if `objective.distillation_weight > 0`.
      augment: makes the pairs to train on from `training_pairs`; called once the run is known to
        be the one that `output_dir` holds, so it may take its time.
      notes: further JSON values that determine the run, such as the arguments of `augment`.
      num_devices: devices that share each batch's rows; all of the process's by default.
      progress: whether to show a progress bar (on a terminal only).

    Returns:
      A `TrainResult`.

    Raises:
      OSError: `output_dir` cannot be written, or another process trains in it.
      TypeError: a value of the wrong type.
      ValueError: a value outside its range, unusable data, an `output_dir` that holds another
        run, or a loss that is no longer finite.
    """
    objective, batching = objective or Objective(), batching or Batching()
    numbers = check_numbers(
        seed=seed, num_steps=num_steps, checkpoint_every=checkpoint_every, log_every=log_every
    )
    seed = numbers.pop("seed")
    if config.param_dtype != np.float32:
        raise ValueError(
            f"param_dtype={config.param_dtype}: small updates would be lost to rounding; train "
            "float32 parameters (dtype=bfloat16 computes in bfloat16)"
        )
    if pad_id == eos_id:
        raise ValueError(
            f"pad_id={pad_id} is also the end-of-sequence token, which would never be learnt; use "
            "a vocabulary with a padding token of its own"
        )
    if (objective.distillation_weight > 0.0) != (teacher is not None):
        raise ValueError(
            f"distillation_weight={objective.distillation_weight} and teacher="
            f"{'given' if teacher else 'None'}: a teacher is needed exactly if the weight is > 0"
        )
    if teacher is not None and teacher.model.vocab_size != config.vocab_size:
        raise ValueError(
            f"the teacher's vocab_size={teacher.model.vocab_size} and the network's vocab_size="
            f"{config.vocab_size} differ; give the network the teacher's"
        )
    devices = local_devices(num_devices)
    ids = {"pad_id": pad_id, "eos_id": eos_id}

    def batches(name: str, pairs: TokenPairs, seed: int | None) -> BucketedBatches:
        largest = int(pairs.tokens.max())
        if largest >= config.vocab_size:
            raise ValueError(
                f"{name} contain token {largest}, but the network's vocab_size="
                f"{config.vocab_size}; make it larger, or use another vocabulary"
            )
        made = BucketedBatches(pairs, batching, seed=seed, row_multiple=len(devices), **ids)
        if progress and made.num_left_out:
            print(
                f"specjax: {made.num_left_out} of {len(pairs)} {name.replace('_', ' ')} are longer "
                f"than the last bucket ({batching.bucket_lengths[-1]} tokens) and left out",
                file=sys.stderr,
            )
        return made

    training = batches("training_pairs", training_pairs, seed)
    validation = batches("validation_pairs", validation_pairs, None)
    if init_params is not None:
        init_params = _fitting(init_params, config)
    path = make_writable(output_dir)
    with locked(path):
        # Whatever refuses a first start comes before this.
        claim(
            path / CONFIG_NAME,
            {
                "model": describe(config),
                "optimizer": describe(optimizer),
                "objective": describe(objective),
                "batching": describe(batching),
                # Depends on the number of devices too; another one would lose and double pairs.
                "rows_per_batch": training.rows,
                "seed": seed,
                "training_data": digest([training_pairs.tokens, training_pairs.offsets]),
                "validation_data": digest([validation_pairs.tokens, validation_pairs.offsets]),
                "init_params": init_params and digest(init_params),
                "teacher": teacher and teacher.describe(),
                **ids,
                **(notes or {}),
            },
        )
        if augment is not None:
            training = batches("training_pairs", augment(training_pairs), seed)
        directory = RunDirectory(path)
        try:
            trainer = _Trainer(
                directory, config, training, validation, optimizer, objective, pad_id, seed,
                teacher, devices,
            )  # fmt: skip
            return trainer.run(init_params=init_params, progress=progress, **numbers)
        finally:
            directory.close()


def check_numbers(*, seed: int, **counts: int) -> dict[str, int]:
    """Whole numbers as Python's: a seed, and counts of at least 1.

    Args:
      seed: the seed.
      **counts: numbers by the names that an error is to tell.

    Returns:
      All of them by name; 1e4 has become 10000.

    Raises:
      TypeError: for what is no number.
      ValueError: for a number that is not whole or not in its range.
    """
    lowest = {"seed": 0} | dict.fromkeys(counts, 1)
    return {
        name: int(checked(name, value, low=lowest[name], dtype=np.int32))
        for name, value in {"seed": seed, **counts}.items()
    }


def local_devices(count: int | None) -> list[jax.Device]:
    """The first `count` devices of this process, or all.

    Args:
      count: how many, or None.

    Returns:
      The devices.

    Raises:
      TypeError: for what is no number.
      ValueError: there are not so many.
    """
    devices = jax.devices()
    if count is None:
        return devices
    chosen = int(checked("num_devices", count, low=1, dtype=np.int32))
    if chosen > len(devices):
        raise ValueError(f"num_devices={chosen}: this process has {len(devices)} devices")
    return devices[:chosen]


def _fitting(params: Params, config: T5Config) -> Params:
    """Parameters to start from, in the network's dtypes."""
    expected = T5(config).abstract_params()
    if jax.tree.map(np.shape, params) != jax.tree.map(np.shape, expected):
        raise ValueError(
            "the parameters to start from do not have the network's names and shapes; use the "
            "configuration they were trained with"
        )
    return jax.tree.map(lambda x, like: jax.numpy.asarray(x, like.dtype), params, expected)


class _Trainer:
    """The jitted steps, the batches and the state of one run."""

    def __init__(
        self,
        directory: RunDirectory,
        config: T5Config,
        batches: BucketedBatches,
        validation: BucketedBatches,
        optimizer: AdamW,
        objective: Objective,
        pad_id: int,
        seed: int,
        teacher: Teacher | None,
        devices: list[jax.Device],
    ):
        mesh = jax.sharding.Mesh(np.asarray(devices), ("data",))
        self._replicated = jax.sharding.NamedSharding(mesh, jax.P())
        self._by_row = jax.sharding.NamedSharding(mesh, jax.P("data"))
        self._batches, self._validation = batches, validation
        self._directory = directory
        self._model = T5(config)
        self._optimizer, self._objective = optimizer, objective
        self._seed = seed
        self._step = make_train_step(
            self._model, optimizer, objective, seed=seed, pad_id=pad_id,
            teacher=None if teacher is None else teacher.model,
        )  # fmt: skip
        self._eval_step = make_eval_step(self._model, pad_id=pad_id)
        self._teacher_params = teacher and jax.device_put(teacher.params, self._replicated)

    def run(
        self,
        *,
        num_steps: int,
        checkpoint_every: int,
        log_every: int,
        init_params: Params | None,
        progress: bool,
    ) -> TrainResult:
        """Trains up to `num_steps` and returns the best checkpoint."""
        directory = self._directory
        state = self._initial_state(init_params)
        step = directory.latest_step or 0
        if step > num_steps:
            raise ValueError(
                f"num_steps={num_steps}: the run in {directory.path} has done {step} updates; give "
                "at least as many, or another output_dir"
            )
        if step:
            state = directory.restore(state, step)
        directory.open_log(step)
        bar = tqdm.tqdm(
            total=num_steps, initial=step, unit="step", disable=None if progress else True
        )
        window = _Window()
        with bar:
            while step < num_steps:
                batch = jax.device_put(self._batches.batch(step), self._by_row)
                state, metrics = self._step(state, *batch, self._teacher_params)
                step += 1
                bar.update()
                window.add(metrics)
                at_checkpoint = step % checkpoint_every == 0 or step == num_steps
                if step % log_every == 0 or at_checkpoint:
                    means = window.close()
                    self._check_finite("loss", means["loss"], step)
                    row = {
                        "step": step,
                        "epoch": step / self._batches.batches_per_epoch,
                        "learning_rate": float(self._optimizer.schedule(step - 1)),
                        **means,
                    }
                    directory.log(row)
                    bar.set_postfix(loss=f"{row['loss']:.3f}")
                if at_checkpoint:
                    loss = self._validation_loss(state)
                    # The last update has been seen by no training loss yet.
                    self._check_finite("validation loss", loss, step)
                    directory.log({"step": step, "validation_loss": loss})
                    if progress:
                        bar.write(f"step {step}: validation loss {loss:.4f}", file=sys.stderr)
                    directory.save(state, loss)
        best = directory.best_step
        assert best is not None  # a checkpoint was written at num_steps, or there was one
        params = directory.restore(state, best).best_params
        return TrainResult(best, directory.validation_loss(best), params)

    def _initial_state(self, init_params: Params | None) -> TrainState:
        if init_params is None:
            init_params = self._model.init(jax.random.key(self._seed))
        state = init_state(init_params, self._optimizer, self._objective)
        return jax.device_put(state, self._replicated)

    def _check_finite(self, name: str, value: float, step: int) -> None:
        if not math.isfinite(value):
            raise ValueError(
                f"the {name} is {value} at step {step}; lower the learning rate in another "
                f"output_dir (the last good checkpoint of {self._directory.path} is step "
                f"{self._directory.latest_step})"
            )

    def _validation_loss(self, state: TrainState) -> float:
        total, tokens = 0.0, 0
        for batch in self._validation.epoch():
            batch_loss, batch_tokens = self._eval_step(
                state.best_params, *jax.device_put(batch, self._by_row)
            )
            total, tokens = total + float(batch_loss), tokens + int(batch_tokens)
        return total / tokens


class _Window:
    """The steps since the last line of the log; reads them from the device once, at its end."""

    def __init__(self) -> None:
        self._open()

    def _open(self) -> None:
        self._start = time.monotonic()
        self._metrics: list[StepMetrics] = []

    def add(self, metrics: StepMetrics) -> None:
        self._metrics.append(metrics)

    def close(self) -> dict[str, float]:
        values = jax.device_get(self._metrics)
        seconds = time.monotonic() - self._start
        tokens = sum(int(m.tokens) for m in values)
        row = {
            "loss": float(np.mean([m.loss for m in values], dtype=np.float64)),
            "grad_norm": float(np.mean([m.grad_norm for m in values], dtype=np.float64)),
            "target_tokens_per_second": round(tokens / max(seconds, 1e-9), 1),
        }
        self._open()
        return row
