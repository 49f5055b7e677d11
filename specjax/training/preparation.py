"""What a training on pairs of texts is made of: models, texts, tokenizer, task and batches."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from specjax.checkpoints import load_model
from specjax.data.batching import BucketedBatches
from specjax.data.examples import Example
from specjax.data.pairs import TokenPairs, check_pairs, tokenize_pairs
from specjax.models import T5Config
from specjax.models.config import FAMILIES, ModelConfig
from specjax.runs.run_directory import RunDirectory
from specjax.tokenizers import Tokenizer, load_tokenizer
from specjax.training.decoder_only import DecoderOnly
from specjax.training.fingerprint import describe, digest
from specjax.training.losses import Objective
from specjax.training.progress import say
from specjax.training.recipe import PathLike, Recipe
from specjax.training.scoring import Scorer
from specjax.training.seq2seq import Seq2Seq
from specjax.training.text_task import TextTask
from specjax.training.trainer_config import TrainerConfig
from specjax.training.vocabulary import vocabulary_of_run

Data = dict[str, list[Example]]


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


def load_float32(path: PathLike | None) -> Any:
    """A model with float32 parameters, or None."""
    if path is None:
        return None
    return load_model(path, dtype="float32")


def describe_model(loaded: Any) -> dict[str, Any]:
    """What determines a loaded model, as JSON values."""
    return {"model": describe(loaded.config), "params": digest(loaded.params)}


def read_data(
    training: Iterable[Example], validation: Iterable[Example], test: Iterable[Example] | None
) -> Data:
    """All examples by the name of their data set, checked."""
    data = {"training": list(training), "validation": list(validation)}
    if test is not None:
        data["test"] = list(test)
    for name, examples in data.items():
        check_pairs(examples, f"{name} data")
    return data


def tokenizer_files(
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


def run_tokenizer(files: Path, recipe: Recipe, config: ModelConfig) -> Tokenizer:
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


def tokenize(examples: Sequence[Example], tokenizer: Tokenizer) -> TokenPairs:
    """Inputs as the Decoder reads prompts; targets as it would have to write them."""

    def encode_target(text: str) -> list[int]:
        return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_ids[0]]

    return tokenize_pairs(examples, tokenizer.encode, encode_target)


def make_scorers(
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


def make_batches(
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
