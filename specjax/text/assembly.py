"""Builds a decoding method, with its parameters, from models and parts that fit together."""

import contextlib
import contextvars
import dataclasses
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.checks import check_part, check_static, checked, whole_number
from specjax.decoding import Autoregressive, Method, MethodParams, Speculative
from specjax.decoding.roundless import PairMethod
from specjax.decoding.scoring import check_widths, powers_of_two
from specjax.drafting import (
    BlockDrafter,
    Budget,
    CostAware,
    Costs,
    EagleDrafter,
    FixedLength,
    NeuralDrafter,
    NeuralDrafterParams,
    OwnEstimate,
)
from specjax.drafting.neural import catches_up_on
from specjax.drafting.stopping import check_own_params, check_policy
from specjax.errors import UserError
from specjax.fingerprints import digest
from specjax.models.heads import BlockHead, DraftHead, EagleHead
from specjax.processors import Constraint, JsonSchema, Regex
from specjax.rules import Budgeted, Learnt, Lossless, Mixture, check_rule
from specjax.text.drafts import (
    MOST_NODES,
    Branches,
    DraftPlan,
    ModelDrafts,
    OwnDrafts,
    PlanInputs,
    Planned,
    WithParams,
    check_is_plan,
)
from specjax.text.passes import check_costs, measure_costs
from specjax.text.text_models import Models, Pair, TextModel
from specjax.types import (
    Drafter,
    LanguageModel,
    Params,
    Processor,
    Rule,
    Sampling,
    Stopping,
    Verification,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a method that a user may choose; None: the default. See `Decoder`."""

    rule: Rule | None = None
    verification: Verification | None = None
    max_draft: int | None = None
    min_draft: int | None = None
    stopping: Stopping | WithParams | None = None
    drafting: DraftPlan | WithParams | None = None
    method: PairMethod | WithParams | None = None
    widths: Sequence[int] | None = None
    process_drafts: bool | None = None

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
        return whole_number("max_draft", 5 if self.max_draft is None else self.max_draft, low=1)

    def check_none(self, why: str, *, but: tuple[str, ...]) -> None:
        """Refuses parts that are not in `but`."""
        for field in dataclasses.fields(self):
            if field.name not in but and getattr(self, field.name) is not None:
                raise UserError(f"{field.name} must be left out: {why}")


@dataclasses.dataclass(frozen=True, eq=False)
class Assembled:
    """A method, ready to decode.

    Attributes:
      method: the method.
      params: its parameters.
      models: the models of the method, by name.
      main: the model whose tokenizer is used.
      own_params: a hash of the parameters that belong to no model, or None.
      stopping: the text of the policy with its costs, or None.
      costs: the costs measured for a policy without costs, or None.
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
    most_rows: int | None = None
    budget: int | None = None


def assemble(models: Models | TextModel, parts: Parts, rows: int, prompt_length: int) -> Assembled:
    """Makes a method from models and parts.

    Args:
      models: a pair, several models, or a single model.
      parts: the chosen parts.
      rows: the batch size for measuring costs.
      prompt_length: the length of prompts for measuring costs.
    """
    if isinstance(models, TextModel):
        named, main = {"verifier": models}, models
    elif isinstance(models, Models):
        named, main = models.named, models.verifier
    else:
        raise UserError(
            f"models must be Models or a TextModel, got {type(models).__name__}: see load_pair"
        )
    if isinstance(parts.method, WithParams):
        parts.check_none("`method` has its own", but=("method", "rule"))
        return _own_method(named, main, parts.method, parts.rule)
    if parts.method is not None:
        parts.check_none("`method` has its own", but=("method", "rule"))
        return _pair_method(named, main, parts.method, parts.rule)
    if parts.drafting is None and len(named) == 1:
        why = "this option needs a drafter: give a Pair, or drafting"
        parts.check_none(why, but=("rule",))
        method = Autoregressive(
            main.model, eos_ids=tuple(main.tokenizer.eos_ids), partitioner=main.partitioner
        )
        params = MethodParams(main.prepared)
        if parts.rule is not None:
            params = params._replace(rule=checked_rule(method, parts.rule))
        return Assembled(method, params, {"verifier": main}, main)
    plan = parts.plan
    _check_plan(parts, plan)
    what = "decoding with several models" if parts.drafting is None else f"drafting={plan!r}"
    _check_names(named, plan.needs, what)
    costs = None
    if plan.weighs_costs:
        parts, costs = _with_costs(parts, Pair(named["drafter"], main), rows, prompt_length)
    return dataclasses.replace(_speculative(named, main, parts, plan), costs=costs)


def _pair_method(
    named: Mapping[str, TextModel], main: TextModel, chosen: PairMethod, rule: Rule | None
) -> Assembled:
    """A cascade in which a single model writes at a time."""
    _check_pair_method(chosen, rule)
    _check_names(named, ("verifier", "drafter"), f"method={type(chosen).__name__}")
    small = named["drafter"]
    eos_ids = tuple(main.tokenizer.eos_ids)
    method = chosen.bound(main.model, small.model, eos_ids, main.partitioner)
    params = MethodParams(main.prepared, small.prepared, rule)
    return Assembled(method, params, {"drafter": small, "verifier": main}, main)


def _check_pair_method(method: Any, rule: Any) -> None:
    check_part("method", method, ("bound",), "specjax.TokenCascade()")
    if rule is None:
        name = type(method).__name__
        raise UserError(f"rule must be given: {name} needs it, see docs/baselines.md")
    method.check_rule(rule)


def _own_method(
    named: Mapping[str, TextModel], main: TextModel, own: WithParams, rule: Rule | None
) -> Assembled:
    method, params = own.part, own.params
    needed = [
        *("init", "run", "describe", "cache_length", "check_rule", "model_names"),
        *("nan_sources", "vocab_size", "min_draft", "max_draft"),
        *("independent_rows", "partitioner"),
    ]
    check_part("method", method, needed, "decoding.Speculative(...)")
    check_static("method", method)
    assert hasattr(params, "_replace"), "the params of an own method must be a NamedTuple"
    if rule is not None:
        params = params._replace(rule=checked_rule(method, rule))
    return Assembled(method, params, named, main, _hash(params))


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
    if isinstance(parts.policy, CostAware) and not plan.weighs_costs:
        raise UserError(
            f"stopping=CostAware cannot be used with drafting={plan!r}, because it needs a single "
            "drafter: choose another policy"
        )


def _speculative(
    named: Mapping[str, TextModel], main: TextModel, parts: Parts, plan: DraftPlan
) -> Assembled:
    planned = _planned(named, main, parts, plan)
    used = {name: model for name, model in named.items() if model is main or name in plan.needs}
    method, rule = _joined(main, planned.drafter, parts, plan)
    weighed = parts.policy.costs if isinstance(parts.policy, CostAware) else None
    shared = parts.policy if isinstance(parts.policy, Budget) and not parts.min_draft else None
    return Assembled(
        method,
        MethodParams(main.prepared, planned.params, rule),
        {**used, **planned.models},
        main,
        own_params=_hash(planned.own, planned.described),
        stopping=None if parts.policy is None else repr(parts.policy),
        most_rows=None if weighed is None else weighed.rows[-1],
        budget=None if shared is None else shared.tokens,
    )


def _joined(
    main: TextModel, drafter: Drafter, parts: Parts, plan: DraftPlan
) -> tuple[Speculative, Rule]:
    """The method and its rule, after checking that they fit together."""
    method = Speculative(
        main.model,
        drafter,
        plan.default_verification if parts.verification is None else parts.verification,
        _chosen_widths(parts),
        parts.process_drafts is not False,
        eos_ids=tuple(main.tokenizer.eos_ids),
        partitioner=main.partitioner,
    )
    return method, checked_rule(method, Lossless() if parts.rule is None else parts.rule)


class _AnyModel(LanguageModel):
    """Stands for the network of any model."""

    vocab_size = 2**30
    reads_trees = True
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
)


