"""`Setting`: a way to decode, in plain values."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np

from specjax import rules
from specjax.checks import check_part, one_number, whole_number
from specjax.errors import UserError
from specjax.text.decoder import Decoder
from specjax.text.drafts import Branches, ModelDrafts, check_is_plan
from specjax.text.parts import (
    PLACE,
    DrafterAlone,
    Part,
    Parts,
    VerifierAlone,
    check_fit,
    make_part,
    registered_parts,
)
from specjax.text.text_models import Models, TextModel
from specjax.types import Sampling

VERIFIER_ALONE, DRAFTER_ALONE = VerifierAlone.__name__, DrafterAlone.__name__

_FIELDS = ("rule", "verification", "stopping", "drafting", "method")
# Rules that give the verifier's distribution where q and p are a single token each, unless they
# are so strong that they keep the drafter's token whatever p is.
_LOSSLESS_GREEDILY = (
    rules.Lossy,
    rules.LossyTuned,
    rules.KLBall,
    rules.KLPrice,
    rules.Mentored,
    rules.Typical,
    rules.AcceptThreshold,
    rules.Cactus,
)


class MisfitError(UserError):
    """The parts of a setting cannot be combined."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A way to decode with a verifier and a drafter: plain values, hashable.

    Its parts are texts that name a class with its arguments (see `specjax.text.parts`); case and
    underscores of names are ignored: `token_v3(0.5)` is `TokenV3(0.5)`. Your own class can be named
    after `specjax.register_part(Mine)`.

    Attributes:
      rule: a rule of `specjax.rules`, such as `OPT(0.2)`; at temperature 0 `Lossless` for rules
        that then give the verifier's token, such as `Lossy(0.3)`.
      method: None for speculative decoding; `VerifierAlone`, `DrafterAlone`, or a cascade in which
        a single model writes at a time, such as `TokenCascade(limit=10)`.
      verification: an algorithm of `specjax.verification`; None: the default of `drafting`, or the
        method has none.
      max_draft: G, the length of a draft, or the longest; None if the method or `drafting` sets it.
      min_draft: the fewest tokens of a draft, whatever `stopping` decides.
      stopping: the stopping policy, such as `Confidence(0.4)`, or None.
      drafting: how drafts are made, such as `Lookup(min_match=3)`; None: by the drafter.
      drafter: the drafter's name among the models.
      temperature: the temperature of both models; 0 is greedy.
      top_k: likewise; None for all tokens.
      top_p: likewise.
      processors: of both models, such as ("RepetitionPenalty(1.3)", "MinP(0.05)").

    Raises:
      MisfitError: a `Decoder` refuses these parts together, whatever its models are.
      UserError: a name is unknown, or a value is out of range.
    """

    rule: str = "Lossless"
    method: str | None = None
    verification: str | None = None
    max_draft: int | None = 5
    min_draft: int = 0
    stopping: str | None = None
    drafting: str | None = None
    drafter: str = "drafter"
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    processors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name in _FIELDS:
            if name == "rule" or getattr(self, name) is not None:
                # The text has standard names; its arguments are checked.
                put(name, str(Part.parse(getattr(self, name), name)))
                _check_single(name, self.part(name), getattr(self, name))
                if name == "drafting":
                    check_is_plan(self.part(name))
        # Equivalent settings are equal: what is not used has its default.
        for name in self.unused:
            put(name, 0 if name == "min_draft" else None)
        if self.is_alone:
            put("rule", "Lossless")
        if "drafter" not in self._named_drafters():
            put("drafter", "drafter")
        plan = self._plan()
        if self.method is None and self.verification is None:
            put("verification", str(Part(type(plan.default_verification).__name__)))
        if self.max_draft is None and "max_draft" not in self.unused:
            put("max_draft", Setting.__dataclass_fields__["max_draft"].default)
        if self.max_draft is not None:
            put("max_draft", whole_number("max_draft", self.max_draft, low=1))
        put("min_draft", whole_number("min_draft", self.min_draft, low=0))
        span: dict[str, Any] = {"low": 0.0, "open_high": True, "dtype": float}
        put("temperature", one_number("temperature", self.temperature, **span))
        is_greedy = self.temperature == 0.0 and self.method is None
        if is_greedy and _lossless_greedily(self.part("rule")):
            put("rule", "Lossless")
        if not isinstance(self.drafter, str):
            raise UserError(f"drafter must be the name of a model, got {self.drafter!r}")
        put("processors", _canonical(self.processors))
        self.sampling  # noqa: B018  checks the values
        # Equal settings have equal JSON, and so one key.
        if self.top_k is not None:
            put("top_k", whole_number("top_k", self.top_k, low=1))
        if self.top_p is not None:
            put("top_p", one_number("top_p", self.top_p, low=0.0, high=1.0, dtype=float))
        fields = (*_FIELDS, "max_draft", "processors")
        values = [(name, getattr(self, name)) for name in fields]
        _check_fit(registered_parts(), (*values, ("min_draft", self.min_draft or None)))

    @property
    def unused(self) -> Mapping[str, str]:
        """Each field without an effect -> why."""
        if self.method is not None:
            fields = ("verification", "max_draft", "min_draft", "stopping", "drafting")
            return dict.fromkeys(fields, f"method={self.method!r} has its own")
        return self._plan().left_out

    def _plan(self) -> Any:
        plan = self.part("drafting")
        return ModelDrafts() if plan is None else plan

    @property
    def sampling(self) -> Sampling:
        """The sampling of both models."""
        parts = tuple(make_part("processors", text) for text in self.processors)
        return Sampling(self.temperature, self.top_k, self.top_p, parts or None)

    @property
    def drafters(self) -> tuple[str, ...]:
        """The names of the models that draft."""
        return tuple(self.drafter if name == "drafter" else name for name in self._named_drafters())

    @property
    def needed(self) -> tuple[str, ...]:
        """The names of the models that `decoder` must be given."""
        if self.method == DRAFTER_ALONE:
            return (self.drafter,)
        return ("verifier", *([self.drafter] if "drafter" in self._named_drafters() else []))

    @property
    def is_alone(self) -> bool:
        """Whether a single model decodes."""
        return self.method in (VERIFIER_ALONE, DRAFTER_ALONE)

    @property
    def is_lossless(self) -> bool:
        """Whether outputs certainly follow the verifier's distribution."""
        return self.rule == "Lossless" and self.method in (None, VERIFIER_ALONE)

    @property
    def verifier_alone(self) -> "Setting":
        """The verifier alone, with the same sampling."""
        names = ("temperature", "top_k", "top_p", "processors")
        return Setting(method=VERIFIER_ALONE, **{name: getattr(self, name) for name in names})

    @property
    def strength(self) -> float | None:
        """The rule's strength, or None: its last number, otherwise that of its parts."""
        return Part.parse(self.rule).number

    @property
    def threshold(self) -> float | None:
        """The policy's threshold, or None: its last number, otherwise that of its parts."""
        return None if self.stopping is None else Part.parse(self.stopping).number

    @property
    def curve(self) -> tuple[Any, ...]:
        """A key shared by settings that differ only in their strength."""
        values = self.to_dict() | {"rule": Part.parse(self.rule).template}
        return tuple(values.items())

    @property
    def key(self) -> str:
        """A file name, unique for each setting and the same in every version and grid."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        plain = "".join(c if c.isalnum() else "-" for c in self.described(without=_USUAL))
        return f"{plain[:40]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def part(self, name: str) -> Any:
        """Makes the object of a field, such as the rule for "rule"; None if the field is None."""
        return make_part(name, getattr(self, name))

    def decoder(self, models: Mapping[str, TextModel], **options: Any) -> Decoder:
        """Makes a decoder.

        Args:
          models: by name, `verifier` among them, and the drafter if the setting needs it.
          **options: more options of `Decoder`, such as `batch_size`.

        Returns:
          A `Decoder`. Settings that differ only in a strength, a threshold or the temperature share
          their programs.
        """
        options = {"sampling": self.sampling} | options
        for name in self.needed:
            if name not in models:
                raise UserError(f"there is no model {name!r}; the models are {', '.join(models)}")
        if self.is_alone:
            return Decoder(models[self.needed[0]], **options)
        named = dict(models)
        if self.drafter in models:
            named["drafter"] = models[self.drafter]
        parts = {name: self.part(name) for name in _FIELDS}
        lengths = {"max_draft": self.max_draft, "min_draft": self.min_draft or None}
        return Decoder(Models(**named), **{**parts, **lengths, **options})

    def _named_drafters(self) -> tuple[str, ...]:
        """The models that draft, by the names in `drafting`."""
        if self.method == VERIFIER_ALONE:
            return ()
        return _models_of(self._plan())

    def described(self, *, without: Collection[str] = ()) -> str:
        """Returns a short text for a table or a legend, without some fields or "strength"."""
        values = {k: x for k, x in self.to_dict().items() if x is not None and k not in without}
        if "strength" in without and "rule" in values:
            template = Part.parse(self.rule).template
            for written, left in ((f"({PLACE})", ""), (f", {PLACE}", ""), (f"({PLACE}, ", "(")):
                template = template.replace(written, left)
            values["rule"] = template
        parts = [] if self.is_alone else [values.get("rule", "")]
        if self.method is not None:
            alone = {VERIFIER_ALONE: "verifier alone", DRAFTER_ALONE: "drafter alone"}
            parts.insert(0, alone.get(self.method, self.method))
        names = ("drafting", "stopping", "verification")
        parts += [values[name] for name in names if name in values]
        parts += [self.drafter] if values.get("drafter", "drafter") != "drafter" else []
        parts += values.get("processors", ())
        if not self.min_draft:
            values["min_draft"] = None
        short = {"max_draft": "G", "min_draft": "least"}
        short |= {"temperature": "T", "top_k": "k", "top_p": "p"}
        parts += [
            f"{letter}={values[name]:g}"
            for name, letter in short.items()
            if values.get(name) is not None
        ]
        return ", ".join(filter(None, parts))

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values; `Setting(**values)` is an equal setting."""
        values = dataclasses.asdict(self)
        if not self.processors:
            del values["processors"]  # keys of settings without them stay what they were
        return values


