"""What is asked of one row, and whether it fits an engine."""

import dataclasses
from typing import Any

import jax
import numpy as np

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
      draft_limit: the longest block in 0 .. G; None for G.
      strengths: the leaves of the rule, numbers in its range (its constructor checks them); None
        for the engine's own.
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
      max_draft: G.
      prompt_length: L, the longest prompt.
      max_new: N.
      sampling: the engine's own settings.
      rule: the engine's own rule, or None.

    Raises:
      ValueError: naming the field, its value and what it must be.
    """
    tokens, last = np.asarray(request.tokens), vocab_size - 1
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"tokens must be whole numbers [n], got {tokens.dtype} {list(tokens.shape)}"
        )
    if not 1 <= len(tokens) <= prompt_length:
        raise ValueError(
            f"the prompt must have 1 to {prompt_length} tokens, got {len(tokens)}: shorten it, "
            "or make the engine with a larger prompt_length"
        )
    spans = {"limit": (1, max_new), "draft_limit": (0, max_draft)}
    spans |= dict.fromkeys(("seed", "stream"), (0, 2**32 - 1))
    values = {"token": tokens.min(), "tokens": tokens.max()}
    values |= {name: getattr(request, name) for name in spans}
    spans |= dict.fromkeys(("token", "tokens"), (0, last))
    for name, (low, high) in spans.items():
        value = values[name]
        if value is not None and not (value == int(value) and low <= value <= high):
            raise ValueError(f"{name} must be a whole number in {low} .. {high}, got {value}")
    asked = {n: getattr(request, n) for n in SETTINGS if getattr(request, n) is not None}
    Sampling(**asked)  # its checks
    for name in asked:
        if np.ndim(asked[name]):
            raise ValueError(f"{name} must be one number, got {asked[name]}")
        if getattr(sampling, name) is None:
            raise ValueError(
                f"{name} must be None: this engine is compiled without it; make it with "
                f"sampling=Sampling({name}=...)"
            )
    needed = len(jax.tree.leaves(rule))
    if request.strengths is not None and (
        len(request.strengths) != needed or any(map(np.ndim, request.strengths))
    ):
        raise ValueError(
            f"strengths must have {needed} number{'s' * (needed != 1)}, one for each of the "
            f"rule, got {request.strengths}"
        )
