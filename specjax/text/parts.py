"""From what a user names to a method: texts of parts, the parts, and what fits together.

A text such as `Survival(OnlineEstimate(shared=True), 0.6)` calls classes with literals and other
parts, in Python's notation. So a part is a plain value, which can be compared, hashed, and written
in JSON and gin files. A text is data: it names only the classes of `PARTS`, and nothing is imported
or evaluated to read it.
"""

import ast
import contextlib
import contextvars
import dataclasses
import difflib
import functools
import inspect
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import jax
import numpy as np

from specjax import drafting, processors, rules, verification
from specjax.checks import check_flag, check_part, check_static, checked, whole_number
from specjax.decoding import (
    Autoregressive,
    BiLDCascade,
    Method,
    MethodParams,
    OracleCascade,
    SequenceCascade,
    Speculative,
    TokenCascade,
)
from specjax.decoding.blocks import powers_of_two
from specjax.drafting import (
    Budget,
    CostAware,
    Costs,
    FixedLength,
    NeuralDrafter,
    NeuralDrafterParams,
)
from specjax.drafting.stopping import check_needs_no_params, check_own_params, check_policy
from specjax.errors import UserError
from specjax.fingerprints import digest
from specjax.models.heads import BlockHead
from specjax.processors import Constraint, JsonSchema, Regex
from specjax.text.draft_length import DraftLength, draft_length, expected_rounds, round_costs
from specjax.text.drafts import (
    MOST_NODES,
    Branches,
    Cascade,
    DraftPlan,
    Lookup,
    ModelDrafts,
    OwnDrafts,
    PlanInputs,
    Planned,
    Tree,
    WithParams,
    catches_up,
    check_is_plan,
    drafter_of,
)
from specjax.text.passes import check_costs, measure_costs
from specjax.text.text_models import Models, Pair, TextModel
from specjax.types import (
    LanguageModel,
    Params,
    Processor,
    Rule,
    Sampling,
    Stopping,
)

PLACE = "{}"
_EXAMPLE = "write a text such as 'OPT(0.2)'"
# Limits of a text, for texts of strangers.
_LONGEST, _DEEPEST, _LARGEST = 100_000, 50, 2**63


@dataclasses.dataclass(frozen=True)
class VerifierAlone:
    """The verifier decodes by itself, token by token: the baseline."""

    model: ClassVar[str] = "verifier"


@dataclasses.dataclass(frozen=True)
class DrafterAlone:
    """The drafter decodes by itself, token by token."""

    model: ClassVar[str] = "drafter"


# The methods in which a single model writes at a time.
CASCADES = (TokenCascade, BiLDCascade, OracleCascade, SequenceCascade)
# What a text may name, by the field of `Setting`; then the parts of other parts.
BY_FIELD: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "rule": (*rules.ALL_RULES, rules.Budgeted, rules.Learnt, *rules.SEQUENTIAL_RULES),
        "verification": verification.ALL_VERIFICATIONS,
        "stopping": drafting.ALL_POLICIES,
        "drafting": (Lookup, Cascade, Tree, Branches),
        "method": (*CASCADES, VerifierAlone, DrafterAlone),
        "processors": processors.ALL_PROCESSORS,
        "": (*rules.ALL_AGGREGATIONS, *drafting.ALL_ESTIMATES),
    }
)
# Name -> class: all that a text may name. `register_part` adds the user's own.
PARTS: dict[str, type] = {one.__name__: one for kind in BY_FIELD.values() for one in kind}
SHIPPED = tuple(PARTS)
_Class = TypeVar("_Class", bound=type)


def register_part(kind: _Class) -> _Class:
    """Lets texts name a class of your own, in this process: `register_part(Mine)`, then `Mine(3)`.

    It is also a decorator. A class replaces an earlier one of its name, but no part of specjax.
    """
    if not isinstance(kind, type):
        raise UserError(f"register_part needs a class, got {kind!r}: write register_part(Mine)")
    same = {_plain(name): name for name in PARTS}.get(_plain(kind.__name__))
    if same is not None and PARTS[same] is kind:
        return kind
    if same in SHIPPED:
        raise UserError(f"register_part: {same} is a part of specjax: rename {kind.__qualname__}")
    if same is not None:
        del PARTS[same]
    PARTS[kind.__name__] = kind
    _made.cache_clear()
    return kind


