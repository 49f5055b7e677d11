"""From models and parts to a decoding method with its parameters."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from specjax.checks import check_part, check_static, checked, whole_number
from specjax.decoding import Autoregressive, AutoregressiveParams, RoundParams, Speculative
from specjax.decoding.scoring import check_widths, powers_of_two
from specjax.drafting import (
    CostAware,
    Costs,
    FixedLength,
    NeuralDrafter,
    NeuralDrafterParams,
    catches_up_on,
    check_policy,
)
from specjax.rules import Budgeted, Lossless, check_rule
from specjax.text.baselines import MethodPlan
from specjax.text.costs import check_costs, measure_costs
from specjax.text.fingerprint import digest
from specjax.text.models import Models, Pair, TextModel
from specjax.text.plans import DraftPlan, Ingredients, Planned
from specjax.types import Drafter, Method, Params, Rule, Stopping, Verification
from specjax.verification import Block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What a user may choose of a method; None where nothing was said. See `Decoder`."""

    rule: Rule | None = None
    verification: Verification | None = None
    max_draft: int | None = None
    min_draft: int | None = None
    stopping: Stopping | None = None
    stopping_params: Params = None
    costs: Costs | None = None
    drafting: DraftPlan | None = None
    drafter: Drafter | None = None
    drafter_params: Params = None
    widths: Sequence[int] | None = None
    method: Method | MethodPlan | None = None
    params: Params = None

    def check_none(self, why: str, *, but: tuple[str, ...] = ()) -> None:
        """Raises ValueError if a part was given, unless it is among `but`."""
        for field in dataclasses.fields(self):
            if field.name not in but and getattr(self, field.name) is not None:
                raise ValueError(f"{field.name}= must be left out: {why}")


@dataclasses.dataclass(frozen=True, eq=False)
class Assembled:
    """A method, ready to decode.

    Attributes:
      method: the method.
      params: its parameters.
      models: the models that were given, by name.
      main: the model whose tokenizer is used.
      own_params: a hash of the parameters that are none of the models', or None.
      stopping: the policy with its costs, in words; None without one.
      costs: those of a policy that brought none; None without one.
      most_rows: the largest batch that a policy has costs of; None if it weighs none.
    """

    method: Method
    params: Params
    models: dict[str, TextModel]
    main: TextModel
    own_params: str | None = None
    stopping: str | None = None
    costs: Costs | None = None
    most_rows: int | None = None


def assemble(models: Models | TextModel, parts: Parts, rows: int, prompt_length: int) -> Assembled:
    """Makes the method that models and parts ask for.

    Args:
      models: a pair or more models, or one to decode alone.
      parts: what was chosen.
      rows: the batch size, for which costs are measured.
      prompt_length: the length of their prompts.

    Returns:
      The method and its parameters.

    Raises:
      TypeError: if `models` is neither, or a part is not what it must be.
      ValueError: if the parts do not go together.
    """
    if isinstance(models, TextModel):
        named, main = {"model": models}, models
    elif isinstance(models, Models):
        named, main = models.named, models.verifier
    else:
        raise TypeError(
            f"models must be a Pair or a TextModel, got {type(models).__name__}: see load_pair"
        )
    if isinstance(parts.method, MethodPlan):
        parts.check_none(f"{parts.method!r} has its own", but=("method", "rule"))
        plan_of = {name: x for name, x in named.items() if name in ("verifier", "drafter")}
        own_method, own_params = parts.method.make(named, parts.rule)
        return Assembled(own_method, own_params, plan_of, main)
    if parts.method is not None:
        parts.check_none("the method has its own", but=("method", "params", "rule"))
        return _whole(named, main, parts)
    if parts.params is not None:
        raise ValueError("params= must be left out: it is for a method of your own, method=")
    if parts.drafter is None and parts.drafter_params is not None:
        raise ValueError("drafter_params= must be left out: it belongs to drafter=")
    if parts.stopping is None and parts.stopping_params is not None:
        raise ValueError("stopping_params= must be left out: it belongs to stopping=")
    if parts.drafting is not None:
        _check_plan(named, parts, parts.drafting)
        if parts.drafting.weighs_costs:
            pair = Pair(named["drafter"], main)
            parts = _with_costs(parts, pair, rows, prompt_length)
        return _speculative(named, main, parts)
    if parts.drafter is None and "drafter" not in named and len(named) > 1:
        raise ValueError(
            f"one of the models must be called drafter, got {', '.join(named)}: name one so, "
            "or give drafter="
        )
    if parts.drafter is None and "drafter" not in named:
        parts.check_none(f"{main.name} decodes alone; give a Pair, or drafter=")
        method = Autoregressive(
            main.model, eos_ids=tuple(main.tokenizer.eos_ids), partitioner=main.partitioner
        )
        return Assembled(method, AutoregressiveParams(main.prepared), named, main)
    if parts.drafter is None:
        pair = Pair(named["drafter"], named["verifier"])
        parts = _with_costs(parts, pair, rows, prompt_length)
    return _speculative(named, main, parts)


