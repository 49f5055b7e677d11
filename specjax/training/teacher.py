"""The teacher's part of a run: samples, corrections of the student's texts, and a measure.

What models draw for a run is drawn once and kept in its directory.

Axes: B rows, T target tokens, V vocabulary.

Source: Kim and Rush 2016; Agarwal et al. 2024 (GKD); Zhou et al. 2024 (DistillSpec).
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32

from specjax.checks import (
    PathLike,
    check_number,
    check_path,
    one_number,
    tuple_of_names,
    whole_fields,
)
from specjax.compilation import jit
from specjax.data.batching import BucketedBatches, TokenPairs
from specjax.data.examples import Example
from specjax.errors import UserError
from specjax.fingerprints import digest
from specjax.models import ModelConfig, model_from_config
from specjax.runs.inference import tokens_of
from specjax.runs.run_directory import Key, RunDirectory, Store
from specjax.text import Decoder, TextModel
from specjax.text.requests import chat_options
from specjax.text.teacher_forcing import KnownRows, KnownTexts, batches, read, rows_at_once
from specjax.tokenizers import Tokenizer
from specjax.training.losses import Total, total_variation
from specjax.training.progress import say
from specjax.training.tasks import TextTask
from specjax.training.trainer import describe
from specjax.types import Params, Sampling

SAMPLES_NAME = "samples"
# Separate from the streams of the data's order, which begin with the same seed.
_CHOICE, _DRAWS = 1, 2
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

    path: PathLike | None = None
    samples: int = 0
    on_policy_share: float = 0.0
    refresh_every: int = 200
    accepted: tuple[str, ...] = ()
    accepted_draft: int = 5

    def __post_init__(self) -> None:
        if self.path is not None:
            check_path(self.path, "teacher=")
        whole_fields(self, "Teacher: ", samples=0, refresh_every=1, accepted_draft=1)
        check_number("Teacher: on_policy_share", self.on_policy_share, low=0.0, high=1.0)
        accepted = tuple_of_names("Teacher: accepted", self.accepted)
        object.__setattr__(self, "accepted", accepted)
        for name in self.accepted:
            if name not in TEXTS:
                raise UserError(f"Teacher: accepted must be among {', '.join(TEXTS)}, got {name!r}")

    def measured(self, choose_by: str) -> tuple[str, ...]:
        """The texts of `accepted`, and the text of the figure that chooses the checkpoint."""
        chosen = [text for text in TEXTS if choose_by == PREFIX + text]
        return tuple(dict.fromkeys((*self.accepted, *chosen)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifierTexts:
    """How a verifier writes texts for prompts.

    Attributes:
      temperature: of the texts.
      max_new_tokens: the longest text.
      max_input_tokens: longer prompts are skipped.
      chat: whether each prompt is a user's message for the model's chat template; or options of the
        template.
      batch_size: rows decoded together.
      shard_rows: prompts of a shard, which an interrupted run repeats at most.
    """

    temperature: float = 1.0
    max_new_tokens: int = 128
    max_input_tokens: int = 1024
    chat: bool | Mapping[str, Any] = False
    batch_size: int = 64
    shard_rows: int = 1024

    def __post_init__(self) -> None:
        kind = type(self).__name__
        one_number(f"{kind}: temperature", self.temperature, low=0.0, open_high=True)
        object.__setattr__(self, "temperature", float(self.temperature))
        whole_fields(self, f"{kind}: ", max_new_tokens=1, max_input_tokens=1)
        whole_fields(self, f"{kind}: ", batch_size=1, shard_rows=1)
        chat_options(f"{kind}: chat", self.chat)


class ReadPrompts:
    """The prompts of a data set that can be decoded, as tokens, and the ids of their examples.

    Others, which are empty or too long, are skipped, with a message on stderr.

    Raises:
      UserError: there is none.
    """

    def __init__(
        self,
        verifier: TextModel,
        settings: VerifierTexts,
        examples: Sequence[Example],
        name: str,
        *,
        progress: bool,
    ):
        self.tokens: list[np.ndarray] = []
        self.ids: list[int] = []
        if not examples:
            raise UserError(f"{name} data: the source has no examples; give another source")
        # The last bucket is long and costs nothing here; prompts beyond it are too long.
        decoder = Decoder(verifier, buckets=(settings.max_input_tokens,), max_new_tokens=1)
        skipped = []
        options: dict[str, Any] = {"chat": settings.chat, "truncate": None}
        for example in examples:
            where = f"{name} example {example.id}"
            try:
                self.tokens.append(tokens_of(decoder, example.inputs, where, **options))
                self.ids.append(example.id)
            except ValueError as error:
                skipped.append(str(error))
        if not self.tokens:
            raise UserError(f"{name} data: no prompt can be decoded; the first error: {skipped[0]}")
        if skipped and progress:
            more = f", and {len(skipped) - 1} more" if len(skipped) > 1 else ""
            count = f"{len(skipped)} of {len(examples)}"
            say(f"{count} {name} prompts were skipped: {skipped[0]}{more}")

    @property
    def fingerprint(self) -> str:
        sha = hashlib.sha256()
        for place, tokens in zip(self.ids, self.tokens, strict=True):
            sha.update(f"{place} {len(tokens)} ".encode() + tokens.astype(np.int32).tobytes())
        return sha.hexdigest()[:16]


def buckets_for(inputs: Iterable[Any]) -> tuple[int, ...]:
    """Powers of two from 16 up to the longest input: few shapes, each at most twice too long."""
    longest = max(map(len, inputs), default=0)
    lengths = [16]
    while lengths[-1] < longest:
        lengths.append(2 * lengths[-1])
    return tuple(lengths)


def draw_pairs(
    model: TextModel,
    inputs: Sequence[np.ndarray],
    limits: Sequence[int],
    ids: Sequence[int],
    *,
    temperature: float = 1.0,
    seed: int = 0,
    longest: int | None = None,
    batch_size: int = 64,
    progress: bool = True,
) -> TokenPairs:
    """Inputs, each with a target that a model draws.

    A target that reaches its limit has no end-of-sequence token, because the model has not drawn
    it. A draw depends only on its input, the seed and its id. Set `longest` if several calls should
    share their programs.
    """
    targets: list[np.ndarray] = []
    if len(inputs):
        decoder = Decoder(
            model,
            sampling=Sampling(temperature),
            max_new_tokens=longest or max(limits),
            batch_size=batch_size,
            buckets=buckets_for(inputs if longest is None else [range(longest)]),
        )
        prompts: Any = list(inputs)
        drawn = decoder(
            prompts,
            seed=seed,
            ids=list(ids),
            max_new_tokens=list(limits),
            progress=None if progress else False,
        )
        for row in drawn:
            targets.append(row.tokens_with_end)
    return TokenPairs.of([part for pair in zip(inputs, targets, strict=True) for part in pair])


def add_teacher_samples(
    pairs: TokenPairs,
    teacher: TextModel,
    *,
    samples: int,
    room: Callable[[int], int],
    seed: int,
    progress: bool,
) -> TokenPairs:
    """Adds further targets to each pair, drawn from the teacher at temperature 1.

    A drafter is judged by the texts of its verifier, not by the references; so it learns most from
    these texts. `room` gives the most tokens of a target after an input of some length. The draw of
    an input depends only on the seed, its place and the round.

    Source: Kim and Rush 2016; drawn at T = 1 as in Zhou et al. 2024 (DistillSpec).
    """
    inputs, limits, places = with_room(pairs, room)
    drawn = [pairs]
    for sample in range(samples if inputs else 0):
        if progress:
            say(f"drawing teacher samples, round {sample + 1} of {samples}")
        ids = [sample * len(pairs) + place for place in places]
        drawn.append(draw_pairs(teacher, inputs, limits, ids, seed=seed, progress=progress))
    return TokenPairs.of([x for each in drawn for i in range(len(each)) for x in each[i]])


def with_room(
    pairs: TokenPairs, room: Callable[[int], int]
) -> tuple[list[np.ndarray], list[int], list[int]]:
    """The inputs that leave room for a target: their tokens, the room and their places."""
    every = [(pairs[i][0], room(len(pairs[i][0])), i) for i in range(len(pairs))]
    fitting = [(x, limit, i) for x, limit, i in every if len(x) and limit > 0]
    return [x for x, _, _ in fitting], [n for _, n, _ in fitting], [i for _, _, i in fitting]


def store_pairs(run: RunDirectory, key: Key, draw: Callable[[], TokenPairs]) -> TokenPairs:
    """Pairs that `draw` makes once; then they are read from the run's directory."""
    store = Store(run, SAMPLES_NAME)
    record = store.get(key)
    if record is not None:
        return TokenPairs(**record.arrays)
    pairs = draw()
    store.put(key, None, {"tokens": pairs.tokens, "offsets": pairs.offsets})
    return pairs