class Part(NamedTuple):
    """A class and its arguments.

    Attributes:
      name: the name of the class, in `PARTS`.
      arguments: by position: numbers, texts, None, tuples and dicts of these, or parts.
      named: (name, value) of keyword arguments.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    named: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, text: str, what: str = "the part", fields: Iterable[str] = ()) -> Self:
        """Reads a text.

        Equal parts have equal texts: classes have their standard names, and arguments without a
        default are given by position: `min_p(min_p=0.05)` is `MinP(0.05)`.

        Args:
          text: such as `OPT(0.2)`; a class without arguments needs no parentheses.
          what: its name in messages, and the field of `Setting` whose part it is.
          fields: several such fields.
        """
        if not isinstance(text, str):
            raise UserError(f"{what} must be a text such as 'OPT(0.2)', got {text!r}")
        if len(text) > _LONGEST:
            raise UserError(f"{what}={text!r} is too long: write at most {_LONGEST:,} characters")
        try:
            node = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            node = None
        reader = _TextReader(f"{what}={text!r}", what)
        if not isinstance(node, ast.Name | ast.Attribute | ast.Call):
            raise reader.refused("is not a class with arguments")
        return cls(*reader.part(node, _DEEPEST, names_of(*(fields or (what,)))))

    def __str__(self) -> str:
        arguments = [_written(value) for value in self.arguments]
        arguments += [f"{name}={_written(value)}" for name, value in self.named]
        return f"{self.name}({', '.join(arguments)})" if arguments else self.name

    @property
    def number(self) -> float | None:
        """A rule's strength, a policy's threshold: its last number, otherwise that of its parts.

        A number by position counts before one by name: 0.3 of `TokenV2(0.3, top_k=10)`.
        """
        return _cut(self)[1]

    @property
    def template(self) -> str:
        """The text with `{}` instead of `number`."""
        return str(_cut(self)[0])

    def make(self) -> Any:
        """Calls the class, which checks its arguments."""
        kind = PARTS[self.name]
        arguments = [_value_of(value) for value in self.arguments]
        named = {name: _value_of(value) for name, value in self.named}
        try:
            inspect.signature(kind).bind(*arguments, **named)
        except TypeError as error:
            raise UserError(f"{self.name}: {error}") from None
        return kind(*arguments, **named)

    def without_defaults(self) -> "Part":
        """Returns the part without arguments that are their defaults.

        Arguments with a default are given by name: `f(1, "both")` is `f(1)` if "both" is the
        default, and `f(1, "prompt")` is `f(1, over="prompt")`.
        """
        bound = inspect.signature(PARTS[self.name]).bind(*self.arguments, **dict(self.named))
        parameters, positions, named = bound.signature.parameters, [], []
        for name, value in bound.arguments.items():
            one = parameters[name]
            if one.kind is not one.POSITIONAL_OR_KEYWORD and one.kind is not one.KEYWORD_ONLY:
                return self
            if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD:
                positions.append(value)
            elif type(made := _value_of(value)) is not type(one.default) or made != one.default:
                named.append((name, value))
        return self._replace(arguments=tuple(positions), named=tuple(named))


def make_part(field: str, value: Any) -> Any:
    """Makes the object of a field of `Setting` from its text; any other value stays."""
    return _made(field, value) if isinstance(value, str) else value


@functools.lru_cache(maxsize=4096)  # grids ask for the same few
def _made(field: str, text: str) -> Any:
    part = Part.parse(text, field)
    try:
        return part.make()
    except UserError as error:
        raise UserError(f"{field}={text!r}: {error}") from None


def _plain(name: str) -> str:
    """A name without what is ignored."""
    return name.replace("_", "").lower()


def registered_parts() -> tuple[type, ...]:
    """Returns the classes that the user has registered."""
    return tuple(kind for name, kind in PARTS.items() if name not in SHIPPED)


def names_of(*fields: str) -> list[str]:
    """Returns the parts of fields of `Setting`, or all, and the user's own."""
    shipped = [one.__name__ for field in fields for one in BY_FIELD.get(field, ())]
    return [*(shipped or SHIPPED), *(kind.__name__ for kind in registered_parts())]


