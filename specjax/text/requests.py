"""Requests of an engine, and their checks.

Axes: n prompts of a call, G longest draft.
"""

import dataclasses
import itertools
import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.checks import check_flag, shown, whole_number
from specjax.decoding import Method
from specjax.errors import UserError
from specjax.text.prompts import Prompt
from specjax.types import Processor, Rule, Sampling
from specjax.types.pytrees import host_values

DRAWN = ("temperature", "top_k", "top_p")
_WORD = 2**32 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """The request of a row; the engine's values replace None.

    Attributes:
      prompt: `[n]` token ids; also a text or a chat, if the engine has a tokenizer. In an engine
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


class Border(NamedTuple):
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


def check_length(tokens: np.ndarray, longest: int, name: str = "") -> None:
    """Raises ValueError for a prompt of more than `longest` tokens."""
    if len(tokens) > longest:
        raise UserError(
            f"{name or 'the prompt'} has {len(tokens)} tokens, the longest bucket holds "
            f"{longest}: shorten it, or set buckets=(..., {len(tokens)}) (for an "
            f"engine, prompt_length={len(tokens)})"
        )


def check_request(request: Request, tokens: np.ndarray, border: Border, name: str = "") -> None:
    """Checks a request, so that it does not fail when it enters a slot.

    Args:
      request: the request.
      tokens: its prompt.
      border: the limits.
      name: the prompt's name in messages.

    Raises:
      TypeError: a field has a wrong type.
      ValueError: a value is out of range.
    """
    check_length(tokens, border.prompt_length, name)
    of = f" of {name}" if name else ""
    samples = checked_samples(request, border, of)
    if request.log_probs is not None:
        check_flag(f"log_probs{of}", request.log_probs)
        if request.log_probs and not border.log_probs:
            raise UserError(
                f"log_probs{of} must be left out, because the engine keeps none: make it with "
                "log_probs=True"
            )
    limits: dict[str, tuple[Any, int, int]] = {
        "max_new_tokens": (request.max_new_tokens, 1, border.max_new_tokens),
        "seed": (request.seed, 0, _WORD),
        "id": (request.id, 0, (_WORD + 1) // samples - 1),
        "draft_limit": (request.draft_limit, 0, border.method.max_draft),
    }
    for field, (value, low, high) in limits.items():
        if value is None and field != "seed":
            continue
        if not _is_whole(value, low, high):
            why = f" (num_samples={samples})" if field == "id" and samples > 1 else ""
            raise UserError(
                f"{field}{of} must be a whole number in {low} .. {high}{why}, got {value!r}"
            )
    if request.draft_limit is not None and request.draft_limit < border.method.min_draft:
        raise UserError(
            f"draft_limit{of} must be None or {border.method.max_draft}, because this verification "
            f"needs drafts of a fixed length, got {request.draft_limit}: use Block or Token"
        )
    if request.sampling is not None:
        _check_sampling(request.sampling, border.sampling)
    limit = border.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
    drawn = border.sampling if request.sampling is None else request.sampling
    for one in drawn.processors or border.sampling.processors or ():
        one.check_limit(limit)
    if request.rule is not None:
        _check_rule(request.rule, border.rule)


def checked_samples(request: Request, border: Border, of: str = "") -> int:
    """Returns the checked number of a request's samples; `of` names the prompt in messages."""
    if request.num_samples is None:
        return border.num_samples
    samples = whole_number(f"num_samples{of}", request.num_samples, low=1)
    if samples % border.num_samples:
        raise UserError(
            f"num_samples{of} must be a multiple of the engine's {border.num_samples}, got "
            f"{samples}"
        )
    return samples


