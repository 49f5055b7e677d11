"""A setting of a pair, and what a tuning run weighs."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from specjax import drafting, rules, verification
from specjax.checks import check_path, one_number, whole_number
from specjax.text import Decoder, Pair, TextModel
from specjax.types import Rule, Sampling, Stopping, Verification

RULES: Mapping[str, Callable[..., Rule]] = MappingProxyType(
    {kind.__name__: kind for kind in rules.ALL_RULES}
)
VERIFICATIONS: Mapping[str, Callable[[], Verification]] = MappingProxyType(
    {kind.__name__: kind for kind in verification.ALL_VERIFICATIONS}
)
# Temperature, top-k and top-p: settings that draw alike share a pass over texts.
Drawn = tuple[float, int | None, float | None]


def _head(threshold: float) -> Stopping:
    return drafting.Survival(drafting.HeadEstimate(), threshold)


def _chance(threshold: float) -> Stopping:
    return drafting.Survival(drafting.ConfidenceEstimate(), threshold)


def _online(threshold: float) -> Stopping:
    return drafting.Survival(drafting.OnlineEstimate(), threshold)


# As the gin files `methods/adaptive_*.gin` are called; each takes its threshold.
STOPPING: Mapping[str, Callable[[float], Stopping]] = MappingProxyType(
    {
        "confidence": drafting.Confidence,
        "entropy": drafting.Entropy,
        "head": _head,
        "chance": _chance,
        "online": _online,
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to decode with a verifier and a drafter: plain values, hashable.

    Names are those of the classes of `specjax.rules` and `specjax.verification`; case and
    underscores do not matter, so that `token_v3` is `TokenV3`.

    Attributes:
      rule: the rule's name.
      strength: its first parameter: alpha, or a budget; None for a rule without any.
      temperature: of both models; 0 is greedy.
      top_k: likewise; None for all tokens.
      top_p: likewise.
      max_draft: G, the tokens of a draft, or the most of them; 0 is the verifier alone.
      stopping: what ends a draft before that, a name of `STOPPING`, or None.
      threshold: of `stopping`.
      drafter: the model's name.
      verification: the algorithm's name.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: for an unknown name, a value out of range, a strength or a threshold that is
        missing or not asked for, or a verifier alone under another rule than `Lossless`.
    """

    rule: str = "Lossless"
    strength: float | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    max_draft: int = 5
    stopping: str | None = None
    threshold: float | None = None
    drafter: str = "drafter"
    verification: str = "Block"

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        put("rule", known_name("rule", self.rule, RULES))
        put("verification", known_name("verification", self.verification, VERIFICATIONS))
        if self.stopping is not None:
            put("stopping", known_name("stopping", self.stopping, STOPPING))
        for name in ("strength", "threshold"):
            if getattr(self, name) is not None:
                put(name, one_number(name, getattr(self, name), dtype=float))
        span: dict[str, Any] = {"low": 0.0, "open_high": True, "dtype": float}
        put("temperature", one_number("temperature", self.temperature, **span))
        put("max_draft", whole_number("max_draft", self.max_draft, low=0))
        if not isinstance(self.drafter, str):
            raise TypeError(f"drafter must be the name of a model, got {self.drafter!r}")
        Sampling(self.temperature, self.top_k, self.top_p)  # its checks
        _check_number(self.rule, "strength", self.strength, _takes_strength(RULES[self.rule]))
        _check_number(
            self.stopping or "a draft of fixed length",
            "threshold",
            self.threshold,
            self.stopping is not None,
        )
        self.make_rule()
        self.make_stopping()
        if not self.max_draft and (self.rule != "Lossless" or self.stopping is not None):
            raise ValueError(
                f"max_draft 0 is the verifier alone: it takes the rule Lossless and no stopping, "
                f"got {self.described()}"
            )

    @property
    def sampling(self) -> Sampling:
        """Of both models."""
        return Sampling(self.temperature, self.top_k, self.top_p)

    @property
    def drawn(self) -> Drawn:
        """The same as a key."""
        return self.temperature, self.top_k, self.top_p

    def make_rule(self) -> Rule:
        """The rule with its strength."""
        made = RULES[self.rule]
        return made() if self.strength is None else made(self.strength)

    def make_stopping(self) -> Stopping:
        """The policy with its threshold."""
        if self.stopping is None:
            return drafting.FixedLength()
        assert self.threshold is not None
        return STOPPING[self.stopping](self.threshold)

    def make_verification(self) -> Verification:
        """The algorithm."""
        return VERIFICATIONS[self.verification]()

    def decoder(self, models: Mapping[str, TextModel], **options: Any) -> Decoder:
        """What decodes with it.

        Args:
          models: by name: "verifier" and `drafter` at least.
          **options: further ones of a `Decoder`, such as `batch_size`.

        Returns:
          A `Decoder`. Those of settings that differ in strength, temperature or threshold alone
          share their programs.

        Raises:
          ValueError: a model is missing, or the parts do not go together.
        """
        names = ("temperature", "top_k", "top_p")
        options = {name: getattr(self, name) for name in names} | options
        for name in ("verifier", self.drafter):
            if name not in models:
                raise ValueError(f"there is no model {name!r}, only {', '.join(models)}")
        if not self.max_draft:
            return Decoder(models["verifier"], **options)
        if self.stopping is not None:
            options["stopping"] = self.make_stopping()
        return Decoder(
            Pair(models[self.drafter], models["verifier"]),
            rule=self.make_rule(),
            verification=self.make_verification(),
            max_draft=self.max_draft,
            **options,
        )

    def described(self) -> str:
        """In words, for a table."""
        if not self.max_draft:
            return f"verifier alone, T={self.temperature:g}"
        rule = self.rule if self.strength is None else f"{self.rule}({self.strength:g})"
        ends = "" if self.stopping is None else f" {self.stopping}({self.threshold:g})"
        return (
            f"{rule}, {self.drafter}: {self.max_draft}{ends}, {self.verification}, "
            f"T={self.temperature:g}"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON values of which `Setting(**values)` is the same."""
        return dataclasses.asdict(self)


def known_name(what: str, given: Any, known: Mapping[str, Any]) -> str:
    """The name in a table that is meant, whatever its case and underscores.

    Raises:
      TypeError: it is no text.
      ValueError: there is no such name.
    """
    if not isinstance(given, str):
        raise TypeError(f"{what} must be a name such as {next(iter(known))!r}, got {given!r}")
    plain = {name.replace("_", "").lower(): name for name in known}
    found = plain.get(given.replace("_", "").lower())
    if found is None and given.lower() == "budgeted":
        raise ValueError(
            f"{what} cannot have Budgeted: what it may spend depends on the tokens before, of "
            "which screening knows none; measure it with specjax sweep"
        )
    if found is None:
        raise ValueError(f"{what} must be one of {', '.join(known)}, got {given!r}")
    return found


def _takes_strength(made: Any) -> bool:
    return bool(dataclasses.fields(made))


def _check_number(who: str, name: str, value: float | None, needed: bool) -> None:
    if needed and value is None:
        raise ValueError(f"{who} needs a {name}: give {name}=...")
    if not needed and value is not None:
        raise ValueError(f"{who} has no {name}: leave out {name}={value:g}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """What is weighed, and how long it is measured.

    Attributes:
      temperature: of decoding.
      top_k: likewise; None for all tokens.
      top_p: likewise.
      batch_size: B.
      max_new_tokens: the longest text.
      screened: how many prompts are read with all models.
      measured: how many others are decoded with the best.
      candidates: how many of the best expected ones are measured, besides the verifier alone and
        the best single drafter.
      max_draft: G, the most tokens that one drafter adds to a block.
      leniences: of the drafters that review for the verifier, at least 1 each; without effect at
        temperature 0.
      levels: the most drafters of a cascade, copies included: 1, 2 or 3.
      bigram: the directory of a bigram table for copies, "built-in", or None.
      repeats: how often each decoder is timed.
      seed: of all draws.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: for one out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    batch_size: int = 1
    max_new_tokens: int = 128
    screened: int = 32
    measured: int = 32
    candidates: int = 5
    max_draft: int = 10
    leniences: Sequence[float] = (1.0, 2.0, 4.0)
    levels: int = 2
    bigram: str | os.PathLike[str] | None = None
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        temperature = one_number("temperature", self.temperature, low=0.0, open_high=True)
        object.__setattr__(self, "temperature", temperature)
        Sampling(temperature, self.top_k, self.top_p)  # its checks
        for name in ("batch_size", "max_new_tokens", "screened", "candidates", "max_draft"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), low=1))
        for name in ("measured", "repeats", "levels"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), low=1))
        object.__setattr__(self, "seed", whole_number("seed", self.seed, low=0))
        if self.levels > 3:
            raise ValueError(f"levels must be 1, 2 or 3, got {self.levels}")
        if self.measured < 2 * self.batch_size:
            raise ValueError(
                f"measured must be at least twice batch_size = {self.batch_size}, so that there is "
                f"an interval, got {self.measured}"
            )
        if isinstance(self.leniences, str) or not isinstance(self.leniences, Sequence):
            raise TypeError(f"leniences must be a tuple such as (1.0, 2.0), got {self.leniences!r}")
        leniences = [one_number("leniences", x, low=1.0, open_high=True) for x in self.leniences]
        if not leniences:
            raise ValueError("leniences must have at least one number: give (1.0,) for none")
        object.__setattr__(self, "leniences", tuple(sorted(set(leniences))))
        if self.bigram is not None:
            check_path(self.bigram, "bigram=")

    @property
    def sampling(self) -> Sampling:
        """Of decoding."""
        return Sampling(self.temperature, self.top_k, self.top_p)

    @property
    def used_leniences(self) -> Sequence[float]:
        """At temperature 0 distributions are one-hot, and lenience does nothing."""
        return self.leniences if self.temperature > 0.0 else (1.0,)

    @property
    def decoding(self) -> dict[str, Any]:
        """The options of a `Decoder`."""
        names = ("temperature", "top_k", "top_p", "batch_size", "max_new_tokens")
        return {name: getattr(self, name) for name in names}