class _TextReader(NamedTuple):
    """Reads the syntax tree of a text, which is `shown` in messages under the name `what`."""

    shown: str
    what: str

    def refused(self, why: str) -> UserError:
        return UserError(f"{self.shown} {why}: {_EXAMPLE}")

    def part(self, node: ast.expr, depth: int, names: Iterable[str] | None = None) -> Part:
        """A part; `names` are those that are allowed, by default all."""
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        if isinstance(call.func, ast.Attribute):
            raise UserError(
                f"{self.shown} has a name with dots, and nothing is imported for a text: give your "
                "own class to specjax.register_part, and write its name without dots"
            )
        if not isinstance(call.func, ast.Name):
            raise self.refused("is not a class with arguments")
        known = {_plain(one): one for one in (PARTS if names is None else names)}
        name = known.get(_plain(call.func.id))
        if name is None:
            given, near = call.func.id, difflib.get_close_matches(_plain(call.func.id), known, n=1)
            if near:
                meant = known[near[0]]
                raise UserError(
                    f"{self.what}={given!r}: there is no such name; did you mean {meant}?"
                )
            if names is not None:
                raise UserError(f"{self.what} must be one of {', '.join(names)}, got {given!r}")
            raise UserError(
                f"{self.shown}: there is no part {given}: give your own class to "
                "specjax.register_part"
            )
        arguments = [self.value(each, depth - 1) for each in call.args]
        named: dict[str, Any] = {}
        for word in call.keywords:
            if word.arg is None or word.arg in named:
                raise self.refused("has an argument twice, or **")
            named[word.arg] = self.value(word.value, depth - 1)
        for one in list(inspect.signature(PARTS[name]).parameters.values())[len(arguments) :]:
            by_position = one.kind is one.POSITIONAL_OR_KEYWORD and one.default is one.empty
            if not by_position or one.name not in named:
                break
            arguments.append(named.pop(one.name))
        return Part(name, tuple(arguments), tuple(named.items()))

    def value(self, node: ast.expr | None, depth: int, *, in_dict: bool = False) -> Any:
        """A number, a text, True, False, None, a tuple or a dict of values, or a part.

        A dict has no parts, and its lists stay lists.
        """
        if depth <= 0:
            raise self.refused(f"is nested deeper than {_DEEPEST} levels")
        if isinstance(node, ast.Name | ast.Attribute | ast.Call) and not in_dict:
            return self.part(node, depth)
        if isinstance(node, ast.List) or (isinstance(node, ast.Tuple) and not in_dict):
            several = [self.value(each, depth - 1, in_dict=in_dict) for each in node.elts]
            return several if in_dict else tuple(several)
        if isinstance(node, ast.Dict):
            if any(isinstance(key, ast.Dict | ast.List) for key in node.keys):
                raise self.refused("has a dict whose key is no number or text")
            keys = [self.value(key, 1, in_dict=True) for key in node.keys]
            values = [self.value(each, depth - 1, in_dict=True) for each in node.values]
            return dict(zip(keys, values, strict=True))
        sign, signed = 1, isinstance(node, ast.UnaryOp)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            sign = -1 if isinstance(node.op, ast.USub) else 1
            node = node.operand
        value: Any = node.value if isinstance(node, ast.Constant) else ...
        if type(value) not in (bool, int, float, str, type(None)) or (
            signed and not _is_number(value)
        ):
            raise self.refused("has an argument that is not a literal")
        if type(value) is int and abs(value) >= _LARGEST:
            raise self.refused("has a number that is too large")
        return sign * value if _is_number(value) else value


