"""A drafter of trees: a language model drafts several next tokens at each node, level by level.

Nodes are numbered level by level; node 0 is the last committed token.

Axes: B rows, G nodes without the root, N = G + 1 nodes, W nodes of a level that get children, K
children of a node, n nodes of a tree that grows, m nodes that have been read, V vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32

from specjax.checks import check_count, check_part, whole_number
from specjax.decoding import history as history_lib
from specjax.decoding.guards import check_model
from specjax.decoding.tree import grown, part_of
from specjax.drafting.neural import ModelDrafter, NeuralDrafterParams, NeuralDrafterState
from specjax.errors import UserError
from specjax.platforms import row
from specjax.processing import distributions, distributions_along
from specjax.sampling import TINY, confidence, draw, num_uniforms
from specjax.types import (
    Bonus,
    Cache,
    ChildLaw,
    DraftBlock,
    DraftInputs,
    DraftTraits,
    LanguageModel,
    Sampling,
    TreeShape,
)

_EXAMPLE = "(0, 0, 1, 1) for two children of the root and two of the first of these"


class Level(NamedTuple):
    """A level of a tree.

    Attributes:
      parents: for each node with children its place in the level above, from 0; None if the nodes
        with the most probable paths get them.
      counts: for each such node the number of its children.
    """

    parents: tuple[int, ...] | None
    counts: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.counts)


@dataclasses.dataclass(frozen=True)
class Topology:
    """A tree that is the same in every round.

    Attributes:
      parents: for each node from 1 on, its parent; level by level, siblings together, and the
        children of a node before those of the next.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        given = self.parents
        if isinstance(given, str) or not isinstance(given, Sequence) or not given:
            raise UserError(f"parents must be a tuple such as {_EXAMPLE}, got {given!r}")
        parents = tuple(whole_number(f"parents[{i}]", x, low=0) for i, x in enumerate(given))
        for i, parent in enumerate(parents):
            if parent > i:
                raise UserError(
                    f"parents[{i}] must be at most {i}, because a node comes after its parent, "
                    f"got {parent}"
                )
        if list(parents) != sorted(parents):
            raise UserError(f"parents must not decrease, got {parents}: number level by level")
        object.__setattr__(self, "parents", parents)

    @property
    def size(self) -> int:
        return len(self.parents)

    @property
    def depths(self) -> tuple[int, ...]:
        """The depth of each node from 1 on."""
        found = [0]
        for parent in self.parents:
            found.append(found[parent] + 1)
        return tuple(found[1:])

    @property
    def widest(self) -> int:
        return max(map(self.parents.count, self.parents))

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels below the root."""
        depths, levels = (0, *self.depths), []
        for depth in range(1, max(depths) + 1):
            above = [node for node, level in enumerate(depths) if level == depth - 1]
            counts = {node: self.parents.count(node) for node in above}
            inner = [node for node in above if counts[node]]
            places = tuple(above.index(node) for node in inner)
            levels.append(Level(places, tuple(counts[node] for node in inner)))
        return tuple(levels)


@dataclasses.dataclass(frozen=True)
class Beam:
    """A tree that grows below the nodes whose paths are the most probable for the drafter.

    Each level has `width` children of each of the best `beam` nodes of the level above.

    Attributes:
      depth: the number of levels, at least 1.
      width: the children of a node, at least 1.
      beam: the nodes of a level that get children, at least 1.
      keep: the verifier reads only this number of nodes, those with the most probable paths; None:
        all. No token may be drawn then: a drawn token that is left out for its value would make the
        output follow another distribution.

    Source: EAGLE-2 (arXiv 2406.16858) for `keep`.
    """

    depth: int
    width: int
    beam: int
    keep: int | None = None

    def __post_init__(self) -> None:
        for name in ("depth", "width", "beam"):
            check_count(name, getattr(self, name), "give a whole number")
        if self.keep is not None:
            check_count("keep", self.keep, "give a number of nodes, or None for all")
            drafted = dataclasses.replace(self, keep=None).size
            inner = sum(len(level.counts) for level in self.levels[1:])
            if not inner <= self.keep <= drafted:
                raise UserError(
                    f"keep must lie between {inner}, the nodes with children, and {drafted}, the "
                    f"nodes of the tree, got {self.keep}"
                )

    @property
    def size(self) -> int:
        return self.keep or sum(level.size for level in self.levels)

    @property
    def widest(self) -> int:
        return self.width

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels below the root."""
        best = min(self.beam, self.width)
        first, next_ = Level((0,), (self.width,)), Level(None, (self.width,) * best)
        third = Level(None, (self.width,) * min(self.beam, best * self.width))
        return (first, next_, *(third,) * self.depth)[: self.depth]