@dataclasses.dataclass
class StudentSamples:
    """The `Phases` in which the student draws the targets of a share of the rows.

    At a phase's start the student, with the parameters that would be evaluated then, draws at
    temperature 1 for the inputs of the phase whose rows the seed has chosen. Each target has at
    most the room that its batch leaves; a target that reaches it has no end-of-sequence token,
    because the student has not drawn it. The targets are kept in the run's directory for a resumed
    run. The first phase has none: an untrained student writes noise.

    Source: Agarwal et al. 2024 (GKD, algorithm 1, with the student of up to `every` updates ago);
    Zhou et al. 2024 (DistillSpec).
    """

    run: RunDirectory
    share: float
    every: int
    task: TextTask
    tokenizer: Tokenizer
    longest: int
    seed: int
    progress: bool

    def begin(
        self, batches: BucketedBatches, step: int, params: Params | None
    ) -> Callable[[int], Any]:
        if step == 0:
            return batches.batch
        rows: list[tuple[int, int]] = []  # whose targets the student draws: step and row
        inputs: list[np.ndarray] = []
        limits: list[int] = []
        for number in range(step, step + self.every):
            known, length = batches.inputs(number)
            draws = np.random.default_rng([self.seed, number, _CHOICE]).random(len(known))
            for row, x in enumerate(known):
                if draws[row] < self.share and len(x):  # an empty input cannot be decoded
                    rows.append((number, row))
                    inputs.append(x)
                    limits.append(self.task.target_room(len(x), length))

        def draw() -> TokenPairs:
            if params is None:
                raise UserError(
                    f"the student's samples of step {step} are missing in {self.run.path}/"
                    f"{SAMPLES_NAME}, and the parameters that drew them are no longer known: put a "
                    "copy of the samples there, or choose another output_dir"
                )
            if self.progress:
                say(f"step {step:,}: the student draws {len(inputs):,} targets")
            return draw_pairs(
                TextModel(model_from_config(self.task.model), params, self.tokenizer),
                inputs,
                limits,
                range(len(inputs)),
                seed=int(np.random.default_rng([self.seed, step, _DRAWS]).integers(2**32)),
                longest=self.longest,
                progress=self.progress,
            )

        drawn = store_pairs(self.run, ("student", step), draw)
        targets: dict[int, dict[int, np.ndarray]] = {n: {} for n in range(step, step + self.every)}
        for i, (number, row) in enumerate(rows):
            targets[number][row] = drawn[i][1]
        return lambda number: batches.batch(number, targets[number])


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
        self._texts = functools.cache(texts)
        # As in decoding: only tokens of the tokenizer get logits.
        tokens = getattr(teacher.model, "tokens", None)
        self._student = dataclasses.replace(model_from_config(student), tokens=tokens)
        read_too: Any = teacher.model if text == "sampled" else None
        self._teacher_params = teacher.prepared if text == "sampled" else None
        self._static = self._student, read_too, draft

    def __call__(self, params: Params) -> dict[str, float]:
        params, texts = self._student.prepare(params), self._texts()
        total, items = 0.0, 0
        for _, rows in batches(texts, min(64, rows_at_once(texts, self._student.vocab_size, 4))):
            accepted = _accepted(*self._static, params, self._teacher_params, rows)
            total, items = total + float(accepted.sum), items + int(accepted.items)
        return {self.name: total / max(items, 1)}


