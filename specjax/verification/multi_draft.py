"""Baselines that judge independent drafts together: K-SEQ and greedy multi-path block verification.

Both are exact. Neither accepts more than `Traversal` of a tree with a drawn child beside the most
probable tokens; see `docs/trees.md`.

Functions take one row. Axes: G nodes without the root, V vocabulary.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.errors import UserError
from specjax.platforms import entry, row
from specjax.sampling import TINY, residual_weights, total
from specjax.types import Array, DraftTraits, Path
from specjax.verification import traversal
from specjax.verification.block import Block
from specjax.verification.token import Token

# Halvings of an interval of at most G - 1: float32 has no more digits.
_HALVINGS = 30


@dataclasses.dataclass(frozen=True)
class KSeq(Token):
    """Accepts each of k independent children by the same chances, k known before the draw.

    Attributes:
      joint: whether whole paths are judged, from the leaves to the root, as `Traversal` does; False
        is the published form.

    Source: Sun et al. 2023, SpecTr (arXiv 2310.15141), algorithm 3.
    """

    joint: bool = False

    walks_trees: ClassVar[bool] = True

    def check(self, max_draft: int, traits: DraftTraits) -> None:
        if not traits.independent_children:
            raise UserError(
                "KSeq needs a tree whose children are drawn independently: give the tree "
                "children='independent', or use Traversal verification"
            )

    def walk(
        self,
        uniforms: Array,
        tokens: Array,
        parents: Array,
        laws: Array | None,
        draft_probs: Array,
        target_probs: Array,
        num_drafted: Array,
        drawn_from: Array | None = None,
    ) -> Path:
        exists = jnp.arange(tokens.size) < num_drafted
        count = tokens.size + 1

        def step(node: Array, state: traversal.JudgedTree) -> traversal.JudgedTree:
            below = exists & (parents == node)
            mass = state.scales[node] * row(target_probs, node)
            judged = _k_seq(mass, row(draft_probs, node), jnp.sum(below, dtype=jnp.int32))
            # The target of a leaf may be unknown.
            weight = jnp.where(jnp.any(below), judged.weight, state.scales[node])
            own = jax.vmap(entry, in_axes=(None, 0))(judged.chances, tokens)
            chances = state.chances.at[1:].set(jnp.where(below, own, state.chances[1:]))
            return traversal.JudgedTree(
                chances,
                state.masses.at[node].set(judged.left),
                chances if self.joint else state.scales,
                state.totals.at[node].set(weight),
            )

        ones = jnp.ones((count,), jnp.float32)
        start = traversal.JudgedTree(ones.at[1:].set(0.0), target_probs, ones, ones)
        judged = lax.fori_loop(0, count, step, start)
        finish = traversal.climb if self.joint else traversal.descend
        return finish(uniforms, parents, judged, target_probs)


@dataclasses.dataclass(frozen=True)
class MultiPathBlock(Block):
    """Takes one of K independent paths, greedily by pi / q, and verifies it as a block.

    With a good drafter it accepts fewer tokens than `Block` of a single path.

    Source: greedy multi-path block verification (arXiv 2602.16961).
    """

    walks_trees: ClassVar[bool] = True

    def check(self, max_draft: int, traits: DraftTraits) -> None:
        if not traits.independent_paths:
            raise UserError(
                "MultiPathBlock needs independent paths of the same length: give the tree "
                "children='independent' and a shape such as parents=(0, 0, 1, 2), or use Traversal "
                "verification"
            )

    def walk(
        self,
        uniforms: Array,
        tokens: Array,
        parents: Array,
        laws: Array | None,
        draft_probs: Array,
        target_probs: Array,
        num_drafted: Array,
        drawn_from: Array | None = None,
    ) -> Path:
        number = jnp.arange(tokens.size, dtype=jnp.int32)
        # Levels that the row's limit cuts are left out, as a shorter draft.
        count = jnp.minimum(jnp.sum(parents == 0, dtype=jnp.int32), num_drafted)
        depth = num_drafted // jnp.maximum(count, 1)
        padded = jnp.pad(tokens, (0, tokens.size))

        def step(level: Array, state: _Picked) -> _Picked:
            node = state.nodes[level]
            draft, target = row(draft_probs, node), row(target_probs, node)
            order = jnp.argsort(jnp.where(draft > 0.0, target / draft, jnp.inf), stable=True)
            place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
            upto = jnp.cumsum(draft[order])[place]
            low = state.lower + state.own * (upto - draft)
            shares = _powers(low + state.own * draft, low, count, tokens.size)
            usual = _powers(state.lower + state.own, state.lower, count, tokens.size)
            law = draft * shares / jnp.maximum(usual, TINY)
            drawn = lax.dynamic_slice_in_dim(padded, level * count, tokens.size)
            ranks = jnp.where(state.alive, place[drawn], -1)
            best = jnp.argmax(ranks).astype(jnp.int32)
            token = drawn[best]
            return _Picked(
                state.nodes.at[level + 1].set(1 + level * count + best),
                state.laws.at[level].set(law / jnp.maximum(total(law), TINY)),
                state.alive & (drawn == token),
                jnp.maximum(low[token], 0.0),
                state.own * draft[token],
            )

        start = _Picked(
            jnp.zeros((tokens.size + 1,), jnp.int32),
            jnp.zeros_like(draft_probs),
            number < count,
            jnp.float32(0.0),
            jnp.float32(1.0),
        )
        picked = lax.fori_loop(0, depth, step, start)
        chain = tokens[jnp.maximum(picked.nodes[1:] - 1, 0)]
        targets = target_probs[picked.nodes]
        acceptance = self.acceptance(chain, picked.laws, targets, depth)
        passed = traversal.passes(uniforms, acceptance.thresholds)
        length = jnp.max(jnp.where(passed, number + 1, 0), initial=0)
        at = row(targets, length), row(picked.laws, length), acceptance.scales[length]
        weights = jnp.where(length < depth, residual_weights(*at), at[0])
        return Path(picked.nodes[1:], length, weights)


class _Shared(NamedTuple):
    """The chances of the children of a node by their token, and what their failure leaves."""

    chances: Array  # [V]
    left: Array  # [V]
    weight: Array


class _Picked(NamedTuple):
    """The greedy choice among paths.

    Attributes:
      nodes: `[G + 1]` int32, the nodes of the chosen path, node 0 first.
      laws: `[G + 1, V]`, the distribution of the chosen path's next token after each of them.
      alive: `[G]` bool, the paths that begin like it.
      lower: the probability that a path is before it in the order.
      own: the probability that a path begins like it.
    """

    nodes: Array  # [G + 1]
    laws: Array  # [G + 1, V]
    alive: Array  # [G]
    lower: Array
    own: Array


def _k_seq(mass: Array, draft: Array, count: Array) -> _Shared:
    """Judges `count` independent children of a node, drawn from `draft [V]`; `mass [V]`."""
    many = count.astype(jnp.float32)

    def accepted(scale: Array) -> tuple[Array, Array]:
        each = jnp.minimum(draft, mass / scale)
        # 1 - (1 - beta)^k, without cancellation.
        return each, -jnp.expm1(many * jnp.log1p(-jnp.minimum(total(each), 1.0)))

    def halve(_: Array, span: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = span
        middle = 0.5 * (low + high)
        each, chance = accepted(middle)
        fits = chance <= middle * total(each)
        return jnp.where(fits, low, middle), jnp.where(fits, middle, high)

    each, chance = accepted(jnp.float32(1.0))
    span = jnp.float32(1.0), jnp.maximum(many, 1.0)
    _, high = lax.fori_loop(0, _HALVINGS, halve, span)
    scale = jnp.where(chance <= total(each), 1.0, high)
    each, chance = accepted(scale)
    beta = total(each)
    taken = each * (chance / jnp.where(beta > 0.0, beta, 1.0))
    rest = jnp.maximum(mass - taken, 0.0)
    # What remains, plus what was missing before.
    below = total(rest) + jnp.maximum(1.0 - total(mass), 0.0)
    left = rest / jnp.where(below > 0.0, below, 1.0)
    safe = jnp.where(draft > 0.0, draft, 1.0)
    return _Shared(jnp.where(draft > 0.0, each / safe, 0.0), left, total(left))


def _powers(high: Array, low: Array, count: Array, most: int) -> Array:
    """(high^k - low^k) / (high - low) for k = `count`, at most `most`, without cancellation."""

    def add(i: Array, so_far: Array) -> Array:
        others = jnp.maximum(count - 1 - i, 0).astype(jnp.float32)
        term = high ** i.astype(jnp.float32) * low**others
        return jnp.where(i < count, so_far + term, so_far)

    return lax.fori_loop(0, most, add, jnp.zeros_like(high))