def _written(value: Any) -> str:
    if isinstance(value, Part):
        return str(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_written, value))}{',' * (len(value) == 1)})"
    # Python writes "inf", which is a name.
    return repr(value).replace("inf", "1e999") if isinstance(value, float) else repr(value)


def _value_of(value: Any) -> Any:
    if isinstance(value, Part):
        return value.make()
    return tuple(map(_value_of, value)) if isinstance(value, tuple) else value


class _Place:
    """Stands for the number of a part."""

    def __repr__(self) -> str:
        return PLACE


def _cut(value: Any) -> tuple[Any, float | None]:
    """A value with a `_Place` for its number, and the number; see `Part.number`."""
    if _is_number(value):
        return _Place(), float(value)
    if not isinstance(value, tuple):
        return value, None
    named = value.named if isinstance(value, Part) else ()
    inner = value.arguments if isinstance(value, Part) else value
    values = [*inner, *(each for _, each in named)]

    # From the last by position; numbers by name come after these, and those of parts last.
    def order(i: int) -> tuple[bool, bool, int]:
        return _is_number(values[i]), i < len(inner), i

    for i in sorted(range(len(values)), key=order, reverse=True):
        values[i], number = _cut(values[i])
        if number is not None:
            break
    else:
        return value, None
    arguments = tuple(values[: len(inner)])
    if not isinstance(value, Part):
        return arguments, number
    names = [name for name, _ in named]
    cut = tuple(zip(names, values[len(inner) :], strict=True))
    return value._replace(arguments=arguments, named=cut), number


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a method that a user may choose, made and checked; None: the default.

    A part is an object or the text of one; see `Decoder`.
    """

    rule: Any = None
    verification: Any = None
    max_draft: int | None = None
    min_draft: int | None = None
    stopping: Any = None
    drafting: Any = None
    method: Any = None
    widths: Any = None
    process_drafts: bool | None = None
    costs: Costs | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name in ("rule", "verification", "stopping", "drafting", "method"):
            put(name, make_part(name, getattr(self, name)))
        for name, low in (("max_draft", 1), ("min_draft", 0)):
            if getattr(self, name) is not None:
                put(name, whole_number(name, getattr(self, name), low=low))
        if self.widths is not None:
            widths = checked("widths", self.widths, low=1, dtype=np.int32)
            put("widths", tuple(widths.reshape(-1).tolist()))
        if self.process_drafts is not None:
            check_flag("process_drafts", self.process_drafts)
        if self.costs is not None:
            needed = ("rows", "widths", "draft", "verifier")
            check_part("costs", self.costs, needed, "drafting.read_costs(FILE)")

    @property
    def policy(self) -> Stopping | None:
        """The stopping policy without its parameters."""
        return self.stopping.part if isinstance(self.stopping, WithParams) else self.stopping

    @property
    def plan(self) -> DraftPlan:
        """How drafts are made."""
        if isinstance(self.drafting, WithParams):
            return OwnDrafts(self.drafting)
        return ModelDrafts() if self.drafting is None else self.drafting

    @property
    def longest(self) -> int:
        """G, unless the drafter has its own."""
        return 5 if self.max_draft is None else self.max_draft

    def check_none(self, why: str, *, but: tuple[str, ...]) -> None:
        """Refuses parts that are not in `but`."""
        for field in dataclasses.fields(self):
            if field.name not in but and getattr(self, field.name) is not None:
                raise UserError(f"{field.name} must be left out: {why}")


@dataclasses.dataclass(frozen=True, eq=False)
class Assembled:
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


def assemble(
    models: Models | TextModel,
    parts: Parts,
    rows: int,
    prompt_length: int,
    temperature: Any = 1.0,
) -> Assembled:
    """Makes a method from models and parts.

    Costs are measured with `rows` prompts of `prompt_length` tokens. Given costs choose G for these
    rows at `temperature`, a number or one for each row.
    """
    if isinstance(models, TextModel):
        named, main = {"verifier": models}, models
    elif isinstance(models, Models):
        named, main = models.named, models.verifier
    else:
        raise UserError(
            f"models must be Models or a TextModel, got {type(models).__name__}: see load_pair"
        )
    chosen, rule, eos_ids = parts.method, parts.rule, tuple(main.tokenizer.eos_ids)
    if chosen is not None:
        parts.check_none("`method` has its own", but=("method", "rule"))
        if isinstance(chosen, WithParams):
            own, params = chosen.part, chosen.params
            check_part("method", own, _OF_METHODS, "decoding.Speculative(...)")
            check_static("method", own)
            assert hasattr(params, "_replace"), "the params of an own method must be a NamedTuple"
            if rule is not None:
                params = params._replace(rule=checked_rule(own, rule))
            return Assembled(own, params, named, main, _hash(params))
        _check_cascade(chosen, rule)
        _check_names(named, ("verifier", "drafter"), f"method={type(chosen).__name__}")
        small = named["drafter"]
        small.check_alone()
        cascade = chosen.bound(main.model, small.model, eos_ids, main.partitioner)
        params = MethodParams(main.prepared, small.prepared, rule)
        return Assembled(cascade, params, {"drafter": small, "verifier": main}, main)
    if parts.drafting is None and len(named) == 1:
        why = (
            'this option needs a drafter: load one beside the model, or give drafting="Lookup()", '
            "which drafts without a second model"
        )
        parts.check_none(why, but=("rule",))
        main.check_alone()
        alone = Autoregressive(main.model, eos_ids=eos_ids, partitioner=main.partitioner)
        params = MethodParams(main.prepared)
        if rule is not None:
            params = params._replace(rule=checked_rule(alone, rule))
        return Assembled(alone, params, {"verifier": main}, main)
    plan = parts.plan
    _check_plan(parts, plan)
    what = "decoding with several models" if parts.drafting is None else f"drafting={plan!r}"
    _check_names(named, plan.needs, what)
    costs = length = None
    if plan.weighs_costs:
        pair = Pair(named["drafter"], main)
        if parts.costs is not None and parts.stopping is None:
            length = chosen_length(parts.costs, pair, rows, temperature)
            if not length.max_draft:  # the rule is its default, and no draft is verified
                assembled = assemble(main, Parts(), rows, prompt_length)
                return dataclasses.replace(assembled, length=length)
            parts = dataclasses.replace(parts, max_draft=length.max_draft)
        parts, costs = _with_costs(parts, plan, pair, rows, prompt_length)
    method, rule, planned = _speculative(named, main, parts, plan)
    used = {name: model for name, model in named.items() if model is main or name in plan.needs}
    weighed = parts.policy.costs if isinstance(parts.policy, CostAware) else None
    shared = parts.policy if isinstance(parts.policy, Budget) and not parts.min_draft else None
    return Assembled(
        method,
        MethodParams(main.prepared, planned.params, rule),
        {**used, **planned.models},
        main,
        own_params=_hash(planned.own, planned.described),
        stopping=None if parts.policy is None else repr(parts.policy),
        costs=costs,
        length=length,
        most_rows=None if weighed is None else weighed.rows[-1],
        budget=None if shared is None else shared.tokens,
    )


def model_alone(models: Models | TextModel, method: VerifierAlone | DrafterAlone) -> TextModel:
    """The only model that writes."""
    if isinstance(models, TextModel):
        return models
    _check_names(models.named, (method.model,), f"method={type(method).__name__}")
    return models.named[method.model]


def _check_cascade(method: Any, rule: Any) -> None:
    """Refuses what is no cascade in which a single model writes at a time, and its rule."""
    check_part("method", method, ("bound",), "specjax.TokenCascade()")
    if rule is None:
        name = type(method).__name__
        raise UserError(f"rule must be given: {name} needs it, see docs/baselines.md")
    method.check_rule(rule)


def _check_names(named: Mapping[str, TextModel], needed: Sequence[str], what: str) -> None:
    for name in needed:
        if name not in named:
            raise UserError(
                f"{what} needs a model named {name}, got {', '.join(named)}: give a Pair, or "
                "Models with this name"
            )


def _check_plan(parts: Parts, plan: DraftPlan) -> None:
    """Refuses what is no plan, and options that cannot be given with it."""
    check_is_plan(plan)
    for part, why in plan.left_out.items():
        if getattr(parts, part) is not None:
            raise UserError(f"{part} must be left out: {why}")
    is_lossless = parts.rule is None or type(parts.rule) is rules.Lossless
    lengths = parts.max_draft, parts.min_draft, parts.stopping, parts.widths
    is_free = is_lossless and all(length is None for length in lengths)
    weighs = isinstance(parts.policy, CostAware) or (is_free and plan.weighs_costs)
    if parts.costs is not None and not weighs:
        raise UserError(
            "costs must be left out: they are for stopping=CostAware(), or choose max_draft where "
            "the drafts of a single drafter are lossless and max_draft, min_draft, stopping and "
            "widths are left out"
        )
    if isinstance(parts.policy, CostAware) and not plan.weighs_costs:
        raise UserError(
            f"stopping=CostAware cannot be used with drafting={plan!r}, because it needs a single "
            "drafter: choose another policy"
        )


class _AnyModel(LanguageModel):
    """Stands for the network of any model."""

    vocab_size = 2**30
    reads_trees = True
    gives_odds = True
    prompt_positions: Any = None
    prefill: Any = None
    score: Any = None
    write: Any = None


# Stands for any `TextModel` where only the parts are checked.
_ANY: Any = types.SimpleNamespace(
    model=_AnyModel(),
    tokenizer=types.SimpleNamespace(eos_ids=(0,)),
    partitioner=None,
    platform="cpu",
    prepared=(),
    place=lambda params: params,
)


def check_fit(parts: Parts, processors: Sequence[Processor] = ()) -> None:
    """Refuses parts as a `Decoder` does if they cannot be combined, whatever its models are.

    No file is read. A plan of the user's own is checked only as far as it needs no models.
    """
    check_one_constraint(processors)
    if isinstance(parts.method, VerifierAlone | DrafterAlone):
        return
    if parts.method is not None:
        _check_cascade(parts.method, parts.rule)
        return
    plan = parts.plan
    _check_plan(parts, plan)
    plans = [plan, *(plan.parts if isinstance(plan, Branches) else ())]
    if all(type(x).__module__.startswith("specjax.") for x in plans if not isinstance(x, str)):
        models = dict.fromkeys((*plan.needs, "verifier"), _ANY)
        method, rule, _ = _speculative(models, _ANY, parts, plan)
        check_forbidding(method, rule, tuple(processors))


def _speculative(
    named: Mapping[str, TextModel], main: TextModel, parts: Parts, plan: DraftPlan
) -> tuple[Speculative, Rule, Planned]:
    """The method and its rule, after checking that they fit together; and the plan's result."""

    def neural(
        model: str | TextModel, longest: int | None = None
    ) -> tuple[NeuralDrafter, NeuralDrafterParams]:
        small = named[model] if isinstance(model, str) else model
        drafter, params = _neural(small, main, parts, longest)
        # Placed now, so that the calls of the loop do not transfer them.
        return drafter, params._replace(stopping=main.place(params.stopping))

    models = {**named, "verifier": main}
    planned = plan.make(PlanInputs(models, parts.longest, neural, main is _ANY))
    method = Speculative(
        main.model,
        planned.drafter,
        plan.default_verification if parts.verification is None else parts.verification,
        parts.widths,
        process_drafts=parts.process_drafts is not False,
        eos_ids=tuple(main.tokenizer.eos_ids),
        partitioner=main.partitioner,
    )
    # Of one's own drafter, the size is one's own matter.
    drafts_trees = not isinstance(plan, OwnDrafts) and planned.drafter.traits.drafts_trees
    if drafts_trees and planned.drafter.max_draft > MOST_NODES:
        raise UserError(
            f"drafting={plan!r} drafts trees of up to {planned.drafter.max_draft} tokens, and at "
            f"most {MOST_NODES} are allowed: draft fewer"
        )
    rule = rules.Lossless() if parts.rule is None else parts.rule
    return method, checked_rule(method, rule), planned


