"""Targets that models draw for a run, once; they are kept in its directory.

Source: Kim and Rush 2016; Agarwal et al. 2024 (GKD); Zhou et al. 2024 (DistillSpec).
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specjax.data.batching import BucketedBatches, TokenPairs
from specjax.errors import UserError
from specjax.models import model_from_config
from specjax.runs.run_directory import Key, RunDirectory, Store
from specjax.text import Decoder, TextModel
from specjax.tokenizers import Tokenizer
from specjax.training.progress import say
from specjax.training.tasks import TextTask
from specjax.types import Params, Sampling

SAMPLES_NAME = "samples"
# Separate from the streams of the data's order, which begin with the same seed.
_CHOICE, _DRAWS = 1, 2


def covering(inputs: Iterable[Any]) -> tuple[int, ...]:
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
            buckets=covering(inputs if longest is None else [range(longest)]),
        )
        prompts: Any = list(inputs)
        drawn = decoder(
            prompts,
            seed=seed,
            ids=list(ids),
            max_new_tokens=list(limits),
            progress=None if progress else False,
        )
        end = np.asarray(model.tokenizer.eos_ids[:1], np.int32)
        for tokens, ended in zip(drawn.tokens, drawn.ended, strict=True):
            targets.append(np.concatenate([tokens, end[: int(ended)]]))
    return TokenPairs.of([part for pair in zip(inputs, targets, strict=True) for part in pair])


def add_teacher_samples(
    pairs: TokenPairs,
    teacher: TextModel,
    *,
    samples: int,
    room: Callable[[int], int],
    seed: int,
    batch_size: int = 64,
    progress: bool = True,
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
        options: dict[str, Any] = {"seed": seed, "batch_size": batch_size, "progress": progress}
        drawn.append(draw_pairs(teacher, inputs, limits, ids, **options))
    return TokenPairs.of([x for pairs in drawn for i in range(len(pairs)) for x in pairs[i]])


def with_room(
    pairs: TokenPairs, room: Callable[[int], int]
) -> tuple[list[np.ndarray], list[int], list[int]]:
    """The inputs that leave room for a target: their tokens, the room and their places."""
    every = [(pairs[i][0], room(len(pairs[i][0])), i) for i in range(len(pairs))]
    fitting = [(x, limit, i) for x, limit, i in every if len(x) and limit > 0]
    return [x for x, _, _ in fitting], [n for _, n, _ in fitting], [i for _, _, i in fitting]


def stored_pairs(run: RunDirectory, key: Key, draw: Callable[[], TokenPairs]) -> TokenPairs:
    """Pairs that `draw` makes once; then they are read from the run's directory."""
    store = Store(run, SAMPLES_NAME)
    record = store.get(key)
    if record is not None:
        return TokenPairs(**record.arrays)
    pairs = draw()
    store.put(key, None, {"tokens": pairs.tokens, "offsets": pairs.offsets})
    return pairs


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

    def __init__(
        self,
        run: RunDirectory,
        share: float,
        every: int,
        task: TextTask,
        tokenizer: Tokenizer,
        *,
        longest: int,
        seed: int,
        batch_size: int = 64,
        progress: bool = True,
    ):
        self._run, self._share, self.every, self._task = run, share, every, task
        self._tokenizer, self._longest, self._seed = tokenizer, longest, seed
        self._batch_size, self._progress = batch_size, progress

    def begin(
        self, batches: BucketedBatches, step: int, params: Params | None
    ) -> Callable[[int], Any]:
        if step == 0:
            return batches.batch
        chosen = {s: self._chosen(batches, s) for s in range(step, step + self.every)}
        draw = functools.partial(self._draw, batches, chosen, step, params)
        drawn = stored_pairs(self._run, ("student", step), draw)
        places = [(s, row) for s, rows in chosen.items() for row in rows]
        targets: dict[int, dict[int, np.ndarray]] = {s: {} for s in chosen}
        for i, (s, row) in enumerate(places):
            targets[s][row] = drawn[i][1]
        return lambda s: batches.batch(s, targets[s])

    def _chosen(self, batches: BucketedBatches, step: int) -> list[int]:
        """The rows of a batch whose targets the student draws."""
        inputs, _ = batches.inputs(step)
        draws = np.random.default_rng([self._seed, step, _CHOICE]).random(len(inputs))
        # An empty input cannot be decoded.
        return [i for i, x in enumerate(inputs) if draws[i] < self._share and len(x)]

    def _draw(
        self,
        batches: BucketedBatches,
        chosen: Mapping[int, list[int]],
        start: int,
        params: Params | None,
    ) -> TokenPairs:
        if params is None:
            raise UserError(
                f"the student's samples of step {start} are missing in {self._run.path}/"
                f"{SAMPLES_NAME}, and the parameters that drew them are no longer known: put a "
                "copy of the samples there, or choose another output_dir"
            )
        inputs, limits = [], []
        for step, rows in chosen.items():
            step_inputs, length = batches.inputs(step)
            inputs += [step_inputs[row] for row in rows]
            limits += [self._task.target_room(len(step_inputs[row]), length) for row in rows]
        if self._progress:
            say(f"step {start:,}: the student draws {len(inputs):,} targets")
        seed = np.random.default_rng([self._seed, start, _DRAWS]).integers(2**32)
        return draw_pairs(
            TextModel(model_from_config(self._task.model), params, self._tokenizer),
            inputs,
            limits,
            range(len(inputs)),
            seed=int(seed),
            longest=self._longest,
            batch_size=self._batch_size,
            progress=self._progress,
        )
