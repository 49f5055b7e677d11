"""The log-probabilities of given outputs, token by token, from one pass without decoding."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax.checks import shown, whole_number
from specjax.errors import UserError
from specjax.text import prompts as prompts_lib
from specjax.text.known_texts import KnownTexts, with_top
from specjax.text.requests import checked_sampling
from specjax.text.results import Row, TopTokens
from specjax.text.text_models import TextModel
from specjax.types import Sampling


@dataclasses.dataclass(frozen=True, eq=False)
class OutputScores:
    """The log-probabilities of n outputs, in nats.

    Attributes:
      log_probs: for each output `[m]` float32, of its tokens; -inf for impossible tokens.
      prompt_log_probs: for each prompt of m tokens `[m - 1]` float32, of all but its first; or
        None.
      top: for each output the most probable tokens at each of its positions, or None.
    """

    log_probs: list[np.ndarray]
    prompt_log_probs: list[np.ndarray] | None = None
    top: list[TopTokens] | None = None

    @property
    def totals(self) -> np.ndarray:
        """`[n]` float64, the log-probability of each output."""
        return np.array([np.sum(row, dtype=np.float64) for row in self.log_probs])

    @property
    def perplexities(self) -> np.ndarray:
        """`[n]` float64, of each output: exp(-total / tokens)."""
        return np.exp(-self.totals / [len(row) for row in self.log_probs])

    def ranked(self) -> list[int]:
        """Returns the places of the outputs, the most probable first; of equal ones the first."""
        return np.argsort(-self.totals, kind="stable").tolist()


def checked_outputs(model: TextModel, outputs: Any, count: int) -> list[np.ndarray]:
    """Returns the tokens of `count` outputs; see `Decoder.score`.

    Raises:
      TypeError: `outputs` is a single text, or an entry is of a wrong type.
      ValueError: there are not `count` outputs, or one has no tokens or is no text.
    """
    if isinstance(outputs, str) or not isinstance(outputs, Sequence | np.ndarray):
        raise UserError(
            f"outputs must be a list of texts, lists of token ids or rows, got {shown(outputs)}"
        )
    if len(outputs) != count:
        raise UserError(
            f"outputs has {len(outputs)} entries, but there are {count} prompts: give an output "
            "for each prompt; repeat a prompt for several outputs"
        )
    return [_tokens(model, output, f"output {i}") for i, output in enumerate(outputs)]


def _tokens(model: TextModel, output: Any, name: str) -> np.ndarray:
    words, ids = model.tokenizer, output
    if isinstance(output, Row):
        ids = [*output.tokens.tolist(), *([] if output.eos_id is None else [output.eos_id])]
    elif isinstance(output, str):
        prompts_lib.check_unicode(output, name)
        ids = [*words.encode(output, add_special_tokens=False), words.eos_ids[0]]
    elif not isinstance(output, Sequence | np.ndarray):
        raise UserError(
            f"{name} must be a text, a list of token ids or a row of a result, got {shown(output)}"
        )
    return prompts_lib.encode(ids, name, model.model.vocab_size)


def check_top(model: TextModel, top: Any) -> None:
    """Raises TypeError or ValueError unless `top` is None or a number of the model's tokens."""
    size = model.model.vocab_size
    if top is not None and whole_number("top_log_probs", top, low=1) > size:
        raise UserError(f"top_log_probs must be at most the vocabulary's size {size}, got {top}")


def with_tops(
    model: TextModel, prompts: Sequence[np.ndarray], rows: Sequence[Row], top: int
) -> tuple[Row, ...]:
    """Returns the rows with their `top`; a row in which a model gave NaN stays as it is.

    Args:
      model: the verifier, which reads the outputs once more.
      prompts: the tokens of each row's prompt.
      rows: the rows.
      top: k.

    Raises:
      ValueError: the verifier gives NaN.
    """
    found = list(rows)
    places = [i for i, row in enumerate(rows) if row.error is None]
    if places:
        outputs = [_tokens(model, rows[i], f"row {i}") for i in places]
        scores = score(model, [prompts[i] for i in places], outputs, None, False, top)
        for i, best in zip(places, scores.top or (), strict=True):
            found[i] = dataclasses.replace(rows[i], top=best)
    return tuple(found)


def score(
    model: TextModel,
    prompts: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    sampling: Sampling | None,
    of_prompts: bool,
    top: int | None,
) -> OutputScores:
    """Returns the scores of outputs; see `Decoder.score`."""
    drawn = checked_sampling(sampling)
    if drawn.processors is not None:
        raise UserError(
            "sampling must have no processors, because scores have none: leave them out"
        )
    if any(np.ndim(leaf) for leaf in jax.tree.leaves(drawn)):
        raise UserError(f"sampling must have a single value per field, got {drawn}")
    check_top(model, top)
    if of_prompts and not model.continues_prompts:
        raise UserError(
            f"prompt_log_probs must be False, because {model.name} is an encoder-decoder, which "
            "gives prompts no probabilities"
        )
    texts, ends = KnownTexts(prompts, outputs), [0] * len(prompts)
    if of_prompts:
        # All but the first token are read as an output.
        pairs = zip(prompts, outputs, strict=True)
        rest = [np.concatenate([prompt[1:], output]) for prompt, output in pairs]
        texts = KnownTexts([prompt[:1] for prompt in prompts], rest)
        ends = [len(prompt) - 1 for prompt in prompts]
    found = list(zip(with_top(model, texts, drawn, top or 0), ends, strict=True))
    return OutputScores(
        [row[end:] for (row, _), end in found],
        [row[:end] for (row, _), end in found] if of_prompts else None,
        [TopTokens(*(x[end:] for x in best)) for (_, best), end in found] if top else None,
    )