def _neural(
    small: TextModel, main: TextModel, parts: Parts, longest: int | None
) -> tuple[NeuralDrafter, NeuralDrafterParams]:
    """The drafter of a small model, for up to `longest` tokens (None: `max_draft`)."""
    min_draft = parts.min_draft or 0
    # A level of a cascade may draft fewer tokens.
    min_draft = min_draft if longest is None else min(min_draft, longest)
    stopping = FixedLength() if parts.policy is None else parts.policy
    check_policy(stopping)
    params: Any = ()
    if isinstance(parts.stopping, WithParams):
        params = parts.stopping.params
        check_own_params(stopping, params, small.head)
    elif small is not _ANY:
        stopping, params = stopping.bind(small.head)
        is_ours = type(stopping).__module__.startswith("specjax.")
        if not is_ours and not jax.tree.leaves(params) and not small.is_head:
            check_needs_no_params(stopping, main.model.vocab_size, small.width)
    # A draft of fixed length continues after an end-of-sequence token, so rows stay independent.
    eos_ids = () if stopping.is_fixed else tuple(main.tokenizer.eos_ids)
    longest = parts.longest if longest is None else longest
    if isinstance(small.model, BlockHead) and parts.max_draft is None:
        # A rule that reads the drafter after a whole draft needs one more of the block's tokens.
        spare = int(parts.rule is not None and parts.rule.reads_draft)
        longest = min(longest, small.model.config.most_drafts - spare)
    options = {"min_draft": min_draft, "eos_ids": eos_ids}
    return drafter_of(small, main, longest, stopping, params, **options)


