"""Trains an acceptance head from a pair of models and prompts: for `specjax train head`."""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.acceptance_head import Head, HeadConfig
from specjax.checkpoints.attachments import HEAD_NAME, check_head_place, save_head
from specjax.checks import one_number, whole_number
from specjax.data.examples import Example
from specjax.drafting import Survival
from specjax.errors import UserError
from specjax.models.weights import has_stored
from specjax.runs.run_directory import MODEL_NAMES, RunDirectory
from specjax.text import Decoder, Pair
from specjax.text.directories import PAIRS, shown_path
from specjax.training.head_data import (
    DATA_NAME,
    HeadBatches,
    HeadData,
    HeadTask,
    Labelling,
    compare_with_constant,
)
from specjax.training.progress import say
from specjax.training.samples import covering
from specjax.training.step import AdamW
from specjax.training.trainer import TrainerConfig, TrainingData, run_directory, train
from specjax.types import Sampling

RESULTS_NAME = "results.json"
# Runs of earlier versions have it.
_CURVES_NAME = "curves.json"
GRID_NAME, HEADS_NAME = "grid_config.json", "heads"

PathLike = str | os.PathLike[str]


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
        for name in ("epochs", "rows_per_batch", "checkpoints"):
            value = whole_number(f"HeadRecipe: {name}", getattr(self, name), low=1)
            object.__setattr__(self, name, value)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadGrid:
    """The heads to train, and how to measure each; the paper's grid by default.

    Attributes:
      rejection_weights: the values of w.
      blocks: the values of D.
      thresholds: the values of h; see `drafting.Survival`.
      max_draft: the longest draft.
      limit: the number of validation prompts to decode.
      batch_size: prompts decoded together.
      repeats: the number of times they are decoded; the heads take turns.

    Source: SpecDec++ (arXiv 2405.19715), table 3.
    """

    rejection_weights: Sequence[float] = (1.0, 3.0, 6.0, 12.0)
    blocks: Sequence[int] = (0, 1, 2, 3, 4)
    thresholds: Sequence[float] = (0.1, 0.3, 0.5, 0.7, 0.9)
    max_draft: int = 20
    limit: int = 64
    batch_size: int = 1
    repeats: int = 3

    def __post_init__(self) -> None:
        for name in ("max_draft", "limit", "batch_size", "repeats"):
            value = whole_number(f"HeadGrid: {name}", getattr(self, name), low=1)
            object.__setattr__(self, name, value)
        for name in ("rejection_weights", "blocks", "thresholds"):
            values = getattr(self, name)
            if not isinstance(values, tuple | list) or not values:
                raise UserError(f"HeadGrid: {name} must be a list of values, got {values!r}")
            object.__setattr__(self, name, tuple(values))
        # Checks the thresholds.
        for threshold in self.thresholds:
            Survival(threshold=threshold)

    def recipes(self, recipe: HeadRecipe) -> dict[str, HeadRecipe]:
        """A name -> a recipe of the grid."""
        return {
            f"w{weight:g}_D{blocks}": dataclasses.replace(
                recipe, rejection_weight=weight, blocks=blocks
            )
            for weight, blocks in itertools.product(self.rejection_weights, self.blocks)
        }


