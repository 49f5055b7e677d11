"""Trains a Hugging Face directory from pairs of texts: for `specjax train`."""

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.checkpoints import load_model, save_model
from specjax.checks import PathLike, check_flag, check_path, tuple_of_names, whole_fields
from specjax.data.batching import Batching, BucketedBatches, TokenPairs, check_pairs, tokenize_pairs
from specjax.data.examples import Example
from specjax.errors import UserError
from specjax.evaluation.metrics import METRICS, check_metrics, check_references
from specjax.memory import check_fits, smaller
from specjax.models import ModelConfig, model_from_config
from specjax.models.families import family_of
from specjax.runs.run_directory import MODEL_NAMES, RunDirectory
from specjax.text import Decoder, TextModel
from specjax.text.directories import log_models, portable_path
from specjax.tokenizers import Tokenizer, load_tokenizer
from specjax.tokenizers.model_files import SpecialIds
from specjax.training.losses import FIGURES, Objective
from specjax.training.progress import say
from specjax.training.tasks import TextTask
from specjax.training.teacher import (
    PREFIX,
    SAMPLES_NAME,
    TEXTS,
    Teacher,
    Teaching,
    buckets_for,
)
from specjax.training.trainer import (
    EXPORT_DTYPES,
    RESULTS_NAME,
    TrainerConfig,
    TrainingData,
    check_choices,
    check_sources,
    run_directory,
    train,
)
from specjax.training.vocabulary import VOCABULARY_TYPES, write_vocabulary
from specjax.types import Params, Sampling
from specjax.writing import new_directory, temporary_directory, write_checksums