_known_costs: contextvars.ContextVar[Costs | None] = contextvars.ContextVar("costs", default=None)


@contextlib.contextmanager
def measured_costs(costs: Costs) -> Iterator[None]:
    """A `Decoder` made in this context uses these costs, if they belong to its pair."""
    token = _known_costs.set(costs)
    try:
        yield
    finally:
        _known_costs.reset(token)


def _with_costs(
    parts: Parts, plan: DraftPlan, pair: Pair, rows: int, prompt_length: int
) -> tuple[Parts, Costs | None]:
    """The parts, with measured costs for a policy without costs; and these costs."""
    policy = parts.stopping
    if not isinstance(policy, CostAware):
        return parts, None
    main, multiple = pair.verifier, pair.verifier.row_multiple
    rows += -rows % multiple
    without = dataclasses.replace(parts, stopping=None)
    longest = _speculative(pair.named, main, without, plan)[0].max_draft + 1
    widths, costs = parts.widths or powers_of_two(longest), None
    policy = policy if policy.costs else dataclasses.replace(policy, costs=parts.costs)
    if policy.costs is None:
        costs = _known_costs.get()
        if costs is None or costs.pair != pair.fingerprint:
            # The length of the prompts is unknown; the shortest bucket is usual.
            sizes = sorted({multiple, rows})
            costs = measure_costs(pair, sizes, widths, prompt_length=prompt_length)
    weighed = policy.costs or costs
    policy = dataclasses.replace(policy, costs=weighed)  # checks them
    assert weighed is not None
    check_costs(weighed, pair, rows, widths[-1] - 1)
    policy = dataclasses.replace(policy, costs=weighed.at_widths(widths))
    return dataclasses.replace(parts, stopping=policy), costs