def train_head(
    recipe: HeadRecipe,
    make_pair: Callable[[], Pair],
    *,
    output_dir: PathLike,
    training_data: Iterable[Example],
    validation_data: Iterable[Example],
    install: bool | str = False,
    grid: HeadGrid | None = None,
    on_start: Callable[[RunDirectory], None] | None = None,
) -> dict[str, Any]:
    """Trains an acceptance head for a pair, and compares it with a constant.

    After an interruption at any moment, the same call continues: labelling at the shard, training
    at the checkpoint (see `train`), with the same bits.

    Training data are mixed by `recipe.labelling`. Validation data always follow the verifier's own
    text, as in decoding, so that heads of several mixings can be compared.

    With a grid, all heads are trained on the same labels, and the validation prompts are decoded
    with each head at each threshold; an interrupted measurement starts again.

    Args:
      recipe: how the head is trained; with a grid, except its weight and its depth.
      make_pair: called after the arguments are checked.
      output_dir: the run's directory: `acceptance_head/` (the result), `results.json`,
        `head_data/`, `metrics.jsonl`, `checkpoints/` and the records; with a grid `heads/w6_D3/`
        and so on instead of a single head.
      training_data: prompts; their references are not used.
      validation_data: prompts; the best checkpoint on them is the result.
      install: whether to write the head into the drafter's directory too, replacing an earlier
        head. A head whose loss on the validation data is not below that of a constant is only
        installed with "anyway".
      grid: train the heads of a grid instead of a single head.
      on_start: called with the `RunDirectory` after all checks, before the long work.

    Returns:
      The contents of `results.json`. For a single head: step, number of parameters, bytes, a row
      each for the head and a constant (see `compare_with_constant`), and whether it is `installed`.
      For a grid: `heads` has a row per head: `rejection_weight`, `blocks`,
      `train_kl` and `kl` (binary KL divergence in nats, without weights, of the training and the
      validation data), and the fastest `threshold` with its figures. `thresholds` has a row per
      head and threshold: `tokens_per_second`, `verification_rate` and `discard_rate` (verifier's
      passes and discarded tokens per emitted token, at the labelling's temperature).

    Raises:
      OSError: `output_dir` or the drafter's directory cannot be written, or another process trains
        there.
      UserError: unusable prompts, a pair without a drafter, or the `output_dir` of another run.
    """
    if not isinstance(install, bool) and install != "anyway":
        raise UserError(f"install must be True, False or 'anyway', got {install!r}")
    if grid is not None:
        if install:
            raise UserError("install must be False with a grid: copy the head that you choose")
        grid.recipes(recipe)  # checks their values
    examples = {"training": list(training_data), "validation": list(validation_data)}
    names = (HEAD_NAME, RESULTS_NAME, _CURVES_NAME, DATA_NAME)
    grid_names = (DATA_NAME, HEADS_NAME, RESULTS_NAME)
    with (
        run_directory(output_dir, names)
        if grid is None
        else RunDirectory(output_dir, config_name=GRID_NAME, makes=grid_names)
    ) as run:
        pair = make_pair()
        _check_pair(run, pair, bool(install))
        data = _head_data(run, recipe, pair, examples)
        if grid is None:
            results, head = _train_one(run, recipe, pair, data, on_start)
            place = save_head(run.own(HEAD_NAME).parent, head)
            if recipe.progress:
                say(f"wrote the head to {place} and its figures to {run.path / RESULTS_NAME}")
            if install:
                results["installed"] = _install(pair, head, results, anyway=install == "anyway")
        else:
            results = _train_grid(run, grid, recipe, pair, data, on_start)
        run.write_json(RESULTS_NAME, results)
    return results


def _check_pair(run: RunDirectory, pair: Pair, install: bool) -> None:
    """Raises UserError for a pair that cannot train a head."""
    for name, model in pair.named.items():
        if model.mesh is not None:
            raise UserError(
                f"the {name} is on a mesh: load the pair without a mesh to train a head"
            )
        if run.makes(model.name):
            raise UserError(
                f"{name}={model.name} is an output of the run in output_dir={run.path}: "
                "choose another output_dir"
            )
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


def _head_data(
    run: RunDirectory, recipe: HeadRecipe, pair: Pair, examples: dict[str, list[Example]]
) -> dict[str, HeadData]:
    """Training and validation data, not made yet."""
    along_text = dataclasses.replace(recipe.labelling, mixing=None)
    labelling = {"training": recipe.labelling, "validation": along_text}
    # Different draws: a prompt may be in both.
    seeds = {"training": recipe.seed, "validation": recipe.seed + 1}
    return {
        name: HeadData(
            run,
            pair,
            labelling[name],
            prompts,
            name,
            seed=seeds[name],
            progress=recipe.progress,
        )
        for name, prompts in examples.items()
    }


def _train_one(
    run: RunDirectory,
    recipe: HeadRecipe,
    pair: Pair,
    data: dict[str, HeadData],
    on_start: Callable[[RunDirectory], None] | None = None,
) -> tuple[dict[str, Any], Head]:
    """Trains a head in its own directory."""
    trainer = recipe.trainer(len(data["training"].prompts))
    task = recipe.task(pair.drafter.width)
    batches = {
        name: HeadBatches(
            labelled,
            recipe.rows_per_batch,
            width=task.head.width,
            seed=recipe.seed if name == "training" else None,
            row_multiple=len(trainer.devices()),
        )
        for name, labelled in data.items()
    }

    def grow() -> HeadBatches:
        for labelled in data.values():
            labelled.make()
            if not labelled.column("labels").size:
                raise UserError(
                    "all drafted tokens were replaced by the verifier's: give more prompts, or "
                    "a smaller mixing"
                )
        return batches["training"]

    result = train(
        trainer,
        task,
        TrainingData(training=batches["training"], validation=batches["validation"], grow=grow),
        output_dir=run,
        notes={
            "checkpoints": recipe.checkpoints,
            MODEL_NAMES: {name: shown_path(x.name) for name, x in pair.named.items()},
        },
        on_start=on_start,
    )
    rows, train_kl = compare_with_constant(task, result.params, data)
    size = sum(leaf.size for leaf in jax.tree.leaves(result.params))
    labels = {name: labelled.column("labels") for name, labelled in data.items()}
    results = {
        "step": result.step,
        "num_params": size,
        "bytes": 4 * size,
        "training_tokens": int(labels["training"].size),
        "validation_tokens": int(labels["validation"].size),
        "acceptance": float(labels["validation"].mean()),
        "train_kl": train_kl,
        "rows": rows,
    }
    labelling = dataclasses.asdict(recipe.labelling)
    trained = ("rejection_weight", "epochs", "learning_rate", "seed")
    notes = {
        **{name: getattr(recipe, name) for name in trained},
        **{name: labelling[name] for name in ("temperature", "mixing", "max_new_tokens")},
        "verifier_fingerprint": pair.verifier.weights_fingerprint,
        "validation": rows[0],
    }
    drafter = pair.drafter.weights_fingerprint
    params = jax.device_get(result.params)
    return results, Head(task.head, params, drafter, task.rejection_weight, notes)


