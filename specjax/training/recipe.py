"""From pairs of texts to a trained Hugging Face directory: what `specjax train` runs."""

import dataclasses
import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from specjax.checkpoints import load_model, save_model
from specjax.checks import check_path, whole_number
from specjax.data.batching import Batching, BucketedBatches
from specjax.data.examples import Example
from specjax.data.pairs import TokenPairs, check_pairs, tokenize_pairs
from specjax.models import T5Config
from specjax.models.config import FAMILIES, ModelConfig
from specjax.runs.run_directory import RunDirectory
from specjax.text import TextModel
from specjax.tokenizers import Tokenizer, load_tokenizer
from specjax.tokenizers.model_files import SpecialIds
from specjax.training.decoder_only import DecoderOnly
from specjax.training.distillation import SAMPLES_NAME, add_teacher_samples, stored_samples
from specjax.training.fingerprint import describe, digest
from specjax.training.losses import Objective
from specjax.training.progress import say
from specjax.training.scoring import Evaluation, Scorer
from specjax.training.seq2seq import Seq2Seq
from specjax.training.step import check_room
from specjax.training.text_task import TextTask
from specjax.training.trainer import (
    TrainerConfig,
    TrainingData,
    TrainResult,
    run_directory,
    train,
)
from specjax.training.vocabulary import (
    TOKENIZER_NAME,
    VOCABULARY_TYPES,
    place_vocabulary,
    vocabulary_of_run,
)

MODEL_NAME = "model"
RESULTS_NAME = "results.json"