def check_fit(parts: Parts, processors: Sequence[Processor] = ()) -> None:
    """Refuses parts as a `Decoder` does if they cannot be combined, whatever its models are.

    No file is read. A plan of the user's own is checked only as far as it needs no models.
    """
    check_one_constraint(processors)
    if parts.method is not None:
        _check_pair_method(parts.method, parts.rule)
        return
    plan = parts.plan
    _check_plan(parts, plan)
    plans = [plan, *(plan.parts if isinstance(plan, Branches) else ())]
    if all(type(x).__module__.startswith("specjax.") for x in plans if not isinstance(x, str)):
        models = dict.fromkeys((*plan.needs, "verifier"), _ANY)
        drafter = _planned(models, _ANY, parts, plan).drafter
        method, rule = _joined(_ANY, drafter, parts, plan)
        check_forbidding(method, rule, tuple(processors))


def _planned(
    named: Mapping[str, TextModel], main: TextModel, parts: Parts, plan: DraftPlan
) -> Planned:
    """The drafter of a plan, with its parameters on the right devices."""

    def neural(
        model: str | TextModel, longest: int | None = None
    ) -> tuple[NeuralDrafter, NeuralDrafterParams]:
        small = named[model] if isinstance(model, str) else model
        drafter, params = _neural(small, main, parts, longest)
        # Placed now, so that the calls of the loop do not transfer them.
        return drafter, params._replace(stopping=_place(main, params.stopping))

    def place(params: Params) -> Params:
        return _place(main, params)

    models = {**named, "verifier": main}
    planned = plan.make(PlanInputs(models, parts.longest, neural, place, main is _ANY))
    if isinstance(plan, OwnDrafts):  # checked with the method
        return planned
    size, trees = planned.drafter.max_draft, planned.drafter.traits.drafts_trees
    if size > MOST_NODES and trees:
        raise UserError(
            f"drafting={plan!r} drafts trees of up to {size} tokens, and at most {MOST_NODES} are "
            "allowed: draft fewer"
        )
    return planned


