"""What the body of a request asks for: prompts, the requests of an engine, and the engine's kind.

Every field is honoured, refused by name, or in the list of those that change no text.
"""

import dataclasses
import difflib
import functools
import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from specjax.errors import UserError
from specjax.processors import (
    FrequencyPenalty,
    JsonSchema,
    LogitBias,
    MinNewTokens,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
)
from specjax.serving.errors import RefusedError
from specjax.text import Decoder, Request
from specjax.text.parts import make_part
from specjax.text.requests import check_unicode
from specjax.text.stops import check_stops
from specjax.types import Processor, Sampling
from specjax.types.pytrees import host_values

# What clients send by habit, and what changes no text.
_WITHOUT_EFFECT = frozenset(
    [
        *("user", "metadata", "store", "service_tier", "parallel_tool_calls", "priority"),
        *("safety_identifier", "prompt_cache_key", "request_id"),
    ]
)
# A field -> the only values that are honoured.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "modalities": (["text"],),
    "length_penalty": (1.0,),
    "skip_special_tokens": (True,),
    "use_beam_search": (False,),
}
_SAMPLING = ("temperature", "top_p", "top_k")
_OF_BOTH = (
    *("model", "n", "seed", "stop", "stream", "stream_options", "max_tokens", "ignore_eos"),
    *("min_tokens", "logit_bias", "prediction", "response_format", "specjax", *_SAMPLING),
    *("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs"),
)
_OF_CHATS = (
    *("messages", "max_completion_tokens", "top_logprobs", "tools", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message"),
)
_OF_TEXTS = ("prompt", "echo")
_TEMPLATE = ("tools", "add_generation_prompt", "continue_final_message")
# The most rows of a request, and the most alternatives of a token.
MOST_CHOICES = 128
MOST_ALTERNATIVES = 20
# The most stop strings, their bytes together (each is a row of a table over the vocabulary), and
# the characters of a rule.
_MOST_STOPS = 16
_STOP_BYTES = 128
_RULE_LENGTH = 500
# What OpenAI's completions have by default.
_USUAL_LENGTH = 16


class Kind(NamedTuple):
    """What an engine must be compiled with for a request.

    Attributes:
      top_k, top_p: whether rows may have these filters.
      processors: of each of its processors what no request of the engine can change.
      rule: the same of the rule; None for the server's.
    """

    top_k: bool = False
    top_p: bool = False
    processors: tuple[str, ...] = ()
    log_probs: bool = False
    predictions: bool = False
    rule: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A body, read.

    Attributes:
      prompts: the tokens of each prompt.
      requests: a row each, all of the first prompt first; they differ in prompts and ids.
      top: the number of alternatives per token; None without log-probabilities.
      echo: whether the prompt's text comes first; `scored`: it is only read, nothing is written.
    """

    chat: bool
    prompts: list[np.ndarray]
    requests: list[Request]
    kind: Kind
    top: int | None = None
    echo: bool = False
    scored: bool = False
    stream: bool = False
    usage_at_end: bool = False
    usage_always: bool = False


def read_body(body: Any, decoder: Decoder, name: str, *, chat: bool) -> Asked:
    """Reads a body of `/v1/chat/completions` or `/v1/completions`; `name` is the model's.

    Raises:
      RefusedError: a field is wrong or cannot be honoured.
    """
    if not isinstance(body, dict):
        raise RefusedError("the body must be a JSON object")
    fields = {key: value for key, value in body.items() if value is not None}
    _check_names(fields, chat)
    if fields.get("model", name) != name:
        raise RefusedError(
            f"model must be {name!r}, the only one here, got {fields['model']!r:.80}",
            status=404,
            param="model",
            code="model_not_found",
        )
    rows = _whole(fields, "n", 1, 1, MOST_CHOICES)
    reading = _messages if chat else _texts
    prompts = _field("messages" if chat else "prompt", reading, fields, decoder, rows)
    stream = _flag(fields, "stream")
    options = fields.get("stream_options", {})
    known = {"include_usage", "continuous_usage_stats", "include_obfuscation"}
    if not isinstance(options, dict) or not known.issuperset(options):
        raise RefusedError(f"stream_options must be {' and '.join(sorted(known))}, each a flag")
    top = _alternatives(fields, chat)
    echo = _flag(fields, "echo")
    if echo and stream:
        raise RefusedError("echo cannot be streamed: leave out echo or stream", param="echo")
    if echo and top is not None and not decoder.main.continues_prompts:
        raise RefusedError(
            "logprobs must be left out with echo, because the model is an encoder-decoder, which "
            "gives prompts no probabilities",
            param="logprobs",
        )
    most = decoder.max_new_tokens
    name_of_limit = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    scored = echo and fields.get("max_tokens") == 0
    usual = most if chat else min(most, _USUAL_LENGTH)
    limit = _whole(fields, name_of_limit, usual, 0 if scored else 1, most)
    if scored and rows > 1:
        raise RefusedError("n must be 1 where nothing is written (max_tokens=0)", param="n")
    stop = _field("stop", _stops, fields)
    processors = tuple(_processors(fields, decoder, limit))
    rule, draft_limit = _field("specjax", _extension, fields, decoder)
    prediction = _field("prediction", _prediction, fields, decoder)
    drawn = {key: fields[key] for key in _SAMPLING if key in fields}
    if drawn.get("top_k") in (-1, 0):  # none, in vLLM
        del drawn["top_k"]
    for key in drawn:
        _field(key, lambda key=key: Sampling(**{key: cast(Any, _number(fields, key))}))
    sampling = Sampling(**drawn, processors=processors or None)
    kind = Kind(
        top_k="top_k" in drawn,
        top_p=drawn.get("top_p", 1.0) != 1.0,
        processors=tuple(_key(one) for one in processors),
        log_probs=top is not None,
        predictions=prediction is not None,
        rule=None if rule is None or _key(rule) == _key(decoder.rule) else _key(rule),
    )
    if not kind.top_p:
        sampling = dataclasses.replace(sampling, top_p=None)
    seed = _whole(fields, "seed", None, -(2**63), 2**63 - 1)
    seed = secrets.randbits(32) if seed is None else seed % 2**32
    # The ids of `decoder(prompts, num_samples=n, seed=seed)`, so its texts.
    requests = [
        Request(
            prompt,
            max_new_tokens=max(limit, 1),
            seed=seed,
            id=place * rows + sample,
            sampling=sampling,
            rule=rule,
            draft_limit=draft_limit,
            stop=stop,
            log_probs=None if top is None else True,
            prediction=prediction,
        )
        for place, prompt in enumerate(prompts)
        for sample in range(rows)
    ]
    return Asked(
        chat=chat,
        prompts=prompts,
        requests=requests,
        kind=kind,
        top=top,
        echo=echo,
        scored=scored,
        stream=stream,
        usage_at_end=_flag(options, "include_usage"),
        usage_always=_flag(options, "continuous_usage_stats"),
    )


def _check_names(fields: Mapping[str, Any], chat: bool) -> None:
    own, others = (_OF_CHATS, _OF_TEXTS) if chat else (_OF_TEXTS, _OF_CHATS)
    known = {*_OF_BOTH, *own, *_WITHOUT_EFFECT, *_FIXED}
    for name, value in fields.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else "leave it out"
            if name in others:
                remedy = f"it is a field of /v1/{'' if chat else 'chat/'}completions"
            raise RefusedError(f"{name} is unknown here: {remedy}", param=name)
        if name in _FIXED and value not in _FIXED[name]:
            allowed = " or ".join(json.dumps(each) for each in _FIXED[name])
            raise RefusedError(f"{name} must be {allowed} or left out, got {value!r}", param=name)


def _field(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """What a function makes of fields; its errors are refusals that name one."""
    try:
        return function(*args)
    except UserError as error:
        message, code = str(error), None
        if "tokens, the longest bucket holds" in message:
            # The rest is for who has the Decoder.
            message, code = f"{message.partition(':')[0]}: shorten it", "context_length_exceeded"
        raise RefusedError(message, param=name, code=code) from None


def _whole(fields: Mapping[str, Any], name: str, default: Any, low: int, high: int) -> Any:
    value = fields.get(name, default)
    if value is not default and (type(value) is not int or not low <= value <= high):
        raise RefusedError(
            f"{name} must be a whole number in {low} .. {high}, got {value!r:.80}", param=name
        )
    return value


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise RefusedError(f"{name} must be true or false, got {value!r:.80}", param=name)
    return value


def _number(fields: Mapping[str, Any], name: str) -> float:
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{name} must be a number, got {value!r:.80}")
    return value


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    stops = check_stops(fields.get("stop", ()))
    if len(stops) > _MOST_STOPS or sum(len(x.encode()) for x in stops) > _STOP_BYTES:
        raise UserError(f"stop may have {_MOST_STOPS} texts, {_STOP_BYTES} bytes in all")
    return stops


def _messages(fields: Mapping[str, Any], decoder: Decoder, rows: int) -> list[np.ndarray]:
    """The tokens of a chat, as the only prompt."""
    messages, more = fields.get("messages"), fields.get("chat_template_kwargs", {})
    if not isinstance(messages, list) or not messages:
        raise UserError('messages must be a list such as [{"role": "user", "content": "..."}]')
    # A template of a client's own may take long.
    if not isinstance(more, dict) or "{" in str(more.get("chat_template")):
        raise UserError(
            "chat_template_kwargs must be an object, in which chat_template is the name of one of "
            f"the model's templates, got {more!r:.80}"
        )
    options = {**more, **{name: fields[name] for name in _TEMPLATE if name in fields}}
    listed = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    return [decoder.encode(listed, "messages", chat_template_kwargs=options)]


def _message(message: Any, name: str) -> Any:
    """A message whose content is a text, not a list of parts."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(f"{name} must be an object with a role and a content, got {message!r:.80}")
    return {**message, "content": _text(message.get("content"), f"{name}.content")}


def _text(content: Any, name: str) -> Any:
    """A text, or None; parts become one."""
    if isinstance(content, list):
        parts: list[Any] = [x.get("text") if isinstance(x, dict) else None for x in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else 0
    if not isinstance(content, str | None):
        raise UserError(f'{name} must be a text or parts like {{"type": "text", "text": "..."}}')
    return content


def _texts(fields: Mapping[str, Any], decoder: Decoder, rows: int) -> list[np.ndarray]:
    """The tokens of each prompt."""
    prompt: Any = fields.get("prompt")
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    listed = prompt if several else [prompt]
    if not all(isinstance(each, str | list) for each in listed):
        raise UserError("prompt must be a text, token ids, or a list of these")
    if rows * len(listed) > MOST_CHOICES:
        raise UserError(
            f"a request may have {MOST_CHOICES} choices, got {rows * len(listed)}: give fewer "
            "prompts or a smaller n"
        )
    names = [f"prompt {i}" for i in range(len(listed))] if several else ["prompt"]
    return [decoder.encode(each, name) for each, name in zip(listed, names, strict=True)]


def _alternatives(fields: Mapping[str, Any], chat: bool) -> int | None:
    """The number of alternatives of each token, or None."""
    if not chat:
        return _whole(fields, "logprobs", None, 0, MOST_ALTERNATIVES)
    top = _whole(fields, "top_logprobs", 0, 0, MOST_ALTERNATIVES)
    if _flag(fields, "logprobs"):
        return top
    if top:
        raise RefusedError("top_logprobs needs logprobs=true", param="top_logprobs")
    return None


# A field -> its processor, and the value that changes nothing.
_STRENGTHS: Mapping[str, tuple[Callable[[Any], Processor], float]] = {
    "min_p": (MinP, 0.0),
    "presence_penalty": (PresencePenalty, 0.0),
    "frequency_penalty": (FrequencyPenalty, 0.0),
    "repetition_penalty": (RepetitionPenalty, 1.0),
}


def _processors(fields: Mapping[str, Any], decoder: Decoder, limit: int) -> list[Processor]:
    found: list[Processor] = []
    for name, (make, neutral) in _STRENGTHS.items():
        value = fields.get(name, neutral)
        if isinstance(value, bool) or value != neutral:
            found.append(_field(name, lambda make=make, name=name: make(_number(fields, name))))
    if fields.get("logit_bias"):
        found.append(_field("logit_bias", _bias, fields["logit_bias"]))
    shortest = limit if _flag(fields, "ignore_eos") else _whole(fields, "min_tokens", 0, 0, limit)
    if shortest:
        found.append(_field("min_tokens", MinNewTokens, shortest, decoder.tokenizer.eos_ids))
    schema = _field("response_format", _schema, fields.get("response_format", {"type": "text"}))
    return found if schema is None else [*found, schema]


def _bias(bias: Any) -> Processor:
    if not isinstance(bias, dict) or not all(str(key).isdecimal() for key in bias):
        raise UserError('logit_bias must be numbers by token id, such as {"50256": -100}')
    return LogitBias({int(key): _number(bias, key) for key in sorted(bias)})


def _schema(wanted: Any) -> Processor | None:
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "text":
        return None
    described = wanted.get("json_schema") if kind == "json_schema" else None
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise UserError(
            'response_format must be {"type": "text"} or {"type": "json_schema", "json_schema": '
            '{"schema": {...}}}; a json_object of any form is no regular language'
        )
    return _json_schema(json.dumps(schema))


@functools.lru_cache(maxsize=64)
def _json_schema(schema: str) -> Processor:
    return JsonSchema(schema)


def _extension(fields: Mapping[str, Any], decoder: Decoder) -> tuple[Any, int | None]:
    """The rule and the draft limit of `specjax`."""
    wanted = fields.get("specjax", {})
    if not isinstance(wanted, dict) or not {"rule", "draft_limit"}.issuperset(wanted):
        raise UserError('specjax must be like {"rule": "OPT(0.2)", "draft_limit": 3}')
    rule = wanted.get("rule")
    if rule is None:
        return None, wanted.get("draft_limit")
    if decoder.rule is None:
        raise UserError("specjax.rule must be left out, because this server's method has no rule")
    if not isinstance(rule, str) or len(rule) > _RULE_LENGTH:
        raise UserError(f'specjax.rule must be a text such as "OPT(0.2)", got {rule!r:.80}')
    made = make_part("rule", rule)
    if any(map(np.ndim, jax.tree.leaves(made))):
        raise UserError(f"specjax.rule must have a number for each strength, got {rule!r:.80}")
    return made, wanted.get("draft_limit")


def _prediction(fields: Mapping[str, Any], decoder: Decoder) -> np.ndarray | None:
    given = fields.get("prediction")
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("type") != "content":
        raise UserError('prediction must be {"type": "content", "content": "the expected text"}')
    content = _text(given.get("content", 0), "prediction.content") or ""
    if not decoder.method.predictions:
        raise UserError(
            "prediction must be left out, because no drafter here copies: start the server with "
            '--drafting "Lookup(min_match=2)"'
        )
    check_unicode(content, "prediction")
    ids = decoder.tokenizer.encode(content, add_special_tokens=False)
    return np.asarray(ids[: decoder.max_new_tokens], np.int32)


def _key(part: Any) -> str:
    """What is compiled of a rule or a processor: all but its strengths."""
    return f"{jax.tree.structure(part)} {host_values(part)!r}"
