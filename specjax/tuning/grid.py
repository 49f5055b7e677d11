"""Many settings at once: every rule and strength with every draft, temperature and drafter."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from specjax.checks import whole_number
from specjax.tuning.settings import RULES, STOPPING, VERIFICATIONS, Setting, known_name

_TENTHS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
_MARGINS = (-0.1, 0.0, 0.1, 0.2, 0.3, 0.5, 1.0)
_NATS = (0.25, 0.5, 1.0, 2.0, 3.0)
DEFAULT_RULES: Mapping[str, Sequence[float]] = MappingProxyType(
    {
        "Lossless": (),
        "Chow": _TENTHS,
        "ChowLog": _NATS,
        "Diff": _MARGINS,
        "DiffLog": (-0.5, 0.0, 0.25, 0.5, 1.0),
        "OPT": _MARGINS,
        "OPTLog": (0.0, 0.5, 1.0, 2.0),
        "TokenV1": _TENTHS,
        "TokenV2": _TENTHS,
        "TokenV3": _TENTHS,
        "BiLD": (0.5, 1.0, 2.0, 3.0, 5.0),
        "Lossy": _TENTHS,
        "LossyTuned": _TENTHS,
        "Mentored": (0.01, 0.05, 0.1, 0.3),
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScreenGrid:
    """What is combined; `settings` lists the combinations.

    Attributes:
      rules: a rule's name -> its strengths, () for a rule that has none. None: `DEFAULT_RULES`.
      temperatures: of decoding.
      top_k: for all; None for all tokens.
      top_p: likewise.
      max_drafts: lengths of drafts of a fixed length.
      stopping: a policy's name -> its thresholds, for drafts of up to `longest` tokens; or None.
      longest: the longest draft under a policy.
      verifications: names.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: for an unknown name, or one out of range.
    """

    rules: Mapping[str, Sequence[float]] | None = None
    temperatures: Sequence[float] = (1.0,)
    top_k: int | None = None
    top_p: float | None = None
    max_drafts: Sequence[int] = (2, 4, 6, 8)
    stopping: Mapping[str, Sequence[float]] | None = None
    longest: int = 12
    verifications: Sequence[str] = ("Token", "Block")

    def __post_init__(self) -> None:
        put = object.__setattr__
        given = DEFAULT_RULES if self.rules is None else self.rules
        put(self, "rules", _table("rules", given, RULES, "{'OPT': (0.1, 0.2)}"))
        put(
            self,
            "stopping",
            _table("stopping", self.stopping or {}, STOPPING, "{'confidence': (0.4,)}"),
        )
        for name, example in (
            ("temperatures", "(0.0, 1.0)"),
            ("max_drafts", "(2, 5)"),
            ("verifications", "('Token', 'Block')"),
        ):
            put(self, name, _several(name, getattr(self, name), example))
        names = [known_name("verifications", name, VERIFICATIONS) for name in self.verifications]
        put(self, "verifications", tuple(dict.fromkeys(names)))
        put(self, "longest", whole_number("longest", self.longest, low=1))
        for length in self.max_drafts:
            whole_number("max_drafts", length, low=1)
        if not self.rules or not self.temperatures or not self.verifications:
            raise ValueError("rules, temperatures and verifications must have at least one each")
        if not self.max_drafts and not any((self.stopping or {}).values()):
            raise ValueError("max_drafts or stopping must have at least one length or threshold")
        self.settings()  # their checks

    def settings(self, drafters: Sequence[str] = ("drafter",)) -> list[Setting]:
        """All combinations, each once; for each temperature first the verifier alone.

        Args:
          drafters: names of models.
        """
        found: dict[Setting, None] = {}
        for temperature in self.temperatures:
            drawn: dict[str, Any] = {
                "temperature": temperature,
                "top_k": self.top_k,
                "top_p": self.top_p,
            }
            found[Setting(max_draft=0, **drawn)] = None
            combined = itertools.product(
                drafters, self._strengths(), self._drafts(), self.verifications
            )
            for drafter, rule, draft, verification in combined:
                one = Setting(**rule, **draft, **drawn, drafter=drafter, verification=verification)
                found[one] = None
        return list(found)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            field.name: dict(value) if isinstance(value, Mapping) else value
            for field in dataclasses.fields(self)
            for value in [getattr(self, field.name)]
        }

    def _strengths(self) -> Iterator[dict[str, Any]]:
        for name, strengths in (self.rules or {}).items():
            for strength in strengths or (None,):
                yield {"rule": name, "strength": strength}

    def _drafts(self) -> Iterator[dict[str, Any]]:
        for length in self.max_drafts:
            yield {"max_draft": length}
        for name, thresholds in (self.stopping or {}).items():
            for threshold in thresholds:
                yield {"max_draft": self.longest, "stopping": name, "threshold": threshold}


def _table(
    what: str, given: Any, known: Mapping[str, Any], example: str
) -> Mapping[str, tuple[float, ...]]:
    if not isinstance(given, Mapping):
        raise TypeError(f"{what} must be a dict such as {example}, got {given!r}")
    found: dict[str, tuple[float, ...]] = {}
    for name, values in given.items():
        plain = known_name(what, name, known)
        if plain in found:
            raise ValueError(f"{what} has {plain} twice: give all its numbers in one place")
        found[plain] = _several(f"{what}[{name!r}]", values, "(0.1, 0.2)")
    return MappingProxyType(found)


def _several(what: str, given: Any, example: str) -> tuple[Any, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(f"{what} must be a tuple such as {example}, got {given!r}")
    return tuple(given)
