"""Where each token of a round came from, as codes; see `DecodeInfo.token_sources`.

Axes: B rows, G longest block.
"""

from typing import Any

import jax.numpy as jnp

from specjax.decoding.outcome import emitted
from specjax.types import Array, DraftBlock, Drafter

# The verifier's own tokens: after a rejection, after a whole block, after no draft. The codes of
# the drafter's parts follow.
OWN = ("residual", "bonus", "verifier")
_RESIDUAL, _BONUS, _NO_DRAFT = range(len(OWN))


def wanted_of(drafter: Drafter, wanted: bool) -> dict[str, Any]:
    """The argument of `propose` that requests sources; only drafters with several parts take it."""
    return {"with_sources": True} if wanted and len(drafter.source_names) > 1 else {}


def drafted_sources(block: DraftBlock) -> Array:
    """`[B, G]` int32, the part of the drafter that each token came from."""
    return jnp.zeros_like(block.tokens) if block.sources is None else block.sources


def round_sources(block: DraftBlock, accepted: Array) -> Array:
    """`[B, G + 1]` int32, the sources of a round's tokens, of which `accepted [B]` were drafted."""
    whole = jnp.where(block.num_drafted == 0, _NO_DRAFT, _BONUS)
    own = jnp.where(accepted < block.num_drafted, _RESIDUAL, whole)
    return emitted(drafted_sources(block) + len(OWN), accepted, own)


def inner_sources(sources: Array) -> Array:
    """The sources of an inner round: 0 for its verifier's own tokens, then the drafter's parts."""
    return jnp.maximum(sources - (len(OWN) - 1), 0)
