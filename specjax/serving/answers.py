"""Finished rows as the answers of OpenAI's routes."""

import dataclasses
import difflib
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.serving.errors import RefusedError
from specjax.serving.fields import Asked
from specjax.text import Decoder
from specjax.text.results import Result, Row, TopTokens, finite, split


class Answer:
    """The answer to a request: its parts, whole or in chunks."""

    def __init__(self, asked: Asked, decoder: Decoder, model: str) -> None:
        self._asked, self._decoder = asked, decoder
        kind = "chat.completion" if asked.chat else "text_completion"
        prefix = "chatcmpl" if asked.chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if asked.stream and asked.chat else kind,
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, rows: Sequence[Row]) -> dict[str, Any]:
        """The answer with all choices; `rows` in the order of the requests."""
        choices = [self._choice(place, row) for place, row in enumerate(rows)]
        return {**self._head, "choices": choices, **self._about(rows)}

    def scored(self) -> dict[str, Any]:
        """The answer that only reads the prompts."""
        choices = [
            {
                "index": place,
                "text": self._text(prompt),
                "logprobs": self._read(prompt, []),
                "finish_reason": "length",
            }
            for place, prompt in enumerate(self._asked.prompts)
        ]
        return {**self._head, "choices": choices, "usage": self._usage([])}

    def chunk(self, place: int, text: str, row: Row | None, so_far: int) -> dict[str, Any]:
        """A part of a choice; with `row` its last. `so_far` counts tokens of all choices."""
        reason = None if row is None else _finish_reason(row)
        choice: dict[str, Any] = {"index": place, "finish_reason": reason}
        choice |= {"delta": {"content": text}} if self._asked.chat else {"text": text}
        choice["logprobs"] = None if row is None else self._log_probs(place, row)
        return self._part(choice, so_far)

    def first(self, place: int) -> dict[str, Any]:
        """The chunk that begins a message."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": place, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._part(choice, 0)

    def _part(self, choice: dict[str, Any], so_far: int) -> dict[str, Any]:
        part = {**self._head, "choices": [choice]}
        if self._asked.usage_always:
            part["usage"] = self._counts(so_far)
        elif self._asked.usage_at_end:
            part["usage"] = None
        return part

    def end(self, rows: Sequence[Row]) -> dict[str, Any]:
        """The last chunk, with the usage."""
        return {**self._head, "choices": [], **self._about(rows)}

    def _choice(self, place: int, row: Row) -> dict[str, Any]:
        choice = {
            "index": place,
            "logprobs": self._log_probs(place, row),
            "finish_reason": _finish_reason(row),
        }
        if self._asked.chat:
            return {**choice, "message": {"role": "assistant", "content": row.text}}
        before = self._text(self._prompt(place)) if self._asked.echo else ""
        return {**choice, "text": before + row.text}

    def _prompt(self, place: int) -> np.ndarray:
        asked = self._asked
        return asked.prompts[place * len(asked.prompts) // len(asked.requests)]

    def _text(self, tokens: Any) -> str:
        return self._decoder.tokenizer.decode(np.asarray(tokens).tolist())

    def _about(self, rows: Sequence[Row]) -> dict[str, Any]:
        drafts = Result(tuple(rows)).acceptance
        speculative = {
            "mean_acceptance_length": drafts.mean_acceptance_length,
            "draft_acceptance_rate": drafts.draft_acceptance_rate,
            "acceptance_histogram": list(drafts.accepted_lengths),
            "num_spec_steps": drafts.drafts,
            "num_accepted_draft_tokens": drafts.accepted_tokens,
            "num_draft_tokens": drafts.draft_tokens,
            "num_spec_tokens": self._decoder.method.max_draft,
        }
        return {
            "usage": self._usage(rows),
            "metrics": {"speculative_decoding": speculative if drafts.drafts else None},
            "specjax": self._promise(rows),
        }

    def _promise(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Whose distribution the texts follow; the nats are this answer's own estimate."""
        request = self._asked.requests[0]
        sampling: Any = request.sampling
        temperature = float(sampling.temperature)
        base = self._decoder.setting
        rule = base.rule if request.rule is None else request.rule
        setting = dataclasses.replace(base, temperature=temperature, rule=rule)
        if setting.is_lossless:
            return {"promise": "exact"}
        nats = None
        if temperature > 0.0:
            gap = sum(float(x.info.log_prob_target - x.info.log_prob_processed) for x in rows)
            nats = finite(gap / sum(int(row.info.emitted) for row in rows))
        return {"promise": "approximate", "rule": str(setting.rule), "nats_per_token": nats}

    def _counts(self, completion: int) -> dict[str, Any]:
        prompt = sum(map(len, self._asked.prompts))
        own = {"prompt_tokens": prompt, "completion_tokens": completion}
        return {**own, "total_tokens": prompt + completion}

    def _usage(self, rows: Sequence[Row]) -> dict[str, Any]:
        usage = self._counts(sum(int(row.info.emitted) for row in rows))
        usage["prompt_tokens_details"] = {"cached_tokens": self.cached(rows)}
        expected: Any = self._asked.requests[0].prediction
        if expected is not None:
            accepted = sum(_common(expected, row.tokens) for row in rows)
            rest = len(expected) * len(rows) - accepted
            details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rest}
            usage["completion_tokens_details"] = details
        return usage

    def cached(self, rows: Sequence[Row]) -> int:
        """The number of the prompts' tokens that were not read for the first row of each."""
        first = rows[:: len(self._asked.requests) // len(self._asked.prompts)]
        pairs = zip(self._asked.prompts, first, strict=False)  # none of scored prompts
        return sum(len(prompt) - row.prefilled for prompt, row in pairs)

    def _log_probs(self, place: int, row: Row) -> dict[str, Any] | None:
        """The log-probabilities under the verifier itself."""
        if self._asked.top is None:
            return None
        tokens = row.tokens_with_end.tolist()
        prompt = self._prompt(place)
        if self._asked.echo:
            return self._read(prompt, tokens)
        assert row.log_probs is not None
        own = [float(x) for x in row.log_probs]
        best = None
        if self._asked.top:
            top = self._asked.top
            best = self._decoder.score([prompt], [tokens], top_log_probs=top).top
        parts = split(row.text, tokens, self._decoder.text_after(prompt))
        if not self._asked.chat:
            return self._columns(parts, tokens, own, best[0] if best else None)
        content = []
        for i, (part, log_prob) in enumerate(zip(parts, own, strict=True)):
            others = [] if best is None else self._best(best[0], i).items()
            content.append(
                {
                    **_named(part, log_prob),
                    "top_logprobs": [_named(text, value) for text, value in others],
                }
            )
        return {"content": content, "refusal": None}

    def _read(self, prompt: np.ndarray, output: Sequence[int]) -> dict[str, Any] | None:
        """The log-probabilities of a prompt's tokens but the first, and of an output's."""
        top = self._asked.top
        if top is None:
            return None
        tokens = [*prompt.tolist(), *output]
        # The others are an output of the first.
        best, own = None, []
        if len(tokens) > 1:
            rest = np.asarray(tokens[1:], np.int32)
            scores = self._decoder.score([prompt[:1]], [rest], top_log_probs=top or None)
            own = [float(x) for x in scores.log_probs[0]]
            best = scores.top[0] if scores.top else None
        parts = split(self._text(tokens), tokens, self._text)
        columns = self._columns(parts[1:], tokens[1:], own, best)
        alternatives = columns["top_logprobs"]
        return {
            "tokens": [parts[0], *columns["tokens"]],
            "token_logprobs": [None, *columns["token_logprobs"]],
            "top_logprobs": alternatives and [None, *alternatives],
            "text_offset": [0, *(len(parts[0]) + x for x in columns["text_offset"])],
        }

    def _columns(
        self, parts: Sequence[str], tokens: Sequence[int], own: list[float], best: TopTokens | None
    ) -> dict[str, Any]:
        alternatives = None
        if best is not None:
            alternatives = []
            for i, (part, token) in enumerate(zip(parts, tokens, strict=True)):
                found = self._best(best, i)
                if token not in best.tokens[i]:  # it is always there, with the same float
                    found[_unused(part, token, found)] = _log(own[i])
                alternatives.append(found)
        offsets = np.cumsum([0, *map(len, parts)])[:-1].tolist()
        return {
            "tokens": list(parts),
            "token_logprobs": [_log(x) for x in own],
            "top_logprobs": alternatives,
            "text_offset": offsets,
        }

    def _best(self, best: TopTokens, place: int) -> dict[str, float | None]:
        """The most probable tokens by their texts."""
        found: dict[str, float | None] = {}
        for token, value in zip(best.tokens[place], best.log_probs[place], strict=True):
            if np.isfinite(value):
                found[_unused(self._text([int(token)]), int(token), found)] = float(value)
        return found


def check_finite(row: Row) -> Row:
    """Refuses a row in which a model gave NaN."""
    if row.error is not None:
        raise RefusedError(f"the output was cut: {row.error}", status=500)
    return row


def _finish_reason(row: Row) -> str:
    return "length" if row.ended_by == "length" else "stop"


def _log(value: float | None) -> float | None:
    """A log-probability for JSON: an impossible token's as OpenAI writes it; None if unknown."""
    return None if value is None or math.isnan(value) else max(value, -9999.0)


def _unused(text: str, token: int, found: Mapping[str, Any]) -> str:
    """A token's text, or if another has the same (such as a part of a character) its id."""
    return f"token_id:{token}" if text in found else text


def _named(text: str, log_prob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": _log(log_prob), "bytes": list(text.encode())}


def _common(expected: np.ndarray, tokens: np.ndarray) -> int:
    """The number of a prediction's tokens that are in the output, in their order."""
    matcher = difflib.SequenceMatcher(None, expected.tolist(), tokens.tolist(), autojunk=False)
    return sum(block.size for block in matcher.get_matching_blocks())
