"""Drafts that are trees: `Decoder(drafting=Tree(depth=3, width=2))`, `Branches(...)`."""

import dataclasses
from collections.abc import Mapping

from specjax.checks import check_count
from specjax.drafting import (
    Beam,
    BranchesDrafter,
    NeuralDrafterParams,
    Topology,
    TreeDrafter,
    k_ary,
)
from specjax.drafting.trees import CHILDREN
from specjax.errors import UserError
from specjax.text.drafts import MOST_NODES, DraftPlan, Ingredients, Planned
from specjax.text.text_models import TextModel
from specjax.types import Verification
from specjax.verification import Traversal


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
                    raise UserError(f"{name} must be left out, because parents gives the shape")
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
            if least > MOST_NODES:
                self._refuse("more than 512")
        if self.children not in CHILDREN:
            known = ", ".join(map(repr, CHILDREN))
            raise UserError(f"children must be one of {known}, got {self.children!r}")
        if self.shape.size > MOST_NODES:
            self._refuse(str(self.shape.size))

    def _refuse(self, size: str) -> None:
        which, remedy = f"{self!r} has", "give a smaller depth, width or beam"
        if self.parents is not None:
            which, remedy = "a tree has len(parents) =", "leave out some"
        raise UserError(f"{which} {size} nodes, and at most {MOST_NODES} are allowed: {remedy}")

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
    def default_verification(self) -> Verification:
        """Traversal verification."""
        return Traversal()

    def longest(self, max_draft: int) -> int:
        return self.shape.size

    def make(self, given: Ingredients) -> Planned:
        chain, params = given.neural("drafter", 1)
        drafter = TreeDrafter(chain.model, self.shape, self.children, chain.name)
        return Planned(drafter, NeuralDrafterParams(params.model), ())


@dataclasses.dataclass(frozen=True)
class Branches(DraftPlan):
    """Several drafters, each with its own branches of a tree; see `drafting.BranchesDrafter`.

    Attributes:
      parts: at least two: plans such as `Tree(...)`, `Lookup(copies=3)` and `Cascade(...)`, or
        names of the decoder's models, which draft chains of `max_draft` tokens. Copies belong to
        the end.

    Raises:
      TypeError: a part has a wrong type.
      ValueError: there are fewer than two parts.
    """

    parts: tuple[str | DraftPlan, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.parts, tuple | list) or len(self.parts) < 2:
            raise (ValueError if isinstance(self.parts, tuple | list) else TypeError)(
                'parts must be a tuple of at least two drafters, such as ("drafter", Lookup()), '
                f"got {self.parts!r}"
            )
        object.__setattr__(self, "parts", tuple(self.parts))
        for i, part in enumerate(self.parts):
            if not isinstance(part, str | DraftPlan):
                raise UserError(
                    f"parts[{i}] must be the name of a model, or a plan such as Lookup(), got "
                    f"{part!r}"
                )

    @property
    def _plans(self) -> list[DraftPlan]:
        return [_Chain(part) if isinstance(part, str) else part for part in self.parts]

    @property
    def needs(self) -> tuple[str, ...]:
        """The models of all parts."""
        return tuple(dict.fromkeys(name for plan in self._plans for name in plan.needs))

    @property
    def left_out(self) -> Mapping[str, str]:
        """The options that no part uses."""
        first, *others = (plan.left_out for plan in self._plans)
        return {name: why for name, why in first.items() if all(name in x for x in others)}

    @property
    def weighs_costs(self) -> bool:
        """False."""
        return False

    @property
    def default_verification(self) -> Verification:
        """Traversal verification."""
        return Traversal()

    def longest(self, max_draft: int) -> int:
        return sum(plan.longest(max_draft) for plan in self._plans)

    def make(self, given: Ingredients) -> Planned:
        made = [plan.make(given) for plan in self._plans]
        models: dict[str, TextModel] = {}
        for i, planned in enumerate(made):
            for name, model in planned.models.items():
                if models.setdefault(name, model) is not model:
                    raise UserError(
                        f"parts[{i}] has a model that is named {name!r}, like another one: load "
                        "the models with load_models, which names them"
                    )
        # Parts that use one model have one name for it.
        shared = tuple(set(given.models) | set(models))
        return Planned(
            BranchesDrafter(tuple(planned.drafter for planned in made), tuple(sorted(shared))),
            tuple(planned.params for planned in made),
            own=tuple(planned.own for planned in made),
            described=", ".join(filter(None, (planned.described for planned in made))),
            models=models,
        )


@dataclasses.dataclass(frozen=True)
class _Chain(DraftPlan):
    """A model of the decoder drafts, token by token."""

    model: str

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.model,)

    def make(self, given: Ingredients) -> Planned:
        drafter, params = given.neural(self.model)
        return Planned(dataclasses.replace(drafter, name=self.model), params, params.stopping)