PathLike = str | os.PathLike[str]
Data = dict[str, list[Example]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How pairs of texts become a model.

    Attributes:
      model: the network's configuration: a T5, a Llama or a Gemma 2; by default that of
        `init_from`.
      init_from: a model's directory to start from (fine-tuning); its network must be `model`'s.
      vocabulary: a model's directory, a SentencePiece model, a `tokenizer.json`, or "bytes". By
        default that of `init_from` or `teacher`; without these a SentencePiece vocabulary of
        `model.vocab_size` pieces is trained on the training data.
      vocabulary_type: of a trained one, "unigram" or "bpe"; see `train_vocabulary`.
      teacher: a model's directory to distil from, with the same vocabulary; the objective's
        `distillation_weight`, `teacher_samples` or both say how.
      teacher_samples: targets drawn from the teacher for each input, added to the references.
      objective: the loss per target token.
      batching: the shapes of the batches.
      evaluation: what is decoded and scored.
      export_dtype: of the exported arrays: float32, bfloat16 or float16.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: for a value outside its range, or a teacher without a use.
    """

    model: ModelConfig | None = None
    init_from: PathLike | None = None
    vocabulary: PathLike | None = None
    vocabulary_type: str | None = None
    teacher: PathLike | None = None
    teacher_samples: int = 0
    objective: Objective = dataclasses.field(default_factory=Objective)
    batching: Batching = dataclasses.field(default_factory=Batching)
    evaluation: Evaluation = dataclasses.field(default_factory=Evaluation)
    export_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("init_from", "vocabulary", "teacher"):
            if getattr(self, name) is not None:
                check_path(getattr(self, name), f"{name}=")
        if self.model is None and self.init_from is None:
            raise ValueError(
                "neither `model` nor `init_from` is given; give a configuration (MODEL, as the "
                "files of gin_configs/models do), or a model's directory to fine-tune (INIT_FROM)"
            )
        if not isinstance(self.model, ModelConfig | None):
            raise TypeError(f"`model` must be a configuration of a network, got {self.model!r}")
        for name, choices in (
            ("export_dtype", ("float32", "bfloat16", "float16")),
            ("vocabulary_type", (*VOCABULARY_TYPES, None)),
        ):
            if getattr(self, name) not in choices:
                told = f"one of {', '.join(filter(None, choices))}, got {getattr(self, name)!r}"
                raise ValueError(f"`{name}` must be {told}")
        samples = whole_number("teacher_samples", self.teacher_samples, low=0)
        object.__setattr__(self, "teacher_samples", samples)
        weight = self.objective.distillation_weight
        if (self.teacher is not None) != bool(weight or self.teacher_samples):
            raise ValueError(
                f"teacher={self.teacher}, distillation_weight={weight}, teacher_samples="
                f"{self.teacher_samples}: a teacher needs one of the other two, and they it"
            )


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
      What `results.json` holds: step, validation loss (nats per token), number of parameters, and
      of the validation (and test) data each metric and the number of outputs cut at their limit.

    Raises:
      OSError: `output_dir` cannot be written, another process trains in it, or a file is missing.
      TypeError: a value of the wrong type.
      ValueError: unusable data, a model that does not fit, or an `output_dir` that holds another
        run.
    """
    names = (MODEL_NAME, RESULTS_NAME, SAMPLES_NAME, TOKENIZER_NAME)
    with (
        run_directory(output_dir, names) as run,
        tempfile.TemporaryDirectory() as scratch,
    ):
        _refuse_own_output(run, recipe)
        row_multiple = len(trainer.devices())
        starting = _load(recipe.init_from)
        teacher = _load(recipe.teacher)
        config = recipe.model or (starting and starting.config)
        check_room(config, trainer.devices(), average=bool(trainer.ema_decay))
        data = _read(training_data, validation_data, test_data)
        files = _tokenizer_files(run, recipe, config, data, Path(scratch) / TOKENIZER_NAME)
        tokenizer = _tokenizer(files, recipe, config)
        pairs = {name: _tokenize(examples, tokenizer) for name, examples in data.items()}
        task = make_task(config, recipe.objective, tokenizer, teacher and teacher.config)
        scorers = _scorers(recipe, trainer, config, tokenizer, data, pairs)
        batches = functools.partial(_batches, task, recipe, trainer, row_multiple)
        grow: Callable[[], BucketedBatches] | None = None
        notes: dict[str, Any] = {"vocabulary_type": recipe.vocabulary_type}
        if teacher is not None and recipe.teacher_samples:
            notes |= {
                "teacher_samples": recipe.teacher_samples,
                "sampled_teacher": _describe(teacher),
            }
            sampler = TextModel(teacher.model, teacher.params, tokenizer, name=str(recipe.teacher))
            longest = recipe.batching.bucket_lengths[-1]
            draw = functools.partial(
                add_teacher_samples,
                pairs["training"],
                sampler,
                samples=recipe.teacher_samples,
                room=lambda length: task.target_room(length, longest),
                seed=trainer.seed,
                progress=trainer.progress,
            )
            grow = lambda: batches("training", stored_samples(run, draw))  # noqa: E731

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
                grow=grow,
            ),
            output_dir=run,
            constants=teacher and teacher.params if recipe.objective.distillation_weight else None,
            init_params=starting and starting.params,
            evaluate=scorers["validation"] if recipe.evaluation.at_checkpoints else None,
            notes=notes,
            on_start=begin,
        )
        _export(run, config, result, recipe.export_dtype, tokenizer)
        return _results(run, result, scorers, progress=trainer.progress)


def _refuse_own_output(run: RunDirectory, recipe: Recipe) -> None:
    for name in ("init_from", "vocabulary", "teacher"):
        path = getattr(recipe, name)
        if path is not None and run.makes(path):
            raise ValueError(
                f"{name}={path} is what the run in output_dir={run.path} writes itself: choose "
                "another output_dir, or copy it to another place"
            )


def make_task(
    config: Any, objective: Objective, tokenizer: Tokenizer, teacher: ModelConfig | None
) -> TextTask:
    """The task that trains a network of a family.

    Args:
      config: the network.
      objective: the loss.
      tokenizer: names the special tokens.
      teacher: the network to distil from; of use only where the objective says so.

    Returns:
      A `Seq2Seq` for T5, a `DecoderOnly` for the others.
    """
    teacher = teacher if objective.distillation_weight else None
    if isinstance(config, T5Config):
        return Seq2Seq(
            model=config,
            objective=objective,
            pad_id=tokenizer.pad_id,
            eos_id=tokenizer.eos_ids[0],
            teacher=teacher,
        )
    return DecoderOnly(model=config, objective=objective, pad_id=tokenizer.pad_id, teacher=teacher)


def _load(path: PathLike | None) -> Any:
    """A model with float32 parameters, or None."""
    if path is None:
        return None
    return load_model(path, dtype="float32")


