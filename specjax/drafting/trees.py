"""A drafter of trees: a language model drafts several next tokens at each node, level by level.

Axes: B rows, G nodes without the root, W nodes of a level that get children, K children of a node,
V vocabulary.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.checks import check_part
from specjax.decoding import history as history_lib
from specjax.decoding.guards import check_model
from specjax.decoding.tree import grown, part_of
from specjax.drafting.neural import ModelDrafter, NeuralDrafterParams, NeuralDrafterState
from specjax.drafting.topologies import Beam, Level, Topology
from specjax.platforms import row
from specjax.processing import distributions, distributions_along
from specjax.sampling import TINY, confidence, draw, num_uniforms
from specjax.types import (
    Array,
    Bonus,
    Cache,
    ChildLaw,
    DraftBlock,
    DraftTraits,
    LanguageModel,
    Sampling,
    TreeShape,
)

# How the children of a node may be chosen.
CHILDREN = ("top", "top+1", "without", "independent")


class _Growing(NamedTuple):
    """A tree with n nodes, the root included, of which m have been read.

    Attributes:
      tokens: `[B, n - 1]` int32.
      parents: `[B, n - 1]` int32.
      laws: `[B, n - 1]` int32.
      logits: `[B, m, V]`.
      shape: of the nodes.
      scores: `[B, n]` float32, the drafter's probability of the path to each node.
      cache: the model's, with the nodes that have been read.
    """

    tokens: Array  # [B, n - 1]
    parents: Array  # [B, n - 1]
    laws: Array  # [B, n - 1]
    logits: Array  # [B, m, V]
    shape: TreeShape
    scores: Array  # [B, n]
    cache: Cache


@dataclasses.dataclass(frozen=True)
class TreeDrafter(ModelDrafter):
    """Drafts trees from a small model; its parameters: `NeuralDrafterParams`.

    A level takes one pass. In the first pass of a round the model reads the tokens that were
    committed since the last.

    Attributes:
      model: the small language model; it must read trees.
      tree: the shape.
      children: how the children of a node are chosen: "top", its most probable tokens; "top+1", one
        that is drawn, then the most probable tokens, without which it was drawn; "without", drawn
        without replacement; "independent", drawn independently, where equal tokens may occur.
      name: its passes are counted under this name.

    Raises:
      TypeError: if a part is of a wrong type.
      ValueError: if `children` is unknown, the model cannot read trees, or a node has more children
        than there are tokens.
    """

    model: LanguageModel
    tree: Topology | Beam
    children: str = "top+1"
    name: str = "drafter"

    def __post_init__(self) -> None:
        check_model("model", self.model)
        check_part("tree", self.tree, ("levels", "size", "widest"), "drafting.k_ary(3, 2)")
        if self.children not in CHILDREN:
            raise ValueError(
                f"children must be one of {', '.join(map(repr, CHILDREN))}, got {self.children!r}"
            )
        if not self.model.reads_trees:
            raise ValueError(f"model must read trees, and {type(self.model).__name__} cannot")
        if self.tree.widest > self.vocab_size and self.children != "independent":
            raise ValueError(
                f"a node of the tree has {self.tree.widest} children, but there are only "
                f"{self.vocab_size} tokens: use a narrower tree"
            )

    @property
    def max_draft(self) -> int:
        """G, the number of nodes."""
        return self.tree.size

    @property
    def depth(self) -> int:
        """The length of the longest path."""
        return len(self.tree.levels)

    @property
    def num_uniforms(self) -> int:
        """A draw per token that is drawn."""
        draws = sum(min(c, self._drawn) for level in self.tree.levels for c in level.counts)
        return draws * num_uniforms(self.vocab_size)

    @property
    def _drawn(self) -> int:
        """The most children of a node that are drawn."""
        return {"top": 0, "top+1": 1}.get(self.children, self.tree.widest)

    @property
    def traits(self) -> DraftTraits:
        """The traits of a single drafter that drafts whole trees."""
        return DraftTraits(
            fixed_length=True, independent_rows=True, drafts_trees=True, processes=True
        )

    def describe(self) -> Any:
        """See `Drafter`."""
        fields = {"name": self.name, "model": self.model.describe()}
        return fields | {"tree": repr(self.tree), "children": self.children}

    def propose(
        self,
        params: NeuralDrafterParams,
        state: NeuralDrafterState,
        tokens: Array,
        limits: Array,
        uniforms: Array,
        sampling: Sampling,
        active: Array,
        *,
        with_confidence: bool,
    ) -> tuple[DraftBlock, NeuralDrafterState]:
        """See `Drafter`."""
        active &= limits > 0
        uniforms = uniforms.reshape(tokens.size, -1, num_uniforms(self.vocab_size))

        def draft(before: NeuralDrafterState) -> tuple[DraftBlock, NeuralDrafterState]:
            return self._draft(params, before, uniforms, sampling, active, with_confidence)

        like = jax.eval_shape(draft, state)[0]
        none = lambda before: (jax.tree.map(jnp.zeros_like, like), before)  # noqa: E731
        block, state = lax.cond(jnp.any(active), draft, none, state)
        count = jnp.where(active, jnp.minimum(limits, self.max_draft), 0)
        return block._replace(num_drafted=count), state

    def bonus(
        self,
        params: NeuralDrafterParams,
        state: NeuralDrafterState,
        tokens: Array,
        block: DraftBlock,
        sampling: Sampling,
        *,
        with_confidence: bool,
    ) -> tuple[Bonus, NeuralDrafterState]:
        """See `Drafter`; the accepted path is read again, in one pass."""
        path = jnp.concatenate([tokens[:, None], block.tokens[:, : self.depth]], axis=1)
        with jax.named_scope("drafter_pass"):
            read = self.model.extend(params.model, state.cache, path, state.positions)
        last = jax.vmap(row)(read.logits, block.num_drafted)
        with jax.named_scope("distribution"):
            q = distributions(last, sampling)
        q_conf = jax.vmap(confidence)(last) if with_confidence else None
        count = jnp.minimum(block.num_drafted, self.depth) + 1
        given = state.history, state.positions, block.tokens, count
        state = state._replace(cache=read.cache, history=history_lib.note_block(*given))
        return Bonus(q, q_conf, {self.name: jnp.int32(1)}), state

    def commit(
        self, state: NeuralDrafterState, tokens: Array, counts: Array, hidden: Array | None = None
    ) -> NeuralDrafterState:
        """See `Drafter`."""
        history = history_lib.commit(state.history, state.positions, tokens, counts)
        return state._replace(positions=state.positions + counts, history=history)

    def _draft(
        self,
        params: NeuralDrafterParams,
        state: NeuralDrafterState,
        uniforms: Array,
        sampling: Sampling,
        active: Array,
        with_confidence: bool,
    ) -> tuple[DraftBlock, NeuralDrafterState]:
        """The trees of all rows; the entries of their nodes stay in the cache until the next."""
        given = params.model, state.cache, state.positions, state.history, active
        with jax.named_scope("drafter_pass"):
            last = history_lib.read_last(self.model, *given, self.depth + 1)
        rows = active.size
        one = jnp.ones((rows, 1), jnp.float32)
        none = jnp.zeros((rows, 0), jnp.int32)
        tree = _Growing(
            tokens=none,
            parents=none,
            laws=none,
            logits=last.logits[:, None],
            shape=TreeShape(jnp.zeros((rows, 1), jnp.int32), one[..., None] > 0),
            scores=one,
            cache=last.cache,
        )
        probs, start, used = [], 0, 0
        for level in self.tree.levels:
            if start:
                tree = self._read(params, tree, state.positions, start)
            with jax.named_scope("draw"):
                probs.append(_distributions(tree, sampling, start))
                greedy = jnp.asarray(sampling.temperature)[:, None, None] < TINY
                # A greedy distribution has no second token.
                order = jnp.where(greedy, tree.logits[:, start:], probs[-1])
                chosen = self._uniforms_of(level, uniforms, used)
                tree = self._grow(tree, level, probs[-1], order, chosen, start)
            used += sum(min(count, self._drawn) for count in level.counts)
            start += probs[-1].shape[1]
        confidences = None
        if with_confidence:
            confidences = self._padded(jax.vmap(jax.vmap(confidence))(tree.logits))
        block = DraftBlock(
            tokens=tree.tokens,
            probs=self._padded(jnp.concatenate(probs, axis=1)),
            confidences=confidences,
            num_drafted=jnp.zeros((rows,), jnp.int32),
            calls={self.name: last.calls + self.depth - 1},
            parents=tree.parents,
            laws=tree.laws,
        )
        return block, state._replace(cache=tree.cache, history=last.history)

    def _uniforms_of(self, level: Level, uniforms: Array, used: int) -> Array:
        """`[B, W, n, U]`: those for the n draws below each node; some are not used."""
        starts = used + np.cumsum([0, *(min(count, self._drawn) for count in level.counts)])[:-1]
        most = min(max(level.counts), self._drawn)
        places = starts[:, None] + np.arange(most)[None]
        return uniforms[:, np.minimum(places, max(uniforms.shape[1] - 1, 0)).astype(np.int32)]

    def _grow(
        self, tree: _Growing, level: Level, q: Array, order: Array, uniforms: Array, start: int
    ) -> _Growing:
        """The tree with one more level, below the nodes from `start` on.

        Args:
          tree: the tree so far.
          level: the new level.
          q: `[B, n, V]`, the distributions after these nodes.
          order: `[B, n, V]`, larger for better tokens.
          uniforms: see `_uniforms_of`.
          start: the number of the first of these nodes.
        """
        rows, most = q.shape[0], max(level.counts)
        pick = jax.vmap(lambda x, at: x[at])
        if level.parents is None:
            places = lax.top_k(tree.scores[:, start:], len(level.counts))[1]
        else:
            places = jnp.broadcast_to(
                jnp.asarray(level.parents, jnp.int32)[None], (rows, len(level.counts))
            )
        counts = jnp.asarray(level.counts, jnp.int32)
        some = lambda *at: _children(self.children, most, *at)  # noqa: E731
        below = jax.vmap(jax.vmap(some), in_axes=(0, 0, 0, None))
        tokens, laws = below(pick(q, places), pick(order, places), uniforms, counts)
        node, rank = np.nonzero(np.arange(most)[None] < np.asarray(level.counts)[:, None])
        tokens, laws, places = tokens[:, node, rank], laws[:, node, rank], places[:, node]
        chances = jax.vmap(lambda x, at, token: x[at, token])(q, places, tokens)
        parents = start + places
        return tree._replace(
            tokens=jnp.concatenate([tree.tokens, tokens], axis=1),
            parents=jnp.concatenate([tree.parents, parents], axis=1),
            laws=jnp.concatenate([tree.laws, laws], axis=1),
            shape=grown(tree.shape, parents),
            scores=jnp.concatenate([tree.scores, pick(tree.scores, parents) * chances], axis=1),
        )

    def _read(
        self, params: NeuralDrafterParams, tree: _Growing, positions: Array, start: int
    ) -> _Growing:
        """The tree with the nodes from `start` on read."""
        end = tree.tokens.shape[1] + 1
        given = tree.tokens[:, start - 1 :], positions, part_of(tree.shape, start, end)
        with jax.named_scope("drafter_pass"):
            read = self.model.extend(params.model, tree.cache, *given)
        logits = jnp.concatenate([tree.logits, read.logits], axis=1)
        return tree._replace(logits=logits, cache=read.cache)

    def _padded(self, x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, self.max_draft + 1 - x.shape[1]), (0, 0)))


def _distributions(tree: _Growing, sampling: Sampling, start: int) -> Array:
    """The distributions after the nodes from `start` on, `[B, n, V]`."""
    if sampling.processing is None:
        return distributions_along(tree.logits[:, start:], sampling, tree.tokens[:, start:])
    return distributions_along(tree.logits, sampling, tree.tokens, tree.parents)[:, start:]


def _children(
    kind: str, most: int, q: Array, order: Array, uniforms: Array, count: Array
) -> tuple[Array, Array]:
    """The children of a node, and their laws. If nothing is left to draw, the best token follows.

    Args:
      kind: see `CHILDREN`.
      most: K.
      q: `[V]`.
      order: `[V]`, larger for better tokens.
      uniforms: `[n, U]`.
      count: int32 scalar, the number of children that are used.

    Returns:
      Both `[K]` int32.
    """
    fixed = jnp.full((most,), ChildLaw.TOP, jnp.int32)
    if kind in ("top", "top+1"):
        tops = lax.top_k(order, most)[1]
        if kind == "top":
            return tops, fixed
        used = jnp.arange(most, dtype=jnp.int32) < count - 1
        rest = _without(q, jnp.where(used, tops, q.size))
        first, law = _drawn(rest, tops[count - 1], ChildLaw.OFF, uniforms[0])
        return jnp.append(first, tops[:-1]), fixed.at[0].set(law)
    tokens, laws = [], []
    kept = kind == "independent"
    usual = ChildLaw.DRAWN if kept else ChildLaw.WITHOUT
    for rank in range(most):
        best = jnp.argmax(order).astype(jnp.int32)
        token, law = _drawn(q, best, usual, uniforms[min(rank, uniforms.shape[0] - 1)])
        if not kept:
            q, order = _without(q, token), order.at[token].set(-jnp.inf)
        tokens.append(token)
        laws.append(law)
    return jnp.stack(tokens), jnp.stack(laws)


def _drawn(weights: Array, best: Array, law: ChildLaw, uniform: Array) -> tuple[Array, Array]:
    """A token drawn by its weight, or `best` if all are zero; and its law."""
    some = jnp.max(weights) > 0.0
    token = jnp.where(some, draw(weights, uniform), best)
    return token, jnp.where(some, jnp.int32(law), jnp.int32(ChildLaw.TOP))


def _without(q: Array, tokens: Array) -> Array:
    return q.at[tokens].set(0.0, mode="drop")
