"""Drafters of trees: from a model level by level, of several drafters, and chains with siblings.

Nodes of a tree are numbered level by level; node 0 is the last committed token.

Axes: B rows, G nodes without the root, N = G + 1 nodes, W nodes of a level that get children, n
nodes of a tree that grows or of a part, m nodes that have been read, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32

from specjax.checks import check_count, whole_number
from specjax.decoding import history as history_lib
from specjax.decoding.blocks import (
    commit_tokens,
    drafted_sources,
    last_token,
    part_of,
    propose_block,
    read_bonus,
    wanted_limits,
    with_nodes,
)
from specjax.decoding.history import put_at
from specjax.decoding.method import check_model
from specjax.drafting.cascades import (
    HorizontalCascade,
    SeveralDrafters,
    SeveralState,
    VerticalCascade,
    Widened,
)
from specjax.drafting.chain import Chain, ChainParams, ChainState, ModelDrafter
from specjax.errors import UserError
from specjax.platforms import entry, row, when
from specjax.processing import distributions, distributions_along
from specjax.sampling.distributions import confidence
from specjax.sampling.draws import TINY, draw, num_uniforms
from specjax.types import (
    Bonus,
    Cache,
    ChildLaw,
    DraftBlock,
    Drafter,
    DraftInputs,
    DraftModels,
    DraftTraits,
    Params,
    Sampling,
    TreeShape,
)

_EXAMPLE = "(0, 0, 1, 1) for two children of the root and two of the first of these"


class Level(NamedTuple):
    """A level of a tree: the places in the level above of nodes with children, and their numbers.

    Without places, the nodes with the most probable paths get children.
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
        parents = self.parents
        if isinstance(parents, str) or not isinstance(parents, Sequence) or not parents:
            raise UserError(f"parents must be a tuple such as {_EXAMPLE}, got {parents!r}")
        parents = tuple(whole_number(f"parents[{i}]", x, low=0) for i, x in enumerate(parents))
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
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths[1:])

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
    inner = sum(width**level for level in range(depth))
    return Topology(tuple(node for node in range(inner) for _ in range(width)))


