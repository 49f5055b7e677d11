"""`Setting`: one value says how to decode. It is checked here, and made into a method.

Axes: G longest draft.
"""

import contextvars
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from specjax import rules
from specjax.checks import (
    check_flag,
    check_number,
    check_part,
    check_static,
    options_of,
    short_repr,
    whole_number,
)
from specjax.decoding import Autoregressive, Method, MethodParams, Speculative
from specjax.decoding.blocks import check_widths, powers_of_two
from specjax.decoding.speculative import check_fit, check_is_verification, check_rule
from specjax.drafting import Budget, Cascade, Chain, CostAware, Costs, FixedLength
from specjax.drafting.chain import USUAL_LENGTH
from specjax.drafting.stopping import check_policy
from specjax.drafting.trees import MOST_NODES
from specjax.errors import UserError
from specjax.fingerprints import digest
from specjax.platforms import scoped
from specjax.rules.target import check_is_rule
from specjax.text.draft_length import DraftLength, draft_length, expected_rounds, round_costs
from specjax.text.drafts import DecoderModels, WithParams, catches_up, check_names
from specjax.text.parts import (
    PLACE,
    DrafterAlone,
    Part,
    VerifierAlone,
    make_part,
    registered_parts,
)
from specjax.text.passes import check_costs, measure_costs
from specjax.text.requests import (
    DRAWN,
    check_forbidding,
    check_one_constraint,
    checked_processors,
    checked_rule,
)
from specjax.text.text_models import Pair, TextModel
from specjax.types import Drafting, Params, Rule, Sampling, Stopping, Verification
from specjax.verification import Block, Traversal

VERIFIER_ALONE, DRAFTER_ALONE = VerifierAlone.__name__, DrafterAlone.__name__

_PARTS = ("rule", "verification", "stopping", "drafting", "method")
# Rules that give the verifier's distribution where q and p are a single token each, unless they
# are so strong that they keep the drafter's token whatever p is.
_LOSSLESS_GREEDILY = (
    *(rules.Lossy, rules.LossyTuned, rules.KLBall, rules.KLPrice),
    *(rules.Mentored, rules.Typical, rules.AcceptThreshold, rules.Cactus),
)
OF_DRAFTS = (
    *("verification", "max_draft", "min_draft", "stopping", "drafting"),
    *("widths", "process_drafts", "costs"),
)


class MisfitError(UserError):
    """The parts of a setting cannot be combined."""