def _describe(loaded: Any) -> dict[str, Any]:
    return {"model": describe(loaded.config), "params": digest(loaded.params)}


def _read(
    training: Iterable[Example], validation: Iterable[Example], test: Iterable[Example] | None
) -> Data:
    data = {"training": list(training), "validation": list(validation)}
    if test is not None:
        data["test"] = list(test)
    for name, examples in data.items():
        check_pairs(examples, f"{name} data")
    return data


def _tokenizer_files(
    run: RunDirectory, recipe: Recipe, config: ModelConfig, data: Data, scratch: Path
) -> Path:
    """The directory with the run's tokenizer files."""
    return vocabulary_of_run(
        run,
        recipe.vocabulary or recipe.init_from or recipe.teacher,
        (text for e in data["training"] for text in (e.inputs, e.targets or "")),
        scratch,
        vocab_size=config.vocab_size,
        model_type=recipe.vocabulary_type,
        family=next(name for name, family in FAMILIES.items() if type(config) is family),
    )


def _tokenizer(files: Path, recipe: Recipe, config: ModelConfig) -> Tokenizer:
    """The run's tokenizer, which must be that of the models that it starts from."""
    tokenizer = load_tokenizer(files)
    for name, path in (("init_from", recipe.init_from), ("teacher", recipe.teacher)):
        if path is not None and load_tokenizer(path).fingerprint != tokenizer.fingerprint:
            raise ValueError(
                f"{name}={path} has another vocabulary than this run; use that directory as "
                "vocabulary"
            )
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"the vocabulary has {tokenizer.vocab_size} pieces, but the network's vocab_size="
            f"{config.vocab_size}; make it at least as large"
        )
    return tokenizer


def _tokenize(examples: Sequence[Example], tokenizer: Tokenizer) -> TokenPairs:
    """Inputs as the Decoder reads prompts; targets as it would have to write them."""

    def encode_target(text: str) -> list[int]:
        return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_ids[0]]

    return tokenize_pairs(examples, tokenizer.encode, encode_target)


def _scorers(
    recipe: Recipe,
    trainer: TrainerConfig,
    config: ModelConfig,
    tokenizer: Tokenizer,
    data: Data,
    pairs: dict[str, TokenPairs],
) -> dict[str, Scorer]:
    """Of all data but the training's."""
    evaluation = recipe.evaluation
    longest = max(evaluation.max_input_tokens, recipe.batching.bucket_lengths[-1])
    evaluation = dataclasses.replace(evaluation, max_input_tokens=longest)
    scorers = {
        name: Scorer(
            evaluation,
            config,
            tokenizer,
            data[name],
            pairs[name],
            name=name,
            progress=trainer.progress,
        )
        for name in data
        if name != "training"
    }
    if trainer.progress and evaluation.metrics:
        for scorer in scorers.values():
            scorer.tell_skipped()
    return scorers


def _batches(
    task: TextTask,
    recipe: Recipe,
    trainer: TrainerConfig,
    row_multiple: int,
    name: str,
    pairs: TokenPairs,
) -> BucketedBatches:
    """Batches of a data set; says how many pairs are too long for them."""
    seed = trainer.seed if name == "training" else None
    made = task.batches(pairs, recipe.batching, seed=seed, row_multiple=row_multiple)
    if trainer.progress and made.num_left_out:
        say(
            f"{made.num_left_out} of {len(pairs)} {name} pairs are longer than the last bucket "
            f"({recipe.batching.bucket_lengths[-1]} tokens) and left out"
        )
    return made


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
    run: RunDirectory, result: TrainResult, scorers: dict[str, Scorer], *, progress: bool
) -> dict[str, Any]:
    """Scores the model as it was written, rounding included, and writes `results.json`."""
    exported = _load(run.path / MODEL_NAME)
    results = {
        "step": result.step,
        "validation_loss": result.validation_loss,
        "num_params": exported.model.num_params(),
    }
    for scorer in scorers.values():
        results |= scorer(exported.params)
    written = run.write(RESULTS_NAME, json.dumps(results, indent=1).encode())
    if progress:
        say(f"the model is in {run.path / MODEL_NAME}, its figures in {written}")
    return results
