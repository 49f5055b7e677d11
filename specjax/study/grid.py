"""Grids of settings: methods and strengths with every temperature, draft and drafter."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from specjax.checks import tuple_text
from specjax.errors import UserError
from specjax.text.parts import make_part
from specjax.text.setting import (
    DRAFTER_ALONE,
    VERIFIER_ALONE,
    MisfitError,
    Named,
    Setting,
    named_method,
    named_stopping,
)

# Names, or name -> None, a number or several numbers.
Choices = Sequence[Any] | Mapping[Any, Any]
_TENTHS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
_MARGINS = (-0.1, 0.0, 0.1, 0.2, 0.3, 0.5, 1.0)
# Every rule with usual strengths.
USUAL_METHODS: Mapping[str, Sequence[float] | None] = MappingProxyType(
    {
        "lossless": None,
        "chow": _TENTHS,
        "chow_log": (0.25, 0.5, 1.0, 2.0, 3.0),
        "diff": _MARGINS,
        "diff_log": (-0.5, 0.0, 0.25, 0.5, 1.0),
        "opt": _MARGINS,
        "opt_log": (0.0, 0.5, 1.0, 2.0),
        "token_v1": _TENTHS,
        "token_v2": _TENTHS,
        "token_v3": _TENTHS,
        "bild": (0.5, 1.0, 2.0, 3.0, 5.0),
        "lossy": _TENTHS,
        "lossy_tuned": _TENTHS,
        "mentored": (0.01, 0.05, 0.1, 0.3),
        "kl_ball": (0.01, 0.03, 0.1, 0.3),
        "kl_price": (0.1, 0.3, 1.0, 2.0),
        "mixture": (0.9, 0.7, 0.5, 0.3),
        "typical": (0.9, 0.3, 0.09),
        "relaxed": (0.3, 0.6),
        "accept_threshold": (0.9, 0.7, 0.5),
        "cactus": (0.001, 0.01, 0.1),
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """All valid combinations of the values of each axis.

    A method without drafts is there once, whatever the axes of drafts have. Parts that do not fit
    together are not combined; a value that fits no other is an error.

    Attributes:
      methods: methods and their strengths; a name or a text (see `text.setting.named_method`) ->
        None, a number or several numbers, which replace `{}`. The verifier alone and the drafters
        alone are always included. None: every rule with usual strengths.
      top_k: the top-k of all settings; None for all tokens. Likewise `top_p` and `processors`.
      max_drafts: the lengths of drafts, or the longest drafts with a policy.
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
    processors: Sequence[str] = ()
    max_drafts: Sequence[int] = (5,)
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
            _check_axis(name, getattr(self, name), Sequence | Mapping, "a tuple of names or a dict")
        for name in ("temperatures", "max_drafts", "drafting", "drafters", "verifications"):
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
                self._methods(), drafters, self._verified_drafting(), self._drafts()
            )
            for named, drafter, (drafting, verification), draft in combined:
                values = {
                    **named._asdict(),
                    "drafting": drafting,
                    "verification": verification,
                    **draft,
                }
                try:
                    settings[Setting(drafter=drafter, **values, **drawn)] = None
                except MisfitError as error:
                    misfits.append((values, error))
                else:
                    fitting |= set(values.items())
        for values, misfit in misfits:
            if not fitting >= values.items():  # a value that fits nothing
                raise misfit
        return list(settings)

    def _methods(self) -> Iterator[Named]:
        assert self.methods is not None
        for name, strength in _pairs("methods", self.methods):
            if not isinstance(name, str):
                raise UserError(
                    f"methods: a method must be a name or a text, got {name!r}: write strengths "
                    "as in {'opt': (0.1, 0.2)}"
                )
            yield named_method(name, strength)

    def _verified_drafting(self) -> Iterator[tuple[str | None, str | None]]:
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
            yield from ((drafting, name) for name in fitting)

    def _drafts(self) -> Iterator[dict[str, Any]]:
        """The lengths of drafts, with and without a policy."""
        for name, threshold in _pairs("stopping", self.stopping):
            policy = named_stopping(name, threshold)
            lengths: Sequence[int] = self.max_drafts
            if policy is not None and self.longest is not None:
                lengths = [self.longest]
            for length in lengths:
                least = 0 if policy is None else self.min_draft
                yield {"max_draft": length, "stopping": policy, "min_draft": least}


def _pairs(axis: str, choices: Choices) -> Iterator[tuple[Any, float | None]]:
    """Each name with each of its numbers."""
    named = choices if isinstance(choices, Mapping) else dict.fromkeys(choices)
    for name, numbers in named.items():
        if name is None and numbers is not None:
            raise UserError(f"{axis}: None takes no number, got {numbers!r}")
        if isinstance(numbers, Mapping):
            raise UserError(
                f"{axis}: the values of {name} must be numbers, got {numbers!r}: write other "
                "arguments as in 'BiLDCascade(rule=FallbackRollback(Chow(0.4), BiLD({})))'"
            )
        several = numbers if isinstance(numbers, list | tuple) else (numbers,)
        if not several:
            raise UserError(f"{axis}: {name} has no numbers: give at least one number, or None")
        for number in several:
            yield name, number


def _check_axis(name: str, values: Any, kind: Any, words: str) -> None:
    if isinstance(values, str) or not isinstance(values, kind):
        example = f"; write {tuple_text(values)}" if isinstance(values, str | int | float) else ""
        raise UserError(f"{name} must be {words}, got {values!r}{example}")
    if not values:
        raise UserError(f"{name} is empty: give at least one value")
