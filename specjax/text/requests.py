"""Prompts, and requests of an engine; each value is checked here, where a user gives it.

Axes: n prompts of a call, L tokens of a prompt, G longest draft.
"""

import contextlib
import dataclasses
import itertools
import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int32

from specjax.checks import check_flag, shown, whole_number
from specjax.decoding import Method
from specjax.errors import UserError
from specjax.text.stops import check_stops
from specjax.tokenizers import Tokenizer
from specjax.tokenizers.chat_template import plain
from specjax.tokenizers.tokenizer import warn_of_two_bos
from specjax.types import Processor, Rule, Sampling
from specjax.types.pytrees import host_values

Prompt = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, Any]]
DRAWN = ("temperature", "top_k", "top_p")
# The options of a `Decoder` that `check_decoding` checks.
CHECKED = ("stop", "buckets", "max_new_tokens", "batch_size")
_WORD = 2**32 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """The request of a row; the engine's values replace None.

    Attributes:
      prompt: `[L]` token ids; also a text or a chat, if the engine has a tokenizer. In an engine
        with a prefix it is the rest of the prompt.
      max_new_tokens: the most tokens to emit.
      seed: in 0 .. 2**32 - 1.
      id: in 0 .. 2**32 - 1; randomness depends only on the seed and the id. None: the next whose
        samples have no id of an earlier request without an id, so that equal requests differ: 0, 1,
        2, ... if all requests have equally many samples.
      sampling: temperature, top-k and top-p, a number each; also the engine's processors with other
        strengths.
      rule: the engine's rule with other strengths.
      draft_limit: the longest block in 0 .. G; None: G, which GreedyBlock requires.
      stop: its stop strings instead of the engine's; () for none.
      num_samples: the number of its outputs, a multiple of the engine's. With n of them, sample j
        has the id `id * n + j`, which must be in the same range.
      log_probs: False leaves log-probabilities out of its rows; True is possible if the engine
        keeps them.
    """

    prompt: Prompt
    max_new_tokens: int | None = None
    seed: int = 0
    id: int | None = None
    sampling: Sampling | None = None
    rule: Rule | None = None
    draft_limit: int | None = None
    stop: str | Sequence[str] | None = None
    num_samples: int | None = None
    log_probs: bool | None = None


class Limits(NamedTuple):
    """The limits of requests.

    Attributes:
      method: the method.
      prompt_length: the longest prompt.
      max_new_tokens: the longest output.
      sampling: the defaults of requests; a field that is None here must be None in requests.
      rule: likewise, or None.
      num_samples: the number of samples of each request.
      log_probs: whether log-probabilities are kept.
    """

    method: Method
    prompt_length: int
    max_new_tokens: int
    sampling: Sampling
    rule: Rule | None
    num_samples: int = 1
    log_probs: bool = False


class Contexts:
    """Warns once if a prompt is longer than a model was trained for.

    Args:
      named: model's name -> its `TextModel.context`.
    """

    def __init__(self, named: Mapping[str, int | None]) -> None:
        lengths = [(length, name) for name, length in named.items() if length is not None]
        self._shortest = min(lengths, default=None)

    def check(self, length: int) -> None:
        if self._shortest is None or length <= self._shortest[0]:
            return
        context, name = self._shortest
        self._shortest = None
        warnings.warn(
            f"a prompt has {length} tokens, but {name} was trained for {context} positions "
            "(max_position_embeddings): its outputs may be poor; give shorter prompts",
            stacklevel=3,
        )


def as_list(prompts: Any) -> list[Prompt]:
    """Returns the prompts of a call as a list."""
    wrong = str | bytes | Mapping | AbstractSet  # a single prompt, or without an order
    if isinstance(prompts, wrong) or not isinstance(prompts, Iterable):
        raise UserError(
            "prompts must be a list of texts, lists of token ids or chats, such as ['A text.'], "
            f"got {type(prompts).__name__}: {str(prompts)[:60]}"
        )
    listed = list(prompts)
    if not listed:
        raise UserError("prompts is empty: give at least one prompt")
    return listed


