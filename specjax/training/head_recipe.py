"""Trains an acceptance head from a pair of models and prompts: for `specjax train head`."""

import dataclasses
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.acceptance_head import Head, HeadConfig
from specjax.checkpoints.attachments import HEAD_NAME, check_head_place, save_head
from specjax.checks import PathLike, one_number, whole_fields
from specjax.data.examples import Example
from specjax.errors import UserError
from specjax.models.weights import has_stored
from specjax.runs.run_directory import MODEL_NAMES, RunDirectory
from specjax.text import Pair
from specjax.text.directories import PAIRS, shown_path
from specjax.training.head_data import (
    DATA_NAME,
    HeadData,
    HeadTask,
    Labelling,
    constant,
)
from specjax.training.progress import say
from specjax.training.step import AdamW
from specjax.training.teacher import ReadPrompts
from specjax.training.trainer import (
    RESULTS_NAME,
    TrainerConfig,
    TrainingData,
    check_sources,
    run_directory,
    train,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadRecipe:
    """Training of an acceptance head; the values of SpecDec++ (section 4.1), except the rate.

    Attributes:
      labelling: how prompts are turned into labelled drafted tokens.
      blocks: residual blocks of the head, 0 .. 4.
      shared: whether the blocks share a matrix.
      confidences: whether the head also reads the drafter's confidences; see `HeadConfig`.
      rejection_weight: w, the weight of a rejected token (accepted: 1); 6 is the paper's best.
      epochs: the number of passes over the data.
      rows_per_batch: the number of prompts in a batch.
      learning_rate: the initial rate; it falls to 0 along a cosine.
      ema_decay: see `TrainerConfig`.
      checkpoints: the number of times the head is saved and evaluated; the best is the result.
      seed: the seed of the verifier's texts, the drafted tokens, the head and the order.
      num_devices: see `TrainerConfig`.
      allow_other_environment: see `TrainerConfig`.
      progress: whether to show progress on stderr.
    """

    labelling: Labelling = dataclasses.field(default_factory=Labelling)
    blocks: int = 3
    shared: bool = False
    confidences: bool = False
    rejection_weight: float = 6.0
    epochs: int = 3
    rows_per_batch: int = 32
    learning_rate: float = 1e-3
    ema_decay: float = 0.0
    checkpoints: int = 6
    seed: int = 0
    num_devices: int | None = 1
    allow_other_environment: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        whole_fields(self, "HeadRecipe: ", epochs=1, rows_per_batch=1, checkpoints=1)
        weight: dict[str, Any] = {"low": 0.0, "open_low": True, "open_high": True}
        one_number("HeadRecipe: rejection_weight", self.rejection_weight, **weight)
        # The validation data use the next seed.
        one_number("HeadRecipe: seed", self.seed, low=0, high=2**31 - 2, dtype=np.int32)
        object.__setattr__(self, "seed", int(self.seed))
        if not isinstance(self.labelling, Labelling):
            raise UserError(f"HeadRecipe: labelling must be a Labelling, got {self.labelling!r}")
        # The other fields are checked by these, before any model is loaded.
        _ = self.task(1), self.trainer(self.rows_per_batch)

    def task(self, width: int) -> HeadTask:
        """The task, for hidden states of a width."""
        head = HeadConfig(width, self.blocks, self.shared, self.confidences)
        return HeadTask(head=head, rejection_weight=float(self.rejection_weight))

    def trainer(self, rows: int) -> TrainerConfig:
        """The trainer's settings for this number of prompts."""
        steps = self.epochs * -(-rows // self.rows_per_batch)
        optimizer = AdamW(
            learning_rate=self.learning_rate,
            warmup_steps=1,
            decay="cosine",
            total_steps=max(2, steps),
            b2=0.999,
            eps=1e-8,
        )
        return TrainerConfig(
            num_steps=steps,
            optimizer=optimizer,
            ema_decay=self.ema_decay,
            seed=self.seed,
            checkpoint_every=max(1, steps // self.checkpoints),
            log_every=max(1, min(50, steps // 10)),
            num_devices=self.num_devices,
            allow_other_environment=self.allow_other_environment,
            progress=self.progress,
        )


def train_head(
    recipe: HeadRecipe,
    make_pair: Callable[[], Pair],
    *,
    output_dir: PathLike,
    training_data: Iterable[Example],
    validation_data: Iterable[Example],
    install: bool | str = False,
    on_start: Callable[[RunDirectory], None] | None = None,
) -> dict[str, Any]:
    """Trains an acceptance head for a pair, and compares it with a constant.

    After an interruption at any moment, the same call continues: labelling at the shard, training
    at the checkpoint (see `train`), with the same bits.

    Training data are mixed by `recipe.labelling`. Validation data always follow the verifier's own
    text, as in decoding, so that heads of several mixings can be compared.

    Args:
      recipe: how the head is trained.
      make_pair: called after the arguments are checked.
      output_dir: the run's directory: `acceptance_head/` (the result), `results.json`,
        `head_data/`, `metrics.jsonl`, `checkpoints/` and the records.
      training_data: prompts; their references are not used.
      validation_data: prompts; the best checkpoint on them is the result.
      install: whether to write the head into the drafter's directory too; an earlier head there
        is renamed. A head whose loss on the validation data is not below that of a constant is only
        installed with "anyway".
      on_start: called with the `RunDirectory` after all checks, before the long work.

    Returns:
      The contents of `results.json`: step, number of parameters, bytes, a row each for the head and
      a constant, and whether it is `installed`. A row has the weighted `loss` and the `kl` of the
      true from the predicted acceptance (unweighted) on the validation data, in nats.

    Raises:
      OSError: `output_dir` or the drafter's directory cannot be written, or another process trains
        there.
      UserError: unusable prompts, a pair without a drafter, or the `output_dir` of another run.
    """
    if not isinstance(install, bool) and install != "anyway":
        raise UserError(f"install must be True, False or 'anyway', got {install!r}")
    examples = {"training": list(training_data), "validation": list(validation_data)}
    # Validation data are other draws, because a prompt may be in both.
    ways: dict[str, dict[str, Any]] = {
        "training": {"labelling": recipe.labelling, "seed": recipe.seed, "order": recipe.seed},
        "validation": {
            "labelling": dataclasses.replace(recipe.labelling, mixing=None),
            "seed": recipe.seed + 1,
            "order": None,
        },
    }
    with run_directory(output_dir, (HEAD_NAME, RESULTS_NAME, DATA_NAME)) as run:
        pair = make_pair()
        _check_pair(run, pair, bool(install))
        prompts = {
            name: ReadPrompts(pair.verifier, recipe.labelling, each, name, progress=recipe.progress)
            for name, each in examples.items()
        }
        trainer = recipe.trainer(len(prompts["training"].tokens))
        task = recipe.task(pair.drafter.width)
        data = {
            name: HeadData(
                run=run,
                pair=pair,
                prompts=prompts[name],
                name=name,
                rows_per_batch=recipe.rows_per_batch,
                row_multiple=len(trainer.devices()),
                progress=recipe.progress,
                **way,
            )
            for name, way in ways.items()
        }

        def grow() -> HeadData:
            for labelled in data.values():
                labelled.make()
                if not labelled.column("labels").size:
                    raise UserError(
                        "all drafted tokens were replaced by the verifier's: give more prompts, or "
                        "a smaller mixing"
                    )
            return data["training"]

        result = train(
            trainer,
            task,
            TrainingData(training=data["training"], validation=data["validation"], grow=grow),
            output_dir=run,
            notes={
                "checkpoints": recipe.checkpoints,
                MODEL_NAMES: {name: shown_path(x.name) for name, x in pair.named.items()},
            },
            on_start=on_start,
        )
        found = {name: result.figures[f"validation_{name}"] for name in ("loss", "kl")}
        best = constant(data, task.rejection_weight)
        rows = [{"predictor": "head", **found}, {"predictor": "constant", **best}]
        size = sum(leaf.size for leaf in jax.tree.leaves(result.params))
        labels = {name: labelled.column("labels") for name, labelled in data.items()}
        results = {
            "step": result.step,
            "num_params": size,
            "bytes": 4 * size,
            "training_tokens": int(labels["training"].size),
            "validation_tokens": int(labels["validation"].size),
            "acceptance": float(labels["validation"].mean()),
            "rows": rows,
        }
        notes = {
            **{x: getattr(recipe, x) for x in ("rejection_weight", "epochs", "learning_rate")},
            "seed": recipe.seed,
            "temperature": recipe.labelling.temperature,
            "mixing": recipe.labelling.mixing,
            "max_new_tokens": recipe.labelling.max_new_tokens,
            "verifier_fingerprint": pair.verifier.weights_fingerprint,
            "validation": rows[0],
        }
        params, weights = jax.device_get(result.params), pair.drafter.weights_fingerprint
        head = Head(task.head, params, weights, task.rejection_weight, notes)
        place = save_head(run.own(HEAD_NAME).parent, head)
        if recipe.progress:
            say(f"wrote the head to {place} and its figures to {run.path / RESULTS_NAME}")
        if install:
            results["installed"] = install == "anyway" or found["loss"] < best["loss"]
            if results["installed"]:
                say(f"installed the head in {save_head(pair.drafter.name, head)}")
            else:
                say(
                    f"the head was not installed: its validation loss, {found['loss']:.4g}, is not "
                    f"below that of a constant, {best['loss']:.4g}: give more prompts or epochs, "
                    "or another learning rate; INSTALL='anyway' installs it regardless"
                )
        run.write_json(RESULTS_NAME, results)
    return results


def _check_pair(run: RunDirectory, pair: Pair, install: bool) -> None:
    """Raises UserError for a pair that cannot train a head."""
    for name, model in pair.named.items():
        if model.mesh is not None:
            raise UserError(
                f"the {name} is on a mesh: load the pair without a mesh to train a head"
            )
    check_sources(run, {name: model.name for name, model in pair.named.items()})
    if has_stored(pair.drafter.params):
        raise UserError(
            "the drafter is quantised, so its head would not match the weights in its directory: "
            "load it without weights='int8'"
        )
    if install:
        directory = Path(pair.drafter.name)
        if directory.resolve().is_relative_to(PAIRS.resolve()):
            raise UserError(
                f"install=True: {directory} is the built-in drafter, which is part of specjax: "
                "give a copy of this directory as the drafter"
            )
        if not directory.is_dir() or not os.access(directory, os.W_OK):
            raise UserError(
                f"install=True: {directory} is not a writable directory: copy acceptance_head "
                "from the output_dir into the drafter's directory yourself"
            )
        check_head_place(directory)