MODEL_NAME = "model"
TOKENIZER_NAME = "tokenizer"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How outputs are decoded, greedily, and scored.

    Attributes:
      metrics: names in `specjax.evaluation.METRICS`; empty for no decoding.
      max_new_tokens: the longest output; outputs that reach it are cut and counted.
      max_input_tokens: longer inputs are not decoded, and their outputs count as empty: a damaged
        line must not exhaust the memory.
      limit: the number of texts to score, from the start of each data set; None for all.
      batch_size: rows decoded together.
      at_checkpoints: whether to score the validation data at each checkpoint, not only at the end.
    """

    metrics: tuple[str, ...] = ("bleu",)
    max_new_tokens: int = 512
    max_input_tokens: int = 512
    limit: int | None = None
    batch_size: int = 64
    at_checkpoints: bool = False

    def __post_init__(self) -> None:
        whole_fields(self, "Evaluation: ", max_new_tokens=1, max_input_tokens=1)
        whole_fields(self, "Evaluation: ", limit=1, batch_size=1)
        metrics = tuple_of_names("Evaluation: `metrics`", self.metrics)
        object.__setattr__(self, "metrics", metrics)
        check_metrics(self.metrics)
        check_flag("Evaluation: at_checkpoints", self.at_checkpoints)


class OutputScorer:
    """Scores parameters of a network on a data set.

    The network is static for compilation, parameters are not: scoring other parameters compiles
    nothing.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        config: ModelConfig,
        tokenizer: Tokenizer,
        examples: Sequence[Example],
        pairs: TokenPairs,
        *,
        name: str = "validation",
        progress: bool = False,
    ):
        self._evaluation, self._tokenizer = evaluation, tokenizer
        self._model = model_from_config(config)
        self._name, self._progress = name, progress
        count = min(len(pairs), evaluation.limit or len(pairs))
        if progress and evaluation.metrics and evaluation.limit and count < evaluation.limit:
            say(f"scoring all {count} {name} texts; limit={evaluation.limit} is larger")
        self._references = [example.targets or "" for example in examples[:count]]
        for metric in evaluation.metrics:
            check_references(METRICS[metric], self._references)
        inputs = [pairs[i][0] for i in range(count)]
        longest = evaluation.max_input_tokens
        self._inputs = {i: x for i, x in enumerate(inputs) if 1 <= len(x) <= longest}
        skipped = count - len(self._inputs)
        if skipped and progress and evaluation.metrics:
            say(
                f"skipped {skipped} of {count} {name} inputs, which are empty or longer "
                f"than {longest} tokens; their outputs count as empty"
            )

    def __call__(self, params: Params) -> dict[str, float]:
        """Decodes and scores."""
        metrics, longest = self._evaluation.metrics, self._evaluation.max_new_tokens
        if not metrics:
            return {}
        texts = [""] * len(self._references)
        cut = 0
        if self._inputs:
            # Always the same device, so that parameters of other devices compile no second program.
            params = jax.device_put(params, jax.devices()[0])
            decoder = Decoder(
                TextModel(self._model, params, self._tokenizer),
                sampling=Sampling(0.0),
                max_new_tokens=longest,
                batch_size=self._evaluation.batch_size,
                buckets=buckets_for(self._inputs.values()),
            )
            prompts: Any = list(self._inputs.values())
            result = decoder(prompts, progress=None if self._progress else False)
            for place, text in zip(self._inputs, result.texts, strict=True):
                texts[place] = text
            cut = int(np.sum(~np.asarray(result.ended)))
        if cut and self._progress:
            say(
                f"{cut} of {len(texts)} {self._name} outputs were cut at MAX_NEW_TOKENS={longest}; "
                "raise it unless the outputs are endless"
            )
        figures = {f"{self._name}_{m}": METRICS[m](texts, self._references) for m in metrics}
        return {**figures, f"{self._name}_cut": cut}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained from pairs of texts.

    Attributes:
      model: the network's configuration, of any family; by default that of `init_from`.
      init_from: a model's directory to start from (fine-tuning); its network must be `model`'s.
      vocabulary: a model's directory, a SentencePiece model, a `tokenizer.json`, or "bytes". By
        default that of `init_from` or the teacher; without these a SentencePiece vocabulary of
        `model.vocab_size` pieces is trained on the training data.
      vocabulary_type: of a trained vocabulary, "unigram" or "bpe"; see `train_vocabulary`.
      teacher: the model to distil from.
      objective: the loss per target token.
      batching: the shapes of the batches.
      evaluation: the decoding and scoring of outputs.
      export_dtype: of the exported arrays: float32, bfloat16 or float16.
    """

    model: ModelConfig | None = None
    init_from: PathLike | None = None
    vocabulary: PathLike | None = None
    vocabulary_type: str | None = None
    teacher: Teacher = dataclasses.field(default_factory=Teacher)
    objective: Objective = dataclasses.field(default_factory=Objective)
    batching: Batching = dataclasses.field(default_factory=Batching)
    evaluation: Evaluation = dataclasses.field(default_factory=Evaluation)
    export_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("init_from", "vocabulary"):
            if getattr(self, name) is not None:
                check_path(getattr(self, name), f"{name}=")
        if self.model is None and self.init_from is None:
            raise UserError(
                "`model` or `init_from` must be given; give a configuration (as in "
                "gin_configs/models), or a model's directory to fine-tune"
            )
        if not isinstance(self.model, ModelConfig | None):
            raise UserError(f"`model` must be a configuration of a network, got {self.model!r}")
        check_choices(
            self, {"export_dtype": EXPORT_DTYPES, "vocabulary_type": (*VOCABULARY_TYPES, None)}
        )
        weight, share = self.objective.distillation_weight, self.teacher.on_policy_share
        uses = {
            "distillation_weight": weight,
            "samples": self.teacher.samples,
            "on_policy_share": share,
            "accepted": self.teacher.accepted,
        }
        if (self.teacher.path is not None) != any(uses.values()):
            used = [f"{name}={value}" for name, value in uses.items() if value]
            raise UserError(
                f"Teacher: path={self.teacher.path} and {', '.join(used) or 'no use of it'}: give "
                "a teacher if and only if one of "
                f"{', '.join(f'`{name}`' for name in uses)} is given"
            )
        if share and weight < 1.0:
            raise UserError(
                f"on_policy_share={share} and distillation_weight={weight}: with a weight below 1 "
                "the student would also learn its own texts; set distillation_weight to 1"
            )

    @property
    def sources(self) -> dict[str, PathLike]:
        """The directories of models that it starts from, by name."""
        named = {"init_from": self.init_from, "teacher": self.teacher.path}
        return {name: path for name, path in named.items() if path is not None}


def train_model(
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

    After an interruption at any moment, the same call continues the run (see `train`).

    Args:
      recipe: how the model is trained.
      trainer: the trainer's settings.
      output_dir: the run's directory: `model/` (the result, with its tokenizer), `results.json`,
        `metrics.jsonl`, `checkpoints/`, `train_config.json`, `tokenizer/`, `samples/`.
      training_data: pairs of texts.
      validation_data: pairs of texts; the best checkpoint on them is exported.
      test_data: pairs of texts for a second score of the result.
      on_start: called with the `RunDirectory` after all checks, before the long work.

    Returns:
      The contents of `results.json`: step, validation loss (nats per token), number of parameters,
      the accepted tokens if these chose the checkpoint, and for the validation (and test) data each
      metric and the number of outputs cut at their limit.

    Raises:
      OSError: `output_dir` cannot be written, another process trains in it, or a file is missing.
      UserError: unusable data, a model that does not fit, or the `output_dir` of another run.
    """
    choose_by, evaluation = trainer.choose_by, recipe.evaluation
    figures = [*FIGURES, *(PREFIX + text for text in TEXTS)]
    if evaluation.at_checkpoints:
        figures += evaluation.metrics
    if choose_by not in figures:
        raise UserError(
            f"choose_by={choose_by!r} is not measured at checkpoints: choose one of "
            f"{', '.join(figures)} (metrics: with Evaluation.at_checkpoints=True)"
        )
    if choose_by.startswith(PREFIX) and recipe.teacher.path is None:
        raise UserError(
            f"choose_by={choose_by!r} is measured with the teacher as the verifier, but "
            "teacher=None: give a teacher, or choose by another figure"
        )
    data = {"training": training_data, "validation": validation_data, "test": test_data}
    names = (MODEL_NAME, RESULTS_NAME, TOKENIZER_NAME, SAMPLES_NAME)
    with run_directory(output_dir, names) as run, temporary_directory() as scratch:
        check_sources(run, {**recipe.sources, "vocabulary": recipe.vocabulary})
        if recipe.sources:
            log_models(recipe.sources)
        # Loading may take minutes, so the data are checked first.
        examples = {name: list(each) for name, each in data.items() if each is not None}
        for name, each in examples.items():
            check_pairs(each, f"{name} data")
        models = {name: load_model(path, dtype="float32") for name, path in recipe.sources.items()}
        start, teacher = models.get("init_from"), models.get("teacher")
        config: Any = recipe.model or (start and start.config)
        _check_room(config, trainer)
        files, words = _tokenizer(recipe, config, run, examples["training"], scratch)

        def encode_target(text: str) -> list[int]:
            """As a Decoder would write it; inputs are as it reads prompts."""
            return [*words.encode(text, add_special_tokens=False), words.eos_ids[0]]

        pairs = {
            name: tokenize_pairs(x, words.encode, encode_target) for name, x in examples.items()
        }
        distils = recipe.objective.distillation_weight > 0.0
        task = TextTask(
            model=config,
            objective=recipe.objective,
            pad_id=words.pad_id,
            eos_id=words.eos_ids[0],
            teacher=teacher.config if teacher is not None and distils else None,
        )
        longest = recipe.batching.bucket_lengths[-1]
        teaching = Teaching(recipe.teacher, teacher, run, task, words, pairs, longest, trainer)

        def batches(name: str, pairs: TokenPairs) -> BucketedBatches:
            """Batches of a data set; reports the number of pairs that are too long."""
            seed, multiple = trainer.seed if name == "training" else None, len(trainer.devices())
            found = task.batches(pairs, recipe.batching, seed=seed, row_multiple=multiple)
            if trainer.progress and found.num_left_out:
                say(
                    f"skipped {found.num_left_out} of {len(pairs)} {name} pairs, which are longer "
                    f"than the last bucket ({longest} tokens)"
                )
            return found

        longest_input = max(evaluation.max_input_tokens, longest)
        scoring = dataclasses.replace(evaluation, max_input_tokens=longest_input)
        options: dict[str, Any] = {"progress": trainer.progress}
        scorers = {
            name: OutputScorer(scoring, config, words, each, pairs[name], name=name, **options)
            for name, each in examples.items()
            if name != "training"
        }
        measures: list[Callable[[Params], dict[str, float]]] = [*teaching.figures]
        if evaluation.at_checkpoints:
            measures.append(scorers["validation"])

        def grow() -> BucketedBatches:
            return batches("training", teaching.training_pairs())

        def begin(run: RunDirectory) -> None:
            if files != run.path / TOKENIZER_NAME:
                with new_directory(run.own(TOKENIZER_NAME), replace=True) as place:
                    shutil.copytree(files, place, dirs_exist_ok=True)
                    write_checksums(place, owner=run.owner)
            if on_start is not None:
                on_start(run)

        result = train(
            trainer,
            task,
            TrainingData(
                training=batches("training", pairs["training"]),
                validation=batches("validation", pairs["validation"]),
                grow=grow if recipe.teacher.samples else None,
                phases=teaching.phases,
            ),
            output_dir=run,
            constants=teaching.constants,
            init_params=start and start.params,
            evaluate=lambda params: {k: v for m in measures for k, v in m(params).items()},
            notes={
                "vocabulary_type": recipe.vocabulary_type,
                **teaching.notes,
                MODEL_NAMES: {name: portable_path(path) for name, path in recipe.sources.items()},
            },
            on_start=begin,
        )
        bos = words.bos_id if config.encoder_style is None else None
        save_model(
            run.own(MODEL_NAME),
            # The dtype of training does not matter to users of the weights.
            config.replace(dtype="float32"),
            result.params,
            format="hf",
            dtype=recipe.export_dtype,
            special_ids=SpecialIds(words.eos_ids, words.pad_id, bos),
            tokenizer_from=run.path / TOKENIZER_NAME,
            replace=True,
        )
        # Scores the model as written, with rounding.
        exported = load_model(run.path / MODEL_NAME, dtype="float32")
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
        written = run.write_json(RESULTS_NAME, results)
        if trainer.progress:
            say(f"wrote the model to {run.path / MODEL_NAME} and its figures to {written}")
        return results