# The most nodes of a tree: each is a token that the verifier reads, and a slot of its cache.
MOST_NODES = 512
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
class Tree(ModelDrafter):
    """A model drafts several next tokens at each place.

    A level takes one pass, over the nodes that get children. In the first pass of a round the model
    reads the tokens that were committed since the last.

    Attributes:
      depth: the length of the longest path.
      width: the number of children of a node.
      children: how they are chosen: "top", the most probable tokens; "top+1", one that is drawn,
        then the most probable tokens, without which it was drawn; "without", drawn without
        replacement; "independent", drawn independently, where equal tokens may occur.
      beam: only this number of nodes of a level have children, those with the most probable paths;
        None: all.
      keep: the verifier reads only this number of nodes, with `beam` and children="top", as in
        EAGLE-2 (arXiv 2406.16858).
      parents: the parent of each node, for a shape of its own (see `Topology`); the other sizes
        must then be left out.
      model: a name of the decoder's models, a draft head among them; or a language model that reads
        trees.
      name: its passes are counted under this name; by default the model's.
    """

    depth: int | None = None
    width: int | None = None
    children: str = "top+1"
    beam: int | None = None
    keep: int | None = None
    parents: tuple[int, ...] | None = None
    model: Any = "drafter"
    name: Any = None

    # Whether a row may lack committed tokens when a draft begins.
    _lags: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check_shape()
        if not self.is_bound:
            return
        check_model("model", self.model)
        object.__setattr__(self, "name", self.name or "drafter")
        if not self.model.reads_trees:
            raise UserError(
                f"trees need a drafter that reads them, not {type(self.model).__name__}: draft "
                "chains, or give an EAGLE or MTP head, or a model without recurrent layers"
            )
        if self.shape.widest > self.vocab_size and self.children != "independent":
            raise UserError(
                f"a node of the tree has {self.shape.widest} children, but there are only "
                f"{self.vocab_size} tokens: use a narrower tree"
            )

    def _check_shape(self) -> None:
        sizes = {name: getattr(self, name) for name in ("depth", "width", "beam", "keep")}
        least = 0
        if self.parents is not None:
            if any(value is not None for value in sizes.values()):
                raise UserError(f"{', '.join(sizes)} must be left out: parents gives the shape")
            object.__setattr__(self, "parents", Topology(self.parents).parents)
        else:
            for name in ("depth", "width"):
                check_count(name, sizes[name], "such as Tree(depth=3, width=2)")
            if self.beam is not None:
                check_count("beam", self.beam, "give the number of nodes, or None")
            if self.keep is not None and (self.beam is None or self.children != "top"):
                raise UserError(
                    f"keep={self.keep!r} needs beam and children='top': leaving out drawn tokens "
                    "by their values would change the distribution of the output"
                )
            depth, width = self.depth or 0, self.width or 0
            # Each level has a node; counted before the tree is built, which would take long.
            least = max(depth, width, 0 if self.beam else min(width, 2) ** min(depth, 12))
        if self.children not in CHILDREN:
            names = ", ".join(map(repr, CHILDREN))
            raise UserError(f"children must be one of {names}, got {self.children!r}")
        if least > MOST_NODES or self.shape.size > MOST_NODES:
            raise UserError(
                f"{self!r:.80} has more than {MOST_NODES} nodes: give a smaller depth, width or "
                "beam, or fewer parents"
            )

    @functools.cached_property
    def shape(self) -> Topology | Beam:
        """The shape of the trees."""
        if self.parents is not None:
            return Topology(self.parents)
        assert self.depth is not None and self.width is not None
        if self.beam is not None:
            return Beam(self.depth, self.width, self.beam, self.keep)
        return k_ary(self.depth, self.width)

    def bind(self, models: DraftModels) -> tuple[Drafter, Params]:
        named = dataclasses.replace(self, name=self.name or self.model)
        tree, network = models.network(named)
        return tree, ChainParams(network)

    @property
    def max_draft(self) -> int:
        return self.shape.size

    @property
    def path(self) -> int:
        """The length of the longest path."""
        return len(self.shape.levels)

    @property
    def num_uniforms(self) -> int:
        draws = sum(min(c, self._drawn) for level in self.shape.levels for c in level.counts)
        return draws * num_uniforms(self.vocab_size)

    @property
    def _drawn(self) -> int:
        """The most children of a node that are drawn."""
        return {"top": 0, "top+1": 1}.get(self.children, self.shape.widest)

    @property
    def traits(self) -> DraftTraits:
        return DraftTraits(
            fixed_length=True,
            independent_rows=True,
            drafts_trees=True,
            processes=not self.is_bound or self.model.predicts_all,
        )

    def describe(self) -> Any:
        fields = {"name": self.name, "model": self.model.describe()}
        return fields | {"tree": repr(self.shape), "children": self.children}

    def propose(
        self, params: ChainParams, state: ChainState, inputs: DraftInputs
    ) -> tuple[DraftBlock, ChainState]:
        active = inputs.active & (inputs.limits > 0)
        uniforms = inputs.uniforms.reshape(active.size, -1, num_uniforms(self.vocab_size))

        def draft(before: tuple[Any, ChainState]) -> tuple[Any, ChainState]:
            return self._draft(params, before[1], uniforms, inputs, active)

        like = jax.eval_shape(draft, (None, state))[0]
        none = jax.tree.map(jnp.zeros_like, like), state
        block, state = when(jnp.any(active), draft, none)
        count = jnp.where(active, jnp.minimum(inputs.limits, self.max_draft), 0)
        return block._replace(num_drafted=count), state

    def bonus(
        self,
        params: ChainParams,
        state: ChainState,
        inputs: DraftInputs,
        block: DraftBlock,
    ) -> tuple[Bonus, ChainState]:
        path = jnp.concatenate([inputs.tokens[:, None], block.tokens[:, : self.path]], axis=1)
        with jax.named_scope("drafter_pass"):
            read = self.model.extend(params.model, state.cache, path, state.positions)
        last = jax.vmap(row)(read.logits, block.num_drafted)
        with jax.named_scope("distribution"):
            q = distributions(last, inputs.sampling)
        q_conf = jax.vmap(confidence)(last) if inputs.with_confidence else None
        count = jnp.minimum(block.num_drafted, self.path) + 1
        history = history_lib.note_block(state.history, state.positions, block.tokens, count)
        state = state._replace(cache=read.cache, history=history)
        return Bonus(q, q_conf, {self.name: jnp.int32(1)}), state

    def commit(
        self, state: ChainState, tokens: Array, counts: Array, hidden: Array | None = None
    ) -> ChainState:
        history = history_lib.commit(state.history, state.positions, tokens, counts)
        return state._replace(positions=state.positions + counts, history=history)

    def _draft(
        self,
        params: ChainParams,
        state: ChainState,
        uniforms: Array,
        inputs: DraftInputs,
        active: Array,
    ) -> tuple[DraftBlock, ChainState]:
        """The trees of all rows; the entries of their nodes stay in the cache until the next."""
        with jax.named_scope("drafter_pass"):
            last = history_lib.read_last(
                self.model, params.model, state.cache, state.positions, state.history, active,
                self.path + 1 if self._lags else 1,
            )  # fmt: skip
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
        for level in self.shape.levels:
            if probs:
                tree = self._read(params, tree, state.positions, level, size)
            with jax.named_scope("draw"):
                probs.append(_distributions(tree, inputs.sampling, len(level.counts)))
                ranks = _ranks(tree, inputs.sampling, probs[-1])
                tree = self._grow(tree, level, probs[-1], ranks, uniforms, used)
            used += sum(min(count, self._drawn) for count in level.counts)
            size = level.size
        tree = self._best(tree)
        confidences = None
        if inputs.with_confidence:
            confidences = self._by_node(tree, jax.vmap(jax.vmap(confidence))(tree.logits))
        block = DraftBlock(
            tokens=tree.tokens,
            probs=self._by_node(tree, jnp.concatenate(probs, axis=1)),
            confidences=confidences,
            num_drafted=jnp.zeros((rows,), jnp.int32),
            calls={self.name: last.calls + self.path - 1},
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
        self, params: ChainParams, tree: _Growing, positions: Array, level: Level, size: int
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
        shape = with_nodes(tree.shape, follows)
        count = tree.read.shape[1]
        tokens, level_shape = pick(tree.tokens, nodes - 1), part_of(shape, count, count + width)
        with jax.named_scope("drafter_pass"):
            read = self.model.extend(params.model, tree.cache, tokens, positions, level_shape)
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


@dataclasses.dataclass(frozen=True)
class Branches(SeveralDrafters):
    """Several drafters, each with its own branches of a tree. Its parameters: a tuple of theirs.

    The block is the union of their chains and trees. A token that a drafter was certain to draw, as
    at temperature 0 or by copying, is joined with an equal token of an earlier drafter, so that the
    longest path that is right is found. Other tokens are never joined: that would change their law.

    A node has no single draft distribution, so rules that read the drafter are refused.

    Source: SpecInfer (arXiv 2305.09781), merge-based construction of trees from several models.

    Attributes:
      parts: at least two, of chains or trees, such as `Tree(...)`, `Lookup(copies=3)` and
        `Cascade(...)`; or names of the decoder's models, which draft chains. Earlier ones are
        verified first, and copies belong to the end.
    """

    parts: tuple[Any, ...]

    def __post_init__(self) -> None:
        parts = self.parts
        several = isinstance(parts, tuple | list) and len(parts) > 1
        if not several or not all(isinstance(x, str) or hasattr(x, "left_out") for x in parts):
            raise UserError(
                "parts must be a tuple of at least two drafters or names of models, such as "
                f'("drafter", Lookup()), got {parts!r}'
            )
        if len(parts) > MOST_NODES:
            raise UserError(f"parts must be at most {MOST_NODES} drafters, got {len(parts)}")
        parts = tuple(Chain(part) if isinstance(part, str) else part for part in parts)
        object.__setattr__(self, "parts", parts)
        if all(hasattr(part, "propose") for part in parts):  # a cascade has it when it is bound
            self._check_parts([f"parts[{i}]" for i in range(len(parts))])

    @property
    def drafters(self) -> tuple[Any, ...]:
        return self.parts

    @property
    def drafts_trees(self) -> bool:
        return True

    @property
    def left_out(self) -> Mapping[str, str]:
        first, *others = (part.left_out for part in self.parts)
        return {name: why for name, why in first.items() if all(name in x for x in others)}

    def bind(self, models: DraftModels) -> tuple[Drafter, Params]:
        parts, params = zip(*(part.bind(models) for part in self.parts), strict=True)
        return Branches(parts), params

    @property
    def max_draft(self) -> int:
        return sum(drafter.max_draft for drafter in self.drafters)

    @property
    def has_confidence(self) -> bool:
        return False

    @property
    def traits(self) -> DraftTraits:
        # The number of nodes depends on the tokens, because equal tokens are joined.
        each = [drafter.traits for drafter in self.drafters]
        return DraftTraits(
            prefix_only=False,
            # A drafter reads the accepted tokens of others in its next pass.
            catches_up=True,
            drafts_trees=True,
            reads_verifier_hidden=any(traits.reads_verifier_hidden for traits in each),
            processes=all(traits.processes for traits in each),
            has_distributions=False,
            predictions=max(traits.predictions for traits in each),
        )

    def propose(
        self, params: Sequence[Params], state: SeveralState, inputs: DraftInputs
    ) -> tuple[DraftBlock, SeveralState]:
        limits = jnp.where(inputs.active, inputs.limits, 0)
        ends = np.cumsum([drafter.num_uniforms for drafter in self.drafters])[:-1].tolist()
        uniforms = jnp.split(inputs.uniforms, ends, axis=1)
        calls = dict.fromkeys(self.model_names, jnp.int32(0))
        states, blocks, named = list(state.drafters), [], 0
        for i, drafter in enumerate(self.drafters):
            allowed = jnp.minimum(limits, drafter.max_draft)
            drafts = wanted_limits(drafter, params[i], states[i], allowed) > 0
            block, states[i] = propose_block(
                drafter,
                params[i],
                states[i],
                inputs._replace(limits=allowed, uniforms=uniforms[i], active=drafts),
            )
            if inputs.with_sources:
                block = block._replace(sources=drafted_sources(block) + named)
                named += len(drafter.source_names)
            blocks.append(block)
            for name in block.calls:
                calls[name] += block.calls[name]
        union = union_of(blocks)._replace(calls=calls)
        return union, state._replace(drafters=tuple(states))

    def bonus(
        self, params: Sequence[Params], state: SeveralState, inputs: DraftInputs, block: DraftBlock
    ) -> tuple[Bonus, SeveralState]:
        raise NotImplementedError  # no rule reads it: see `DraftTraits.has_distributions`


class _Part(NamedTuple):
    """A part of a union: its nodes, whose `drawn_from` are rows of the union's `probs`."""

    tokens: Int32[Array, " n"]
    parents: Int32[Array, " n"]
    laws: Int32[Array, " n"]
    drawn_from: Int32[Array, " n"]
    sources: Int32[Array, " n"]
    length: Int32[Array, ""]


def union_of(blocks: Sequence[DraftBlock]) -> DraftBlock:
    """The union of blocks after the same committed token, in their order.

    A token that was not drawn, or that has all of its draft distribution, is joined with an equal
    earlier token after the same text. A sibling that the law of a drawn token needs stays in the
    union, and past its end if it was cut off: the draw did not know of the limit.

    The blocks are chains and trees, and all or none have `sources`. The union is a tree of up to
    the sum of their lengths, with `drawn_from` and without calls.
    """
    nobody = sum(_rows(block) for block in blocks)  # the row that no token is drawn from
    parts, probs, start = [], [], 0
    for block in blocks:
        part = _part(block, start, nobody)
        parts.append(part)
        if block.probs is not None:
            rows = start + jnp.arange(_rows(block), dtype=jnp.int32)
            # Rows that nothing is drawn from may be arbitrary.
            exists = jax.vmap(_exists)(part)[:, None]
            used = jnp.any((part.drawn_from[:, None] == rows[None, :, None]) & exists, axis=2)
            probs.append(jnp.where(used[..., None], block.probs[:, : rows.size], 0.0))
        start += _rows(block)
    size = sum(part.tokens.shape[1] for part in parts)
    none = jnp.zeros((blocks[0].num_drafted.size, size), jnp.int32)
    tree = _Part(none, none, none, jnp.full_like(none, nobody), none, none[:, 0])
    for part in parts:
        tree = jax.vmap(_join)(tree, part)
    tree = jax.vmap(_with_cut_siblings)(tree, parts)
    return DraftBlock(
        tokens=tree.tokens,
        probs=jnp.pad(jnp.concatenate(probs, axis=1), ((0, 0), (0, 1), (0, 0))) if probs else None,
        confidences=None,
        num_drafted=tree.length,
        calls={},
        parents=tree.parents,
        laws=tree.laws,
        sources=None if blocks[0].sources is None else tree.sources,
        drawn_from=tree.drawn_from,
    )


def _rows(block: DraftBlock) -> int:
    """The number of rows of `probs` that a token may be drawn from."""
    if block.probs is None:
        return 0
    # The last node has no children.
    return block.probs.shape[1] - (block.drawn_from is None)


def _exists(part: _Part) -> Array:
    """Which nodes of a row's part its limit left, `[n]`."""
    return jnp.arange(part.tokens.size) < part.length


def _part(block: DraftBlock, start: int, nobody: int) -> _Part:
    """A block whose `probs` begin at row `start` of the union's."""
    tokens, parents, laws = block.tokens, block.parents, block.laws
    if parents is None:
        size = tokens.shape[1]
        parents = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], tokens.shape)
        laws = jnp.full_like(tokens, ChildLaw.DRAWN)
    assert laws is not None, "the trees of Branches need DraftBlock.laws"
    rows = jnp.full_like(tokens, nobody)
    if block.probs is None:
        laws = jnp.full_like(tokens, ChildLaw.TOP)
    else:
        source_rows = parents if block.drawn_from is None else block.drawn_from
        rows = jnp.where(source_rows < _rows(block), source_rows + start, nobody)
        drawn_by = block.probs[:, : tokens.shape[1]]
        if block.parents is not None:
            drawn_by = jax.vmap(jax.vmap(row, (None, 0)))(block.probs, source_rows)
        chances = jax.vmap(jax.vmap(entry))(drawn_by, tokens)
        # A token that was certain is a function of the text.
        laws = jnp.where(chances >= 1.0, ChildLaw.TOP, laws)
    return _Part(tokens, parents, laws, rows, drafted_sources(block), block.num_drafted)