def k_ary(depth: int, width: int) -> Topology:
    """The tree in which every node above the last level has `width` children."""
    check_count("depth", depth, "give the number of levels")
    check_count("width", width, "give the number of children of a node")
    inner = sum(width**level for level in range(depth))
    return Topology(tuple(node for node in range(inner) for _ in range(width)))


def caterpillar(depth: int, width: int) -> Topology:
    """The tree in which only the first child of a node has children: `width` on each level."""
    check_count("depth", depth, "give the number of levels")
    check_count("width", width, "give the number of children of a node")
    firsts = [0, *(1 + level * width for level in range(depth - 1))]
    return Topology(tuple(node for node in firsts for _ in range(width)))


def paths(count: int, depth: int) -> Topology:
    """The tree of `count` paths of `depth` nodes each that part at the root."""
    check_count("count", count, "give the number of paths")
    check_count("depth", depth, "give the number of levels")
    return Topology((0,) * count + tuple(range(1, count * (depth - 1) + 1)))


# How the children of a node may be chosen.
CHILDREN = ("top", "top+1", "without", "independent")


class _Growing(NamedTuple):
    """A tree with n nodes, the root included, of which m have been read: those with children.

    Attributes:
      scores: the drafter's probability of the path to each node (see `_ranks`).
      read: the nodes that have been read, in this order.
      follows: the place in `read` of the parent of each but the root.
      shape: of the read nodes.
      logits: after the read nodes.
      cache: the model's, with the read nodes.
    """

    tokens: Int32[Array, "B n-1"]
    parents: Int32[Array, "B n-1"]
    laws: Int32[Array, "B n-1"]
    scores: Float32[Array, "B n"]
    read: Int32[Array, "B m"]
    follows: Int32[Array, "B m-1"]
    shape: TreeShape
    logits: Float32[Array, "B m V"]
    cache: Cache