def encode(
    prompt: Prompt,
    name: str,
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Int32[np.ndarray, " L"]:
    """Returns the tokens of a prompt.

    Args:
      prompt: a text, token ids, or the messages of a chat (dicts with `role` and `content`).
      name: its name in messages.
      vocab_size: V of the model.
      tokenizer: the tokenizer of the model; without it a prompt must be token ids.
      chat_template_kwargs: options of `Tokenizer.encode_chat`, for the messages of a chat.
    """
    ids: Any
    is_chat = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    if tokenizer is not None and isinstance(prompt, str):
        if not prompt.strip():
            raise UserError(f"{name} is empty: add text, or leave it out")
        check_unicode(prompt, name)
        with _named(name):
            ids = tokenizer.encode(prompt)
    elif tokenizer is not None and is_chat:
        messages: Any = prompt
        for message in messages:
            if isinstance(message, Mapping):
                check_unicode(str(message.get("content")), name)
        with _named(name):
            ids = tokenizer.encode_chat(messages, **chat_template_kwargs or {})
    else:
        ids = _token_ids(prompt, name)
        if isinstance(tokenizer, Tokenizer):
            warn_of_two_bos(tokenizer, ids, "remove one")
    array = np.asarray(ids)
    if not array.size:
        raise UserError(f"{name} has no tokens: add text, or leave it out")
    bad = (array < 0) | (array >= vocab_size)  # before the cast to int32
    if bad.any():
        raise UserError(
            f"{name} has token {array[bad][0]}: tokens must be in 0 .. {vocab_size - 1}"
        )
    return array.astype(np.int32)


@contextlib.contextmanager
def _named(prompt: str) -> Iterator[None]:
    """Puts the prompt's name before the message of an error."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{prompt}: {error}") from None


def _token_ids(prompt: Any, name: str) -> np.ndarray:
    try:
        array = np.asarray(prompt)
    except (TypeError, ValueError):  # lists of different lengths
        array = np.empty((1, 1))
    if array.ndim == 1 and (array.dtype.kind in "iu" or not array.size):
        return array
    hint = ""
    if isinstance(prompt, int | np.integer | Mapping):
        hint = " (give a single prompt as a list: [prompt])"
    raise UserError(
        f"{name} must be a text, a list of token ids or a list of chat messages, got "
        f"{shown(prompt)}{hint}"
    )


def check_unicode(text: str, name: str) -> None:
    """Refuses half a surrogate pair, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{name} has half a surrogate pair at character {error.start + 1}: correct or remove "
            "this character"
        ) from None


def shortened(tokenizer: Tokenizer, tokens: np.ndarray, longest: int, side: str) -> np.ndarray:
    """Cuts the tokens of a prompt that is too long; keeps the tokenizer's special tokens.

    `side` is "end", where seqio cuts too, or "beginning".
    """
    if len(tokens) <= longest:
        return tokens
    first = int(tokenizer.add_bos and tokens[0] == tokenizer.bos_id and longest > 1)
    last = int(tokenizer.add_eos and tokens[-1] in tokenizer.eos_ids and longest > 1 + first)
    head, body, tail = np.split(tokens, [first, len(tokens) - last])
    length = longest - first - last
    body = body[:length] if side == "end" else body[len(body) - length :]
    return np.concatenate([head, body, tail])


def check_truncate(truncate: Any) -> None:
    """Refuses what is no place where a long prompt is cut."""
    if truncate not in (None, "end", "beginning"):
        raise UserError(f"truncate must be None, 'end' or 'beginning', got {truncate!r}")


def checked_template_kwargs(options: Any) -> dict[str, Any]:
    """Returns a plain copy of the options of a chat template; {} for None."""
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise UserError(
            "chat_template_kwargs must be options by name, such as {'enable_thinking': False}, got "
            f"{options!r}"
        )
    # Arguments of the renderer, which no template reads.
    if reserved := [name for name in ("messages", "template", "self") if name in options]:
        raise UserError(
            f"chat_template_kwargs must not have {reserved[0]}: give messages as a prompt, and a "
            "template as chat_template"
        )
    return plain("chat_template_kwargs", dict(options))


def checked_chat(name: str, chat: Any) -> dict[str, Any] | None:
    """Returns the options of the chat template for inputs that are messages, or None for texts.

    Args:
      name: the name of the value in messages.
      chat: whether inputs are messages of the user; or options of the chat template.
    """
    if isinstance(chat, Mapping):
        return checked_template_kwargs(chat)
    if not isinstance(chat, bool):
        raise UserError(
            f"{name} must be True or False, or options of the chat template such as "
            f"{{'enable_thinking': False}}, got {chat!r}"
        )
    return {} if chat else None