def chosen_length(costs: Costs, pair: Pair, rows: int, temperature: Any) -> DraftLength:
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
    if isinstance(small.model, BlockHead):
        longest = min(longest, small.model.config.most_drafts)
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


def checked_rule(method: Method, rule: Any) -> Rule:
    """Returns a rule after checking that the method accepts it; traces a user's own rule."""
    rule = make_part("rule", rule)
    method.check_rule(rule)
    inner = rule.rule if isinstance(rule, rules.Budgeted) else rule
    if not type(inner).__module__.startswith("specjax.rules"):
        rules.check_rule(inner)
    return rule


def warn_of_excluded(rule: Rule | None, sampling: Sampling, vocab_size: int) -> None:
    """Warns if a mixture of the models would emit tokens that the sampling excludes."""
    rule = rule.rule if isinstance(rule, rules.Learnt) else rule
    if not isinstance(rule, rules.Mixture) or np.all(np.asarray(rule.weight) == 1.0):
        return
    excluding = ["temperature=0"] if np.any(np.asarray(sampling.temperature) == 0.0) else []
    for name, most in (("top_k", vocab_size), ("top_p", 1.0)):
        value = getattr(sampling, name)
        if value is not None and np.any(np.asarray(value) < most):
            excluding.append(name)
    if excluding:
        warnings.warn(
            f"rule={rule!r} emits tokens that the verifier does not with "
            f"{' and '.join(excluding)}, where the drafter can draw them: use a rule that does "
            "not, such as KLPrice",
            stacklevel=4,
        )