def _install(pair: Pair, head: Head, results: dict[str, Any], *, anyway: bool) -> bool:
    """Writes the head into the drafter's directory, unless a constant predicts as well."""
    losses = {row["predictor"]: row["loss"] for row in results["rows"]}
    if not anyway and losses["head"] >= losses["constant"]:
        say(
            f"the head was not installed: its validation loss, {losses['head']:.4g}, is not below "
            f"that of a constant, {losses['constant']:.4g}: give more prompts or epochs, or "
            "another learning rate; INSTALL='anyway' installs it regardless"
        )
        return False
    say(f"installed the head in {save_head(pair.drafter.name, head)}")
    return True


class _Trained(NamedTuple):
    recipe: HeadRecipe
    head: Head
    figures: dict[str, Any]


def _train_grid(
    run: RunDirectory,
    grid: HeadGrid,
    recipe: HeadRecipe,
    pair: Pair,
    data: dict[str, HeadData],
    on_start: Callable[[RunDirectory], None] | None,
) -> dict[str, Any]:
    """Trains all heads of a grid, and decodes with each of them at each threshold."""
    described = {name: labelled.describe() for name, labelled in data.items()}
    run.claim({"grid": dataclasses.asdict(grid), "data": described})
    if on_start is not None:
        on_start(run)
    heads = run.own(HEADS_NAME)
    heads.mkdir(exist_ok=True)
    recipes, trained = grid.recipes(recipe), []
    for name, of_head in recipes.items():
        if recipe.progress:
            say(f"training head {name} of {', '.join(recipes)}")
        with run_directory(heads / name, (_CURVES_NAME,)) as place:
            figures, head = _train_one(place, of_head, pair, data)
        run.keep()
        trained.append(_Trained(of_head, head, figures))
    rows = _measured(grid, pair, trained, data["validation"].prompts[: grid.limit], recipe)
    table, count = [], len(grid.thresholds)
    for i, one in enumerate(trained):
        best = max(rows[i * count : (i + 1) * count], key=lambda row: row["tokens_per_second"])
        kl = {"train_kl": one.figures["train_kl"], "kl": one.figures["rows"][0]["kl"]}
        table.append({**best, **kl})
    return {"heads": table, "thresholds": rows}


def _measured(
    grid: HeadGrid, pair: Pair, trained: list[_Trained], prompts: Any, recipe: HeadRecipe
) -> list[dict[str, Any]]:
    """A row per head and threshold; they take turns at all prompts."""
    labelling = recipe.labelling
    decoders = [
        Decoder(
            Pair(dataclasses.replace(pair.drafter, head=of_head.head), pair.verifier),
            stopping=Survival(threshold=threshold),
            max_draft=grid.max_draft,
            sampling=Sampling(labelling.temperature),
            max_new_tokens=labelling.max_new_tokens,
            batch_size=grid.batch_size,
            buckets=covering(prompts),
        )
        for of_head, threshold in itertools.product(trained, grid.thresholds)
    ]
    if recipe.progress:
        say(f"decoding {len(prompts)} prompts with {len(decoders)} pairs of head and threshold")
    infos = [decoder(prompts, progress=False).info for decoder in decoders]  # compiles
    seconds = np.zeros(len(decoders))
    for _ in range(grid.repeats):
        for place, decoder in enumerate(decoders):
            seconds[place] += decoder(prompts, progress=False).seconds
    cases = itertools.product((of_head.recipe for of_head in trained), grid.thresholds)
    return [
        {
            "rejection_weight": of_head.rejection_weight,
            "blocks": of_head.blocks,
            "threshold": threshold,
            "verification_rate": info.verification_rate,
            "discard_rate": info.discard_rate,
            "tokens_per_second": int(info.per_row.emitted.sum()) * grid.repeats / spent,
        }
        for (of_head, threshold), info, spent in zip(cases, infos, seconds, strict=True)
    ]