def _place(model: TextModel, params: Params) -> Params:
    """Puts parameters on the devices of a model."""
    where = model.partitioner
    return jax.device_put(params) if where is None else where.replicate(params)


def _neural(
    small: TextModel, main: TextModel, parts: Parts, longest: int | None
) -> tuple[NeuralDrafter, NeuralDrafterParams]:
    """The drafter of a small model, for up to `longest` tokens (None: `max_draft`)."""
    min_draft = whole_number("min_draft", parts.min_draft or 0, low=0)
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
    # A draft of fixed length continues after an end-of-sequence token, so rows stay independent.
    eos_ids = () if stopping.is_fixed else tuple(main.tokenizer.eos_ids)
    longest = parts.longest if longest is None else longest
    head = small.model
    options: Any = {"min_draft": min_draft, "eos_ids": eos_ids}
    judges = isinstance(head, BlockHead) and head.config.confidence
    own = isinstance(getattr(stopping, "estimate", None), OwnEstimate)
    if own and not judges and small is not _ANY:
        raise UserError(
            f"stopping={stopping!r} needs a drafter with a confidence head, such as a DSpark, got "
            f"{small.name}"
        )
    if not isinstance(head, DraftHead):
        catches_up = catches_up_on(small.platform)
        drafter = NeuralDrafter(head, longest, stopping, catches_up=catches_up, **options)
        return drafter, NeuralDrafterParams(small.prepared, params)
    joined = NeuralDrafterParams(head.joined(small.prepared, main.prepared), params)
    if isinstance(head, EagleHead):
        return EagleDrafter(head, longest, stopping, **options), joined
    assert isinstance(head, BlockHead)
    if parts.max_draft is None:
        # A rule that reads the drafter after a whole draft needs one more of the block's tokens.
        spare = int(parts.rule is not None and parts.rule.reads_draft)
        longest = min(longest, head.config.most_drafts - spare)
    return BlockDrafter(head, longest, stopping, **options), joined


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
    parts: Parts, pair: Pair, rows: int, prompt_length: int
) -> tuple[Parts, Costs | None]:
    """The parts, with measured costs for a policy without costs; and these costs."""
    policy = parts.stopping
    if not isinstance(policy, CostAware):
        return parts, None
    main = pair.verifier
    multiple = 1 if main.partitioner is None else main.partitioner.row_multiple
    rows += -rows % multiple
    longest = parts.plan.longest(parts.longest) + 1
    widths = _chosen_widths(parts) or powers_of_two(longest)
    check_widths(widths, longest)
    costs = None
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


