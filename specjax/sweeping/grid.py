"""A grid of points: methods, strengths, temperatures, draft lengths, stopping, drafters."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from specjax.checks import one_number, whole_number
from specjax.sweeping.points import DRAFTER, REFERENCES, VERIFIER, Point
from specjax.verification import ALL_VERIFICATIONS

# What a method may leave open.
MAX_DRAFT, VERIFICATION, STOPPING = "max_draft", "verification", "stopping"
Choices = Sequence[Any] | Mapping[Any, Any]


class Files(Protocol):
    """What is known of the methods, policies and drafters that a grid names."""

    def main_name(self, kind: str, key: str) -> str | None:
        """The name to which a bare number is given; None if there is none.

        Args:
          kind: "methods", "stopping" or "drafters".
          key: the method, policy or drafter.

        Raises:
          ValueError: there is nothing of that name.
        """

    def is_plan(self, drafter: str) -> bool:
        """Whether a drafter says how drafts are made, and is no model of its own."""

    def takes(self, method: str, drafter: str | None) -> frozenset[str]:
        """Which of `MAX_DRAFT`, `VERIFICATION` and `STOPPING` the method leaves open."""


class _Choice(NamedTuple):
    """A method, policy or drafter with its number and further names."""

    key: str | None
    number: float | None
    names: tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """All combinations of the values of each axis that go together.

    `methods`, `stopping` and `drafters` are names, or a dict: name -> None, a number, several
    numbers (of the first name in its file, such as ALPHA), or a dict: NAME -> a value or several.
    A method that has no drafts of its own is measured once for all draft lengths, policies and
    verifications.

    Attributes:
      methods: the methods and their strengths; the verifier and the drafter alone are always there.
      temperatures: at least 0 each.
      max_drafts: at least 1 each.
      stopping: policies and their thresholds; None among them is a draft of fixed length.
      drafters: None is the pair's own; others are directories of models, or ways to draft.
      verifications: names of classes in `specjax.verification`.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: for a value out of range, an empty axis, or a value that is there twice.
    """

    methods: Choices
    temperatures: Sequence[float] = (1.0,)
    max_drafts: Sequence[int] = (5,)
    stopping: Choices = (None,)
    drafters: Choices = (None,)
    verifications: Sequence[str] = ("Block",)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            values, name = getattr(self, field.name), f"Grid: {field.name}"
            choices = field.name in ("methods", "stopping", "drafters")
            if isinstance(values, str) or not isinstance(
                values, Sequence | Mapping if choices else Sequence
            ):
                kind = "a tuple of names or a dict" if choices else "a tuple"
                raise TypeError(f"{name} must be {kind}, got {values!r}")
            if not values:
                raise ValueError(f"{name} is empty: give at least one")
        span: dict[str, Any] = {"low": 0.0, "open_high": True, "dtype": float}
        temperatures = [one_number("Grid: temperatures", x, **span) for x in self.temperatures]
        lengths = [whole_number("Grid: max_drafts", x, low=1) for x in self.max_drafts]
        object.__setattr__(self, "temperatures", tuple(temperatures))
        object.__setattr__(self, "max_drafts", tuple(lengths))
        for name in ("methods", "verifications"):
            for key in getattr(self, name):
                if not isinstance(key, str):
                    raise TypeError(f"Grid: {name} must be names, got {key!r}")
        known = [kind.__name__ for kind in ALL_VERIFICATIONS]
        for name in self.verifications:
            if name not in known:
                raise ValueError(
                    f"Grid: verifications must be among {', '.join(known)}, got {name!r}"
                )
        for key in REFERENCES:
            if key in self.methods:
                raise ValueError(f"Grid: methods: {key} is always measured: leave it out")

    def points(self, files: Files) -> list[Point]:
        """All points, those of one temperature together, the models alone first.

        Args:
          files: what is known of what the grid names.

        Raises:
          TypeError: for a value of the wrong type.
          ValueError: for an unknown name, or a point that is there twice.
        """
        made = [point for t in self.temperatures for point in self._at(t, files)]
        for point in made:
            if made.count(point) > 1:
                raise ValueError(f"Grid: {point.described()} is there twice: give each value once")
        return made

    def _at(self, temperature: float, files: Files) -> Iterator[Point]:
        yield Point(method=VERIFIER, temperature=temperature)
        drafters = list(_choices("drafters", self.drafters, files))
        for model in dict.fromkeys(choice.key for choice in drafters):
            if model is None or not files.is_plan(model):
                yield Point(method=DRAFTER, temperature=temperature, drafter=model)
        policies = list(_choices("stopping", self.stopping, files))
        for method, drafter in itertools.product(
            _choices("methods", self.methods, files), drafters
        ):
            assert method.key is not None
            planned = drafter.key is not None and files.is_plan(drafter.key)
            if planned and MAX_DRAFT not in files.takes(method.key, None):
                continue  # the method has no drafts
            takes = files.takes(method.key, drafter.key)
            for policy in policies if STOPPING in takes else [_Choice(None, None, ())]:
                names = dict(method.names) | dict(policy.names) | dict(drafter.names)
                shared = {
                    "method": method.key,
                    "strength": method.number,
                    "temperature": temperature,
                    "stopping": policy.key,
                    "threshold": policy.number,
                    "drafter": drafter.key,
                }
                yield from self._lengths(names, takes, shared)

    def _lengths(
        self, names: dict[str, Any], takes: frozenset[str], shared: dict[str, Any]
    ) -> Iterator[Point]:
        """The points of one method, policy and drafter."""
        lengths: Sequence[Any] = self.max_drafts if MAX_DRAFT in takes else (None,)
        if "MAX_DRAFT" in names:  # a file's own goes before
            lengths = (names.pop("MAX_DRAFT"),)
        algorithms = self.verifications if VERIFICATION in takes else (None,)
        rest = tuple(sorted(names.items()))
        for max_draft, verification in itertools.product(lengths, algorithms):
            yield Point(max_draft=max_draft, verification=verification, names=rest, **shared)


def _choices(axis: str, given: Choices, files: Files) -> Iterator[_Choice]:
    values = given if isinstance(given, Mapping) else dict.fromkeys(given)
    if len(values) < len(given):
        raise ValueError(f"Grid: {axis} has a value twice: {given}")
    for key, value in values.items():
        if key is None:
            if value is not None:
                raise ValueError(f"Grid: {axis}: None takes no value, got {value!r}")
            yield _Choice(None, None, ())
            continue
        if not isinstance(key, str):
            raise TypeError(f"Grid: {axis} must be names, or None, got {key!r}")
        main = files.main_name(axis, key)
        for choice in _variants(f"Grid: {axis}: {key}", key, main, value):
            if axis == "drafters" and choice.number is not None and main is not None:
                # Of a drafter, a number is a name like others.
                choice = _Choice(key, None, (*choice.names, (main, choice.number)))
            yield choice


def _variants(where: str, key: str, main: str | None, value: Any) -> Iterator[_Choice]:
    """One choice for each combination of the values that a name is given."""
    if value is None:
        yield _Choice(key, None, ())
        return
    if not isinstance(value, Mapping):
        if main is None:
            raise ValueError(f"{where} has no strength: give None for {value!r}")
        for one in value if isinstance(value, list | tuple) else (value,):
            if not _is_number(one):
                raise TypeError(f"{where}: {main} must be a number, got {one!r}")
        value = {main: value}
    axes = []
    for name, given in value.items():
        several = given if isinstance(given, list | tuple) else (given,)
        if not isinstance(name, str) or not several:
            raise ValueError(f"{where} must have names with values, got {name!r}: {given!r}")
        axes.append([(name, one) for one in several])
    for pairs in itertools.product(*axes):
        names: dict[str, Any] = dict(pairs)
        number = names.pop(main) if main is not None and _is_number(names.get(main)) else None
        for name, one in names.items():
            if not isinstance(one, str | int | float | None):
                raise TypeError(f"{where}: {name} must be a number, a text or None, got {one!r}")
        yield _Choice(key, number, tuple(names.items()))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
