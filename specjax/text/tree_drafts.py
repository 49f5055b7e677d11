"""Drafts that are trees: `Decoder(drafting=Tree(depth=3, width=2))`."""

import dataclasses
from collections.abc import Mapping

from specjax.checks import check_count
from specjax.drafting import Beam, NeuralDrafterParams, Topology, TreeDrafter, k_ary
from specjax.drafting.trees import CHILDREN
from specjax.text.drafts import DraftPlan, Ingredients, Planned
from specjax.types import Verification
from specjax.verification import Traversal

# The most nodes of a tree: each is a token that the verifier reads, and a slot of its cache.
_MOST = 512


@dataclasses.dataclass(frozen=True)
class Tree(DraftPlan):
    """The drafter drafts several next tokens at each place; see `drafting.TreeDrafter`.

    Attributes:
      depth: the length of the longest path.
      width: the number of children of a node.
      children: how they are chosen; see `drafting.TreeDrafter`.
      beam: only this number of nodes of a level have children, those with the most probable paths;
        None: all.
      keep: the verifier reads only this number of nodes, with `beam` and children="top"; see
        `drafting.Beam`.
      parents: the parent of each node, for a shape of its own (see `drafting.Topology`); the
        other sizes must then be left out.

    Raises:
      TypeError: a value has a wrong type.
      ValueError: a value is out of range, or the tree has more than 512 nodes.
    """

    depth: int | None = None
    width: int | None = None
    children: str = "top+1"
    beam: int | None = None
    keep: int | None = None
    parents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("depth", "width", "beam", "keep")}
        if self.parents is not None:
            for name, value in sizes.items():
                if value is not None:
                    raise ValueError(f"{name} must be left out, because parents gives the shape")
        else:
            for name in ("depth", "width"):
                check_count(name, sizes[name], "such as Tree(depth=3, width=2)")
            if self.beam is not None:
                check_count("beam", self.beam, "give the number of nodes, or None")
            if self.keep is not None and (self.beam is None or self.children != "top"):
                raise ValueError(
                    f"keep={self.keep!r} needs beam and children='top': leaving out drawn tokens "
                    "by their values would change the distribution of the output"
                )
            inner = min(self.width or 0, self.beam or 2) ** min(self.depth or 0, 12)
            if self.beam is None and inner > _MOST:
                self._refuse("more than 512")
        if self.children not in CHILDREN:
            known = ", ".join(map(repr, CHILDREN))
            raise ValueError(f"children must be one of {known}, got {self.children!r}")
        if self.shape.size > _MOST:
            self._refuse(str(self.shape.size))

    def _refuse(self, size: str) -> None:
        raise ValueError(
            f"{self!r} has {size} nodes, and at most {_MOST} are allowed: give a smaller depth, "
            "width or beam"
        )

    @property
    def shape(self) -> Topology | Beam:
        """The shape of the trees."""
        if self.parents is not None:
            return Topology(self.parents)
        assert self.depth is not None and self.width is not None
        if self.beam is not None:
            return Beam(self.depth, self.width, self.beam, self.keep)
        return k_ary(self.depth, self.width)

    @property
    def needs(self) -> tuple[str, ...]:
        """The drafter."""
        return ("drafter",)

    @property
    def left_out(self) -> Mapping[str, str]:
        """The options of chains."""
        why = f"drafting={self!r} drafts trees of a fixed size"
        return dict.fromkeys(("max_draft", "min_draft", "stopping"), why)

    @property
    def weighs_costs(self) -> bool:
        """False."""
        return False

    @property
    def verification(self) -> Verification:
        """Traversal verification."""
        return Traversal()

    def longest(self, max_draft: int) -> int:
        """See `DraftPlan`."""
        return self.shape.size

    def make(self, given: Ingredients) -> Planned:
        """See `DraftPlan`."""
        chain, params = given.neural("drafter", 1)
        drafter = TreeDrafter(chain.model, self.shape, self.children, chain.name)
        return Planned(drafter, NeuralDrafterParams(params.model), ())