def _chosen_widths(parts: Parts) -> tuple[int, ...] | None:
    if parts.widths is None:
        return None
    return tuple(checked("widths", parts.widths, low=1, dtype=np.int32).reshape(-1).tolist())


def _hash(params: Params, described: str = "") -> str | None:
    """A hash of parameters and a text; None if both are empty."""
    return digest(params, described) if described or jax.tree.leaves(params) else None


def checked_rule(method: Method, rule: Any) -> Rule:
    """Returns a rule after checking that the method accepts it; traces a user's own rule."""
    method.check_rule(rule)
    inner = rule.rule if isinstance(rule, Budgeted) else rule
    if not type(inner).__module__.startswith("specjax.rules"):
        check_rule(inner)
    return rule


def warn_of_excluded(rule: Rule | None, sampling: Sampling, vocab_size: int) -> None:
    """Warns if a mixture of the models would emit tokens that the sampling excludes."""
    rule = rule.rule if isinstance(rule, Learnt) else rule
    if not isinstance(rule, Mixture) or np.all(np.asarray(rule.weight) == 1.0):
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


class BoundProcessors(NamedTuple):
    """Processors in the order in which they run, and for each the arrays that rows share."""

    processors: tuple[Processor, ...] | None = None
    shared: tuple[Params, ...] = ()


def bind_processors(processors: Any, model: TextModel) -> BoundProcessors:
    """Binds processors, some of them `WithParams(processor, params)`, to the verifier."""
    if processors is None:
        return BoundProcessors()
    if isinstance(processors, str) or not isinstance(processors, Sequence):
        raise UserError(
            "processors must be a tuple such as (processors.MinP(0.05),), in gin files "
            f"(@MinP(),), got {processors!r}"
        )
    pairs = [(bound, _place(model, shared)) for bound, shared in _bound(processors, model)]
    bound, shared = zip(*pairs, strict=True) if pairs else ((), ())
    return BoundProcessors(tuple(bound) or None, tuple(shared))


def bind_request(sampling: Sampling, model: TextModel) -> Sampling:
    """The sampling of a request with bound processors; the engine has their arrays already."""
    bound = tuple(processor for processor, _ in _bound(sampling.processors or (), model))
    return dataclasses.replace(sampling, processors=bound or None)


def _bound(processors: Any, model: TextModel) -> list[tuple[Processor, Params]]:
    pairs: list[tuple[Processor, Params]] = []
    for i, entry in enumerate(processors):
        part = entry.part if isinstance(entry, WithParams) else entry
        needed = ("bind", "init", "process", "advance", "check_limit", "order", "forbids")
        check_part(f"processors[{i}]", part, needed, "processors.MinP(0.05)")
        leaves, structure = jax.tree.flatten(part)
        assert not any(leaf is part for leaf in leaves), (
            f"{type(part).__name__} is no pytree: decorate it with @types.traced_dataclass"
        )
        check_static(f"processors[{i}]", structure)
        bound, shared = (part, entry.params) if isinstance(entry, WithParams) else part.bind(model)
        pairs.append((bound, shared))
    check_one_constraint([x for x, _ in pairs])
    return sorted(pairs, key=lambda pair: pair[0].order)


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
    drafter = method.drafter
    if method.process_drafts and drafter.traits.processes:
        return
    why = (
        f"{type(drafter).__name__} ignores processors"
        if method.process_drafts
        else "process_drafts is False"
    )
    raise UserError(
        f"{forbidding[0]} cannot be used with rule {type(rule).__name__} here, because this rule "
        f"may accept a drafted token that {forbidding[0]} forbids ({why}): use rules.Lossless(), "
        "or a drafter that is a model"
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