def _models_of(plan: Any) -> tuple[str, ...]:
    """The models that draft in a plan, also those that a cascade loads itself."""
    if isinstance(plan, str):
        return (plan,)
    if isinstance(plan, Branches):
        return tuple(dict.fromkeys(name for part in plan.parts for name in _models_of(part)))
    return getattr(plan, "models", plan.needs)


def _check_single(field: str, part: Any, text: str) -> None:
    """Refuses a strength per row: a setting is for any prompts."""
    if any(map(np.ndim, jax.tree.leaves(part))):
        raise UserError(f"{field} of a setting must have single numbers as strengths, got {text}")


@functools.lru_cache(maxsize=4096)  # grids make the same few again and again
def _check_fit(_: tuple[type, ...], values: tuple[tuple[str, Any], ...]) -> None:
    chosen = dict(values)
    processors = [make_part("processors", text) for text in chosen.pop("processors")]
    try:
        check_fit(Parts(**chosen), processors)
    except (TypeError, ValueError) as error:
        given = [(name, value) for name, value in values if value and name != "max_draft"]
        shown = ", ".join(f"{name}={value!r}" for name, value in given)
        raise MisfitError(f"{shown} cannot be combined: {error}") from None


def _lossless_greedily(rule: Any) -> bool:
    """Whether a rule is `Lossless` at temperature 0."""
    if isinstance(rule, rules.AcceptThreshold):  # programs read a subnormal number as 0
        return bool(rule.single >= np.finfo(np.float32).tiny)
    if isinstance(rule, rules.KLBall | rules.Mentored) and np.isinf(jax.tree.leaves(rule)[0]):
        return False
    return type(rule) in _LOSSLESS_GREEDILY


def _canonical(processors: Any) -> tuple[str, ...]:
    """The processors' texts with standard names."""
    several = isinstance(processors, list | tuple)
    if not several or not all(isinstance(text, str) for text in processors):
        raise UserError(
            f"processors must be a tuple of texts such as ('MinP(0.05)',), got {processors!r}"
        )
    what = "processors"
    ordered = []
    for text in processors:
        make_part(what, text)  # checks the arguments
        written = str(Part.parse(text, what).without_defaults())
        part = make_part(what, written)
        check_part(f"{what}={written!r}", part, ("process", "order"), "MinP(0.05)")
        _check_single(what, part, written)
        ordered.append((part.order, written))
    # The order in which they are given changes nothing.
    return tuple(text for _, text in sorted(ordered, key=lambda pair: pair[0]))


_USUAL = tuple(f.name for f in dataclasses.fields(Setting) if f.name not in ("rule", "method"))
