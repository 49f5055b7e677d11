"""Whether a method's state fits into the memory, asked before anything is allocated."""

from typing import Any

import jax
import numpy as np

from specjax.decoding import LoopMethod
from specjax.memory import check_fits
from specjax.types import Method, Params, PromptBatch

# Positions are int32, and writes that are to be dropped go to the second half of their range.
LONGEST = 2**30


def resized(prompts: PromptBatch, rows: int, length: int) -> PromptBatch:
    """The shapes of so many prompts of this length, from those of one; nothing is allocated."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, length)[: x.ndim], x.dtype), prompts)


def in_words(method: Method, rows: int, length: int, max_new: int) -> str:
    """What is asked of a method, for messages.

    Args:
      method: the method.
      rows: B.
      length: L, of the prompts.
      max_new: N, the longest output.
    """
    drafts = f", drafts of {method.max_draft}" if method.max_draft else ""
    return (
        f"{rows} row{'s' * (rows != 1)} with prompts of {length}{drafts} and outputs of {max_new} "
        "tokens"
    )


def check_state_fits(
    method: Method,
    params: Params,
    prompts: PromptBatch,
    *,
    max_new: int,
    max_length: int,
    remedy: str,
    token_log_probs: bool = False,
) -> None:
    """Raises ValueError if such prompts and outputs certainly cannot fit.

    Args:
      method: the method; nothing is known of one that is no `LoopMethod`.
      params: its parameters.
      prompts: arrays or their shapes.
      max_new: N, the longest output.
      max_length: S, cache positions.
      remedy: what to do.
      token_log_probs: see `Method.init`.
    """
    if not isinstance(method, LoopMethod):
        return
    rows, length = np.shape(prompts.inputs)
    # Tracing needs memory too: more is asked for only if this much fits.
    traced = min(length, 2**20)
    inputs: Any = jax.ShapeDtypeStruct((rows, traced), np.int32)
    mesh = None if method.partitioner is None else method.partitioner.mesh
    devices = jax.devices()[:1] if mesh is None else mesh.devices.flatten().tolist()
    needed = 4 * rows * (length - traced) // len(devices) + method.least_memory(
        params,
        prompts._replace(inputs=inputs),
        max_new=min(max_new, LONGEST),
        max_length=min(max_length, LONGEST),
        token_log_probs=token_log_probs,
    )
    asked = in_words(method, rows, length, max_new)
    check_fits(asked, needed, remedy, devices)
    if max_length > LONGEST:
        raise ValueError(
            f"{asked}: this takes {max_length} positions of the cache, which has at most "
            f"{LONGEST}: {remedy}"
        )