def bind_processors(
    processors: Any, model: TextModel
) -> tuple[tuple[Processor, ...] | None, tuple[Params, ...]]:
    """Binds processors, some of them `WithParams(processor, params)`, to the verifier.

    Returns:
      The processors in the order in which they run, and for each the arrays that rows share.
    """
    if isinstance(processors, str) or not isinstance(processors, Sequence):
        raise UserError(f"processors must be a tuple such as ('MinP(0.05)',), got {processors!r}")
    pairs: list[tuple[Processor, Params]] = []
    for i, value in enumerate(processors):
        entry = make_part("processors", value)
        part = entry.part if isinstance(entry, WithParams) else entry
        needed = ("bind", "init", "process", "advance", "check_limit", "order", "forbids")
        check_part(f"processors[{i}]", part, needed, "processors.MinP(0.05)")
        leaves, structure = jax.tree.flatten(part)
        assert not any(leaf is part for leaf in leaves), (
            f"{type(part).__name__} is no pytree: decorate it with @types.traced_dataclass"
        )
        check_static(f"processors[{i}]", structure)
        pairs.append((part, entry.params) if isinstance(entry, WithParams) else part.bind(model))
    check_one_constraint([processor for processor, _ in pairs])
    pairs.sort(key=lambda pair: pair[0].order)
    bound, shared = zip(*pairs, strict=True) if pairs else ((), ())
    return tuple(bound) or None, tuple(shared)


def check_one_constraint(processors: Sequence[Processor]) -> None:
    """Refuses several constraints: their automata cannot be joined."""
    several = [x for x in processors if isinstance(x, Constraint | Regex | JsonSchema)]
    if len(several) > 1:
        shown = ", ".join(getattr(x, "source", None) or type(x).__name__ for x in several)
        raise UserError(
            f"processors must have at most one Regex or JsonSchema, got {shown}: write a single "
            "pattern, or a pattern for each row with `which`"
        )


def check_forbidding(
    method: Method, rule: Rule | None, processors: tuple[Processor, ...] | None
) -> None:
    """Refuses a rule that could emit a token that a processor forbids."""
    forbidding = [type(one).__name__ for one in processors or () if one.forbids]
    if not forbidding or not isinstance(method, Speculative) or not getattr(rule, "reads_draft", 0):
        return
    drafter, why = method.drafter, "process_drafts is False"
    if method.process_drafts:
        if drafter.traits.processes:
            return
        why = f"{type(drafter).__name__} may draft it"
    raise UserError(
        f"{forbidding[0]} cannot be used with rule {type(rule).__name__} here, because this rule "
        f"may accept a drafted token that {forbidding[0]} forbids ({why}): use rules.Lossless(), "
        "or a drafter that is a model of all tokens"
    )


def warn_of_ignored(model: TextModel, processors: Sequence[Processor]) -> None:
    """Warns of settings of the model's generation that these processors do not apply."""
    if not model.settings:
        return
    # Imported here to keep `import specjax` fast: importing Orbax takes long.
    from specjax.checkpoints.ignored import warn_of_settings

    names = {type(one).__name__ for one in processors}
    has_encoder = not model.continues_prompts
    warn_of_settings(model.name, model.settings, has_encoder=has_encoder, processors=names)
