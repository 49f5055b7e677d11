"""From a pair of models and prompts to an acceptance head: what `specjax train_head` runs."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.acceptance_head import Head, HeadConfig
from specjax.checkpoints.heads import HEAD_NAME, check_head_place, save_head
from specjax.checks import check_part, one_number, whole_number
from specjax.data.examples import Example
from specjax.evaluation import (
    ClassWeights,
)
from specjax.runs.run_directory import RunDirectory
from specjax.text import Pair
from specjax.training.head_data import (
    DATA_NAME,
    HeadBatches,
    HeadData,
    Labelling,
    read_prompts,
)
from specjax.training.head_evaluation import compare_predictors, predict
from specjax.training.head_task import HeadTask
from specjax.training.optimizer import AdamW, Cosine
from specjax.training.progress import say
from specjax.training.trainer import TrainerConfig, TrainingData, run_directory, train
from specjax.types import Params

RESULTS_NAME = "results.json"
CURVES_NAME = "curves.json"

PathLike = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadRecipe:
    """How an acceptance head is trained; the values of SpecDec++ (section 4.1) by default.

    Attributes:
      labelling: how prompts become drafted tokens with labels.
      blocks: residual blocks of the head, 0 .. 4.
      shared: whether they share one matrix.
      confidences: whether the head also reads the drafter's confidences; see `HeadConfig`.
      rejection_weight: w_rej, how much a rejected token counts; 6 is the paper's best.
      acceptance_weight: w_acc.
      epochs: how often the data are seen.
      rows_per_batch: prompts of a batch.
      learning_rate: at first; it falls to 0 along a cosine.
      ema_decay: see `TrainerConfig`.
      checkpoints: how often the head is saved and evaluated; the best one is the result.
      seed: of the verifier's texts, the drafted tokens, the head and the order.
      num_devices: see `TrainerConfig`.
      allow_other_streams: see `TrainerConfig`.
      progress: whether to tell progress on stderr.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: for a value outside its range.
    """

    labelling: Labelling = dataclasses.field(default_factory=Labelling)
    blocks: int = 3
    shared: bool = False
    confidences: bool = False
    rejection_weight: float = 6.0
    acceptance_weight: float = 1.0
    epochs: int = 3
    rows_per_batch: int = 32
    learning_rate: float = 5e-5
    ema_decay: float = 0.0
    checkpoints: int = 6
    seed: int = 0
    num_devices: int | None = 1
    allow_other_streams: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        for name in ("epochs", "rows_per_batch", "checkpoints"):
            value = whole_number(f"HeadRecipe: {name}", getattr(self, name), low=1)
            object.__setattr__(self, name, value)
        # The validation data's is one more.
        one_number("HeadRecipe: seed", self.seed, low=0, high=2**31 - 2, dtype=np.int32)
        object.__setattr__(self, "seed", int(self.seed))
        if not isinstance(self.labelling, Labelling):
            raise TypeError(f"HeadRecipe: labelling must be a Labelling, got {self.labelling!r}")
        # What they are made of checks the rest, before any model is loaded.
        _ = self.weights, self.head(1), self.trainer(self.rows_per_batch)

    @property
    def weights(self) -> ClassWeights:
        """w_acc and w_rej."""
        return ClassWeights(self.acceptance_weight, self.rejection_weight)

    def head(self, width: int) -> HeadConfig:
        """The head on hidden states of a width."""
        return HeadConfig(width, self.blocks, self.shared, self.confidences)

    def trainer(self, rows: int) -> TrainerConfig:
        """The trainer's settings for so many prompts."""
        steps = self.epochs * -(-rows // self.rows_per_batch)
        schedule = Cosine(peak=self.learning_rate, warmup_steps=1, total_steps=max(2, steps))
        return TrainerConfig(
            num_steps=steps,
            optimizer=AdamW(schedule=schedule, b2=0.999, eps=1e-8),
            ema_decay=self.ema_decay,
            seed=self.seed,
            checkpoint_every=max(1, steps // self.checkpoints),
            log_every=max(1, min(50, steps // 10)),
            num_devices=self.num_devices,
            allow_other_streams=self.allow_other_streams,
            progress=self.progress,
        )


def run_head_recipe(
    recipe: HeadRecipe,
    make_pair: Callable[[], Pair],
    *,
    output_dir: PathLike,
    training_data: Iterable[Example],
    validation_data: Iterable[Example],
    install: bool = False,
    on_start: Callable[[RunDirectory], None] | None = None,
) -> dict[str, Any]:
    """Trains an acceptance head for a pair, and compares it with simpler predictors.

    Killed at any moment and started again, it continues where it stopped: labelling at the shard,
    training at the checkpoint (see `train`), with the same bits.

    Training data are mixed as `recipe.labelling` says. Validation data are always read along the
    verifier's own text, as in decoding, so that heads of several mixings can be compared.

    Args:
      recipe: how the head is trained.
      make_pair: is called after the arguments have been checked.
      output_dir: takes the run: `acceptance_head/` (the result), `results.json`, `curves.json` (ROC
        and reliability diagrams), `head_data/`, `metrics.jsonl`, `checkpoints/` and the records.
      training_data: prompts; their references are not used.
      validation_data: prompts; the best checkpoint on them is the result.
      install: whether the head is written into the drafter's directory, too, in the place of an
        earlier one.
      on_start: called with the `RunDirectory` once all checks are passed, before the long work.

    Returns:
      What `results.json` holds: step, number of parameters, bytes, and one row per predictor with
      its figures on the validation data (see `compare_predictors`).

    Raises:
      OSError: `output_dir` or the drafter's directory cannot be written, or another process trains
        there.
      TypeError: a value of the wrong type.
      ValueError: no usable prompt, a pair that is none, or an `output_dir` that holds another run.
    """
    check_part("recipe", recipe, ("labelling", "trainer"), "training.HeadRecipe()")
    if not isinstance(install, bool):
        raise TypeError(f"install must be True or False, got {install!r}")
    examples = {"training": list(training_data), "validation": list(validation_data)}
    names = (HEAD_NAME, RESULTS_NAME, CURVES_NAME, DATA_NAME)
    with run_directory(output_dir, names) as run:
        pair = make_pair()
        check_head_pair(run, pair, install)
        data = head_data(run, recipe, pair, examples)
        results, head = train_one_head(run, recipe, pair, data, on_start=on_start)
        run.write(RESULTS_NAME, (json.dumps(results, indent=1) + "\n").encode())
        place = save_head(run.own(HEAD_NAME).parent, head)
        if install:
            place = save_head(pair.drafter.name, head)
    if recipe.progress:
        say(f"the head is in {place}, its figures in {run.path / RESULTS_NAME}")
    return results


def train_one_head(
    run: RunDirectory,
    recipe: HeadRecipe,
    pair: Pair,
    data: dict[str, HeadData],
    *,
    on_start: Callable[[RunDirectory], None] | None = None,
) -> tuple[dict[str, Any], Head]:
    """Trains one head, and writes its curves.

    Args:
      run: an open directory that may hold `CURVES_NAME`.
      recipe: how the head is trained.
      pair: the models.
      data: "training" and "validation"; made once the directory is claimed.
      on_start: see `run_head_recipe`.

    Returns:
      What `results.json` holds, and the head.
    """
    trainer = recipe.trainer(data["training"].rows)
    task = HeadTask(head=recipe.head(pair.drafter.width), weights=recipe.weights)
    batches = {
        name: HeadBatches(
            of_one,
            recipe.rows_per_batch,
            width=task.head.width,
            seed=recipe.seed if name == "training" else None,
            row_multiple=len(trainer.devices()),
        )
        for name, of_one in data.items()
    }

    def grow() -> HeadBatches:
        for of_one in data.values():
            of_one.make(progress=recipe.progress)
            if not of_one.column("labels").size:
                raise ValueError(
                    "all drafted tokens were replaced by the verifier's: give more prompts, or "
                    "a smaller mixing"
                )
        return batches["training"]

    result = train(
        trainer,
        task,
        TrainingData(training=batches["training"], validation=batches["validation"], grow=grow),
        output_dir=run,
        notes={"checkpoints": recipe.checkpoints},
        on_start=on_start,
    )
    results = _results(run, recipe, data, task, result.params)
    results = {"step": result.step, **results}
    return results, _head(recipe, pair, task, result.params, results)


def check_head_pair(run: RunDirectory, pair: Pair, install: bool = False) -> None:
    """Raises TypeError or ValueError for a pair that no head can be trained for."""
    if not isinstance(pair, Pair):
        raise TypeError(f"make_pair must return a Pair, got {type(pair).__name__}: use load_pair")
    for name, model in pair.named.items():
        if model.mesh is not None:
            raise ValueError(
                f"the {name} is spread over a mesh: load the pair without one to train a head"
            )
        if run.makes(model.name):
            raise ValueError(
                f"{name}={model.name} is what the run in output_dir={run.path} writes itself: "
                "choose another output_dir"
            )
    if install:
        directory = Path(pair.drafter.name)
        if not directory.is_dir() or not os.access(directory, os.W_OK):
            raise ValueError(
                f"install=True: {directory} is no directory that can be written: copy "
                "acceptance_head from the output_dir into the drafter's directory yourself"
            )
        check_head_place(directory)


def head_data(
    run: RunDirectory, recipe: HeadRecipe, pair: Pair, examples: dict[str, list[Example]]
) -> dict[str, HeadData]:
    """Training and validation data, not yet made; `run` must make `DATA_NAME`."""
    labelling = {
        "training": recipe.labelling,
        "validation": dataclasses.replace(recipe.labelling, mixing=None),
    }
    # Of each its own draws: a prompt may be in both.
    seeds = {"training": recipe.seed, "validation": recipe.seed + 1}
    return {
        name: HeadData(
            run,
            pair,
            labelling[name],
            read_prompts(pair, labelling[name], given, name, progress=recipe.progress),
            seed=seeds[name],
        )
        for name, given in examples.items()
    }


def _head(
    recipe: HeadRecipe, pair: Pair, task: HeadTask, params: Params, results: dict[str, Any]
) -> Head:
    labelling = dataclasses.asdict(recipe.labelling)
    trained = ("rejection_weight", "acceptance_weight", "epochs", "learning_rate", "seed")
    notes = {
        **{name: getattr(recipe, name) for name in trained},
        **{name: labelling[name] for name in ("temperature", "mixing", "max_new_tokens")},
        "verifier_fingerprint": pair.verifier.weights_fingerprint,
        "validation": next(row for row in results["rows"] if row["predictor"] == "head"),
    }
    weight = recipe.rejection_weight / recipe.acceptance_weight
    known = pair.drafter.weights_fingerprint
    return Head(task.head, jax.device_get(params), known, weight, notes)


def _results(
    run: RunDirectory,
    recipe: HeadRecipe,
    data: dict[str, HeadData],
    task: HeadTask,
    params: Params,
) -> dict[str, Any]:
    """Figures of the head and of simpler predictors; writes the curves."""
    log_odds = predict(task, params, data["validation"])
    rows, curves = compare_predictors(log_odds, data, recipe.weights)
    run.write(CURVES_NAME, (json.dumps(curves) + "\n").encode())
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    return {
        "num_params": sum(sizes),
        "bytes": 4 * sum(sizes),
        "training_tokens": int(data["training"].column("labels").size),
        "validation_tokens": int(log_odds.size),
        "acceptance": float(data["validation"].column("labels").mean()),
        "rows": rows,
    }
