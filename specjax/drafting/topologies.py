"""The shapes of drafted trees: fixed, or grown by what has been drawn.

A tree's nodes are numbered level by level; node 0 is the last committed token.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from specjax.checks import check_count, whole_number
from specjax.errors import UserError

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
        """The number of nodes of the level."""
        return sum(self.counts)


@dataclasses.dataclass(frozen=True)
class Topology:
    """A tree that is the same in every round.

    Attributes:
      parents: for each node from 1 on, its parent; level by level, siblings together, and the
        children of a node before those of the next.

    Raises:
      TypeError: if `parents` is not a sequence of whole numbers.
      ValueError: if it is no such tree.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        given = self.parents
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise UserError(f"parents must be a tuple such as {_EXAMPLE}, got {given!r}")
        if not given:
            raise UserError(f"parents must have at least one entry, such as {_EXAMPLE}")
        parents = tuple(whole_number(f"parents[{i}]", x, low=0) for i, x in enumerate(given))
        for i, parent in enumerate(parents):
            if parent > i:
                raise UserError(
                    f"parents[{i}] must be at most {i}, because a node comes after its parent, "
                    f"got {parent}"
                )
            if i and parent < parents[i - 1]:
                raise UserError(
                    f"parents must not decrease, but parents[{i}]={parent} comes after "
                    f"{parents[i - 1]}: number the nodes level by level"
                )
        object.__setattr__(self, "parents", parents)

    @property
    def size(self) -> int:
        """The number of nodes without the root."""
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
        """The most children of a node."""
        return max(map(self.parents.count, self.parents))

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels below the root."""
        depths, found = (0, *self.depths), []
        for depth in range(1, max(depths) + 1):
            above = [node for node, own in enumerate(depths) if own == depth - 1]
            counts = {node: self.parents.count(node) for node in above}
            inner = [node for node in above if counts[node]]
            places = tuple(above.index(node) for node in inner)
            found.append(Level(places, tuple(counts[node] for node in inner)))
        return tuple(found)


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

    Raises:
      TypeError: if a value is not a whole number.
      ValueError: if a value is below 1, or `keep` does not lie between the numbers of nodes with
        children and of all nodes.

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
            if self.keep > drafted:
                raise UserError(
                    f"keep must be at most {drafted}, the nodes of the tree, got {self.keep}"
                )
            inner = sum(len(level.counts) for level in self.levels[1:])
            if self.keep < inner:
                raise UserError(
                    f"keep must be at least {inner}, the nodes with children, got {self.keep}"
                )

    @property
    def size(self) -> int:
        """The number of nodes that the verifier reads, without the root."""
        return self.keep or sum(level.size for level in self.levels)

    @property
    def widest(self) -> int:
        """The most children of a node."""
        return self.width

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels below the root."""
        best = min(self.beam, self.width)
        first, next_ = Level((0,), (self.width,)), Level(None, (self.width,) * best)
        third = Level(None, (self.width,) * min(self.beam, best * self.width))
        return (first, next_, *(third,) * self.depth)[: self.depth]


def k_ary(depth: int, width: int) -> Topology:
    """The tree in which every node above the last level has `width` children.

    Raises:
      TypeError: if a value is not a whole number.
      ValueError: if a value is below 1.
    """
    check_count("depth", depth, "give the number of levels")
    check_count("width", width, "give the number of children of a node")
    inner = sum(width**level for level in range(depth))
    return Topology(tuple(node for node in range(inner) for _ in range(width)))


def caterpillar(depth: int, width: int) -> Topology:
    """The tree in which only the first child of a node has children: `width` on each level.

    Raises:
      TypeError: if a value is not a whole number.
      ValueError: if a value is below 1.
    """
    check_count("depth", depth, "give the number of levels")
    check_count("width", width, "give the number of children of a node")
    firsts = [0, *(1 + level * width for level in range(depth - 1))]
    return Topology(tuple(node for node in firsts for _ in range(width)))


def paths(count: int, depth: int) -> Topology:
    """The tree of `count` paths of `depth` nodes each that part at the root.

    Raises:
      TypeError: if a value is not a whole number.
      ValueError: if a value is below 1.
    """
    check_count("count", count, "give the number of paths")
    check_count("depth", depth, "give the number of levels")
    return Topology((0,) * count + tuple(range(1, count * (depth - 1) + 1)))
