"""The training loop: from pairs of token sequences to a run directory with a trained network."""

import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import tqdm

from specjax.base import Params
from specjax.data.batching import BucketedBatches, TokenPairs
from specjax.models import T5, T5Config, config_to_dict
from specjax.training.optimizer import AdamW
from specjax.training.run_directory import RunDirectory
from specjax.training.step import (
    Objective,
    StepMetrics,
    TrainState,
    init_state,
    make_eval_step,
    make_train_step,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batching:
    """How pairs become batches.

    Attributes:
      tokens_per_batch: padded target tokens per batch.
      bucket_lengths: increasing lengths; a pair is padded to the first that holds it, and left
        out if none does.
    """

    tokens_per_batch: int = 2048
    bucket_lengths: tuple[int, ...] = (16, 24, 32, 48, 96)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher:
    """A network to distil from, with the student's vocabulary.

    Attributes:
      model: the network.
      params: its parameters.
    """

    model: T5
    params: Params


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
    prolong a finished run.

    Args:
      output_dir: holds the checkpoints (the latest and the best), the configuration and
        `metrics.jsonl`.
      config: the network.
      training_pairs: pairs of token sequences, each with its end-of-sequence token.
      validation_pairs: likewise; the checkpoint with the lowest loss on them is the result.
      optimizer: the optimiser and its schedule.
      num_steps: updates in all.
      objective: the loss; by default label smoothing and a running average.
      batching: the shapes of the batches.
      pad_id: pads batches and never occurs in the data.
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
      OSError: `output_dir` cannot be written.
      ValueError: a value outside its range, unusable data, or an `output_dir` that holds another
        run.
    """
    objective, batching = objective or Objective(), batching or Batching()
    for name, value in (
        ("num_steps", num_steps),
        ("checkpoint_every", checkpoint_every),
        ("log_every", log_every),
    ):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
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
    for name, pairs in (
        ("training_pairs", training_pairs),
        ("validation_pairs", validation_pairs),
    ):
        largest = int(pairs.tokens.max())
        if largest >= config.vocab_size:
            raise ValueError(
                f"{name} contain token {largest}, but the network's vocab_size="
                f"{config.vocab_size}; make it larger, or use another vocabulary"
            )
    directory = RunDirectory(output_dir)
    directory.claim(
        {
            "model": config_to_dict(config),
            "optimizer": _describe(optimizer),
            "objective": _describe(objective),
            "batching": _describe(batching),
            "seed": seed,
            "training_data": digest(training_pairs.tokens, training_pairs.offsets),
            "validation_data": digest(validation_pairs.tokens, validation_pairs.offsets),
            "init_params": init_params and digest(*jax.tree.leaves(init_params)),
            "teacher": teacher and digest(*jax.tree.leaves(teacher.params)),
            **(notes or {}),
        }
    )
    if augment is not None:
        training_pairs = augment(training_pairs)
    trainer = _Trainer(
        directory, config, training_pairs, validation_pairs, optimizer, objective, batching,
        pad_id, eos_id, seed, teacher, num_devices,
    )  # fmt: skip
    try:
        return trainer.run(num_steps, checkpoint_every, log_every, init_params, progress)
    finally:
        directory.close()


class _Trainer:
    """The jitted steps, the batches and the state of one run."""

    def __init__(
        self,
        directory: RunDirectory,
        config: T5Config,
        pairs: TokenPairs,
        validation_pairs: TokenPairs,
        optimizer: AdamW,
        objective: Objective,
        batching: Batching,
        pad_id: int,
        eos_id: int,
        seed: int,
        teacher: Teacher | None,
        num_devices: int | None,
    ):
        devices = jax.devices()[:num_devices]
        if num_devices is not None and not 1 <= num_devices <= len(jax.devices()):
            raise ValueError(
                f"num_devices={num_devices}: this process has {len(jax.devices())} devices"
            )
        mesh = jax.sharding.Mesh(np.asarray(devices), ("data",))
        self._replicated = jax.sharding.NamedSharding(mesh, jax.P())
        self._by_row = jax.sharding.NamedSharding(mesh, jax.P("data"))
        shapes: dict[str, Any] = {
            "bucket_lengths": batching.bucket_lengths,
            "tokens_per_batch": batching.tokens_per_batch,
            "row_multiple": len(devices),
            "pad_id": pad_id,
            "eos_id": eos_id,
        }
        self._batches = BucketedBatches(pairs, seed=seed, **shapes)
        self._validation = BucketedBatches(validation_pairs, seed=None, **shapes)
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
        if step:
            state = directory.restore(state, step)
        directory.open_log(step)
        bar = tqdm.tqdm(
            total=num_steps, initial=step, unit="step", disable=None if progress else True
        )
        window = _Window()
        with bar:
            if progress and self._batches.num_left_out:
                bar.write(
                    f"{self._batches.num_left_out} training pairs are longer than the last bucket "
                    "and left out",
                    file=sys.stderr,
                )
            while step < num_steps:
                batch = jax.device_put(self._batches.batch(step), self._by_row)
                state, metrics = self._step(state, *batch, self._teacher_params)
                step += 1
                bar.update()
                window.add(metrics)
                at_checkpoint = step % checkpoint_every == 0 or step == num_steps
                if step % log_every == 0 or at_checkpoint:
                    means = window.close()
                    if not np.isfinite(means["loss"]):
                        raise ValueError(
                            f"the loss is {means['loss']} at step {step}; lower the learning rate "
                            f"in another output_dir (the last good checkpoint of {directory.path} "
                            f"is step {directory.latest_step})"
                        )
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
        expected = self._model.abstract_params()
        found = jax.tree.map(np.shape, init_params)
        if found != jax.tree.map(np.shape, expected):
            raise ValueError(
                "the parameters to start from do not have the network's names and shapes; use the "
                "configuration they were trained with"
            )
        init_params = jax.tree.map(
            lambda x, like: jax.numpy.asarray(x, like.dtype), init_params, expected
        )
        state = init_state(init_params, self._optimizer, self._objective)
        return jax.device_put(state, self._replicated)

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
        self.__init__()  # type: ignore[misc]
        return row


def _describe(value: Any) -> Any:
    """A frozen configuration as JSON values, each with its class's name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _describe(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"class": type(value).__name__, **fields}
    return json.loads(json.dumps(value))


def digest(*arrays: Any) -> str:
    """A short hash of arrays: dtypes, shapes and contents."""
    sha = hashlib.sha256()
    for array in arrays:
        array = np.ascontiguousarray(array)
        sha.update(f"{array.dtype}{array.shape}".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()[:16]