@dataclasses.dataclass(frozen=True)
class TreeDrafter(ModelDrafter):
    """Drafts trees from a small model; its parameters: `NeuralDrafterParams`.

    A level takes one pass, over the nodes that get children. In the first pass of a round the model
    reads the tokens that were committed since the last.

    Attributes:
      model: the small language model; it must read trees.
      tree: the shape.
      children: how the children of a node are chosen: "top", its most probable tokens; "top+1", one
        that is drawn, then the most probable tokens, without which it was drawn; "without", drawn
        without replacement; "independent", drawn independently, where equal tokens may occur.
      name: its passes are counted under this name.
    """

    model: LanguageModel
    tree: Topology | Beam
    children: str = "top+1"
    name: str = "drafter"

    def __post_init__(self) -> None:
        check_model("model", self.model)
        check_part("tree", self.tree, ("levels", "size", "widest"), "drafting.k_ary(3, 2)")
        if self.children not in CHILDREN:
            raise UserError(
                f"children must be one of {', '.join(map(repr, CHILDREN))}, got {self.children!r}"
            )
        if not self.model.reads_trees:
            raise UserError(f"model must read trees, and {type(self.model).__name__} cannot")
        if getattr(self.tree, "keep", None) is not None and self.children != "top":
            raise UserError(
                f"{self.tree!r} needs children='top', got {self.children!r}: leaving out drawn "
                "tokens by their values would change the distribution of the output"
            )
        if self.tree.widest > self.vocab_size and self.children != "independent":
            raise UserError(
                f"a node of the tree has {self.tree.widest} children, but there are only "
                f"{self.vocab_size} tokens: use a narrower tree"
            )

    @property
    def max_draft(self) -> int:
        return self.tree.size

    @property
    def depth(self) -> int:
        """The length of the longest path."""
        return len(self.tree.levels)

    @property
    def num_uniforms(self) -> int:
        draws = sum(min(c, self._drawn) for level in self.tree.levels for c in level.counts)
        return draws * num_uniforms(self.vocab_size)

    @property
    def _drawn(self) -> int:
        """The most children of a node that are drawn."""
        return {"top": 0, "top+1": 1}.get(self.children, self.tree.widest)

    @property
    def traits(self) -> DraftTraits:
        return DraftTraits(
            fixed_length=True,
            independent_rows=True,
            drafts_trees=True,
            processes=True,
        )

    def describe(self) -> Any:
        fields = {"name": self.name, "model": self.model.describe()}
        return fields | {"tree": repr(self.tree), "children": self.children}

    def propose(
        self,
        params: NeuralDrafterParams,
        state: NeuralDrafterState,
        inputs: DraftInputs,
        *,
        with_confidence: bool,
    ) -> tuple[DraftBlock, NeuralDrafterState]:
        active = inputs.active & (inputs.limits > 0)
        uniforms = inputs.uniforms.reshape(active.size, -1, num_uniforms(self.vocab_size))

        def draft(before: NeuralDrafterState) -> tuple[DraftBlock, NeuralDrafterState]:
            return self._draft(params, before, uniforms, inputs.sampling, active, with_confidence)

        like = jax.eval_shape(draft, state)[0]
        none = lambda before: (jax.tree.map(jnp.zeros_like, like), before)  # noqa: E731
        block, state = lax.cond(jnp.any(active), draft, none, state)
        count = jnp.where(active, jnp.minimum(inputs.limits, self.max_draft), 0)
        return block._replace(num_drafted=count), state

    def bonus(
        self,
        params: NeuralDrafterParams,
        state: NeuralDrafterState,
        inputs: DraftInputs,
        block: DraftBlock,
        *,
        with_confidence: bool,
    ) -> tuple[Bonus, NeuralDrafterState]:
        path = jnp.concatenate([inputs.tokens[:, None], block.tokens[:, : self.depth]], axis=1)
        with jax.named_scope("drafter_pass"):
            read = self.model.extend(params.model, state.cache, path, state.positions)
        last = jax.vmap(row)(read.logits, block.num_drafted)
        with jax.named_scope("distribution"):
            q = distributions(last, inputs.sampling)
        q_conf = jax.vmap(confidence)(last) if with_confidence else None
        count = jnp.minimum(block.num_drafted, self.depth) + 1
        given = state.history, state.positions, block.tokens, count
        state = state._replace(cache=read.cache, history=history_lib.note_block(*given))
        return Bonus(q, q_conf, {self.name: jnp.int32(1)}), state

    def commit(
        self, state: NeuralDrafterState, tokens: Array, counts: Array, hidden: Array | None = None
    ) -> NeuralDrafterState:
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
        root = jnp.zeros((rows, 1), jnp.int32)
        tree = _Growing(
            tokens=none,
            parents=none,
            laws=none,
            scores=one,
            read=root,
            follows=none,
            shape=TreeShape(root, one[..., None] > 0),
            logits=last.logits[:, None],
            cache=last.cache,
        )
        probs: list[Array] = []
        used, size = 0, 1
        for level in self.tree.levels:
            if probs:
                tree = self._read(params, tree, state.positions, level, size)
            with jax.named_scope("draw"):
                probs.append(_distributions(tree, sampling, len(level.counts)))
                ranks = _ranks(tree, sampling, probs[-1])
                tree = self._grow(tree, level, probs[-1], ranks, uniforms, used)
            used += sum(min(count, self._drawn) for count in level.counts)
            size = level.size
        tree = self._best(tree)
        confidences = None
        if with_confidence:
            confidences = self._by_node(tree, jax.vmap(jax.vmap(confidence))(tree.logits))
        block = DraftBlock(
            tokens=tree.tokens,
            probs=self._by_node(tree, jnp.concatenate(probs, axis=1)),
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

    def _read(
        self, params: NeuralDrafterParams, tree: _Growing, positions: Array, level: Level, size: int
    ) -> _Growing:
        """The tree with those of its last `size` nodes read that get children."""
        pick, width = jax.vmap(lambda x, at: x[at]), len(level.counts)
        rows, start = tree.scores.shape[0], tree.scores.shape[1] - size
        if level.parents is None:
            places = lax.top_k(tree.scores[:, start:], width)[1]
        else:
            places = jnp.broadcast_to(jnp.asarray(level.parents, jnp.int32)[None], (rows, width))
        nodes = start + places
        above = pick(tree.parents, nodes - 1)
        follows = jnp.argmax(above[:, :, None] == tree.read[:, None], axis=2).astype(jnp.int32)
        shape = grown(tree.shape, follows)
        count = tree.read.shape[1]
        given = pick(tree.tokens, nodes - 1), positions, part_of(shape, count, count + width)
        with jax.named_scope("drafter_pass"):
            read = self.model.extend(params.model, tree.cache, *given)
        return tree._replace(
            read=jnp.concatenate([tree.read, nodes], axis=1),
            follows=jnp.concatenate([tree.follows, follows], axis=1),
            shape=shape,
            logits=jnp.concatenate([tree.logits, read.logits], axis=1),
            cache=read.cache,
        )

    def _grow(
        self,
        tree: _Growing,
        level: Level,
        q: Array,
        ranks: Array,
        uniforms: Array,
        used: int,
    ) -> _Growing:
        """The tree with one more level, below the nodes that were read last."""
        width, most = len(level.counts), max(level.counts)
        pick = jax.vmap(lambda x, at: x[at])
        counts = jnp.asarray(level.counts, jnp.int32)
        some = lambda *at: _children(self.children, most, *at)  # noqa: E731
        below = jax.vmap(jax.vmap(some), in_axes=(0, 0, 0, None))
        tokens, laws = below(q, ranks, self._uniforms_of(level, uniforms, used), counts)
        place, rank = np.nonzero(np.arange(most)[None] < np.asarray(level.counts)[:, None])
        tokens, laws = tokens[:, place, rank], laws[:, place, rank]
        parents = tree.read[:, -width:][:, place]
        chances = jax.vmap(lambda x, token: x[place, token])(ranks, tokens)
        return tree._replace(
            tokens=jnp.concatenate([tree.tokens, tokens], axis=1),
            parents=jnp.concatenate([tree.parents, parents], axis=1),
            laws=jnp.concatenate([tree.laws, laws], axis=1),
            scores=jnp.concatenate([tree.scores, pick(tree.scores, parents) * chances], axis=1),
        )

    def _best(self, tree: _Growing) -> _Growing:
        """The tree with the most probable paths only, if some nodes are left out."""
        if self.max_draft == tree.tokens.shape[1]:
            return tree
        # A node comes before its children and is at least as probable: it is kept if they are.
        kept = jnp.sort(lax.top_k(tree.scores[:, 1:], self.max_draft)[1], axis=1)
        pick = jax.vmap(lambda x, at: x[at])
        nodes = jnp.pad(kept + 1, ((0, 0), (1, 0)))
        number = jax.vmap(jnp.searchsorted)
        # A node that was read and is left out gets the number of a place that is dropped.
        there = jax.vmap(lambda x, of: jnp.any(x[:, None] == of[None], axis=1))(tree.read, nodes)
        read = jnp.where(there, number(nodes, tree.read), self.max_draft + 1)
        return tree._replace(
            tokens=pick(tree.tokens, kept),
            parents=number(nodes, pick(tree.parents, kept)).astype(jnp.int32),
            laws=pick(tree.laws, kept),
            read=read.astype(jnp.int32),
        )

    def _by_node(self, tree: _Growing, x: Array) -> Float32[Array, "B N V"]:
        """From `x [B, m, V]` of the nodes that were read; 0 elsewhere."""
        empty = jnp.zeros((x.shape[0], self.max_draft + 1, x.shape[2]), x.dtype)
        return jax.vmap(lambda y, at, values: y.at[at].set(values, mode="drop"))(
            empty, tree.read, x
        )


def _distributions(tree: _Growing, sampling: Sampling, width: int) -> Array:
    """The distributions after the `width` nodes that were read last, `[B, W, V]`."""
    if sampling.processing is None:
        return distributions_along(tree.logits[:, -width:], sampling, tree.follows)
    tokens = jax.vmap(lambda x, at: x[at - 1])(tree.tokens, tree.read[:, 1:])
    return distributions_along(tree.logits, sampling, tokens, tree.follows)[:, -width:]


def _ranks(tree: _Growing, sampling: Sampling, q: Array) -> Array:
    """The probabilities by which tokens and paths are ranked, `[B, W, V]`: those of q."""
    # A greedy q has no second token: there they are those at temperature 1.
    rows = jnp.asarray(sampling.temperature)
    ones = jnp.ones(rows.shape, jnp.float32)
    plain = dataclasses.replace(sampling, temperature=ones, top_k=None, top_p=None)
    return jnp.where(rows[:, None, None] < TINY, _distributions(tree, plain, q.shape[1]), q)


def _children(
    kind: str, most: int, q: Array, order: Array, uniforms: Array, count: Array
) -> tuple[Array, Array]:
    """The children of a node, and their laws; the best token if nothing is left to draw."""
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
