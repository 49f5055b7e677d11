"""Grids of settings: methods and strengths with every temperature, draft and drafter."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from specjax.checks import one_number, tuple_text
from specjax.errors import UserError
from specjax.text.draft_length import LONGEST
from specjax.text.parts import PARTS, PLACE, Part, make_part
from specjax.text.setting import (
    DRAFTER_ALONE,
    VERIFIER_ALONE,
    MisfitError,
    Setting,
    check_single,
    left_out,
)

# Texts, or text with {} -> a number or several numbers.
Choices = Sequence[Any] | Mapping[Any, Any]
# The lengths of drafts to choose from.
LENGTHS = tuple(range(1, LONGEST + 1))
_TENTHS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
_MARGINS = (-0.1, 0.0, 0.1, 0.2, 0.3, 0.5, 1.0)
# Every rule with usual strengths.
USUAL_METHODS: Mapping[str, Sequence[float] | None] = MappingProxyType(
    {
        "Lossless": None,
        "Chow({})": _TENTHS,
        "ChowLog({})": (0.25, 0.5, 1.0, 2.0, 3.0),
        "Diff({})": _MARGINS,
        "DiffLog({})": (-0.5, 0.0, 0.25, 0.5, 1.0),
        "OPT({})": _MARGINS,
        "OPTLog({})": (0.0, 0.5, 1.0, 2.0),
        "TokenV1({})": _TENTHS,
        "TokenV2({})": _TENTHS,
        "TokenV3({})": _TENTHS,
        "BiLD({})": (0.5, 1.0, 2.0, 3.0, 5.0),
        "Lossy({})": _TENTHS,
        "LossyTuned({})": _TENTHS,
        "Mentored({})": (0.01, 0.05, 0.1, 0.3),
        "KLBall({})": (0.01, 0.03, 0.1, 0.3),
        "KLPrice({})": (0.1, 0.3, 1.0, 2.0),
        "Mixture({})": (0.9, 0.7, 0.5, 0.3),
        "Typical(0.3, {})": (0.9, 0.3, 0.09),
        "TokenV2({}, top_k=10, replacement='argmax')": (0.3, 0.6),
        "AcceptThreshold({})": (0.9, 0.7, 0.5),
        "Cactus({})": (0.001, 0.01, 0.1),
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """All valid combinations of the values of each axis.

    A method without drafts is there once, whatever the axes of drafts have. Parts that do not fit
    together are not combined; a value that fits no other is an error.

    Attributes:
      methods: rules and methods, such as `OPT({})` or `TokenCascade(rule=Chow({}))` -> None, a
        number or several numbers, which replace `{}`. The verifier alone and the drafters alone
        are always included. None: every rule with usual strengths.
      top_k: the top-k of all settings; None for all tokens. Likewise `top_p` and `processors`.
      max_drafts: the lengths of drafts, or the longest drafts with a policy. None: `LENGTHS`, of
        which a comparison chooses one for each rule, drafter and sampling; with a policy 5.
      min_draft: the fewest tokens of a draft with a policy.
      stopping: policies and their thresholds, in the form of `methods`; None is a fixed length.
      longest: the longest draft with a policy; None: each of `max_drafts`.
      drafting: how drafts are made, such as "Lookup(min_match=3)"; None: by the drafter.
      drafters: names of models; None is "drafter".
      verifications: such as "Block"; None: the default of each kind of drafts. Those that verify
        trees are combined with trees only, the others with chains only.

    Raises:
      UserError: a name is unknown, a value is out of range, or an axis is empty.
    """

    methods: Choices | None = None
    temperatures: Sequence[float] = (1.0,)
    top_k: int | None = None
    top_p: float | None = None
    processors: Sequence[Any] = ()
    max_drafts: Sequence[int] | None = (5,)
    min_draft: int = 0
    stopping: Choices = (None,)
    longest: int | None = None
    drafting: Sequence[str | None] = (None,)
    drafters: Sequence[str | None] = (None,)
    verifications: Sequence[str | None] = (None,)

    def __post_init__(self) -> None:
        if self.methods is None:
            object.__setattr__(self, "methods", USUAL_METHODS)
        for name in ("methods", "stopping"):
            _check_axis(name, getattr(self, name), Sequence | Mapping, "a tuple of texts or a dict")
        for name in ("temperatures", "max_drafts", "drafting", "drafters", "verifications"):
            if name != "max_drafts" or self.max_drafts is not None:
                _check_axis(name, getattr(self, name), Sequence, "a tuple")
        self.settings()  # checks the parts

    def settings(self) -> list[Setting]:
        """Returns all settings, each once; at each temperature the models alone first."""
        settings: dict[Setting, None] = {}
        misfits: list[tuple[dict[str, Any], MisfitError]] = []
        fitting: set[tuple[str, Any]] = set()
        drafters = ["drafter" if name is None else name for name in self.drafters]
        for temperature in self.temperatures:
            drawn: dict[str, Any] = {
                "temperature": temperature,
                "top_k": self.top_k,
                "top_p": self.top_p,
                "processors": self.processors,
            }
            settings[Setting(method=VERIFIER_ALONE, **drawn)] = None
            for drafter in drafters:
                settings[Setting(method=DRAFTER_ALONE, drafter=drafter, **drawn)] = None
            combined = itertools.product(
                _filled("methods", self.methods or ()),
                drafters,
                self._verified_drafting(),
                self._drafts(),
            )
            for text, drafter, verified, draft in combined:
                values = {**method_of(text), **verified, **draft}
                try:
                    settings[_setting({"drafter": drafter, **values, **drawn})] = None
                except MisfitError as error:
                    misfits.append((values, error))
                else:
                    fitting |= set(values.items())
        for values, misfit in misfits:
            if not fitting >= values.items():  # a value that fits nothing
                raise misfit
        return list(settings)

    def _verified_drafting(self) -> Iterator[dict[str, Any]]:
        """Each kind of drafting with each verification that fits."""
        walking = {
            name: name is not None and make_part("verification", name).walks_trees
            for name in self.verifications
        }
        for drafting in self.drafting:
            trees = Setting(drafting=drafting).part("verification").walks_trees
            fitting = [name for name, walks in walking.items() if name is None or walks == trees]
            if not fitting:
                kind = "the trees" if trees else "the chains"
                raise UserError(
                    f"none of verifications={tuple(self.verifications)} can verify {kind} of "
                    f"drafting={drafting!r}: add None, for the default of each kind of drafts"
                )
            yield from ({"drafting": drafting, "verification": name} for name in fitting)

    def _drafts(self) -> Iterator[dict[str, Any]]:
        """The lengths of drafts, with and without a policy."""
        for policy in _filled("stopping", self.stopping):
            lengths: Sequence[int | None] = LENGTHS
            if self.max_drafts is not None:
                lengths = self.max_drafts
            elif policy is not None:
                lengths = [None]
            if policy is not None and self.longest is not None:
                lengths = [self.longest]
            for length in lengths:
                least = 0 if policy is None else self.min_draft
                yield {"max_draft": length, "stopping": policy, "min_draft": least}


def _setting(values: dict[str, Any]) -> Setting:
    """The setting without what has no effect in it; `Lossless` for rules that are it."""
    unused = left_out(values["method"], values["drafting"])
    setting = Setting(**{name: x for name, x in values.items() if name not in unused})
    check_single(setting)
    setting.to_dict()  # its parts have texts
    if setting.method is None and setting.is_lossless:
        setting = dataclasses.replace(setting, rule=None)
    return setting


def method_of(text: str) -> dict[str, str | None]:
    """Splits `TokenCascade(rule=Chow(0.3), limit=4)` into the method and its rule."""
    part = Part.parse(text, "methods", ("rule", "method"))
    is_cascade = hasattr(PARTS[part.name], "bound")
    if not is_cascade and part.name not in (VERIFIER_ALONE, DRAFTER_ALONE):
        return {"rule": str(part), "method": None}
    rule = dict(part.named).get("rule", Part("Lossless"))
    others = tuple(pair for pair in part.named if pair[0] != "rule")
    return {"rule": str(rule), "method": str(part._replace(named=others))}


def _filled(axis: str, choices: Choices) -> Iterator[Any]:
    """Each text with each of its numbers."""
    named = choices if isinstance(choices, Mapping) else dict.fromkeys(choices)
    for text, numbers in named.items():
        if not isinstance(text, str | None if axis == "stopping" else str):
            raise UserError(
                f"{axis} must be texts such as 'OPT({PLACE})', got {text!r}: write numbers as in "
                f"{{'OPT({PLACE})': (0.1, 0.2)}}"
            )
        if isinstance(numbers, Mapping):
            raise UserError(
                f"{axis}: the values of {text} must be numbers, got {numbers!r}: write other "
                "arguments as in 'BiLDCascade(rule=FallbackRollback(Chow(0.4), BiLD({})))'"
            )
        several = numbers if isinstance(numbers, list | tuple) else (numbers,)
        if not several:
            raise UserError(f"{axis}: {text} has no numbers: give at least one number, or None")
        for number in several:
            if number is None and PLACE in (text or ""):
                raise UserError(f"{axis}: {text} needs a number for {PLACE}: give a number")
            if number is not None and PLACE not in (text or ""):
                raise UserError(
                    f"{axis}: {text} takes no number, got {number!r}: give None, or write {PLACE} "
                    "where the number belongs"
                )
            if number is None:
                yield text
            else:
                value = one_number(f"{axis}: {text}", number, dtype=float)
                yield text.replace(PLACE, repr(float(value)))


def _check_axis(name: str, values: Any, kind: Any, words: str) -> None:
    if isinstance(values, str) or not isinstance(values, kind):
        example = f"; write {tuple_text(values)}" if isinstance(values, str | int | float) else ""
        raise UserError(f"{name} must be {words}, got {values!r}{example}")
    if not values:
        raise UserError(f"{name} is empty: give at least one value")
