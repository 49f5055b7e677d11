"""What is asked of one row, and whether it can be done.

Axes: n prompts of a call, G longest draft.
"""

import dataclasses
import operator
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.decoding import Method
from specjax.text.prompts import Prompt
from specjax.types import Rule, Sampling

DRAWN = ("temperature", "top_k", "top_p")
_WORD = 2**32 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """What is asked of one row; what is None is as the engine has it.

    Attributes:
      prompt: `[n]` token ids; also a text or a chat, where the engine has a tokenizer.
      max_new_tokens: how many tokens it may emit.
      seed: in 0 .. 2**32 - 1.
      id: in 0 .. 2**32 - 1; randomness depends on the seed and this number alone.
      sampling: temperature, top-k and top-p, one number each.
      rule: another strength of the engine's rule.
      draft_limit: the longest block in 0 .. G; None for G, as GreedyBlock needs it.
    """

    prompt: Prompt
    max_new_tokens: int | None = None
    seed: int = 0
    id: int = 0
    sampling: Sampling | None = None
    rule: Rule | None = None
    draft_limit: int | None = None


class Border(NamedTuple):
    """What requests must fit.

    Attributes:
      method: the method.
      prompt_length: the longest prompt.
      max_new_tokens: the longest output.
      sampling: what requests leave open; a field that is None cannot be asked for.
      rule: likewise, or None.
    """

    method: Method
    prompt_length: int
    max_new_tokens: int
    sampling: Sampling
    rule: Rule | None


def check_request(request: Request, tokens: np.ndarray, border: Border, name: str = "") -> None:
    """Checks a request, so that it does not fail once it enters a slot.

    Args:
      request: the request.
      tokens: its prompt.
      border: what it must fit.
      name: of the prompt among others, for messages.

    Raises:
      TypeError: if a field is of a wrong type; it is named, with its value and what it must be.
      ValueError: likewise, if its value is out of range.
    """
    if len(tokens) > border.prompt_length:
        raise ValueError(
            f"{name or 'the prompt'} has {len(tokens)} tokens, the longest bucket holds "
            f"{border.prompt_length}: shorten it, or set buckets=(..., {len(tokens)}) (for an "
            f"engine, prompt_length={len(tokens)})"
        )
    of = f" of {name}" if name else ""
    limits: dict[str, tuple[Any, int, int]] = {
        "max_new_tokens": (request.max_new_tokens, 1, border.max_new_tokens),
        "seed": (request.seed, 0, _WORD),
        "id": (request.id, 0, _WORD),
        "draft_limit": (request.draft_limit, 0, border.method.max_draft),
    }
    for field, (value, low, high) in limits.items():
        if value is None and field in ("max_new_tokens", "draft_limit"):
            continue
        if not _is_whole(value, low, high):
            raise ValueError(
                f"{field}{of} must be a whole number in {low} .. {high}, got {value!r}"
            )
    if request.draft_limit is not None and request.draft_limit < border.method.min_draft:
        raise ValueError(
            f"draft_limit{of} must be None or {border.method.max_draft}, got "
            f"{request.draft_limit}: this verification needs drafts of a fixed length; use Block "
            "or Token"
        )
    if request.sampling is not None:
        _check_sampling(request.sampling, border.sampling)
    if request.rule is not None:
        _check_rule(request.rule, border.rule)


def _is_whole(value: Any, low: int, high: int) -> bool:
    """Whether it is a whole number in `low` .. `high`; True and 5.0 are none."""
    try:
        return not isinstance(value, bool | np.bool_) and low <= operator.index(value) <= high
    except TypeError:
        return False


def checked_sampling(value: Any) -> Sampling:
    """Raises TypeError unless it says how tokens are drawn; at temperature 1 by default."""
    if not isinstance(value, Sampling | None):
        raise TypeError(f"sampling must be Sampling(temperature=...), got {value!r}")
    return Sampling() if value is None else value


def _check_sampling(asked: Any, own: Sampling) -> None:
    for name in DRAWN:
        value = getattr(checked_sampling(asked), name)
        if np.ndim(value):
            raise ValueError(f"{name} of a request must be one number, got {value}")
        if value is not None and getattr(own, name) is None:
            raise ValueError(
                f"{name} must be None: this engine is compiled without it; make the Decoder or "
                f"the Engine with sampling=Sampling({name}=...)"
            )


def _check_rule(asked: Any, own: Rule | None) -> None:
    strengths = jax.tree.leaves(asked)
    if not isinstance(asked, type(own)) or len(strengths) != len(jax.tree.leaves(own)):
        raise TypeError(f"rule must be {type(own).__name__}(...) as the engine's is, got {asked!r}")
    if any(np.ndim(strength) for strength in strengths):
        raise ValueError(f"rule of a request must have one number for each strength, got {asked!r}")


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
    """One request per prompt, of values that are given once or per prompt.

    Args:
      prompts: their tokens.
      seed: one number or n.
      ids: n numbers, or None for the places of the prompts.
      sampling: its fields are one number or n each, or None.
      rule: its strengths are one number or n each; or None.
      max_new_tokens: one number or n.
      draft_limit: one number or n, or None.

    Raises:
      TypeError: if a value is no number.
      ValueError: if there are not as many values as prompts.
    """
    count = len(prompts)
    if ids is not None and not np.ndim(ids):
        raise ValueError(f"ids must be a list of {count} numbers, one per prompt, got {ids}")
    rows = {
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
    """One value per prompt; numbers of Python."""
    array = _one_or_each(name, value, count)
    return array.tolist() if array.ndim else [array.item()] * count


def _rows_of(name: str, tree: Any, count: int) -> list[Any]:
    """The tree of each prompt, of one whose leaves are one number or one per prompt."""
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
        shown = " ".join(repr(value).split())[:60]
        raise TypeError(f"{name} must be one number, or one per prompt, got {shown}")
    if array.shape not in ((), (count,)):
        raise ValueError(
            f"{name} has shape {list(array.shape)}, but there are {count} prompts: give one "
            "value or one per prompt"
        )
    return array