def _needed(part: _Part) -> Array:
    """The nodes `[n]` without which a drawn node of the block would have another law."""
    index = jnp.arange(part.tokens.size)
    beside = (part.drawn_from[:, None] == part.drawn_from[None]) & _exists(part)[None]
    elder = index[:, None] < index[None]
    law = part.laws[None]
    return jnp.any(beside & ((law == ChildLaw.OFF) | (elder & (law == ChildLaw.WITHOUT))), axis=1)


def _join(tree: _Part, part: _Part) -> _Part:
    size, longest = part.tokens.size, tree.tokens.size
    numbers = jnp.arange(1, longest + 1, dtype=jnp.int32)
    fixed, needed = part.laws == ChildLaw.TOP, _needed(part)

    def step(i: Array, carry: tuple[_Part, Array]) -> tuple[_Part, Array]:
        tree, places = carry  # places [n + 1]: where the nodes of the part are in the tree
        new = jax.tree.map(lambda x: x[i] if x.ndim else x, part)
        new = new._replace(parents=places[new.parents])
        equal = (tree.parents == new.parents) & (tree.tokens == new.tokens)
        equal &= numbers <= tree.length
        joins = fixed[i] & jnp.any(equal)
        adds = (i < part.length) & (needed[i] | ~joins)
        at = jnp.where(adds, tree.length, longest)
        put = lambda x, y: x.at[at].set(y, mode="drop") if x.ndim else x + adds.astype(jnp.int32)  # noqa: E731
        place = jnp.where(joins, numbers[jnp.argmax(equal)], tree.length + 1)
        return jax.tree.map(put, tree, new), places.at[i + 1].set(place)

    start = tree, jnp.zeros((size + 1,), jnp.int32)
    return lax.fori_loop(0, size, step, start)[0]


