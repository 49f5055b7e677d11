"""Drafters of bare networks, without the texts of a decoder."""

import dataclasses
import types
from typing import Any

from specjax import drafting, rules
from specjax.types import DraftModels


def tree(model, shape, children="top+1", name="drafter", kind=drafting.Tree, **options):
    """A `Tree` of a `Topology` or a `Beam`."""
    return kind(**dataclasses.asdict(shape), children=children, model=model, name=name, **options)


@dataclasses.dataclass
class Networks(DraftModels):
    """Name -> (network, its parameters); and those of a lookup."""

    named: dict[str, Any]
    copied: Any = ()
    rule: Any = rules.Lossless()  # noqa: RUF009
    max_draft: int | None = None
    min_draft: int = 0
    eos_ids: tuple[int, ...] = ()

    def model(self, name):
        network, params = self.named.get(name) or next(iter(self.named.values()))
        return types.SimpleNamespace(model=network, prepared=params, platform="cpu", head=None)

    def level(self, place, source, **loading):
        return source, self.model(source)

    def network(self, drafter):
        small = self.model(drafter.model)
        return dataclasses.replace(drafter, model=small.model), small.prepared

    def policy(self, model, own):
        return own or drafting.FixedLength(), ()

    def table(self, bigram):
        return self.copied

    def place(self, params):
        return params


def cascade(lengths, named, last=None, copied=(), **options):
    """The drafter of a matrix and its parameters, from networks with theirs."""
    given = drafting.Cascade(lengths, tuple(named), last, **options)
    return given.bind(Networks(named, copied))