class Contexts:
    """Warns once if a prompt is longer than a model was trained for.

    Args:
      named: model's name -> its `TextModel.context`.
    """

    def __init__(self, named: Mapping[str, int | None]) -> None:
        shortest = [(length, name) for name, length in named.items() if length is not None]
        self._shortest, self._silent = min(shortest, default=None), not shortest

    def check(self, length: int) -> None:
        """Warns if a prompt has so many tokens."""
        if self._silent or self._shortest is None or length <= self._shortest[0]:
            return
        self._silent = True
        context, name = self._shortest
        warnings.warn(
            f"a prompt has {length} tokens, but {name} was trained for {context} positions "
            "(max_position_embeddings): its outputs may be poor; give shorter prompts",
            stacklevel=3,
        )


def _is_whole(value: Any, low: int, high: int) -> bool:
    """Whether it is a whole number in `low` .. `high`; True and 5.0 are not."""
    try:
        return not isinstance(value, bool | np.bool_) and low <= operator.index(value) <= high
    except TypeError:
        return False


def checked_sampling(value: Any) -> Sampling:
    """Returns a checked `Sampling`, by default at temperature 1; raises TypeError."""
    if not isinstance(value, Sampling | None):
        raise UserError(f"sampling must be Sampling(temperature=...), got {value!r}")
    return Sampling() if value is None else value


def _check_sampling(given: Any, own: Sampling) -> None:
    for name in DRAWN:
        value = getattr(checked_sampling(given), name)
        if np.ndim(value):
            raise UserError(f"{name} of a request must be a single number, got {value}")
        if value is not None and getattr(own, name) is None:
            raise UserError(
                f"{name} must be None, because this engine is compiled without it: make the "
                f"Decoder or the Engine with sampling=Sampling({name}=...)"
            )
    if given.processors is not None:
        _check_processors(given.processors, own.processors or ())


def _check_processors(given: Sequence[Processor], own: Sequence[Processor]) -> None:
    for i, (one, other) in enumerate(itertools.zip_longest(given, own)):
        kinds: list[Any] = [(jax.tree.structure(x), host_values(x)) for x in (one, other)]
        if kinds[0] != kinds[1]:
            raise UserError(
                "processors of a request must be the engine's with other strengths: "
                f"processors[{i}] is {one!r:.300}, the engine has {other!r:.300}: make the Decoder "
                "with it"
            )
        for strength in jax.tree.leaves(one):
            if np.ndim(strength):
                raise UserError(
                    f"processors[{i}] of a request must have single numbers as strengths, got "
                    f"{one!r}"
                )


def _check_rule(given: Any, own: Rule | None) -> None:
    strengths = jax.tree.leaves(given)
    if not isinstance(given, type(own)) or len(strengths) != len(jax.tree.leaves(own)):
        raise UserError(f"rule must be {type(own).__name__}(...) like the engine's, got {given!r}")
    if any(np.ndim(strength) for strength in strengths):
        raise UserError(f"rule of a request must have scalar strengths, got {given!r}")


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
    """Makes a request for each prompt from scalar values or values per prompt.

    Args:
      prompts: the tokens of n prompts.
      seed: a number or n numbers.
      ids: n numbers, or None for the places of the prompts.
      sampling: each field is a number, n numbers, or None.
      rule: each strength is a number or n numbers; or None.
      max_new_tokens: a number or n numbers.
      draft_limit: a number or n numbers, or None.

    Raises:
      TypeError: a value is not a number.
      ValueError: the number of values is not the number of prompts.
    """
    count = len(prompts)
    if ids is not None and not np.ndim(ids):
        raise UserError(f"ids must be a list of {count} numbers, one per prompt, got {ids}")
    rows: dict[str, list[Any]] = {
        "max_new_tokens": _each("max_new_tokens", max_new_tokens, count),
        "seed": _each("seed", seed, count),
        "id": list(range(count)) if ids is None else _each("ids", ids, count),
        "draft_limit": _each("draft_limit", draft_limit, count),
    }
    drawn = _rows_of("sampling", sampling, count)
    rules = _rows_of(type(rule).__name__, rule, count)
    return [
        Request(
            prompt,
            sampling=drawn[i],
            rule=rules[i],
            **{name: values[i] for name, values in rows.items()},
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