@options_of("Setting")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A way to decode with a verifier and a drafter: plain values, hashable.

    A part is a text that names a class with its arguments (see `specjax.text.parts`), or an object,
    which is kept as its text if it has one: `OPT(0.2)`. Case and underscores of names are ignored:
    `token_v3(0.5)` is `TokenV3(0.5)`. Your own class can be named after
    `specjax.register_part(Mine)`.

    Attributes:
      rule: a rule of `specjax.rules`, such as `OPT(0.2)`. Strengths may be per prompt.
      method: None for speculative decoding; `VerifierAlone`, `DrafterAlone`, a cascade in which a
        single model writes at a time, such as `TokenCascade(limit=10)`, or
        `WithParams(method, params)`.
      verification: an algorithm of `specjax.verification`; by default that of `drafting`.
      max_draft: G, the length of a draft, or the longest; by default 5 (of a block head fewer if it
        drafts fewer), or what `costs` choose.
      min_draft: the fewest tokens of a draft, whatever `stopping` decides.
      stopping: the stopping policy, such as `Confidence(0.4)`, `WithParams(policy, params)`, or
        None.
      drafting: how drafts are made, such as `Lookup(min_match=3)` or `WithParams(drafter, params)`;
        None: by the drafter.
      drafter: the drafter's name among the models.
      temperature: the temperature of both models, a number or one per prompt; 0 is greedy.
      top_k: likewise; None for all tokens.
      top_p: likewise.
      processors: of both models, such as ("RepetitionPenalty(1.3)", "MinP(0.05)").
      process_drafts: whether processors change the drafter's distributions too, which accepts more
        drafts. The output follows the same distribution.
      widths: the numbers of tokens that a pass of the verifier may read; see `decoding.Round`.
      costs: `drafting.read_costs(FILE)`: what passes cost and how often drafts are accepted. They
        choose `max_draft` for the batch size and the temperature, or are for `CostAware()`. If no
        draft pays, the verifier decodes alone.

    Raises:
      MisfitError: these parts cannot be combined, whatever the models are.
      UserError: a name is unknown, or a value is out of range.
    """

    rule: Any = "Lossless"
    method: Any = None
    verification: Any = None
    max_draft: int | None = None
    min_draft: int = 0
    stopping: Any = None
    drafting: Any = None
    drafter: str = "drafter"
    temperature: Any = 1.0
    top_k: Any = None
    top_p: Any = None
    processors: tuple[Any, ...] = ()
    process_drafts: bool = True
    widths: tuple[int, ...] | None = None
    costs: Costs | None = None

    def __post_init__(self) -> None:
        put = functools.partial(object.__setattr__, self)
        for name in _PARTS:
            put(name, _plain(name, getattr(self, name)))
        for name, check in _KINDS.items():
            part = self.part(name)
            has_own = name == "rule" and self.method is not None  # which checks its rule
            if part is not None and not has_own and not isinstance(part, WithParams):
                check(part)
        if self.max_draft is not None:
            put("max_draft", whole_number("max_draft", self.max_draft, low=1))
        put("min_draft", whole_number("min_draft", self.min_draft, low=0))
        if not isinstance(self.drafter, str):
            raise UserError(f"drafter must be the name of a model, got {self.drafter!r}")
        check_flag("process_drafts", self.process_drafts)
        if self.widths is not None:
            widths = check_number("widths", self.widths, low=1, dtype=np.int32)
            put("widths", tuple(widths.reshape(-1).tolist()))
        if isinstance(self.costs, Mapping) and self.costs.keys() >= {"rows", "widths", "draft"}:
            put("costs", Costs.of(self.costs))
        if not isinstance(self.costs, Costs | None):
            raise UserError(
                f"costs must be drafting.read_costs(FILE) or None, got {short_repr(self.costs)}"
            )
        processors = [value for value, _ in checked_processors(self.processors)]
        put("processors", tuple(_plain("processors", value) for value in processors))
        drawn = self.sampling  # checks the values
        for name in DRAWN:
            given = getattr(self, name)
            is_number = isinstance(given, int | float) and name != "top_k"
            put(name, float(given) if is_number else as_written(getattr(drawn, name)))
        # What is usual has one form, which can follow other fields of a copy.
        if self.method is None or self.is_alone:
            put("rule", self.rule or "Lossless")
        elif self.rule == "Lossless":
            put("rule", None)
        for name, usual in (("drafting", Chain()), ("stopping", FixedLength())):
            if self.part(name) == usual:
                put(name, None)
        given = self.given
        for name, why in self.left_out.items():
            if name in given:
                raise MisfitError(f"{name} must be left out: {why}, got {short_repr(given[name])}")
        if "drafter" not in self._named_drafters():
            put("drafter", "drafter")
        if self.method is None and self.part("verification") == self._usual_verification:
            put("verification", None)
        texts = (*(getattr(self, name) for name in _PARTS), *self.processors)
        if all(isinstance(one, str | None) for one in texts):
            _check_fit_once(registered_parts(), self)
        else:  # a cache would keep its arrays
            _check_fit(self)

    @property
    def given(self) -> Mapping[str, Any]:
        """Each field whose value is not the default, with it."""
        return {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default and value is not None
        }

    @property
    def left_out(self) -> Mapping[str, str]:
        """Each field that has no effect, and must not be given -> why."""
        return left_out(self.method, self.drafting)

    @property
    def drafts(self) -> Drafting:
        """How drafts are made, without parameters."""
        return _drafts_of(self.part("drafting"))

    @property
    def part_of_drafts(self) -> Any:
        """`drafts`, or `WithParams` of them."""
        return self.part("drafting") or self.drafts

    @property
    def longest(self) -> int | None:
        """G; None where the method, `drafting` or `costs` set it."""
        chosen = self.costs is not None and self.stopping is None
        if self.max_draft is not None or chosen or "max_draft" in self.left_out:
            return self.max_draft
        return USUAL_LENGTH

    @property
    def _usual_verification(self) -> Verification:
        drafts = self.drafts
        if drafts.drafts_trees:
            return Traversal()
        return drafts.verification if isinstance(drafts, Cascade) else Block()

    @property
    def policy(self) -> Stopping | None:
        """The stopping policy without its parameters."""
        policy = self.part("stopping")
        return policy.part if isinstance(policy, WithParams) else policy

    @property
    def sampling(self) -> Sampling:
        """The sampling of both models; processors have no arrays yet."""
        parts = [make_part("processors", one) for one in self.processors]
        bare = tuple(one.part if isinstance(one, WithParams) else one for one in parts)
        return Sampling(self.temperature, self.top_k, self.top_p, bare or None)

    @property
    def drafters(self) -> tuple[str, ...]:
        """The names of the models that draft."""
        return tuple(self.drafter if name == "drafter" else name for name in self._named_drafters())

    @property
    def needed(self) -> tuple[str, ...]:
        """The names of the models that a `Decoder` must be given."""
        if self.method == DRAFTER_ALONE:
            return (self.drafter,)
        return ("verifier", *([self.drafter] if "drafter" in self._named_drafters() else []))

    @property
    def is_alone(self) -> bool:
        """Whether a single model decodes."""
        return isinstance(self.method, str) and self.method in (VERIFIER_ALONE, DRAFTER_ALONE)

    @property
    def is_lossless(self) -> bool:
        """Whether outputs certainly follow the verifier's distribution."""
        if self.method not in (None, VERIFIER_ALONE):
            return False
        if self.rule == "Lossless":
            return True
        is_greedy = bool(np.all(np.equal(self.temperature, 0.0)))
        return is_greedy and _is_lossless_greedily(self.part("rule"))

    @property
    def verifier_alone(self) -> "Setting":
        """The verifier alone, with the same sampling."""
        names = (*DRAWN, "processors")
        return Setting(method=VERIFIER_ALONE, **{name: getattr(self, name) for name in names})

    @property
    def strength(self) -> float | None:
        """The rule's strength, or None: its last number, otherwise that of its parts."""
        return Part.parse(self.rule).number if isinstance(self.rule, str) else None

    @property
    def curve(self) -> tuple[Any, ...]:
        """A key shared by settings that differ only in their strength."""
        values = self.to_dict() | {"rule": Part.parse(self.rule).template, "costs": self.costs}
        return tuple(values.items())

    @property
    def key(self) -> str:
        """A file name, unique for each setting and the same in every version and grid."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        plain = "".join(c if c.isalnum() else "-" for c in self.described(without=_DETAILS))
        return f"{plain[:40]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def part(self, name: str) -> Any:
        """Makes the object of a field, such as the rule for "rule"; None if it has none."""
        if name == "verification" and self.verification is None and self.method is None:
            return self._usual_verification
        return make_part(name, getattr(self, name))

    def _named_drafters(self) -> tuple[str, ...]:
        if self.method == VERIFIER_ALONE:
            return ()
        return self.drafts.model_names

    def described(self, *, without: Collection[str] = ()) -> str:
        """Returns a short text for a table or a legend, without some fields or "strength"."""
        values = self.to_dict() | {"max_draft": self.longest}
        values = {k: x for k, x in values.items() if x is not None and k not in without}
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
        short = {"max_draft": "G", "min_draft": "least", "widths": "widths"}
        short |= {"temperature": "T", "top_k": "k", "top_p": "p"}
        for name, letter in short.items():
            if (value := values.get(name)) is not None:
                parts.append(
                    f"{letter}={value}" if isinstance(value, tuple) else f"{letter}={value:g}"
                )
        parts += ["drafts as they are"] if "process_drafts" in values else []
        parts += ["costs"] if "costs" in values else []
        return ", ".join(filter(None, parts))

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values; `Setting(**values)` is an equal setting.

        Raises:
          UserError: a part of your own has no text.
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.method is None and self.verification is None:
            values["verification"] = _plain("verification", self._usual_verification)
        for name in {"processors", "process_drafts", "widths", "costs"} - self.given.keys():
            del values[name]
        parts = [(name, values[name]) for name in _PARTS]
        for name, part in (*parts, *(("processors", one) for one in self.processors)):
            if not isinstance(part, str | None):
                raise UserError(
                    f"{name}={short_repr(part)} has no text: its arguments must be numbers, texts "
                    "and parts, and a class of your own must be given to specjax.register_part"
                )
        if self.costs is not None:
            values["costs"] = dataclasses.asdict(self.costs)
        return values


def left_out(method: Any, drafting: Any) -> Mapping[str, str]:
    """Each field of a `Setting` that has no effect with these two -> why."""
    method = make_part("method", method)
    if isinstance(method, VerifierAlone | DrafterAlone):
        why = f"method={type(method).__name__} decodes without drafts"
        return dict.fromkeys(OF_DRAFTS, why)
    if method is not None:
        return dict.fromkeys(OF_DRAFTS, "`method` has its own")
    return _drafts_of(make_part("drafting", drafting)).left_out


def _drafts_of(drafting: Any) -> Drafting:
    if drafting is None:
        return Chain()
    drafts = drafting.part if isinstance(drafting, WithParams) else drafting
    needed = ("bind", "model_names", "left_out", "weighs_costs", "drafts_trees")
    check_part("drafting", drafts, needed, "specjax.drafting.Lookup()")
    if isinstance(drafting, WithParams) and not getattr(drafts, "vocab_size", 0):
        raise UserError(
            f"drafting=WithParams({type(drafts).__name__}(...)) must have a drafter with its "
            "network: leave out WithParams to draft with the decoder's models"
        )
    return drafts


def _plain(name: str, value: Any) -> Any:
    """The text of a part if it has one; else the object."""
    if isinstance(value, str):
        make_part(name, value)  # checks the arguments
        return str(Part.parse(value, name))
    part = None if value is None else Part.of(value)
    return value if part is None else str(part)


def _check_is_cascade(method: Any) -> None:
    if not isinstance(method, VerifierAlone | DrafterAlone):
        check_part("method", method, ("bound",), "specjax.decoding.TokenCascade()")


# Refuses what is no such part.
_KINDS: Mapping[str, Callable[[Any], None]] = {
    "rule": functools.partial(check_is_rule, "rule"),
    "method": _check_is_cascade,
    "verification": check_is_verification,
    "stopping": check_policy,
}


def check_single(setting: Setting) -> None:
    """Refuses values per prompt: these settings are for any prompts."""
    for name in (*_PARTS, "processors", *DRAWN):
        value = getattr(setting, name)
        made = setting.sampling.processors if name == "processors" else make_part(name, value)
        if any(map(np.ndim, jax.tree.leaves(made))) or (isinstance(value, tuple) and name in DRAWN):
            raise UserError(f"{name} must have single numbers, got {value}: give one number")


def _is_lossless_greedily(rule: Any) -> bool:
    if isinstance(rule, rules.AcceptThreshold):  # programs read a subnormal number as 0
        return bool(np.all(rule.single >= np.finfo(np.float32).tiny))
    if isinstance(rule, rules.KLBall | rules.Mentored) and np.isinf(jax.tree.leaves(rule)[0]).any():
        return False
    return type(rule) in _LOSSLESS_GREEDILY


def as_written(value: Any) -> Any:
    """Numbers as a user wrote them: 0.7, not the nearest float32."""
    if value is None:
        return None
    array = np.asarray(value)
    written = array if array.dtype.kind in "iu" else array.astype(str).astype(float)
    return tuple(written.tolist()) if array.ndim else written.item()


def _check_fit(setting: Setting) -> None:
    try:
        _check_parts(setting)
    except UserError as error:
        given = {name: value for name, value in setting.given.items() if name not in DRAWN}
        named = ", ".join(f"{name}={short_repr(value)}" for name, value in given.items())
        together = f"{named} cannot be combined: " if len(given) > 1 else ""
        raise MisfitError(f"{together}{error}") from None


# Grids make the same few again and again.
@functools.lru_cache(maxsize=4096)
def _check_fit_once(_: tuple[type, ...], setting: Setting) -> None:
    _check_fit(setting)


_DETAILS = tuple(f.name for f in dataclasses.fields(Setting) if f.name not in ("rule", "method"))


@dataclasses.dataclass(frozen=True, eq=False)
class Built:
    """A method, ready to decode, with its parameters, and its models by name.

    Attributes:
      main: the model whose tokenizer is used.
      own_params: a hash of the parameters that belong to no model, or None.
      stopping: the text of the policy with its costs, or None.
      costs: the costs measured for a policy without costs, or None.
      length: the choice of G by given costs, or None.
      most_rows: the largest batch with known costs; None if the policy needs no costs.
      budget: the tokens of a `drafting.Budget` without a smallest draft; None for other policies.
    """

    method: Method
    params: Params
    models: Mapping[str, TextModel]
    main: TextModel
    own_params: str | None = None
    stopping: str | None = None
    costs: Costs | None = None
    length: DraftLength | None = None
    most_rows: int | None = None
    budget: int | None = None


# The attributes of a user's own method that a decoder reads.
_OF_METHODS = (
    *("init", "run", "describe", "cache_length", "check_rule", "model_names", "nan_sources"),
    *("vocab_size", "min_draft", "max_draft", "independent_rows", "partitioner"),
)


def build(
    setting: Setting,
    models: Any,
    rows: int,
    prompt_length: int,
) -> Built:
    """Makes the method of a setting from its `chosen_models`.

    Costs are measured with `rows` prompts of `prompt_length` tokens. Given costs choose G for these
    rows.
    """
    single = isinstance(models, TextModel)
    named, main = ({"verifier": models}, models) if single else (models.named, models.verifier)
    chosen, rule = setting.part("method"), setting.part("rule")
    if setting.is_alone:
        return _alone(main, rule)
    if isinstance(chosen, WithParams):
        return _own_method(chosen, rule, named, main)
    if chosen is not None:
        check_names(named, ("verifier", "drafter"), f"method={type(chosen).__name__}")
        small = named["drafter"]
        small.check_alone()
        eos_ids = tuple(main.tokenizer.eos_ids)
        cascade = chosen.bound(main.model, small.model, eos_ids, main.partitioner)
        params = MethodParams(main.prepared, small.prepared, rule)
        return Built(cascade, params, {"drafter": small, "verifier": main}, main)
    costs = length = None
    if setting.drafts.weighs_costs:
        check_names(named, ("drafter",), _drafting(setting))
        pair = Pair(named["drafter"], main)
        if setting.costs is not None and setting.stopping is None:
            length = choose_length(setting.costs, pair, rows, setting.temperature)
            if not length.max_draft:  # no draft is verified
                return dataclasses.replace(_alone(main, None), length=length)
            setting = dataclasses.replace(setting, max_draft=length.max_draft, costs=None)
        setting, costs = _with_costs(setting, pair, rows, prompt_length)
    method, rule, params, drafts = _speculative(setting, named)
    policy = setting.policy
    return Built(
        method,
        MethodParams(main.prepared, params, rule),
        drafts.used,
        main,
        own_params=_hash(*drafts.own_params(params)),
        stopping=None if policy is None else repr(policy),
        costs=costs,
        length=length,
        most_rows=policy.costs.rows[-1] if isinstance(policy, CostAware) and policy.costs else None,
        budget=policy.tokens if isinstance(policy, Budget) and not setting.min_draft else None,
    )


def chosen_models(setting: Setting, models: Any) -> tuple[Setting, Pair | TextModel]:
    """The setting for these models; and the only model that writes, or all with its drafter."""
    if setting.is_alone and isinstance(models, TextModel):
        return setting, models
    named = {"verifier": models} if isinstance(models, TextModel) else models
    named = named.named if isinstance(named, Pair) else named
    if not isinstance(named, Mapping):
        raise UserError(
            "models must be a Pair, models by name or a TextModel, got "
            f"{type(models).__name__}: see load_pair"
        )
    if setting.is_alone:
        check_names(named, setting.needed, f"method={setting.method}")
        model = named[setting.needed[0]]
        if not isinstance(model, TextModel):
            raise UserError(f"models must be TextModels by name, got {type(model).__name__}")
        return setting, model
    all_models = models if isinstance(models, Pair) else Pair(**named)
    if len(named) == 1 and setting.method is None and setting.drafting is None:
        for name in ("drafter", *OF_DRAFTS):
            if name in setting.given:
                raise UserError(
                    f"{name} must be left out: this option needs a drafter: load one beside the "
                    'model, or give drafting="Lookup()", which drafts without a second model'
                )
        Autoregressive(all_models.verifier.model).check_rule(setting.part("rule"))
        alone = dataclasses.replace(setting.verifier_alone, rule=setting.rule)
        return alone, all_models.verifier
    if isinstance(models, TextModel):
        return setting, models
    if setting.drafter in named and setting.drafter != "drafter":
        all_models = Pair(**{**named, "drafter": named[setting.drafter]})
    elif setting.drafter != "drafter":
        check_names(named, (setting.drafter,), "the setting")
    return setting, all_models


def _alone(main: TextModel, rule: Rule | None) -> Built:
    main.check_alone()
    eos_ids = tuple(main.tokenizer.eos_ids)
    alone = Autoregressive(main.model, eos_ids=eos_ids, partitioner=main.partitioner)
    params = MethodParams(main.prepared)
    if rule is not None and type(rule) is not rules.Lossless:
        params = params._replace(rule=checked_rule(alone.check_rule, rule))
    return Built(alone, params, {"verifier": main}, main)


def _own_method(
    chosen: WithParams, rule: Any, named: Mapping[str, TextModel], main: TextModel
) -> Built:
    own, params = chosen.part, chosen.params
    check_part("method", own, _OF_METHODS, "decoding.Speculative(...)")
    check_static("method", own)
    assert hasattr(params, "_replace"), "the params of an own method must be a NamedTuple"
    if rule is not None:
        params = params._replace(rule=checked_rule(own.check_rule, rule))
    return Built(own, params, named, main, _hash(params))


def _drafting(setting: Setting) -> str:
    if setting.drafting is None:
        return "decoding with several models"
    return f"drafting={short_repr(setting.drafting)}"


def _check_parts(setting: Setting) -> None:
    """Refuses parts that cannot be combined, whatever the models are; no file is read."""
    processors = setting.sampling.processors or ()
    check_one_constraint(processors)
    method, rule = setting.part("method"), setting.part("rule")
    if isinstance(method, WithParams):
        return
    if setting.is_alone:
        check_is_rule("rule", rule)
        if rule.reads_draft:
            raise UserError(
                f"rule must be left out: method={setting.method} decodes without drafts"
            )
        return
    if method is not None:
        if rule is None:
            name = type(method).__name__
            raise UserError(f"rule must be given: {name} needs it, see docs/baselines.md")
        method.check_rule(rule)
        return
    _check_costs(setting)
    drafter, _ = setting.part_of_drafts.bind(_models_of_drafts(setting, None))
    check_fit(drafter, setting.part("verification"))
    if setting.widths is not None:
        check_widths(setting.widths, drafter.max_draft + 1)
    # Of one's own drafter, the size is one's own matter.
    is_own = isinstance(setting.part_of_drafts, WithParams)
    if not is_own and drafter.traits.drafts_trees and drafter.max_draft > MOST_NODES:
        raise UserError(
            f"{_drafting(setting)} drafts trees of up to {drafter.max_draft} tokens, and at most "
            f"{MOST_NODES} are allowed: draft fewer"
        )
    checked_rule(functools.partial(check_rule, drafter=drafter), rule)
    check_forbidding(drafter, rule, processors, process_drafts=setting.process_drafts)


def _check_costs(setting: Setting) -> None:
    """Refuses costs that nothing weighs, and a policy that weighs them with these drafts."""
    weighs_costs = setting.drafts.weighs_costs
    is_free = setting.rule == "Lossless" and setting.max_draft is None and not setting.min_draft
    is_free = is_free and setting.stopping is None and setting.widths is None
    weighs = isinstance(setting.policy, CostAware) or (is_free and weighs_costs)
    if setting.costs is not None and not weighs:
        raise UserError(
            "costs must be left out: they are for stopping=CostAware(), or choose max_draft "
            "where the drafts of a single drafter are lossless and max_draft, min_draft, "
            "stopping and widths are left out"
        )
    if isinstance(setting.policy, CostAware) and not weighs_costs:
        raise UserError("CostAware needs a single drafter: choose another policy")


def _models_of_drafts(setting: Setting, named: Mapping[str, TextModel] | None) -> DecoderModels:
    return DecoderModels(
        named,
        setting.max_draft,
        setting.min_draft,
        setting.part("stopping"),
        setting.part("rule"),
        _drafting(setting),
    )


def _speculative(
    setting: Setting, named: Mapping[str, TextModel]
) -> tuple[Speculative, Rule, Params, DecoderModels]:
    """The method, its rule, the drafter's parameters, and the models that it uses."""
    main, models = named["verifier"], _models_of_drafts(setting, named)
    models.used["verifier"] = main
    drafter, params = setting.part_of_drafts.bind(models)
    method = Speculative(
        main.model,
        drafter,
        setting.part("verification"),
        setting.widths,
        process_drafts=setting.process_drafts,
        eos_ids=models.eos_ids,
        partitioner=main.partitioner,
    )
    return method, checked_rule(method.check_rule, setting.part("rule")), params, models


