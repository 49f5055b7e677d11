"""The target distributions of a round, and what a rule with a budget has left after each.

Axes: B rows, N positions, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specjax.rules import Budgeted
from specjax.types import Array, Rule


def block_targets(rule: Rule, credit: Array, *distributions: Array | None) -> tuple[Array, Array]:
    """The targets at successive positions.

    Args:
      rule: the rule, its strengths `[B]`.
      credit: `[B]` float32, what its budget has left before the first position.
      *distributions: q, p, q_conf and p_conf, `[B, N, V]` float32; None where they are not read.

    Returns:
      pi `[B, N, V]`, and the credit after 0 .. N positions `[B, N + 1]`. Both depend at a position
      on what stands before it alone, so that a drafted token never decides about itself.
    """

    def row(rule: Rule, credit: Array, *at: Any) -> tuple[Array, Array]:
        if not isinstance(rule, Budgeted):
            return jax.vmap(rule)(*at), jnp.broadcast_to(credit, (at[0].shape[0] + 1,))

        def spend(credit: Array, one: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
            held, left = rule.spend(*one, credit)
            return left, (held, left)

        wanted = jax.vmap(rule.rule)(*at)
        _, (held, left) = lax.scan(spend, credit, (wanted, at[1]))
        return held, jnp.concatenate([credit[None], left])

    return jax.vmap(row)(rule, credit, *distributions)


def next_target(rule: Rule, credit: Array, *distributions: Array | None) -> tuple[Array, Array]:
    """`block_targets` at one position: `[B, V]` to `[B, V]`, and the credit after it `[B]`."""
    one = (None if x is None else x[:, None] for x in distributions)
    targets, credits = block_targets(rule, credit, *one)
    return targets[:, 0], credits[:, 1]
