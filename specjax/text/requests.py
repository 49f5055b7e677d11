"""What is asked of one row, and whether it fits an engine."""

import dataclasses
import operator
from typing import Any

import jax
import numpy as np

from specjax.checks import checked
from specjax.types import Rule, Sampling

SETTINGS = ("temperature", "top_k", "top_p")


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """What is asked of one row.

    Attributes:
      tokens: `[n]` int32, the prompt.
      limit: how many tokens it may emit.
      seed: in 0 .. 2**32 - 1.
      stream: in 0 .. 2**32 - 1; randomness depends on the seed and this number alone.
      temperature: None for the engine's own.
      top_k: None for the engine's own.
      top_p: None for the engine's own.
      draft_limit: the longest block in 0 .. G; None for G, as GreedyBlock needs it.
      strengths: the leaves of the rule, one number each, in its range; None for the engine's own.
    """

    tokens: np.ndarray
    limit: int
    seed: int = 0
    stream: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    draft_limit: int | None = None
    strengths: tuple[Any, ...] | None = None


def settings_of(request: Request) -> Sampling:
    """How a request's tokens are drawn."""
    return Sampling(*(getattr(request, name) for name in SETTINGS))


def check_request(
    request: Request,
    *,
    vocab_size: int,
    min_draft: int,
    max_draft: int,
    prompt_length: int,
    max_new: int,
    sampling: Sampling,
    rule: Rule | None,
) -> None:
    """Checks a request, so that it does not fail once it enters a slot.

    Args:
      request: the request.
      vocab_size: V.
      min_draft: the least draft limit.
      max_draft: G.
      prompt_length: L, the longest prompt.
      max_new: N.
      sampling: the engine's own settings.
      rule: the engine's own rule, or None.

    Raises:
      TypeError: if a field is of a wrong type; it is named, with its value and what it must be.
      ValueError: likewise, if its value is out of range.
    """
    if not isinstance(request, Request):
        raise TypeError(
            f"add takes a Request, got {type(request).__name__}: write Request(tokens, limit=...)"
        )
    _check_tokens(request.tokens, vocab_size, prompt_length)
    for name, high in (("limit", max_new), ("seed", 2**32 - 1), ("stream", 2**32 - 1)):
        _check_whole(name, getattr(request, name), int(name == "limit"), high)
    if request.draft_limit is not None:
        _check_whole("draft_limit", request.draft_limit, 0, max_draft)
        if request.draft_limit < min_draft:
            raise ValueError(
                f"draft_limit must be None or {max_draft}, got {request.draft_limit}: this "
                "engine's verification needs drafts of a fixed length; use Block or Token"
            )
    asked = {n: getattr(request, n) for n in SETTINGS if getattr(request, n) is not None}
    Sampling(**asked)  # its checks
    for name in asked:
        if np.ndim(asked[name]):
            raise ValueError(f"{name} must be one number, got {asked[name]}")
        if getattr(sampling, name) is None:
            raise ValueError(
                f"{name} must be None: this engine is compiled without it; make the Decoder with "
                f"{name}=..., or an Engine of your own with sampling=Sampling({name}=...)"
            )
    if request.strengths is not None:
        _check_strengths(request.strengths, rule)


def _check_tokens(value: Any, vocab_size: int, longest: int) -> None:
    if isinstance(value, str):
        raise TypeError(
            f"tokens must be whole numbers [n], got the text {value[:40]!r}: use "
            "decoder.encode(text)"
        )
    tokens = np.asarray(value)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise ValueError(
            f"tokens must be whole numbers [n], got {tokens.dtype} {list(tokens.shape)}"
        )
    if not 1 <= len(tokens) <= longest:
        raise ValueError(
            f"the prompt must have 1 to {longest} tokens, got {len(tokens)}: shorten it, "
            "or make the engine with a larger prompt_length"
        )
    for token in (tokens.min(), tokens.max()):
        _check_whole("token", token, 0, vocab_size - 1)


def _check_whole(name: str, value: Any, low: int, high: int) -> None:
    """Raises unless `value` is a whole number in `low` .. `high`; True and 5.0 are none."""
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        shown = repr(value) if number is None else number
        raise ValueError(f"{name} must be a whole number in {low} .. {high}, got {shown}")


def _check_strengths(strengths: Any, rule: Rule | None) -> None:
    needed = len(jax.tree.leaves(rule))
    if not isinstance(strengths, tuple | list):
        raise TypeError(
            f"strengths must be a tuple of {_numbers(needed)}, got {strengths!r}: write "
            f"({strengths!r},)"
        )
    if len(strengths) != needed or any(map(np.ndim, strengths)):
        raise ValueError(
            f"strengths must have {_numbers(needed)}, one for each of the rule, got {strengths}"
        )
    for place, strength in enumerate(strengths):
        checked(f"strengths[{place}]", strength)
    if needed:
        try:
            _made_anew(jax.tree.unflatten(jax.tree.structure(rule), strengths))
        except ValueError as error:
            raise ValueError(f"strengths {strengths} do not fit the rule: {error}") from None


def _numbers(count: int) -> str:
    return f"{count} number{'s' * (count != 1)}"


def _made_anew(rule: Any) -> Any:
    """The rule by its constructor, whose checks it passes: unflattening calls none."""
    if not dataclasses.is_dataclass(rule) or isinstance(rule, type):
        return rule
    fields = [field.name for field in dataclasses.fields(rule) if field.init]
    return dataclasses.replace(rule, **{name: _made_anew(getattr(rule, name)) for name in fields})
