"""Prompts, and requests of an engine; each value is checked here, where a user gives it.

Axes: n prompts of a call, L tokens of a prompt, G longest draft.
"""

import dataclasses
import functools
import itertools
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int32

from specjax import rules
from specjax.checks import (
    check_flag,
    check_part,
    check_static,
    options_of,
    short_repr,
    whole_number,
)
from specjax.decoding import Method
from specjax.errors import UserError
from specjax.memory import nbytes
from specjax.models.beginnings import Beginning
from specjax.processors import Constraint, JsonSchema, Regex
from specjax.text.drafts import WithParams
from specjax.text.parts import make_part
from specjax.text.results import Row
from specjax.text.stops import check_stops
from specjax.text.text_models import TextModel
from specjax.tokenizers import Tokenizer
from specjax.tokenizers.chat_template import plain
from specjax.tokenizers.tokenizer import warn_of_two_bos
from specjax.types import Drafter, Params, Processor, Rule, Sampling
from specjax.types.pytrees import host_values

Prompt = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, Any]]
DRAWN = ("temperature", "top_k", "top_p")
# The options of a `Decoder` that `check_decoding` checks.
CHECKED = ("stop", "buckets", "max_new_tokens", "batch_size")
_WORD = 2**32 - 1


@options_of("Request")
@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """The request of a row; the engine's values replace None.

    Attributes:
      prompt: `[L]` token ids, a text or a chat; in an engine with a prefix the rest of the prompt.
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
      prediction: a text, token ids or a row that the output may resemble, of which drafts are
        copied, in an engine with `predictions`. What is beyond the longest output does not count.
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
    prediction: str | Sequence[int] | np.ndarray | Row | None = None


class Limits(NamedTuple):
    """The longest prompt and output of requests, their defaults, and what is compiled.

    A field of `sampling` that is None here must be None in requests; `rule` likewise.
    """

    method: Method
    prompt_length: int
    max_new_tokens: int
    sampling: Sampling
    rule: Rule | None
    num_samples: int = 1
    log_probs: bool = False
    predictions: bool = False


def warn_beyond(length: int, contexts: dict[str, int]) -> None:
    """Warns the first time that a prompt is longer than the context of a model, by its name."""
    over = [(context, name) for name, context in contexts.items() if length > context]
    if over:
        context, name = min(over)
        contexts.clear()
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
    """Returns the tokens of a prompt, which is `name` in messages.

    Without a tokenizer a prompt must be token ids.
    """
    is_text = isinstance(prompt, str)
    is_chat = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    ids: Any = prompt
    if tokenizer is not None and (is_text or is_chat):
        if is_text and not ids.strip():
            raise UserError(f"{name} is empty: add text, or leave it out")
        messages = [] if is_text else [x for x in ids if isinstance(x, Mapping)]
        for text in [ids] if is_text else [str(message.get("content")) for message in messages]:
            check_unicode(text, name)
        try:
            if is_text:
                ids = tokenizer.encode(ids)
            else:
                ids = tokenizer.encode_chat(ids, **chat_template_kwargs or {})
        except ValueError as error:
            raise UserError(f"{name}: {error}") from None
    try:
        array: Any = np.asarray(ids)
    except (TypeError, ValueError):  # lists of different lengths
        array = np.empty((1, 1))
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        single = isinstance(prompt, int | np.integer | Mapping)
        hint = " (give a single prompt as a list: [prompt])" if single else ""
        raise UserError(
            f"{name} must be a text, a list of token ids or a list of chat messages, got "
            f"{short_repr(prompt)}{hint}"
        )
    if ids is prompt and isinstance(tokenizer, Tokenizer):
        warn_of_two_bos(tokenizer, array, "remove one")
    if not array.size:
        raise UserError(f"{name} has no tokens: add text, or leave it out")
    bad = (array < 0) | (array >= vocab_size)  # before the cast to int32
    if bad.any():
        raise UserError(
            f"{name} has token {array[bad][0]}: tokens must be in 0 .. {vocab_size - 1}"
        )
    return array.astype(np.int32)


def encode_output(output: Any, name: str, model: TextModel) -> Int32[np.ndarray, " L"]:
    """Returns the tokens of an output: of a text without its prompt, with the end of a sequence."""
    ids = output
    if isinstance(output, Row):
        ids = output.tokens_with_end
    elif isinstance(output, str):
        check_unicode(output, name)
        words = model.tokenizer
        ids = [*words.encode(output, add_special_tokens=False), words.eos_ids[0]]
    elif not isinstance(output, Sequence | np.ndarray):
        raise UserError(
            f"{name} must be a text, a list of token ids or a row of a result, got "
            f"{short_repr(output)}"
        )
    return encode(ids, name, model.model.vocab_size)


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


def template_options(options: Any) -> dict[str, Any]:
    """Returns a plain copy of the options of a chat template; {} for None."""
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise UserError(
            "chat_template_kwargs must be options by name, such as {'enable_thinking': False}, got "
            f"{options!r}"
        )
    if taken := {"self", "messages", "template"} & set(options):
        raise UserError(f"chat_template_kwargs must not name {taken.pop()!r}, which has a value")
    return plain("chat_template_kwargs", dict(options))


def chat_options(name: str, chat: Any) -> dict[str, Any] | None:
    """Returns the options of the chat template for inputs that are messages, or None for texts.

    `chat`, which is `name` in messages, says whether inputs are messages, or is these options.
    """
    if isinstance(chat, Mapping):
        return template_options(chat)
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
            "buckets must be increasing lengths in tokens, such as (64, 128), got "
            f"{short_repr(buckets)}"
        )
    return tuple(map(int, lengths))


def check_decoding(options: Mapping[str, Any]) -> None:
    """Checks the arguments of a `Decoder` in `CHECKED`, by name, before models are read."""
    check_stops(options.get("stop"))
    if options.get("buckets") is not None:
        check_buckets(options["buckets"])
    for name in ("max_new_tokens", "batch_size"):
        whole_number(name, options.get(name, 1), low=1)


def as_sampling(value: Any) -> Sampling:
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
    """Checks the prompt and the numbers of a request, before it enters a slot.

    `name` is that of a call's prompt in messages.
    """
    check_length(tokens, limits.prompt_length, name or "the prompt")
    of = f" of {name}" if name else ""
    samples = checked_samples(request, limits, of)
    ranges: dict[str, tuple[int, int]] = {
        "max_new_tokens": (1, limits.max_new_tokens),
        "seed": (0, _WORD),
        "id": (0, (_WORD + 1) // samples - 1),
        "draft_limit": (0, limits.method.max_draft),
    }
    for field, (low, high) in ranges.items():
        value = getattr(request, field)
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
    most = limits.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
    drawn = limits.sampling if request.sampling is None else request.sampling
    for processor in drawn.processors or limits.sampling.processors or ():
        processor.check_limit(most)


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


def check_strengths(request: Request, limits: Limits) -> None:
    """Refuses what an engine's request cannot change, because its program is compiled."""
    if request.log_probs is not None:
        check_flag("log_probs", request.log_probs)
        if request.log_probs and not limits.log_probs:
            raise UserError("log_probs must be left out: make the engine with log_probs=True")
    if request.prediction is not None and not limits.predictions:
        raise UserError("prediction must be left out: make the engine with predictions=True")
    compiled = limits.sampling
    drawn = compiled if request.sampling is None else request.sampling
    for name in DRAWN:
        value = getattr(drawn, name)
        if np.ndim(value):
            raise UserError(f"{name} of a request must be a single number, got {value}")
        if value is not None and getattr(compiled, name) is None:
            raise UserError(
                f"{name} must be None, because this engine is compiled without it: make the "
                f"Decoder or the Engine with sampling=Sampling({name}=...)"
            )
    chosen = compiled.processors if drawn.processors is None else drawn.processors
    both = itertools.zip_longest(chosen or (), compiled.processors or ())
    for i, (one, other) in enumerate(both):
        structures: list[Any] = [(jax.tree.structure(x), host_values(x)) for x in (one, other)]
        if structures[0] != structures[1] or any(map(np.ndim, jax.tree.leaves(one))):
            raise UserError(
                "processors of a request must be the engine's with other strengths, a number "
                f"each: processors[{i}] is {one!r:.300}, the engine has {other!r:.300}: make the "
                "Decoder with it"
            )
    rule, strengths = request.rule, jax.tree.leaves(request.rule)
    if rule is None:
        return
    structures = [jax.tree.structure(rule), jax.tree.structure(limits.rule)]
    if structures[0] != structures[1]:
        name = type(limits.rule).__name__
        raise UserError(f"rule must be {name}(...) like the engine's, got {rule!r}")
    if any(map(np.ndim, strengths)):
        raise UserError(f"rule of a request must have scalar strengths, got {rule!r}")


