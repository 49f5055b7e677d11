"""Verification of trees: which path is accepted, and which token follows it.

All algorithms judge the children of a node one after the other, in the order in which they were
drawn. A node has a mass of each next token; a child that fails takes its share away. One function
computes all chances; the algorithms differ in what they do with them.

Functions take one row. Axes: G longest block, N = G + 1 nodes, V vocabulary.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32

from specjax.errors import UserError
from specjax.platforms import entry, row
from specjax.sampling.draws import TINY, total
from specjax.types import ChildLaw, DraftTraits, Path, ScoredBlock
from specjax.verification.chains import Block, Token


@dataclasses.dataclass(frozen=True)
class Walk(Token):
    """Draws from the target at each node, and moves on to the child with the drawn token.

    It is exact for any tree, and reads no draft distribution. No exact algorithm accepts more of a
    tree whose tokens were not drawn at random.

    Source: SpecInfer (arXiv 2305.09781), naive sampling; EAGLE and Medusa verify their trees so.
    """

    walks_trees: ClassVar[bool] = True

    def check(self, max_draft: int, traits: DraftTraits) -> None:
        if not traits.drafts_trees:
            raise UserError(
                "Walk needs a drafter of trees, because it does not read the draft distributions "
                "of a chain: use Block or Token verification"
            )

    def walk(self, uniforms: Float32[Array, " G"], block: ScoredBlock) -> Path:
        certain = jnp.full_like(block.tokens, ChildLaw.TOP)
        block = block._replace(laws=certain, draft_probs=None)
        return descend(uniforms, block, _judge(block, joint=False))


@dataclasses.dataclass(frozen=True)
class TopDown(Token):
    """Judges the children of the accepted node, and goes on below the first that is accepted.

    Recursive rejection sampling: a baseline for `Traversal`, which accepts at least as many tokens
    in expectation. Of a chain it is `Token`.

    Source: SpecInfer (arXiv 2305.09781), multi-step speculative sampling; without replacement:
    Sequoia (arXiv 2402.12374).
    """

    walks_trees: ClassVar[bool] = True

    def walk(self, uniforms: Float32[Array, " G"], block: ScoredBlock) -> Path:
        return descend(uniforms, block, _judge(block, joint=False))


@dataclasses.dataclass(frozen=True)
class Traversal(Block):
    """Judges whole paths, from the leaves to the root. Of a chain it is `Block`.

    Source: Weng et al. 2025, Traversal Verification (arXiv 2505.12398).
    """

    walks_trees: ClassVar[bool] = True

    def walk(self, uniforms: Float32[Array, " G"], block: ScoredBlock) -> Path:
        assert block.parents is not None
        parents, count = block.parents, block.parents.size
        judged = _judge(block, joint=True)
        # Of a leaf, whose own target may be unknown, this is the chance of its path.
        passed = passes(uniforms, judged.totals[1:])
        none = jnp.int32(-1)

        def step(number: Array, best: Array) -> Array:
            node = count - number
            this = jnp.where(passed[node - 1], node, none)
            lowest = jnp.where(best[node] >= 0, best[node], this)
            # Elder siblings come later in this loop, and have priority.
            at = parents[node - 1]
            return best.at[at].set(jnp.where(lowest >= 0, lowest, best[at]))

        # To the first node, children before their parents, that passes by the sum of its masses.
        best = lax.fori_loop(0, count, step, jnp.full((count + 1,), none))
        return _path_to(jnp.maximum(best[0], 0), parents, judged, block.target_probs)


class JudgedTree(NamedTuple):
    """The state of a tree of which some children have been judged.

    The mass of a token after node n is `scales[n] * masses[n, v]`.

    Attributes:
      chances: the chance to accept each node after its elder siblings failed.
      totals: the sum of a node's masses.
    """

    chances: Float32[Array, " N"]
    masses: Float32[Array, "N V"]
    scales: Float32[Array, " N"]
    totals: Float32[Array, " N"]


def passes(uniforms: Float32[Array, " G"], chances: Float32[Array, " G"]) -> Bool[Array, " G"]:
    """Whether each node passes."""
    return uniforms < chances


def _judge(block: ScoredBlock, *, joint: bool) -> JudgedTree:
    """Judges all nodes but node 0, elder siblings first."""
    tokens, parents, laws = block.tokens, block.parents, block.laws
    assert parents is not None, "a tree needs parents"
    assert laws is not None, "the drafter must set DraftBlock.laws, how each token was drawn"
    drawn_from = parents if block.drawn_from is None else block.drawn_from

    def step(node: Array, state: JudgedTree) -> JudgedTree:
        token, at, law = (x[node - 1] for x in (tokens, parents, laws))
        masses, scale = row(state.masses, at), state.scales[at]
        share = jnp.minimum(scale * entry(masses, token), 1.0)
        # A token without randomness is accepted with its own mass, which leaves the rest.
        chance = share
        rest = jnp.where(share < 1.0, 1.0 - share, 1.0)
        after: tuple[Array, ...] = (
            masses.at[token].set(0.0),
            scale / rest,
            jnp.maximum(state.totals[at] - share, 0.0) / rest,
        )
        if block.draft_probs is not None:
            left = jnp.maximum(1.0 - state.totals[at], 0.0)
            draft = row(block.draft_probs, drawn_from[node - 1])
            index = jnp.arange(1, tokens.size + 1, dtype=jnp.int32)
            siblings = (drawn_from == drawn_from[node - 1]) & (index != node)
            # Siblings that the row's limit cuts off count too: the draw did not know of the limit.
            gone = siblings & jnp.where(index < node, law >= ChildLaw.WITHOUT, law == ChildLaw.OFF)
            draft = draft.at[jnp.where(gone, tokens, draft.size)].set(0.0, mode="drop")
            drawn = _after_draw(scale * masses, token, draft, left)
            fixed = law == ChildLaw.TOP
            chance = jnp.where(fixed, share, drawn[0])
            after = tuple(jnp.where(fixed, x, y) for x, y in zip(after, drawn[1:], strict=True))
        if not joint:
            after = (*after[:2], jnp.float32(1.0))
        exists = node <= block.num_drafted
        chance = jnp.where(exists, chance, 0.0)
        first = chance if joint else jnp.float32(1.0)
        before = masses, scale, state.totals[at]
        masses, scale, mass = (jnp.where(exists, x, y) for x, y in zip(after, before, strict=True))
        return JudgedTree(
            state.chances.at[node].set(chance),
            state.masses.at[at].set(masses),
            state.scales.at[at].set(scale).at[node].set(first),
            state.totals.at[at].set(mass).at[node].set(first),
        )

    count = tokens.size + 1
    ones = jnp.ones((count,), jnp.float32)
    start = JudgedTree(ones, block.target_probs, ones, ones)
    return lax.fori_loop(1, count, step, start)


def _after_draw(mass: Array, token: Array, draft: Array, left: Array) -> tuple[Array, ...]:
    """The chance of a token that was drawn by the weights `draft`, and what it leaves."""
    weight = total(draft)
    exists = weight > 0.0
    draft = draft / jnp.where(exists, weight, 1.0)
    drawn = entry(draft, token)
    chance = jnp.where(drawn > 0.0, entry(mass, token) / jnp.where(drawn > 0.0, drawn, 1.0), 0.0)
    rest = jnp.maximum(mass - draft, 0.0)
    remains = total(rest)
    below = remains + left
    some = exists & (jnp.max(rest) >= TINY)
    scale = jnp.where(some, 1.0 / jnp.where(some, below, 1.0), jnp.where(exists, 0.0, 1.0))
    kept = jnp.where(exists, remains * scale, 1.0 - left)
    return jnp.minimum(chance, 1.0), jnp.where(some, rest, mass), scale, kept


def descend(uniforms: Float32[Array, " G"], block: ScoredBlock, judged: JudgedTree) -> Path:
    """From node 0 to the first accepted child, and so on."""
    assert block.parents is not None
    parents = block.parents
    passed = passes(uniforms, judged.chances[1:])

    def step(node: Array, at: Array) -> Array:
        return jnp.where(passed[node - 1] & (parents[node - 1] == at), node, at)

    last = lax.fori_loop(1, parents.size + 1, step, jnp.int32(0))
    return _path_to(last, parents, judged, block.target_probs)


def _path_to(last: Array, parents: Array, judged: JudgedTree, targets: Array) -> Path:
    """The path to a node, and the masses there."""
    count = parents.size

    def rise(step: Array, on_path: Array) -> Array:
        node = count - step
        return on_path.at[parents[node - 1]].max(on_path[node])

    on_path = lax.fori_loop(0, count, rise, jnp.arange(count + 1) == last)[1:]
    # Parents come before their children, so the numbers rise along the path.
    index = jnp.arange(1, count + 1, dtype=jnp.int32)
    nodes = jnp.sort(jnp.where(on_path, index, count + 1))
    weights = row(judged.masses, last)
    # Without any mass, which only rounding can bring about, the target itself.
    weights = jnp.where(jnp.max(weights) >= TINY, weights, row(targets, last))
    return Path(nodes, jnp.sum(on_path, dtype=jnp.int32), weights)
