"""On-policy distillation: the teacher corrects texts that the student itself has drawn."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specjax.checks import checked, whole_number
from specjax.data.batching import BucketedBatches
from specjax.data.pairs import TokenPairs
from specjax.models import model_from_config
from specjax.runs.run_directory import RunDirectory
from specjax.text import TextModel
from specjax.tokenizers import Tokenizer
from specjax.training.distillation import Writer, joined, stored_samples
from specjax.training.progress import say
from specjax.training.text_task import TextTask
from specjax.types import Params

STUDENT_SAMPLES_NAME = "student_samples"
# Apart from the streams of the data's order, which begin with the same seed.
_CHOICE, _DRAWS = 1, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnPolicy:
    """How much of the training is on the student's own texts.

    Attributes:
      share: of the rows, in [0, 1], how many have a target that the student has drawn; the others
        have references and samples of the teacher.
      refresh_every: updates after which the student draws anew.

    Raises:
      TypeError: for a value that is not a number.
      ValueError: for a value outside its range.
    """

    share: float = 0.0
    refresh_every: int = 200

    def __post_init__(self) -> None:
        checked("OnPolicy: share", self.share, low=0.0, high=1.0)
        every = whole_number("OnPolicy: refresh_every", self.refresh_every, low=1)
        object.__setattr__(self, "refresh_every", every)


class StudentSamples:
    """The `Phases` in which a share of the rows has targets of the student.

    At a phase's start the student, with the parameters that would be evaluated then, draws at
    temperature 1 for those inputs of the phase whose rows the seed has chosen, and no others. Each
    target has at most the room that its batch leaves; one that reaches it has no
    end-of-sequence token, which the student has not drawn. They are kept in
    `student_samples/<step>.npz`, from which a resumed run reads them. The first phase has none: an
    untrained student writes noise.

    Args:
      run: the run's directory, with `STUDENT_SAMPLES_NAME` among what it makes.
      on_policy: the share, and the length of the phases.
      task: the student's task.
      tokenizer: the student's.
      longest: the last bucket, in tokens.
      seed: of the choice of rows and of the draws.
      batch_size: rows decoded together.
      progress: whether to tell progress on stderr.

    Source: Agarwal et al. 2024 (GKD, algorithm 1, with the student of up to `refresh_every` updates
    ago); Zhou et al. 2024 (DistillSpec).
    """

    def __init__(
        self,
        run: RunDirectory,
        on_policy: OnPolicy,
        task: TextTask,
        tokenizer: Tokenizer,
        *,
        longest: int,
        seed: int,
        batch_size: int = 64,
        progress: bool = True,
    ):
        self._run, self._settings, self._task = run, on_policy, task
        self._tokenizer, self._longest, self._seed = tokenizer, longest, seed
        self._batch_size, self._progress = batch_size, progress

    @property
    def every(self) -> int:
        """See `Phases`."""
        return self._settings.refresh_every

    def begin(
        self, batches: BucketedBatches, step: int, params: Params | None
    ) -> Callable[[int], Any]:
        """See `Phases`."""
        if step == 0:
            return batches.batch
        chosen = {s: self._chosen(batches, s) for s in range(step, step + self.every)}
        name = f"{STUDENT_SAMPLES_NAME}/{step}.npz"
        draw = functools.partial(self._draw, name, batches, chosen, step, params)
        drawn = stored_samples(self._run, name, draw)
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
        return [i for i, x in enumerate(inputs) if draws[i] < self._settings.share and len(x)]

    def _draw(
        self,
        name: str,
        batches: BucketedBatches,
        chosen: Mapping[int, list[int]],
        start: int,
        params: Params | None,
    ) -> TokenPairs:
        if params is None:
            raise ValueError(
                f"{self._run.path / name} is missing, and the run has gone on from step {start}, "
                "whose parameters drew it: put a copy of it there, or choose another output_dir"
            )
        inputs, limits = [], []
        for step, rows in chosen.items():
            step_inputs, length = batches.inputs(step)
            inputs += [step_inputs[row] for row in rows]
            limits += [self._task.target_room(len(step_inputs[row]), length) for row in rows]
        if self._progress:
            say(f"step {start:,}: the student draws {len(inputs):,} targets")
        seed = np.random.default_rng([self._seed, start, _DRAWS]).integers(2**32)
        write = Writer(
            TextModel(model_from_config(self._task.model), params, self._tokenizer),
            # The same for all phases, which so share their programs.
            longest=self._longest,
            longest_input=self._longest,
            seed=int(seed),
            batch_size=self._batch_size,
            progress=self._progress,
        )
        return joined(inputs, write(inputs, limits, range(len(inputs))))
