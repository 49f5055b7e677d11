"""The teacher's part of a run: samples, corrections of the student's texts, and a measure.

Axes: B rows, T target tokens, V vocabulary.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from specjax.checks import check_path, checked, tuple_text, whole_number
from specjax.compilation import jit
from specjax.data.batching import TokenPairs
from specjax.errors import UserError
from specjax.fingerprints import digest
from specjax.models import ModelConfig, model_from_config
from specjax.runs.run_directory import RunDirectory
from specjax.text import TextModel
from specjax.text.teacher_forcing import KnownRows, KnownTexts, batches, read, rows_at_once
from specjax.training.losses import Total, total_variation
from specjax.training.progress import say
from specjax.training.samples import (
    StudentSamples,
    add_teacher_samples,
    draw_pairs,
    stored_pairs,
    with_room,
)
from specjax.training.tasks import TextTask
from specjax.training.trainer import describe
from specjax.types import Params

# The teacher's texts, and the temperature of each.
TEXTS = {"greedy": 0.0, "sampled": 1.0}
# `accepted_greedy` and `accepted_sampled` are the names of the figures.
PREFIX = "accepted_"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher:
    """The model to distil from, with the student's vocabulary, and its uses.

    The weight of its distributions in the loss is `Objective.distillation_weight`.

    Attributes:
      path: its directory; None for no teacher.
      samples: targets drawn from it for each input, added to the references.
      on_policy_share: the share of the rows, in [0, 1], whose target the student itself draws, for
        the teacher to correct; this needs `distillation_weight` 1.
      refresh_every: the updates after which the student draws again; it draws nothing for the first
        of them, so it is at most half of the run.
      accepted: the teacher's texts for the validation inputs on which accepted tokens are measured,
        with it as the verifier: "greedy" (temperature 0), "sampled" (temperature 1), both or none.
      accepted_draft: G, the tokens of a drafted block for that.
    """

    path: str | os.PathLike[str] | None = None
    samples: int = 0
    on_policy_share: float = 0.0
    refresh_every: int = 200
    accepted: tuple[str, ...] = ()
    accepted_draft: int = 5

    def __post_init__(self) -> None:
        if self.path is not None:
            check_path(self.path, "teacher=")
        for name, low in (("samples", 0), ("refresh_every", 1), ("accepted_draft", 1)):
            value = whole_number(f"Teacher: {name}", getattr(self, name), low=low)
            object.__setattr__(self, name, value)
        checked("Teacher: on_policy_share", self.on_policy_share, low=0.0, high=1.0)
        if isinstance(self.accepted, str):
            raise UserError(
                f"Teacher: accepted must be a tuple of names, got {self.accepted!r}; write "
                f"{tuple_text(self.accepted)}"
            )
        object.__setattr__(self, "accepted", tuple(self.accepted))
        for name in self.accepted:
            if name not in TEXTS:
                raise UserError(f"Teacher: accepted must be among {', '.join(TEXTS)}, got {name!r}")

    def measured(self, choose_by: str) -> tuple[str, ...]:
        """The texts of `accepted`, and the text of the figure that chooses the checkpoint."""
        text = choose_by.removeprefix(PREFIX)
        needed = choose_by == PREFIX + text and text in TEXTS and text not in self.accepted
        return (*self.accepted, *(text,) * needed)


def accepted_total(
    acceptance: Float32[Array, "B T"], mask: Bool[Array, "B T"], draft: int
) -> Total:
    """Expected accepted tokens of blocks that start at each position of known texts.

    For a block of G = `draft` tokens before position t it is Σ_{i=1..G} Π_{j<i} a_{t+j}, where a is
    the acceptance at each position, given the text before it. Nothing is accepted past the end of
    the text, whose positions are adjacent.

    Source: Leviathan et al. 2023, section 3.1, with an acceptance per position.
    """
    acceptance = jnp.where(mask, acceptance, 0.0)
    length = acceptance.shape[1]
    total = survival = acceptance
    for shift in range(1, min(draft, length)):
        later = jnp.pad(acceptance[:, shift:], ((0, 0), (0, shift)))
        survival = survival * later
        total = total + survival
    return Total(jnp.sum(total), jnp.sum(mask.astype(jnp.int32)))


class AcceptedTokens:
    """The expected accepted tokens per round of a student's drafts.

    The acceptance at a position, given the teacher's text before it, is
      - of greedy texts, at temperature 0: whether the student's most probable token is the
        teacher's, which is the text's next token;
      - of sampled texts, at temperature 1: Σ_v min(p(v), q(v)), one minus the total variation.
    Blocks start at every position, with equal weights. For greedy texts the number of accepted
    tokens is exact: an accepted draft is the teacher's own text. For sampled texts the product is
    an approximation: it uses the acceptances at the prefixes of the teacher's text, not at the
    drafted prefixes.
    """

    def __init__(
        self,
        student: ModelConfig,
        text: str,
        draft: int,
        texts: Callable[[], KnownTexts],
        teacher: TextModel,
    ):
        self.name = f"validation_{PREFIX}{text}"
        self._make = texts
        self._texts: KnownTexts | None = None
        # As in decoding: only tokens of the tokenizer get logits.
        tokens = getattr(teacher.model, "tokens", None)
        self._student = dataclasses.replace(model_from_config(student), tokens=tokens)
        read_too: Any = teacher.model if text == "sampled" else None
        self._teacher_params = teacher.prepared if text == "sampled" else None
        self._step = _accepted_step(self._student, read_too, draft)

    def __call__(self, params: Params) -> dict[str, float]:
        if self._texts is None:
            self._texts = self._make()
        params = self._student.prepare(params)
        at_once = min(64, rows_at_once(self._texts, self._student.vocab_size, 4))
        total, items = 0.0, 0
        for _, rows in batches(self._texts, at_once):
            accepted = jax.device_get(self._step(params, self._teacher_params, rows))
            total, items = total + float(accepted.sum), items + int(accepted.items)
        return {self.name: total / max(items, 1)}


@functools.lru_cache(maxsize=8)
def _accepted_step(student: Any, teacher: Any, draft: int) -> Callable[..., Total]:
    """Builds `step(params, teacher_params, rows)`, jitted; for sampled texts with a teacher."""

    @jit
    def step(params: Params, teacher_params: Params, rows: KnownRows) -> Total:
        logits = read(student, params, rows).logits
        if teacher is None:
            acceptance = (jnp.argmax(logits, axis=-1) == rows.outputs).astype(jnp.float32)
        else:
            reference = read(teacher, teacher_params, rows).logits
            acceptance = 1.0 - total_variation(logits, reference)
        return accepted_total(acceptance, rows.real, draft)

    return step


class Teaching:
    """Everything that a run needs from its teacher; nothing if `loaded` is None.

    Attributes:
      constants: the teacher's parameters if the loss reads them.
      notes: the settings that determine the run.
      figures: functions that measure the student at each checkpoint.
      phases: the phases of on-policy training, or None.
    """

    def __init__(
        self,
        settings: Teacher,
        loaded: Any,
        run: RunDirectory,
        task: TextTask,
        tokenizer: Any,
        pairs: dict[str, TokenPairs],
        longest: int,
        trainer: Any,
    ):
        self._settings, self._run, self._trainer, self._pairs = settings, run, trainer, pairs
        self._room = functools.partial(task.target_room, longest=longest)
        self.constants = loaded.params if loaded and task.teacher is not None else None
        self.notes: dict[str, Any] = {}
        self.figures: list[AcceptedTokens] = []
        self.phases: StudentSamples | None = None
        if loaded is None:
            return
        self._model = TextModel(loaded.model, loaded.params, tokenizer, name=str(settings.path))
        texts = settings.measured(trainer.choose_by)
        if settings.samples or texts:
            model = {"model": describe(loaded.config), "params": digest(loaded.params)}
            self.notes["sampled_teacher"] = model
        if settings.samples:
            self.notes["teacher_samples"] = settings.samples
        if "sampled" in texts and loaded.config.vocab_size != task.model.vocab_size:
            raise UserError(
                f"the teacher's vocab_size={loaded.config.vocab_size} and the network's "
                f"vocab_size={task.model.vocab_size} differ: measure only greedy texts, or give "
                "the network the teacher's vocab_size"
            )
        if texts:
            self.notes["accepted"] = {"texts": texts, "draft": settings.accepted_draft}
        for text in texts:
            draw = functools.partial(self._validation, text)
            figure = AcceptedTokens(task.model, text, settings.accepted_draft, draw, self._model)
            self.figures.append(figure)
        if settings.on_policy_share:
            share, most = settings.on_policy_share, max(1, trainer.num_steps // 2)
            every = min(settings.refresh_every, most)
            if every < settings.refresh_every and trainer.progress:
                say(
                    f"reduced refresh_every from {settings.refresh_every} to {every}, half of "
                    f"num_steps={trainer.num_steps}"
                )
            self.notes["on_policy"] = {"share": share, "refresh_every": every}
            options = {"seed": trainer.seed, "progress": trainer.progress}
            self.phases = StudentSamples(
                run, share, every, task, tokenizer, longest=longest, **options
            )

    def grown(self) -> TokenPairs:
        """The training pairs: references and samples."""
        draw = functools.partial(
            add_teacher_samples,
            self._pairs["training"],
            self._model,
            samples=self._settings.samples,
            room=self._room,
            seed=self._trainer.seed,
            progress=self._trainer.progress,
        )
        return stored_pairs(self._run, "teacher", draw)

    def _validation(self, text: str) -> KnownTexts:
        """The validation inputs with the teacher's texts."""
        pairs = stored_pairs(self._run, ("validation", text), lambda: self._write(text))
        return KnownTexts(*zip(*(pairs[i] for i in range(len(pairs))), strict=True))

    def _write(self, text: str) -> TokenPairs:
        inputs, limits, places = with_room(self._pairs["validation"], self._room)
        if not inputs:
            raise UserError("no validation input leaves room for a text: add a longer bucket")
        if self._trainer.progress:
            say(f"the teacher writes {len(limits):,} {text} texts for the validation inputs")
        options = {"seed": self._trainer.seed, "progress": self._trainer.progress}
        return draw_pairs(self._model, inputs, limits, places, temperature=TEXTS[text], **options)