_known_costs: contextvars.ContextVar[Costs | None] = contextvars.ContextVar("costs", default=None)


def use_costs(costs: Costs) -> AbstractContextManager[Any]:
    """A `Decoder` made in this context uses these costs, if they belong to its pair."""
    return scoped(_known_costs, costs)


def _with_costs(
    setting: Setting, pair: Pair, rows: int, prompt_length: int
) -> tuple[Setting, Costs | None]:
    """The setting, with measured costs for a policy without costs; and these costs."""
    policy = setting.part("stopping")
    if not isinstance(policy, CostAware):
        return setting, None
    multiple = pair.verifier.row_multiple
    rows += -rows % multiple
    without = dataclasses.replace(setting, stopping=None, costs=None)
    longest = _speculative(without, pair.named)[0].max_draft
    widths, costs = setting.widths or powers_of_two(longest + 1), None
    longest = min(longest, pair.drafter.model.most_drafts or longest)  # without longer copies
    policy = policy if policy.costs else dataclasses.replace(policy, costs=setting.costs)
    if policy.costs is None:
        costs = _known_costs.get()
        if costs is None or costs.pair != pair.fingerprint:
            # The length of the prompts is unknown; the shortest bucket is usual.
            sizes = sorted({multiple, rows})
            drafted = (*(width for width in widths if width <= longest), longest + 1)
            costs = measure_costs(pair, sizes, drafted, prompt_length=prompt_length)
    weighed = policy.costs or costs
    policy = dataclasses.replace(policy, costs=weighed)  # checks them
    assert weighed is not None
    check_costs(weighed, pair, rows, longest)
    policy = dataclasses.replace(policy, costs=weighed.at_widths(widths))
    return dataclasses.replace(setting, stopping=policy), costs