def _check_room(config: Any, trainer: TrainerConfig) -> None:
    """Raises an error for a network that is too large, before anything is allocated."""
    count = model_from_config(config).num_params()
    widths = {name: getattr(config, name) for name in ("vocab_size", "embed_dim", "mlp_dim")}
    # Parameters, gradients, two moments and the average, all float32.
    check_fits(
        f"{count:,} parameters ({len(config.style.layers)} layers, embed_dim={config.embed_dim}, "
        f"vocab_size={config.vocab_size}) with gradients and optimizer state",
        4 * count * (5 if trainer.ema_decay else 4),
        f"{smaller(widths)}, or fewer layers, of `model`",
        trainer.devices(),
    )


def _tokenizer(
    recipe: Recipe, config: Any, run: RunDirectory, examples: Sequence[Example], scratch: Path
) -> tuple[Path, Tokenizer]:
    """The tokenizer's files and the tokenizer, which must be the models' tokenizer."""
    files = run.path / TOKENIZER_NAME
    source = recipe.vocabulary or recipe.init_from or recipe.teacher.path
    if not (run.kept and files.exists()):
        files = scratch / TOKENIZER_NAME
        write_vocabulary(
            files,
            source,
            (text for example in examples for text in (example.inputs, example.targets)),
            vocab_size=config.vocab_size,
            model_type=recipe.vocabulary_type,
            family=family_of(config).name,
        )
    tokenizer = load_tokenizer(files)
    if source and load_tokenizer(source).fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"vocabulary={source} differs from the vocabulary of the run in {run.path}; choose "
            "another output_dir"
        )
    for name, path in recipe.sources.items():
        if load_tokenizer(path).fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"{name}={path} has another vocabulary than this run; give that directory as "
                "vocabulary"
            )
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"the vocabulary has {tokenizer.vocab_size} pieces, but the network's vocab_size="
            f"{config.vocab_size}; raise vocab_size to at least that"
        )
    return files, tokenizer
