"""What a run takes from its teacher: samples, corrections of its own texts, and its measure."""

import functools
from collections.abc import Callable
from typing import Any

from specjax.data.batching import BucketedBatches
from specjax.data.pairs import TokenPairs
from specjax.runs.run_directory import RunDirectory
from specjax.text import TextModel
from specjax.tokenizers import Tokenizer
from specjax.training.acceptance import PREFIX, TEXTS, AcceptedTokens
from specjax.training.distillation import (
    SAMPLES_NAME,
    Writer,
    add_teacher_samples,
    joined,
    stored_samples,
)
from specjax.training.fingerprint import describe
from specjax.training.losses import FIGURES
from specjax.training.on_policy import STUDENT_SAMPLES_NAME, StudentSamples
from specjax.training.preparation import describe_model
from specjax.training.progress import say
from specjax.training.recipe import Recipe
from specjax.training.text_task import TextTask
from specjax.training.trainer_config import TrainerConfig

_TEXTS_NAME = "validation_{}.npz"
# What it writes into the run's directory.
TEACHING_NAMES = (SAMPLES_NAME, STUDENT_SAMPLES_NAME, *map(_TEXTS_NAME.format, TEXTS))


def check_together(recipe: Recipe, trainer: TrainerConfig) -> None:
    """Makes sure that the recipe gives what the trainer's settings ask for.

    Args:
      recipe: the recipe.
      trainer: the trainer's settings.

    Raises:
      ValueError: the figure that chooses the checkpoint is not measured, or the run ends before the
        student has drawn anything.
    """
    choose_by = trainer.choose_by
    known = [*FIGURES, *(PREFIX + text for text in TEXTS)]
    if recipe.evaluation.at_checkpoints:
        known += recipe.evaluation.metrics
    if choose_by not in known:
        raise ValueError(
            f"choose_by={choose_by!r} is not measured at checkpoints: choose one of "
            f"{', '.join(known)} (metrics: with Evaluation.at_checkpoints=True)"
        )
    if choose_by.startswith(PREFIX) and recipe.teacher is None:
        raise ValueError(
            f"choose_by={choose_by!r} is measured with the teacher as the verifier, but teacher="
            "None: give a teacher, or choose by another figure"
        )
    every = recipe.on_policy.refresh_every
    if recipe.on_policy.share and trainer.num_steps <= every:
        raise ValueError(
            f"num_steps={trainer.num_steps} and refresh_every={every}: the student draws nothing "
            "for its first refresh_every updates; lower refresh_every, or raise num_steps"
        )


class Teaching:
    """All that the recipe asks of the teacher.

    Args:
      recipe: the recipe; without a teacher nothing is made.
      trainer: the trainer's settings.
      run: the run's directory.
      task: the student's task.
      tokenizer: both models'.
      pairs: training and validation data.
      teacher: the loaded model, or None.

    Attributes:
      constants: the teacher's parameters where the loss reads them.
      notes: what of it determines the run.
      figures: measures of the student, for each checkpoint.
    """

    def __init__(
        self,
        recipe: Recipe,
        trainer: TrainerConfig,
        run: RunDirectory,
        task: TextTask,
        tokenizer: Tokenizer,
        pairs: dict[str, TokenPairs],
        teacher: Any,
    ):
        self._recipe, self._trainer, self._run = recipe, trainer, run
        self._task, self._tokenizer, self._pairs = task, tokenizer, pairs
        self._longest = recipe.batching.bucket_lengths[-1]
        self.constants = (
            teacher and teacher.params if recipe.objective.distillation_weight else None
        )
        self.notes: dict[str, Any] = {}
        self.figures: list[AcceptedTokens] = []
        if teacher is None:
            return
        self._model = TextModel(teacher.model, teacher.params, tokenizer, name=str(recipe.teacher))
        acceptance = recipe.acceptance.with_figure(trainer.choose_by)
        if recipe.teacher_samples or acceptance.texts:
            self.notes["sampled_teacher"] = describe_model(teacher)
        if recipe.teacher_samples:
            self.notes["teacher_samples"] = recipe.teacher_samples
        if recipe.on_policy.share:
            self.notes["on_policy"] = describe(recipe.on_policy)
        if acceptance.texts:
            self.notes["acceptance"] = describe(acceptance)
        for text in acceptance.texts:
            batches = functools.partial(self._validation, text)
            figure = AcceptedTokens(
                task, text, acceptance.draft, batches, teacher.config, teacher.params
            )
            self.figures.append(figure)

    def grow(self, batches: Callable[[TokenPairs], BucketedBatches]) -> BucketedBatches:
        """The batches to train on, of references and samples.

        Args:
          batches: makes them of pairs.
        """
        recipe = self._recipe
        draw = functools.partial(
            add_teacher_samples,
            self._pairs["training"],
            self._model,
            samples=recipe.teacher_samples,
            room=lambda length: self._task.target_room(length, self._longest),
            seed=self._trainer.seed,
            progress=self._trainer.progress,
        )
        return batches(stored_samples(self._run, SAMPLES_NAME, draw))

    def phases(self) -> StudentSamples | None:
        """The phases of on-policy training, if it is asked for."""
        if not self._recipe.on_policy.share:
            return None
        return StudentSamples(
            self._run,
            self._recipe.on_policy,
            self._task,
            self._tokenizer,
            longest=self._longest,
            seed=self._trainer.seed,
            progress=self._trainer.progress,
        )

    def _validation(self, text: str) -> BucketedBatches:
        """The validation inputs with the teacher's texts."""
        draw = functools.partial(self._write, text)
        pairs = stored_samples(self._run, _TEXTS_NAME.format(text), draw)
        return self._task.batches(pairs, self._recipe.batching, seed=None, row_multiple=1)

    def _write(self, text: str) -> TokenPairs:
        pairs, task = self._pairs["validation"], self._task
        inputs = [pairs[i][0] for i in range(len(pairs))]
        limits = {
            i: task.target_room(len(x), self._longest) for i, x in enumerate(inputs) if len(x)
        }
        limits = {i: limit for i, limit in limits.items() if limit > 0}
        if not limits:
            raise ValueError("no validation input leaves room for a text: add a longer bucket")
        if self._trainer.progress:
            say(f"the teacher writes {len(limits):,} {text} texts for the validation inputs")
        inputs = [inputs[i] for i in limits]
        write = Writer(
            self._model,
            temperature=TEXTS[text],
            longest=max(limits.values()),
            longest_input=max(map(len, inputs)),
            seed=self._trainer.seed,
            progress=self._trainer.progress,
        )
        return joined(inputs, write(inputs, list(limits.values()), list(limits)))
