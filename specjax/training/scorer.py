"""Decodes and scores texts with a network in training, through the `Decoder` for users."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax.checks import check_flag, tuple_text, whole_number
from specjax.data.batching import TokenPairs
from specjax.data.examples import Example
from specjax.errors import UserError
from specjax.evaluation.metrics import METRICS, check_metrics, check_references
from specjax.models import ModelConfig, model_from_config
from specjax.text import Decoder, TextModel
from specjax.tokenizers import Tokenizer
from specjax.training.progress import say
from specjax.training.samples import covering
from specjax.types import Params, Sampling


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
        for name in ("max_new_tokens", "max_input_tokens", "limit", "batch_size"):
            value = getattr(self, name)
            if name != "limit" or value is not None:
                object.__setattr__(self, name, whole_number(f"Evaluation: {name}", value, low=1))
        if isinstance(self.metrics, str):
            raise UserError(
                f"Evaluation: `metrics` must be a tuple of names, got {self.metrics!r}; write "
                f"{tuple_text(self.metrics)}"
            )
        object.__setattr__(self, "metrics", tuple(self.metrics))
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
        self.num_skipped = count - len(self._inputs)
        if self.num_skipped and progress and evaluation.metrics:
            say(
                f"skipped {self.num_skipped} of {count} {name} inputs, which are empty or longer "
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
                buckets=covering(self._inputs.values()),
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