def check_buckets(buckets: Any) -> tuple[int, ...]:
    """Returns the checked lengths of buckets."""
    lengths: Any = tuple(buckets) if isinstance(buckets, Sequence | np.ndarray) else ()
    numbers = all(isinstance(x, int | float | np.number) for x in lengths)
    whole = numbers and all(x >= 1 and float(x).is_integer() for x in lengths)
    if not lengths or not whole or any(a >= b for a, b in itertools.pairwise(lengths)):
        raise UserError(
            f"buckets must be increasing lengths in tokens, such as (64, 128), got {shown(buckets)}"
        )
    return tuple(map(int, lengths))


def check_decoding(options: Mapping[str, Any]) -> None:
    """Checks the arguments of a `Decoder` in `CHECKED`, by name, before models are read."""
    check_stops(options.get("stop"))
    if options.get("buckets") is not None:
        check_buckets(options["buckets"])
    for name in ("max_new_tokens", "batch_size"):
        whole_number(name, options.get(name, 1), low=1)


def checked_sampling(value: Any) -> Sampling:
    """Returns a checked `Sampling`, by default at temperature 1."""
    if not isinstance(value, Sampling | None):
        raise UserError(f"sampling must be Sampling(temperature=...), got {value!r}")
    return Sampling() if value is None else value


def check_length(tokens: np.ndarray, longest: int, name: str = "the prompt") -> None:
    """Refuses prompts that no bucket holds."""
    if len(tokens) > longest:
        raise UserError(
            f"{name} has {len(tokens)} tokens, the longest bucket holds "
            f"{longest}: shorten it, or set buckets=(..., {len(tokens)}) (for an "
            f"engine, prompt_length={len(tokens)})"
        )


