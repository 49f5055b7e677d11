"""A block as a tree: the places of its nodes, and the accepted path. A chain is a simple tree.

Only this module knows which token of a block follows which. After verification, the accepted path
replaces the tree, as a chain.

Axes: B rows, G longest block, T nodes: the last committed token, then the block's; V vocabulary.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from specjax.sampling import draw
from specjax.types import (
    Acceptance,
    Cache,
    DraftBlock,
    LanguageModel,
    Path,
    ScoredBlock,
    TreeShape,
    Verification,
)
from specjax.verification import accept, draw_next


def shape_of(parents: Array | None) -> TreeShape | None:
    """The places of the nodes with `parents [B, G]`; None for a chain."""
    if parents is None:
        return None
    longest = parents.shape[1]  # the path of a chain
    numbers = jnp.arange(longest + 1, dtype=jnp.int32)
    follows = jnp.pad(parents, ((0, 0), (1, 0)))[:, :, None] == numbers[None, None]
    itself = jnp.eye(longest + 1, dtype=bool)[None]
    seen = jnp.tril(follows, -1) | itself
    for _ in range((longest - 1).bit_length()):
        # Ways of up to twice as many steps; the sums of zeros and ones are exact.
        ways = seen.astype(jnp.float32)
        seen = jnp.einsum("bij,bjk->bik", ways, ways) > 0
    return TreeShape(jnp.sum(seen, axis=2, dtype=jnp.int32) - 1, seen)


def grown(tree: TreeShape, parents: Array) -> TreeShape:
    """A whole tree with more nodes, of `parents [B, n]` in it."""
    pick, count = jax.vmap(lambda x, at: x[at]), parents.shape[1]
    itself = jnp.broadcast_to(jnp.eye(count, dtype=bool)[None], (parents.shape[0], count, count))
    new = jnp.concatenate([pick(tree.seen, parents), itself], axis=2)
    old = jnp.pad(tree.seen, ((0, 0), (0, 0), (0, count)))
    depths = jnp.concatenate([tree.depths, pick(tree.depths, parents) + 1], axis=1)
    return TreeShape(depths, jnp.concatenate([old, new], axis=1))


def part_of(tree: TreeShape, start: int, end: int) -> TreeShape:
    """The nodes `start .. end` of a whole tree, after those before."""
    return TreeShape(tree.depths[:, :end], tree.seen[:, start:end, :end])


def draft_probs(block: DraftBlock, vocab: int) -> Array:
    """`DraftBlock.probs` of a chain; of certain tokens one-hot, and made where they are read."""
    if block.probs is not None:
        return block.probs
    return jax.nn.one_hot(jnp.pad(block.tokens, ((0, 0), (0, 1))), vocab, dtype=jnp.float32)


class Judgement(NamedTuple):
    """The result of verification.

    Attributes:
      accepted: the number of accepted tokens.
      acceptance: of chains; else None.
      path: of trees; else None.
    """

    accepted: Int32[Array, " B"]
    acceptance: Acceptance | None
    path: Path | None


def judge(
    verification: Verification, uniforms: Array, block: DraftBlock, targets: Array, carry: Any
) -> Judgement:
    """Decides which tokens are accepted; `uniforms [B, G]`, `targets [B, G + 1, V]`."""
    if block.parents is None:
        needed = verification.needs_probs
        probs = draft_probs(block, targets.shape[2]) if needed else block.probs
        chains = ScoredBlock(block.tokens, probs, targets, block.num_drafted)
        of_chains = jax.vmap(functools.partial(accept, verification))
        acceptance, accepted = of_chains(uniforms, chains, carry)
        return Judgement(accepted, acceptance, None)
    tree = block.parents, block.laws, block.drawn_from
    trees = ScoredBlock(block.tokens, block.probs, targets, block.num_drafted, *tree)
    path = jax.vmap(verification.walk)(uniforms, trees)
    return Judgement(path.length, None, path)


def node_counts(judged: Judgement, block: DraftBlock) -> Int32[Array, "B 2 G"] | None:
    """Which nodes of a tree were drafted and accepted; None of chains."""
    if judged.path is None:
        return None
    nodes = jnp.arange(1, block.tokens.shape[1] + 1, dtype=jnp.int32)
    in_path = nodes[None] <= judged.path.length[:, None]
    hit = (judged.path.nodes[:, :, None] == nodes[None, None]) & in_path[:, :, None]
    there = nodes[None] <= block.num_drafted[:, None]
    return jnp.stack([there, hit.any(axis=1)], axis=1).astype(jnp.int32)


def along(judged: Judgement, block: DraftBlock, *others: Any) -> tuple[Any, ...]:
    """The block and arrays `[B, G + 1, ...]` like it, by the nodes of the accepted path.

    A path that ends at a leaf becomes a chain that is accepted whole; any other path becomes a
    chain whose next token was rejected. Chains do not change.
    """
    path = judged.path
    if path is None or block.parents is None:
        return block, *others
    index = jnp.arange(block.tokens.shape[1], dtype=jnp.int32)[None]
    nodes = jnp.where(index < path.length[:, None], path.nodes, 0)
    last = jnp.max(jnp.where(index == path.length[:, None] - 1, nodes, 0), axis=1)
    has_child = (block.parents == last[:, None]) & (index < block.num_drafted[:, None])
    places = jnp.pad(nodes, ((0, 0), (1, 0)))
    pick = jax.vmap(lambda x, at: x[at])
    of_nodes = lambda x: pick(jnp.pad(x, ((0, 0), (1, 0))), nodes)  # noqa: E731
    chain = block._replace(
        tokens=of_nodes(block.tokens),
        num_drafted=path.length + has_child.any(axis=1).astype(jnp.int32),
        parents=None,
        laws=None,
        sources=None if block.sources is None else of_nodes(block.sources),
        drawn_from=None,
    )
    every = (chain, *others)
    chain, *others = jax.tree.map(lambda x: pick(x, places) if jnp.ndim(x) == 3 else x, every)
    return chain, *others


def kept(judged: Judgement, model: LanguageModel, cache: Cache, positions: Array) -> Cache:
    """The cache with the accepted path at successive positions."""
    if judged.path is None:
        return cache
    return model.keep(cache, positions, judged.path.nodes)


def draw_after(judged: Judgement, uniforms: Array, chain: DraftBlock, bonus: Array) -> Array:
    """The token after the accepted tokens, `[B]`; `bonus [B, V]`: the target after whole blocks."""
    if judged.path is None:
        assert judged.acceptance is not None
        targets = judged.acceptance.targets
        block = ScoredBlock(chain.tokens, chain.probs, targets, chain.num_drafted)
        draw_each = jax.vmap(draw_next)
        return draw_each(uniforms, judged.acceptance, block, judged.accepted, bonus)
    whole = judged.accepted == chain.num_drafted
    return jax.vmap(draw)(jnp.where(whole[:, None], bonus, judged.path.weights), uniforms)