def choose_length(costs: Costs, pair: Pair, rows: int, temperature: Any) -> DraftLength:
    """Chooses the length of a pair's drafts, up to the longest that `costs` were measured with.

    Raises:
      UserError: the costs are not those of the pair, the rows and the temperatures.
    """
    small = pair.drafter
    rows += -rows % pair.verifier.row_multiple
    longest = costs.widths[-1] - 1
    if longest < 1:
        raise UserError(
            f"costs has the widths {costs.widths}, and a draft needs one of at least 2 to choose "
            "its length: measure it with `specjax bench --costs FILE`"
        )
    longest = min(longest, small.model.most_drafts or longest)
    check_costs(costs, pair, rows, longest)
    low, high = np.min(temperature), np.max(temperature)
    if not costs.temperatures or not costs.temperatures[0] <= low <= high <= costs.temperatures[-1]:
        raise UserError(
            f"costs has acceptance at the temperatures {costs.temperatures}, which must include "
            f"{low:g} to {high:g}: measure it with `specjax bench --costs FILE --temperatures`"
        )
    acceptance = np.mean(np.interp(temperature, costs.temperatures, costs.acceptance))
    tokens = expected_rounds(float(acceptance), longest)
    return draft_length(round_costs(costs, rows, tokens, catches_up=catches_up(small)))


def _hash(params: Params, described: str = "") -> str | None:
    """A hash of parameters and a text; None if both are empty."""
    return digest(params, described) if described or jax.tree.leaves(params) else None
