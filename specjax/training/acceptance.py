"""How many drafted tokens a verifier would accept, measured without decoding.

Axes: B rows, T target tokens, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checks import whole_number
from specjax.compilation import jit
from specjax.data.batching import BucketedBatches
from specjax.models.config import ModelConfig
from specjax.training.divergences import total_variation
from specjax.training.task import Total
from specjax.training.text_task import TextTask, check_reads_alike
from specjax.types import Array, Params

# What the teacher writes, and the temperature at which it does so.
TEXTS = {"greedy": 0.0, "sampled": 1.0}
# `accepted_greedy` and `accepted_sampled` are the names of the figures.
PREFIX = "accepted_"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What is measured of a drafter with its teacher as the verifier.

    Attributes:
      texts: on which of the teacher's texts for the validation inputs: "greedy" (decoding at
        temperature 0), "sampled" (at temperature 1), both or none.
      draft: G, the tokens of a drafted block.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: for an unknown kind of texts, or a draft below 1.
    """

    texts: tuple[str, ...] = ()
    draft: int = 5

    def __post_init__(self) -> None:
        if isinstance(self.texts, str):
            raise TypeError(
                f"Acceptance: `texts` must be a tuple of names, got {self.texts!r}; write "
                f"({self.texts!r},)"
            )
        object.__setattr__(self, "texts", tuple(self.texts))
        for name in self.texts:
            if name not in TEXTS:
                raise ValueError(
                    f"Acceptance: `texts` must be among {', '.join(TEXTS)}, got {name!r}"
                )
        object.__setattr__(self, "draft", whole_number("Acceptance: draft", self.draft, low=1))

    def with_figure(self, name: str) -> "Acceptance":
        """The same, with the texts that a figure of this name is measured on."""
        text = name.removeprefix(PREFIX)
        if name == PREFIX + text and text in TEXTS and text not in self.texts:
            return dataclasses.replace(self, texts=(*self.texts, text))
        return self


def accepted_total(acceptance: Array, mask: Array, draft: int) -> Total:
    """Expected accepted tokens of blocks that start at each position of known texts.

    For a block before position t it is Σ_{i=1..G} Π_{j<i} a_{t+j}, where nothing is accepted past
    the end of the text.

    Args:
      acceptance: `[B, T]` float32, a: the probability that the token drafted at each position is
        accepted, given the text before it.
      mask: `[B, T]` bool, which positions are part of the text; they stand side by side.
      draft: G.

    Returns:
      The sum over positions, and their number.

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
    Blocks start at every position, with equal weights. For greedy texts the number of tokens that a
    block there gets accepted is exact: an accepted draft is the teacher's own text. For sampled
    texts the product is an approximation: along a drafted block acceptances are those at the
    drafted prefixes, here those at the prefixes of the teacher's text.

    Args:
      task: the student's task.
      text: "greedy" or "sampled".
      draft: G.
      batches: makes the batches of inputs with the teacher's texts; called once, when needed.
      teacher: the teacher's network; read for sampled texts alone.
      teacher_params: its parameters.

    Raises:
      ValueError: the teacher of sampled texts cannot be compared token by token.
    """

    def __init__(
        self,
        task: TextTask,
        text: str,
        draft: int,
        batches: Callable[[], BucketedBatches],
        teacher: ModelConfig,
        teacher_params: Params,
    ):
        self.name = f"validation_{PREFIX}{text}"
        self._make = batches
        self._batches: BucketedBatches | None = None
        config = teacher if text == "sampled" else None
        if config is not None:
            remedy = "measure greedy texts alone, or use another teacher"
            check_reads_alike(task.model, config, task.families, remedy)
        self._teacher_params = None if config is None else teacher_params
        self._step = _step(task, draft, config)

    def __call__(self, params: Params) -> dict[str, float]:
        """Measures parameters of the student.

        Args:
          params: on one device.

        Returns:
          `validation_accepted_<text>`: from 0 to G.
        """
        if self._batches is None:
            self._batches = self._make()
        total, items = 0.0, 0
        for batch in self._batches.epoch():
            found = jax.device_get(self._step(params, self._teacher_params, batch))
            total, items = total + float(found.sum), items + int(found.items)
        return {self.name: total / max(items, 1)}


@functools.lru_cache(maxsize=8)
def _step(task: TextTask, draft: int, teacher: ModelConfig | None) -> Callable[..., Total]:
    """Builds `step(params, teacher_params, batch)`, jitted; by sampled texts with a teacher."""

    @jit
    def step(params: Params, teacher_params: Params, batch: Any) -> Total:
        targets, mask = task.targets(batch)
        logits = task.logits(task.model, params, batch)
        if teacher is None:
            acceptance = (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32)
        else:
            reference = task.logits(teacher, teacher_params, batch)
            acceptance = 1.0 - total_variation(logits, reference)
        return accepted_total(acceptance, mask, draft)

    return step