def _check_plan(named: dict[str, TextModel], parts: Parts, plan: DraftPlan) -> None:
    needed = ("needs", "left_out", "weighs_costs", "longest", "make")
    check_part("drafting", plan, needed, "text.Lookup()")
    if parts.drafter is not None:
        raise ValueError("drafter= must be left out: drafting= makes one")
    for name in plan.needs:
        if name not in named:
            raise ValueError(
                f"drafting={plan!r} needs a model called {name}, got {', '.join(named)}: give a "
                "Pair, or Models with such a name"
            )
    for part, why in plan.left_out.items():
        if getattr(parts, part) is not None:
            raise ValueError(f"{part}= must be left out: {why}")
    if isinstance(parts.stopping, CostAware) and not plan.weighs_costs:
        raise ValueError(
            "stopping=CostAware weighs one drafter's passes against the verifier's: choose another "
            f"policy with drafting={plan!r}"
        )


def _planned(
    named: dict[str, TextModel], main: TextModel, parts: Parts, plan: DraftPlan
) -> Planned:
    """The drafter of a plan; its parameters lie where they are needed."""
    where = main.partitioner

    def neural(
        model: str | TextModel, longest: int | None = None
    ) -> tuple[NeuralDrafter, NeuralDrafterParams]:
        small = named[model] if isinstance(model, str) else model
        drafter, params = _neural(small, main, parts, longest)
        if where is not None:
            params = params._replace(stopping=where.replicate(params.stopping))
        return drafter, params

    return plan.make(
        Ingredients(
            models={**named, "verifier": main},
            max_draft=_max_draft(parts),
            neural=neural,
            place=jax.device_put if where is None else where.replicate,
        )
    )


def _whole(named: dict[str, TextModel], main: TextModel, parts: Parts) -> Assembled:
    """A method of the user's own."""
    method, params = parts.method, parts.params
    needed = [
        *("init", "run", "describe", "cache_length", "check_rule", "model_names"),
        *("nan_sources", "vocab_size", "min_draft", "max_draft"),
        *("independent_rows", "partitioner"),
    ]
    check_part("method", method, needed, "decoding.Speculative(...)")
    check_static("method", method)
    assert method is not None and not isinstance(method, MethodPlan)
    if not hasattr(params, "_replace"):
        raise TypeError(
            f"params must be a NamedTuple, the parameters of {type(method).__name__}, got "
            f"{type(params).__name__}"
        )
    if parts.rule is not None:
        method.check_rule(parts.rule)
        params = params._replace(rule=parts.rule)
    return Assembled(method, params, named, main, _own(params))


def _speculative(named: dict[str, TextModel], main: TextModel, parts: Parts) -> Assembled:
    drafter, drafter_params, own = parts.drafter, parts.drafter_params, parts.stopping_params
    described = ""
    if parts.drafting is not None:
        plan = parts.drafting
        drafter, drafter_params, own, described, brought = _planned(named, main, parts, plan)
        used = {name: x for name, x in named.items() if x is main or name in plan.needs}
        named = {**used, **brought}
    elif drafter is None:
        drafter, drafter_params = _neural(named["drafter"], main, parts)
        own = drafter_params.stopping
    else:
        for name in ("max_draft", "min_draft", "stopping", "stopping_params", "costs"):
            if getattr(parts, name) is not None:
                raise ValueError(f"{name}= must be left out: the drafter has its own")
        # A drafter of the user's own takes the place of the pair's.
        named = {name: model for name, model in named.items() if name != "drafter"}
    if main.partitioner is not None and parts.drafter is not None:
        drafter_params = main.partitioner.replicate(drafter_params)
    elif main.partitioner is not None and parts.drafting is None:
        own_there = main.partitioner.replicate(drafter_params.stopping)
        drafter_params = drafter_params._replace(stopping=own_there)
    method = Speculative(
        main.model,
        drafter,
        Block() if parts.verification is None else parts.verification,
        _given_widths(parts),
        eos_ids=tuple(main.tokenizer.eos_ids),
        partitioner=main.partitioner,
    )
    rule = Lossless() if parts.rule is None else parts.rule
    method.check_rule(rule)
    params = RoundParams(main.prepared, drafter_params, rule)
    own_params = _own((parts.drafter_params, own), described)
    stopping = None if parts.stopping is None else repr(parts.stopping)
    weighed = parts.stopping.costs if isinstance(parts.stopping, CostAware) else None
    most_rows = None if weighed is None else weighed.rows[-1]
    return Assembled(method, params, named, main, own_params, stopping, parts.costs, most_rows)


