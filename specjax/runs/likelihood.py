"""The perplexity of predictions under a model."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.errors import UserError
from specjax.evaluation.bootstrap import Sums, divided
from specjax.runs.scored import Predictions


class Likelihood:
    """Scores predictions by their probability under a model, at temperature 1.

    Args:
      model: a model, or its directory (see `specjax.text.load_text_model`).
      chat: whether each input is a user's message for the model's chat template; or options of the
        template.
      runs: the predictions to score, for checks before the model is loaded.

    Attributes:
      model: the model.

    Raises:
      FileNotFoundError: the directory is missing.
      TypeError: `model` is neither a path nor a model, or `chat` is not a bool.
      ValueError: the model cannot be loaded, or a row has no input.
    """

    def __init__(self, model: Any, chat: Any, runs: Sequence[Predictions]) -> None:
        # Imported here, because other scores need no models.
        from specjax.text import TextModel, load_text_model
        from specjax.text.directories import check_model_path, real_path
        from specjax.text.requests import checked_chat

        self._options = checked_chat("chat", chat)
        for run in runs:
            if None in run.inputs:
                raise UserError(
                    f"score needs the input of each row, and {run.path} has none in row "
                    f"{run.inputs.index(None)}: leave out score"
                )
        if not isinstance(model, TextModel):
            check_model_path("score", real_path(model))
            model = load_text_model(model)
        self.model = model

    def perplexity(self, run: Predictions) -> Sums:
        """Returns exp(nats / tokens) of the outputs; infinite if an output is impossible.

        An output counts with its end-of-sequence token, unless the length limit ended it. Rows
        without a prediction are left out.

        Raises:
          ValueError: an input has no tokens, or the model gives NaN.
        """
        from specjax.text.teacher_forcing import checked_outputs, score

        cut = np.zeros(len(run), bool) if run.counts is None else run.counts.cut
        rows = [row for row in range(len(run)) if row not in run.missing]
        texts = checked_outputs(self.model, [run.outputs[row] for row in rows], len(rows))
        texts = [text[: len(text) - cut[row]] for text, row in zip(texts, rows, strict=True)]
        rows = [row for row, text in zip(rows, texts, strict=True) if text.size]
        texts = [text for text in texts if text.size]
        sums = np.zeros((len(run), 3))
        if rows:
            prompts = [self._prompt(run, row) for row in rows]
            found = score(self.model, prompts, texts, None, False, None).log_probs
            for row, logs in zip(rows, found, strict=True):
                total = np.sum(logs, dtype=np.float64)
                known = np.isfinite(total)
                sums[row] = -total if known else 0.0, len(logs), not known
        return Sums(sums, _perplexity)

    def _prompt(self, run: Predictions, row: int) -> np.ndarray:
        from specjax.text.requests import encode

        text: Any = run.inputs[row]
        given = text if self._options is None else [{"role": "user", "content": text}]
        name, model = f"{run.path}: the input of row {row}", self.model
        return encode(given, name, model.model.vocab_size, model.tokenizer, self._options)


def _perplexity(sums: np.ndarray) -> np.ndarray:
    return np.where(sums[:, 2] > 0, np.inf, np.exp(divided(sums[:, 0], sums[:, 1])))
