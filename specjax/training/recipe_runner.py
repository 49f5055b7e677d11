"""From pairs of texts to a trained Hugging Face directory: what `specjax train` runs."""

import functools
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from specjax.checkpoints import save_model
from specjax.data.examples import Example
from specjax.models import T5Config
from specjax.models.config import ModelConfig
from specjax.runs.run_directory import RunDirectory
from specjax.tokenizers import Tokenizer
from specjax.tokenizers.model_files import SpecialIds
from specjax.training.acceptance import PREFIX
from specjax.training.preparation import (
    load_float32,
    make_batches,
    make_scorers,
    make_task,
    read_data,
    run_tokenizer,
    tokenize,
    tokenizer_files,
)
from specjax.training.progress import say
from specjax.training.recipe import PathLike, Recipe
from specjax.training.scoring import Scorer
from specjax.training.step import check_room
from specjax.training.teaching import TEACHING_NAMES, Teaching, check_together
from specjax.training.trainer import TrainResult, run_directory, train
from specjax.training.trainer_config import TrainerConfig
from specjax.training.training_data import TrainingData
from specjax.training.vocabulary import TOKENIZER_NAME, place_vocabulary
from specjax.types import Params

MODEL_NAME = "model"
RESULTS_NAME = "results.json"


def run_recipe(
    recipe: Recipe,
    trainer: TrainerConfig,
    *,
    output_dir: PathLike,
    training_data: Iterable[Example],
    validation_data: Iterable[Example],
    test_data: Iterable[Example] | None = None,
    on_start: Callable[[RunDirectory], None] | None = None,
) -> dict[str, Any]:
    """Trains a language model on pairs of texts and writes it as a Hugging Face directory.

    Killed at any moment and started again, it continues where it stopped (see `train`).

    Args:
      recipe: how texts become a model.
      trainer: the trainer's settings.
      output_dir: takes the run: `model/` (the result, with its tokenizer), `results.json`,
        `metrics.jsonl`, `checkpoints/`, `train_config.json`, `environments.json`, `tokenizer/`.
      training_data: pairs of texts.
      validation_data: pairs of texts; the best checkpoint on them is exported.
      test_data: pairs of texts on which the result is scored too.
      on_start: called with the `RunDirectory` once all checks are passed, before the long work.

    Returns:
      What `results.json` holds: step, validation loss (nats per token), number of parameters, the
      accepted tokens if these chose the checkpoint, and of the validation (and test) data each
      metric and the number of outputs cut at their limit.

    Raises:
      OSError: `output_dir` cannot be written, another process trains in it, or a file is missing.
      TypeError: a value of the wrong type.
      ValueError: unusable data, a model that does not fit, or an `output_dir` that holds another
        run.
    """
    check_together(recipe, trainer)
    names = (MODEL_NAME, RESULTS_NAME, TOKENIZER_NAME, *TEACHING_NAMES)
    with (
        run_directory(output_dir, names) as run,
        tempfile.TemporaryDirectory() as scratch,
    ):
        _refuse_own_output(run, recipe)
        row_multiple = len(trainer.devices())
        starting = load_float32(recipe.init_from)
        teacher = load_float32(recipe.teacher)
        config = recipe.model or (starting and starting.config)
        check_room(config, trainer.devices(), average=bool(trainer.ema_decay))
        data = read_data(training_data, validation_data, test_data)
        files = tokenizer_files(run, recipe, config, data, Path(scratch) / TOKENIZER_NAME)
        tokenizer = run_tokenizer(files, recipe, config)
        pairs = {name: tokenize(examples, tokenizer) for name, examples in data.items()}
        task = make_task(config, recipe.objective, tokenizer, teacher and teacher.config)
        scorers = make_scorers(recipe, trainer, config, tokenizer, data, pairs)
        batches = functools.partial(make_batches, task, recipe, trainer, row_multiple)
        teaching = Teaching(recipe, trainer, run, task, tokenizer, pairs, teacher)
        grow = functools.partial(teaching.grow, functools.partial(batches, "training"))
        measures: list[Callable[[Params], dict[str, float]]] = [*teaching.figures]
        if recipe.evaluation.at_checkpoints:
            measures.append(scorers["validation"])

        def begin(run: RunDirectory) -> None:
            place_vocabulary(run, files)
            if on_start is not None:
                on_start(run)

        result = train(
            trainer,
            task,
            TrainingData(
                training=batches("training", pairs["training"]),
                validation=batches("validation", pairs["validation"]),
                grow=grow if recipe.teacher_samples else None,
                phases=teaching.phases(),
            ),
            output_dir=run,
            constants=teaching.constants,
            init_params=starting and starting.params,
            evaluate=lambda params: {k: v for m in measures for k, v in m(params).items()},
            notes={"vocabulary_type": recipe.vocabulary_type, **teaching.notes},
            on_start=begin,
        )
        _export(run, config, result, recipe.export_dtype, tokenizer)
        return _results(
            run, result, scorers, choose_by=trainer.choose_by, progress=trainer.progress
        )


def _refuse_own_output(run: RunDirectory, recipe: Recipe) -> None:
    for name in ("init_from", "vocabulary", "teacher"):
        path = getattr(recipe, name)
        if path is not None and run.makes(path):
            raise ValueError(
                f"{name}={path} is what the run in output_dir={run.path} writes itself: choose "
                "another output_dir, or copy it to another place"
            )


def _export(
    run: RunDirectory, config: ModelConfig, result: TrainResult, dtype: str, tokenizer: Tokenizer
) -> None:
    """Writes the Hugging Face directory, in the place of an earlier export."""
    bos = None if isinstance(config, T5Config) else tokenizer.bos_id
    save_model(
        run.own(MODEL_NAME),
        # Computing in bfloat16 while training does not bind those who load the weights.
        config.replace(dtype="float32"),
        result.params,
        format="hf",
        dtype=dtype,
        special_ids=SpecialIds(tokenizer.eos_ids, tokenizer.pad_id, bos),
        tokenizer_from=run.path / TOKENIZER_NAME,
        replace=True,
    )


def _results(
    run: RunDirectory,
    result: TrainResult,
    scorers: dict[str, Scorer],
    *,
    choose_by: str,
    progress: bool,
) -> dict[str, Any]:
    """Scores the model as it was written, rounding included, and writes `results.json`."""
    exported = load_float32(run.path / MODEL_NAME)
    results = {
        "step": result.step,
        "validation_loss": result.validation_loss,
        "num_params": exported.model.num_params(),
    }
    if choose_by.startswith(PREFIX):
        name = f"validation_{choose_by}"
        results[name] = result.figures[name]
    for scorer in scorers.values():
        results |= scorer(exported.params)
    written = run.write(RESULTS_NAME, json.dumps(results, indent=1).encode())
    if progress:
        say(f"the model is in {run.path / MODEL_NAME}, its figures in {written}")
    return results