def _neural(
    small: TextModel, main: TextModel, parts: Parts, longest: int | None = None
) -> tuple[NeuralDrafter, NeuralDrafterParams]:
    """The drafter that decodes with a small model, up to `longest` tokens or `max_draft`."""
    max_draft = _max_draft(parts) if longest is None else longest
    min_draft = whole_number("min_draft", parts.min_draft or 0, low=0)
    # A level of a cascade may draft fewer.
    min_draft = min_draft if longest is None else min(min_draft, longest)
    stopping = FixedLength() if parts.stopping is None else parts.stopping
    check_policy(stopping)
    own = parts.stopping_params
    if own is None:
        stopping, own = stopping.bind(small.head)
        if small.partitioner is None:
            own = jax.device_put(own)  # else each call of the loop would send it
    # A draft of a fixed length goes on: rows then do not depend on each other's passes.
    eos_ids = () if stopping.is_fixed else tuple(main.tokenizer.eos_ids)
    drafter = NeuralDrafter(
        small.model,
        max_draft,
        stopping,
        min_draft,
        eos_ids=eos_ids,
        catches_up=catches_up_on(small.platform),
    )
    return drafter, NeuralDrafterParams(small.prepared, own)


def _with_costs(parts: Parts, pair: Pair, rows: int, prompt_length: int) -> Parts:
    """The same parts; a policy that has no costs to weigh gets those given, or measured ones."""
    policy = parts.stopping
    if not isinstance(policy, CostAware) or parts.stopping_params is not None:
        if parts.costs is not None:
            raise ValueError("costs= must be left out: it is for stopping=drafting.CostAware()")
        return parts
    if policy.costs is not None and parts.costs is not None:
        raise ValueError("costs= must be left out: the policy has its own")
    main = pair.verifier
    multiple = 1 if main.partitioner is None else main.partitioner.row_multiple
    rows += -rows % multiple
    costs, widths = parts.costs, _widths(parts)
    if policy.costs is None and costs is None:
        # The length of the prompts is not known; the shortest bucket is the usual one.
        sizes = sorted({multiple, rows})
        costs = measure_costs(pair, sizes, widths, prompt_length=prompt_length)
    weighed = policy.costs or costs
    policy = dataclasses.replace(policy, costs=weighed)  # its checks
    assert weighed is not None
    check_costs(weighed, pair, rows, widths[-1] - 1)
    policy = dataclasses.replace(policy, costs=weighed.at_widths(widths))
    return dataclasses.replace(parts, stopping=policy, costs=costs)


def _widths(parts: Parts) -> tuple[int, ...]:
    """How many tokens the verifier's passes will read."""
    longest = _max_draft(parts) + 1
    if parts.drafting is not None:
        longest = parts.drafting.longest(longest - 1) + 1
    widths = _given_widths(parts) or powers_of_two(longest)
    check_widths(widths, longest)
    return widths


def _given_widths(parts: Parts) -> tuple[int, ...] | None:
    if parts.widths is None:
        return None
    return tuple(checked("widths", parts.widths, low=1, dtype=np.int32).reshape(-1).tolist())


def _max_draft(parts: Parts) -> int:
    return whole_number("max_draft", 5 if parts.max_draft is None else parts.max_draft, low=1)


def _own(params: Params, described: str = "") -> str | None:
    """A hash of parameters, and of a text; None where there is neither."""
    return digest(params, described) if described or jax.tree.leaves(params) else None


def checked_rule(method: Method, rule: Rule) -> Rule:
    """A rule that the method takes."""
    method.check_rule(rule)
    check_own_rule(rule)
    return rule


def check_own_rule(rule: Rule | None) -> None:
    """Checks a rule that a user wrote; those of `specjax.rules` are known to be right."""
    if isinstance(rule, Budgeted):
        rule = rule.rule
    if rule is not None and not type(rule).__module__.startswith("specjax.rules"):
        check_rule(rule)