def _with_cut_siblings(tree: _Part, parts: Sequence[_Part]) -> _Part:
    """A row's tree, and past its end the nodes that were cut off and that a law needs."""
    kept = jnp.concatenate([_needed(part) & ~_exists(part) for part in parts])
    tokens = jnp.concatenate([part.tokens for part in parts])
    rows = jnp.concatenate([part.drawn_from for part in parts])
    at = tree.length - 1 + jnp.cumsum(kept, dtype=jnp.int32)
    at = jnp.where(kept, at, kept.size)
    put = lambda x, new: x.at[at].set(new, mode="drop")  # noqa: E731
    return tree._replace(tokens=put(tree.tokens, tokens), drawn_from=put(tree.drawn_from, rows))


@dataclasses.dataclass(frozen=True)
class CaterpillarDrafter(Widened):
    """Adds siblings to the tokens of a drafter of chains. Parameters and state: the drafter's.

    A token with a confidence distribution gets as siblings the most probable other tokens there; of
    a vertical cascade, these are the middle model's. Siblings have no children. Tokens without a
    confidence, as copied ones, get none. The chain is verified with its own distributions, and
    siblings follow from the text, so that decoding is exact at any temperature. A row's limit
    leaves out siblings, the last first, before it shortens the chain.

    After an accepted sibling, a rule that reads the drafter gets q from a pass that the drafter
    makes after it.

    Source: Cascade Speculative Drafting (arXiv 2312.11462), section 5.2, with tree attention; at
    temperature 0.

    Attributes:
      drafter: drafts chains, and reports a confidence for some of its tokens.
      width: the number of tokens at such a place, the drafter's own token included; at least 2.
    """

    drafter: Drafter
    width: int

    def __post_init__(self) -> None:
        if 0 < self.vocab_size < self.width:
            raise UserError(
                f"width must be at most the number of tokens, {self.vocab_size}, got {self.width}"
            )

    @property
    def max_draft(self) -> int:
        wide = min(_with_confidence(self.drafter), self.drafter.max_draft)
        return self.drafter.max_draft + (self.width - 1) * wide

    @property
    def traits(self) -> DraftTraits:
        # The drafter's; it reads an accepted sibling in its next pass.
        return self.drafter.traits._replace(
            drafts_trees=True, catches_up=True, independent_rows=False
        )

    def describe(self) -> Any:
        return {"drafter": self.drafter.describe(), "width": self.width}

    def draft_limits(self, params: Params, state: Any, limits: Array) -> Array:
        chain = self.drafter.draft_limits(params, state, self._chain_limits(limits))
        return jnp.where(chain > 0, limits, 0)

    def propose(self, params: Params, state: Any, inputs: DraftInputs) -> tuple[DraftBlock, Any]:
        limits = self._chain_limits(inputs.limits)
        chain, state = self.drafter.propose(
            params,
            state,
            inputs._replace(limits=limits, with_confidence=True),
        )
        chain = chain._replace(num_drafted=jnp.minimum(chain.num_drafted, limits))
        block = self._with_siblings(chain, inputs.with_sources)
        return block if inputs.with_confidence else block._replace(confidences=None), state

    def bonus(
        self, params: Params, state: Any, inputs: DraftInputs, block: DraftBlock
    ) -> tuple[Bonus, Any]:
        drafter, rows = self.drafter, inputs.tokens.size
        # As if the path were committed, after which the drafter drafts nothing.
        moved = commit_tokens(drafter, state, block.tokens, block.num_drafted)
        last = last_token(block.tokens, block.num_drafted, inputs.tokens)
        none = jnp.zeros((rows,), jnp.int32)
        inputs = DraftInputs(
            tokens=last,
            limits=none,
            uniforms=jnp.zeros((rows, drafter.num_uniforms), jnp.float32),
            sampling=inputs.sampling,
            active=none == 0,
            with_confidence=inputs.with_confidence,
        )
        empty, moved = drafter.propose(params, moved, inputs)
        empty = empty._replace(num_drafted=none)
        extra, _ = read_bonus(drafter, params, moved, inputs, empty)
        calls = {name: passes + empty.calls[name] for name, passes in extra.calls.items()}
        return extra._replace(calls=calls), state

    def _chain_limits(self, limits: Array) -> Array:
        return jnp.minimum(limits, self.drafter.max_draft)

    def _with_siblings(self, chain: DraftBlock, with_sources: bool) -> DraftBlock:
        """The chain, then the siblings, place by place."""
        confidences, longest = chain.confidences, self.drafter.max_draft
        assert confidences is not None
        rows, more = chain.num_drafted.size, self.width - 1
        place = jnp.arange(longest, dtype=jnp.int32)[None]
        here = confidences[:, :longest]
        wide = (place < chain.num_drafted[:, None]) & (jnp.max(here, axis=2) > 0.0)
        others = jax.vmap(jax.vmap(lambda x, token: x.at[token].set(-1.0)))(here, chain.tokens)
        siblings = lax.top_k(others, more)[1]
        # Where each place's siblings begin.
        before = jnp.cumsum(wide, axis=1, dtype=jnp.int32) - wide.astype(jnp.int32)
        starts = chain.num_drafted[:, None] + more * before
        at = starts[..., None] + jnp.arange(more, dtype=jnp.int32)[None, None]
        at = jnp.where(wide[..., None], at, self.max_draft).reshape(rows, -1)
        first = jnp.zeros_like(chain.num_drafted)
        kept = place < chain.num_drafted[:, None]

        def whole(of_chain: Array, of_siblings: Array) -> Array:
            empty = jnp.zeros((rows, self.max_draft), jnp.int32)
            with_chain = put_at(empty, jnp.broadcast_to(of_chain, kept.shape), first, kept)
            flat = jnp.broadcast_to(of_siblings, siblings.shape).reshape(rows, -1)
            put = lambda row, where, new: row.at[where].set(new, mode="drop")  # noqa: E731
            return jax.vmap(put)(with_chain, at, flat)

        missing = self.max_draft - longest
        pad = lambda x: jnp.pad(x, ((0, 0), (0, missing), (0, 0)))  # noqa: E731
        sources = None
        if with_sources:
            drafted = drafted_sources(chain)
            chosen = jnp.asarray(_choosers(self.drafter), jnp.int32)[drafted]
            sources = whole(drafted, chosen[..., None])
        return chain._replace(
            tokens=whole(chain.tokens, siblings),
            probs=pad(chain.probs),
            confidences=pad(confidences),
            num_drafted=chain.num_drafted + more * jnp.sum(wide, axis=1, dtype=jnp.int32),
            parents=whole(place, place[..., None]),
            laws=whole(jnp.int32(ChildLaw.DRAWN), jnp.int32(ChildLaw.TOP)),
            sources=sources,
        )


def _with_confidence(drafter: Drafter) -> int:
    """The most tokens of a block that have a confidence."""
    if isinstance(drafter, HorizontalCascade):
        return sum(_with_confidence(part) for part in drafter.drafters)
    return drafter.max_draft if drafter.has_confidence else 0


def _choosers(drafter: Drafter) -> list[int]:
    """For the source of each token, the source of the model whose confidence it has."""
    if isinstance(drafter, VerticalCascade):
        return [0] * len(drafter.source_names)
    if isinstance(drafter, HorizontalCascade):
        choosers: list[int] = []
        for part in drafter.drafters:
            start = len(choosers)
            choosers += [start + i for i in _choosers(part)]
        return choosers
    return list(range(len(drafter.source_names)))
