"""A point of a sweep: one way to decode, in plain values."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

VERIFIER, DRAFTER = "verifier_alone", "drafter_alone"
REFERENCES = (VERIFIER, DRAFTER)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One way to decode: JSON values, hashable; what they mean is known to who makes decoders.

    Attributes:
      method: the name of the method, such as that of a gin file in `methods/`.
      strength: its strength; None for a method without one. It is not checked here: a decoder that
        cannot be made of it fails by itself.
      temperature: 0 is greedy.
      max_draft: G, the tokens of a draft, or the most of them; None where the method has no say.
      verification: the name of the algorithm; None where the method has no say.
      stopping: the name of what ends drafts before G; None for nothing.
      threshold: of `stopping`.
      drafter: another drafter than the pair's, or a plan of how drafts are made; None for neither.
      names: further names of the method's files, and their values.
    """

    method: str
    strength: float | None = None
    temperature: float = 1.0
    max_draft: int | None = None
    verification: str | None = None
    stopping: str | None = None
    threshold: float | None = None
    drafter: str | None = None
    names: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        # 0 and 0.0 are equal, and so must their keys be.
        for name in ("strength", "temperature", "threshold"):
            value = getattr(self, name)
            if isinstance(value, int) and not isinstance(value, bool):
                object.__setattr__(self, name, float(value))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Point":
        """The point of which `to_dict` gave these values; others among them are left out."""
        known = {field.name: values[field.name] for field in dataclasses.fields(cls)}
        return cls(**{**known, "names": tuple((name, value) for name, value in known["names"])})

    @property
    def curve(self) -> "Point":
        """The same without its strength: what the points of one curve have in common."""
        return dataclasses.replace(self, strength=None)

    @property
    def key(self) -> str:
        """A name for a directory, another one for every point."""
        text = json.dumps(self.to_dict(), sort_keys=True, default=str)
        plain = "".join(c if c.isalnum() or c in "_-" else "-" for c in self.method)
        return f"{plain[:40]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def part(self, count: int) -> int:
        """Which of `count` replicas measures it; the same in every grid."""
        return int(self.key.rpartition("-")[2], 16) % count

    def to_dict(self) -> dict[str, Any]:
        """JSON values, of which `of` makes the same."""
        return dataclasses.asdict(self) | {"names": [list(pair) for pair in self.names]}

    def described(self, *, without: Iterable[str] = ()) -> str:
        """In words, for a table or a legend.

        Args:
          without: attributes that are not told.
        """
        left_out = set(without)

        def told(name: str) -> Any:
            return None if name in left_out else getattr(self, name)

        parts = [self.method + _number(told("strength"))]
        if told("stopping") is not None:
            parts.append(self.stopping + _number(self.threshold))  # type: ignore[operator]
        parts += [f"{name}={value}" for name, value in told("names") or ()]
        parts += [str(told(name)) for name in ("drafter", "verification") if told(name) is not None]
        if told("max_draft") is not None:
            parts.append(f"G={self.max_draft}")
        if told("temperature") is not None:
            parts.append(f"T={self.temperature:g}")
        return " ".join(parts)


def _number(value: float | None) -> str:
    return "" if value is None else f"({value:g})"


def common(points: Iterable[Point]) -> tuple[str, ...]:
    """The attributes, but the method, in which all points are equal that have a say in them."""
    # The models alone have no drafts.
    found = [point for point in points if point.method not in REFERENCES]

    def values(name: str) -> set[Any]:
        own = {getattr(point, name) for point in found}
        return own - {None} if name in ("max_draft", "verification") else own

    names = [field.name for field in dataclasses.fields(Point) if field.name != "method"]
    return tuple(name for name in names if len(values(name)) < 2)
