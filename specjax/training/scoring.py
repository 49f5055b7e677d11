"""Decoding and scoring texts with a network in training, through the Decoder that users have."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax.checks import whole_number
from specjax.data.examples import Example
from specjax.data.pairs import TokenPairs
from specjax.evaluation.metrics import METRICS, check_metrics, check_references
from specjax.models import model_from_config
from specjax.models.config import ModelConfig
from specjax.text import Decoder, TextModel
from specjax.tokenizers import Tokenizer
from specjax.training.progress import say
from specjax.types import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How outputs are decoded, greedily, and scored.

    Attributes:
      metrics: names in `specjax.evaluation.METRICS`; none for no decoding at all.
      max_new_tokens: of an output; one that reaches it is cut, counted and told.
      max_input_tokens: an input of more tokens is not decoded, and its output counts as empty: one
        damaged line must not exhaust the memory.
      max_examples: how many of each data set are scored, from its start; None for all.
      batch_size: rows decoded together.
      at_checkpoints: score the validation data at each checkpoint too, not only at the end.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: for a value outside its range, an unknown metric, or one that is not installed.
    """

    metrics: tuple[str, ...] = ("bleu",)
    max_new_tokens: int = 512
    max_input_tokens: int = 512
    max_examples: int | None = None
    batch_size: int = 64
    at_checkpoints: bool = False

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_input_tokens", "max_examples", "batch_size"):
            value = getattr(self, name)
            if name != "max_examples" or value is not None:
                object.__setattr__(self, name, whole_number(f"Evaluation: {name}", value, low=1))
        if isinstance(self.metrics, str):
            raise TypeError(
                f"Evaluation: `metrics` must be a tuple of names, got {self.metrics!r}; write "
                f"({self.metrics!r},)"
            )
        object.__setattr__(self, "metrics", tuple(self.metrics))
        check_metrics(self.metrics)
        if not isinstance(self.at_checkpoints, bool):
            raise TypeError(
                f"Evaluation: `at_checkpoints` must be True or False, got {self.at_checkpoints!r}"
            )


class Scorer:
    """Scores parameters of one network on one data set.

    The network is static to what is compiled, and parameters are not: scoring other parameters
    compiles nothing.

    Args:
      evaluation: the settings.
      config: the network.
      tokenizer: its tokenizer.
      examples: inputs with references.
      pairs: the same, tokenised: inputs as the network reads them.
      name: of the data, for figures and messages.
      progress: whether to tell progress and what is left out on stderr.

    Raises:
      ValueError: a reference that a metric cannot use.
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
        count = min(len(pairs), evaluation.max_examples or len(pairs))
        self._references = [example.targets or "" for example in examples[:count]]
        for metric in evaluation.metrics:
            check_references(METRICS[metric], self._references)
        inputs = [pairs[i][0] for i in range(count)]
        longest = evaluation.max_input_tokens
        self._inputs = {i: x for i, x in enumerate(inputs) if 1 <= len(x) <= longest}
        self.num_skipped = count - len(self._inputs)
        self._buckets = covering(self._inputs.values())

    def tell_skipped(self) -> None:
        """Says on stderr how many inputs cannot be decoded."""
        if self.num_skipped:
            say(
                f"{self.num_skipped} of {len(self._references)} {self._name} inputs are empty or "
                f"longer than {self._evaluation.max_input_tokens} tokens; they are not decoded, "
                "and their outputs count as empty"
            )

    def __call__(self, params: Params) -> dict[str, float]:
        """Decodes and scores.

        Args:
          params: the network's parameters.

        Returns:
          `<name>_<metric>` for each metric, 0 to 100, and `<name>_cut`, the number of outputs that
          the length limit ended; nothing without metrics.
        """
        if not self._evaluation.metrics:
            return {}
        texts = [""] * len(self._references)
        cut = 0
        if self._inputs:
            # One place, whatever devices the parameters come from: no second program for them.
            params = jax.device_put(params, jax.devices()[0])
            decoder = Decoder(
                TextModel(self._model, params, self._tokenizer),
                temperature=0.0,
                max_new_tokens=self._evaluation.max_new_tokens,
                batch_size=self._evaluation.batch_size,
                buckets=self._buckets,
            )
            prompts: Any = list(self._inputs.values())
            result = decoder(prompts, progress=None if self._progress else False)
            for place, text in zip(self._inputs, result.texts, strict=True):
                texts[place] = text
            cut = int(np.sum(~np.asarray(result.ended)))
        if cut and self._progress:
            say(
                f"{cut} of {len(texts)} {self._name} outputs were cut at max_new_tokens="
                f"{self._evaluation.max_new_tokens}; raise it if they are not endless"
            )
        figures = {m: METRICS[m](texts, self._references) for m in self._evaluation.metrics}
        return {f"{self._name}_{m}": v for m, v in figures.items()} | {f"{self._name}_cut": cut}


def covering(inputs: Any) -> tuple[int, ...]:
    """Powers of two from 16 up to the longest input: few shapes, each at most twice too long."""
    longest = max(map(len, inputs), default=0)
    lengths = [16]
    while lengths[-1] < longest:
        lengths.append(2 * lengths[-1])
    return tuple(lengths)