@functools.partial(jit, static_argnums=(0, 1, 2))
def _accepted(
    student: Any, teacher: Any, draft: int, params: Params, teacher_params: Params, rows: KnownRows
) -> Total:
    """`accepted_total` of a batch; the teacher is None for greedy texts."""
    logits = read(student, params, rows).logits
    if teacher is None:
        acceptance = (jnp.argmax(logits, axis=-1) == rows.outputs).astype(jnp.float32)
    else:
        acceptance = 1.0 - total_variation(logits, read(teacher, teacher_params, rows).logits)
    return accepted_total(acceptance, rows.real, draft)


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
        self._settings, self._run, self._pairs = settings, run, pairs
        self._options: dict[str, Any] = {"seed": trainer.seed, "progress": trainer.progress}
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
            self.phases = StudentSamples(
                run, share, every, task, tokenizer, longest, **self._options
            )

    def training_pairs(self) -> TokenPairs:
        """The training pairs: references and samples."""
        draw = functools.partial(
            add_teacher_samples,
            self._pairs["training"],
            self._model,
            samples=self._settings.samples,
            room=self._room,
            **self._options,
        )
        return store_pairs(self._run, "teacher", draw)

    def _validation(self, text: str) -> KnownTexts:
        def write() -> TokenPairs:
            inputs, limits, places = with_room(self._pairs["validation"], self._room)
            if not inputs:
                raise UserError("no validation input leaves room for a text: add a longer bucket")
            if self._options["progress"]:
                say(f"the teacher writes {len(limits):,} {text} texts for the validation inputs")
            how = {"temperature": TEXTS[text], **self._options}
            return draw_pairs(self._model, inputs, limits, places, **how)

        pairs = store_pairs(self._run, ("validation", text), write)
        return KnownTexts(*zip(*(pairs[i] for i in range(len(pairs))), strict=True))