def check_request(request: Request, tokens: np.ndarray, limits: Limits, name: str = "") -> None:
    """Checks a request, so that it does not fail when it enters a slot.

    Args:
      request: the request.
      tokens: its prompt.
      limits: the limits.
      name: the prompt's name in messages.
    """
    check_length(tokens, limits.prompt_length, name or "the prompt")
    of = f" of {name}" if name else ""
    samples = checked_samples(request, limits, of)
    if request.log_probs is not None:
        check_flag(f"log_probs{of}", request.log_probs)
        if request.log_probs and not limits.log_probs:
            raise UserError(f"log_probs{of} must be left out: make the engine with log_probs=True")
    ranges: dict[str, tuple[Any, int, int]] = {
        "max_new_tokens": (request.max_new_tokens, 1, limits.max_new_tokens),
        "seed": (request.seed, 0, _WORD),
        "id": (request.id, 0, (_WORD + 1) // samples - 1),
        "draft_limit": (request.draft_limit, 0, limits.method.max_draft),
    }
    for field, (value, low, high) in ranges.items():
        if value is None and field != "seed":
            continue
        if not _is_whole(value, low, high):
            why = f" (num_samples={samples})" if field == "id" and samples > 1 else ""
            raise UserError(
                f"{field}{of} must be a whole number in {low} .. {high}{why}, got {value!r}"
            )
    if request.draft_limit is not None and request.draft_limit < limits.method.min_draft:
        raise UserError(
            f"draft_limit{of} must be None or {limits.method.max_draft}, because this verification "
            f"needs drafts of a fixed length, got {request.draft_limit}: use Block or Token"
        )
    if request.sampling is not None:
        _check_sampling(request.sampling, limits.sampling)
    most = limits.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
    drawn = limits.sampling if request.sampling is None else request.sampling
    for processor in drawn.processors or limits.sampling.processors or ():
        processor.check_limit(most)
    if request.rule is not None:
        _check_rule(request.rule, limits.rule)


def checked_samples(request: Request, limits: Limits, of: str = "") -> int:
    """Returns the checked number of a request's samples; `of` names the prompt in messages."""
    if request.num_samples is None:
        return limits.num_samples
    samples = whole_number(f"num_samples{of}", request.num_samples, low=1)
    if samples % limits.num_samples:
        raise UserError(
            f"num_samples{of} must be a multiple of the engine's {limits.num_samples}, got "
            f"{samples}"
        )
    return samples


def _is_whole(value: Any, low: int, high: int) -> bool:
    """Whether it is a whole number in `low` .. `high`; True and 5.0 are not."""
    try:
        return not isinstance(value, bool | np.bool_) and low <= operator.index(value) <= high
    except TypeError:
        return False


def _check_sampling(sampling: Any, compiled: Sampling) -> None:
    for name in DRAWN:
        value = getattr(checked_sampling(sampling), name)
        if np.ndim(value):
            raise UserError(f"{name} of a request must be a single number, got {value}")
        if value is not None and getattr(compiled, name) is None:
            raise UserError(
                f"{name} must be None, because this engine is compiled without it: make the "
                f"Decoder or the Engine with sampling=Sampling({name}=...)"
            )
    if sampling.processors is not None:
        _check_processors(sampling.processors, compiled.processors or ())


def _check_processors(processors: Sequence[Processor], compiled: Sequence[Processor]) -> None:
    for i, (one, other) in enumerate(itertools.zip_longest(processors, compiled)):
        structures: list[Any] = [(jax.tree.structure(x), host_values(x)) for x in (one, other)]
        if structures[0] != structures[1] or any(map(np.ndim, jax.tree.leaves(one))):
            raise UserError(
                "processors of a request must be the engine's with other strengths, a number "
                f"each: processors[{i}] is {one!r:.300}, the engine has {other!r:.300}: make the "
                "Decoder with it"
            )


def _check_rule(rule: Any, compiled: Rule | None) -> None:
    strengths = jax.tree.leaves(rule)
    if not isinstance(rule, type(compiled)) or len(strengths) != len(jax.tree.leaves(compiled)):
        name = type(compiled).__name__
        raise UserError(f"rule must be {name}(...) like the engine's, got {rule!r}")
    if any(map(np.ndim, strengths)):
        raise UserError(f"rule of a request must have scalar strengths, got {rule!r}")


def requests_of(
    prompts: list[np.ndarray],
    *,
    seed: Any = 0,
    ids: Any = None,
    sampling: Sampling,
    rule: Rule | None,
    max_new_tokens: Any = None,
    draft_limit: Any = None,
) -> list[Request]:
    """Makes a request for each prompt from scalar values or values per prompt."""
    count = len(prompts)
    if ids is not None and not np.ndim(ids):
        raise UserError(f"ids must be {count} numbers, one per prompt, got {ids}")
    limits = _each("max_new_tokens", max_new_tokens, count)
    seeds = _each("seed", seed, count)
    numbers = list(range(count)) if ids is None else _each("ids", ids, count)
    draft_limits = _each("draft_limit", draft_limit, count)
    drawn = _rows_of("sampling", sampling, count)
    rules = _rows_of(type(rule).__name__, rule, count)
    return [
        Request(
            prompt,
            max_new_tokens=limits[i],
            seed=seeds[i],
            id=numbers[i],
            sampling=drawn[i],
            rule=rules[i],
            draft_limit=draft_limits[i],
        )
        for i, prompt in enumerate(prompts)
    ]


def _each(name: str, value: Any, count: int) -> list[Any]:
    """A Python number for each prompt."""
    array = _one_or_each(name, value, count)
    return array.tolist() if array.ndim else [array.item()] * count


def _rows_of(name: str, tree: Any, count: int) -> list[Any]:
    """The tree of each prompt, from a tree whose leaves are scalars or have a value per prompt."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    for path, leaf in leaves:
        _one_or_each(f"{name}{jax.tree_util.keystr(path)}", leaf, count)
    if not any(np.ndim(leaf) for _, leaf in leaves):
        return [tree] * count
    return [
        jax.tree.unflatten(structure, [leaf[i] if np.ndim(leaf) else leaf for _, leaf in leaves])
        for i in range(count)
    ]


def _one_or_each(name: str, value: Any, count: int) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # a key, or lists of different lengths
        array = np.asarray("")
    if array.dtype.kind in "US":
        raise UserError(f"{name} must be a number, or a number per prompt, got {shown(value)}")
    if array.shape not in ((), (count,)):
        raise UserError(
            f"{name} has shape {list(array.shape)}, but there are {count} prompts: give a single "
            "value, or a value per prompt"
        )
    return array