def requests_of(
    prompts: list[np.ndarray], sampling: Sampling, rule: Rule | None, ids: Any, **options: Any
) -> list[Request]:
    """Makes a request for each prompt from scalar values or values per prompt."""
    count = len(prompts)
    if ids is not None and not np.ndim(ids):
        raise UserError(f"ids must be {count} numbers, one per prompt, got {ids}")
    columns = {name: _each(name, value, count) for name, value in options.items()}
    columns["id"] = _each("ids", np.arange(count) if ids is None else ids, count)
    columns["sampling"] = _rows_of("sampling", sampling, count)
    columns["rule"] = _rows_of(type(rule).__name__, rule, count)
    return [
        Request(prompt, **{name: column[i] for name, column in columns.items()})
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
        raise UserError(f"{name} must be a number, or a number per prompt, got {short_repr(value)}")
    if array.shape not in ((), (count,)):
        raise UserError(
            f"{name} has shape {list(array.shape)}, but there are {count} prompts: give a single "
            "value, or a value per prompt"
        )
    return array


@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """A common beginning of prompts with the caches of the models; from `Decoder.prefix`.

    Attributes:
      prompt: the text, token ids or chat messages that prompts continue; None if they are whole.
      method: the method of its Decoder.
      params: the parameters of the method.
      taken: the caches if a row has left them; None reads the tokens when they are first needed.
    """

    tokens: Int32[np.ndarray, " L"]
    prompt: Prompt | None = dataclasses.field(repr=False)
    method: Method = dataclasses.field(repr=False)
    params: Params = dataclasses.field(repr=False)
    taken: Beginning | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.tokens.setflags(write=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"Prefix({len(self)} tokens)"

    @functools.cached_property
    def beginning(self) -> Beginning | None:
        """The caches of the models; None without tokens, or if no model continues a prompt."""
        if not len(self):
            return None
        beginning = self.taken or self.method.begin(self.params, self.tokens)
        return beginning if beginning.caches else None

    @functools.cached_property
    def nbytes(self) -> int:
        """The least bytes of its caches on each device, from their shapes."""
        if not len(self):
            return 0
        begin = self.method.begin
        beginning = self.taken or jax.eval_shape(lambda now: begin(now, self.tokens), self.params)
        where = self.method.partitioner
        return nbytes(beginning.caches) // (1 if where is None else where.mesh.size)

    def join(self, prompt: Any, name: str) -> Prompt:
        """Returns the whole prompt from its rest, which is of the prefix's kind.

        If prompts are whole, it is `prompt` itself. `name` is its name in messages.
        """
        if self.prompt is None:
            return prompt
        if isinstance(self.prompt, str) and isinstance(prompt, str):
            return self.prompt + prompt
        texts = isinstance(self.prompt, str), isinstance(prompt, str)
        if any(texts) or not isinstance(prompt, Sequence | np.ndarray):
            kind = "a text"
            if not isinstance(self.prompt, str):
                ids = isinstance(self.prompt[0], int | np.integer)
                kind = "a list of token ids" if ids else "a list of messages"
            raise UserError(
                f"{name} must be {kind}, because the prefix is {kind}, got {short_repr(prompt)}"
            )
        if isinstance(prompt, np.ndarray):
            return np.concatenate([self.prompt, prompt])
        return [*self.prompt, *prompt]

    def common(self, tokens: np.ndarray) -> int:
        """Returns the number of the prefix's first tokens with which a longer prompt begins."""
        return common_length(self.tokens, tokens[:-1])


class KeptPrefixes:
    """What finished rows have read, for prompts that begin alike; at most `most`.

    The least recently used goes first. `shortest` is the number of tokens that are worth it.
    """

    def __init__(self, most: int, shortest: int = 16) -> None:
        self._most, self._shortest = most, shortest
        self._kept: list[Prefix] = []  # the most recently used last

    def best(self, tokens: np.ndarray) -> Prefix | None:
        """The one with which a prompt begins longest, or None."""
        found = max(self._kept, key=lambda each: each.common(tokens), default=None)
        if found is None or found.common(tokens) < self._shortest:
            return None
        self._kept.remove(found)
        self._kept.append(found)
        return found

    def keep(self, new: Prefix) -> None:
        """Adds one, in the place of those that it continues."""
        rest = [one for one in self._kept if common_length(one.tokens, new.tokens) < len(one)]
        self._kept = [*rest, new][-self._most :]


def common_of(prompts: Sequence[np.ndarray]) -> Int32[np.ndarray, " L"]:
    """Returns the longest tokens with which more than half of the prompts begin.

    Each of these prompts has at least one more token.
    """
    # Among sorted prompts, more than half lie around the middle.
    middle = sorted(prompts, key=lambda prompt: prompt.tolist())[len(prompts) // 2]
    lengths = sorted(common_length(middle, prompt[:-1]) for prompt in prompts)
    return middle[: lengths[(len(prompts) - 1) // 2]].copy()


def common_length(first: np.ndarray, second: np.ndarray) -> int:
    """Returns the number of tokens with which two sequences begin alike."""
    shorter = min(len(first), len(second))
    differ = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(differ[0]) if differ.size else shorter


def checked_rule(accepts: Callable[[Rule], None], rule: Any) -> Rule:
    """Returns a rule after a method's check of it; traces a user's own rule."""
    rule = make_part("rule", rule)
    accepts(rule)
    inner = rule.rule if isinstance(rule, rules.Budgeted) else rule
    if not type(inner).__module__.startswith("specjax.rules"):
        rules.check_rule(inner)
    return rule


def warn_of_excluded(rule: Rule | None, sampling: Sampling, vocab_size: int) -> None:
    """Warns if a mixture of the models would emit tokens that the sampling excludes."""
    if not isinstance(rule, rules.Mixture) or np.all(np.asarray(rule.weight) == 1.0):
        return
    excluding = ["temperature=0"] if np.any(np.asarray(sampling.temperature) == 0.0) else []
    for name, most in (("top_k", vocab_size), ("top_p", 1.0)):
        value = getattr(sampling, name)
        if value is not None and np.any(np.asarray(value) < most):
            excluding.append(name)
    if excluding:
        warnings.warn(
            f"rule={rule!r} emits tokens that the verifier does not with "
            f"{' and '.join(excluding)}, where the drafter can draw them: use a rule that does "
            "not, such as KLPrice",
            stacklevel=4,
        )


def bind_processors(
    processors: Any, model: TextModel
) -> tuple[tuple[Processor, ...] | None, tuple[Params, ...]]:
    """Binds processors, some of them `WithParams(processor, params)`, to the verifier.

    Returns:
      The processors in the order in which they run, and for each the arrays that rows share.
    """
    entries = checked_processors(processors)
    pairs = [
        (entry.part, entry.params) if isinstance(entry, WithParams) else entry.bind(model)
        for _, entry in entries
    ]
    check_one_constraint([processor for processor, _ in pairs])
    bound, shared = zip(*pairs, strict=True) if pairs else ((), ())
    return tuple(bound) or None, tuple(shared)


def checked_processors(processors: Any) -> list[tuple[Any, Any]]:
    """Returns processors, each as it is given and as an object, in the order in which they run."""
    if isinstance(processors, str) or not isinstance(processors, Sequence):
        raise UserError(f"processors must be a tuple such as ('MinP(0.05)',), got {processors!r}")
    entries = []
    for i, value in enumerate(processors):
        entry = make_part("processors", value)
        part = entry.part if isinstance(entry, WithParams) else entry
        needed = ("bind", "init", "process", "advance", "check_limit", "order", "forbids")
        check_part(f"processors[{i}]", part, needed, "processors.MinP(0.05)")
        leaves, structure = jax.tree.flatten(part)
        assert not any(leaf is part for leaf in leaves), (
            f"{type(part).__name__} is no pytree: decorate it with @types.traced_dataclass"
        )
        check_static(f"processors[{i}]", structure)
        entries.append((part.order, value, entry))
    # The order in which they are given changes nothing.
    return [(value, entry) for _, value, entry in sorted(entries, key=lambda x: x[0])]


def check_one_constraint(processors: Sequence[Processor]) -> None:
    """Refuses several constraints: their automata cannot be joined."""
    several = [x for x in processors if isinstance(x, Constraint | Regex | JsonSchema)]
    if len(several) > 1:
        shown = ", ".join(getattr(x, "source", None) or type(x).__name__ for x in several)
        raise UserError(
            f"processors must have at most one Regex or JsonSchema, got {shown}: write a single "
            "pattern, or a pattern for each row with `which`"
        )


def check_forbidding(
    drafter: Drafter,
    rule: Rule | None,
    processors: Sequence[Processor] | None,
    *,
    process_drafts: bool,
) -> None:
    """Refuses a rule that could emit a token that a processor forbids."""
    forbidding = [type(one).__name__ for one in processors or () if one.forbids]
    if not forbidding or not getattr(rule, "reads_draft", False):
        return
    why = "process_drafts is False"
    if process_drafts:
        if drafter.traits.processes:
            return
        why = f"{type(drafter).__name__} may draft it"
    raise UserError(
        f"{forbidding[0]} cannot be used with rule {type(rule).__name__} here, because this rule "
        f"may accept a drafted token that {forbidding[0]} forbids ({why}): use rules.Lossless(), "
        "or a drafter that is a model of all tokens"
    )


def warn_of_ignored(model: TextModel, processors: Sequence[Processor]) -> None:
    """Warns of settings of the model's generation that these processors do not apply."""
    if not model.settings:
        return
    # Imported here to keep `import specjax` fast: importing Orbax takes long.
    from specjax.checkpoints.ignored import warn_of_settings

    names = {type(one).__name__ for one in processors}
    has_encoder = not model.continues_prompts
    warn_of_settings(model.name, model.settings, has_encoder=has_encoder, processors=names)
