"""Decoding of a pair in T5X: the bindings of gin, and the loop on T5X's batches.

Axes: B rows of T5X's batch, n decodes of each, L longest output, P prompt length.
"""

import contextlib
import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.core.spmd import get_logical_axis_rules
from flax.linen.partitioning import logical_to_mesh_axes
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from t5x import gin_utils, partitioning

from specjax import text
from specjax.checks import in_names
from specjax.decoding import Autoregressive, Method, MethodParams, Speculative
from specjax.decoding.method import check_strengths
from specjax.drafting import Chain, FixedLength, Lookup
from specjax.drafting.chain import ChainParams, catches_up_on
from specjax.errors import UserError
from specjax.integrations.t5x.call import Call
from specjax.text.drafts import WithParams
from specjax.text.setting import OF_DRAFTS, check_single
from specjax.types import (
    DecodeState,
    LanguageModel,
    Params,
    PromptBatch,
    Rule,
)

# T5X's own: specjax's commands have theirs in `cli`.
_gin = gin_utils.gin
_MACRO = "gin.macro"
# The gin files for pairs, and those of T5X that they include.
_FILES = (
    *(Path(__file__).parents[2] / "gin_configs" / "t5x").rglob("*.gin"),
    *(Path(partitioning.__file__).parent / f"configs/runs/{run}.gin" for run in ("eval", "infer")),
)
# What messages say beside parameters, in the words of gin files.
_PHRASES = {
    "Chain has fixed_length=False": "STOPPING ends them earlier",
}
_NEEDS_DRAFTER = (
    "{} must be left out, because there is no drafter; give drafter_module, or Setting.drafting"
)
# An axis without a name in T5X is split like another axis.
_ALIASES = {"kv_heads": "heads"}


@_gin.config.register_finalize_hook
def refuse_unread(config: Mapping[tuple[str, str], Any]) -> None:
    """Refuses names and scopes that a pair's gin files and flags set, and that nothing reads."""
    references = list(_gin.config.iterate_references(config))
    if not any(one.configurable.wrapped is setting for one in references):
        return
    names, scopes = {"MODEL"}, {""}  # a program may ask gin for the model
    for one in references:
        if one.configurable.selector == _MACRO:
            names.add("/".join(one.scopes))
        else:  # which also reads what is bound in an outer scope
            scopes |= {"/".join(one.scopes[: i + 1]) for i in range(len(one.scopes))}
    for given, selector in config:
        is_name = selector == _MACRO
        known = names if is_name else scopes
        if given in known or (is_name and _is_overridden(given, config)):
            continue
        near = difflib.get_close_matches(given.upper() if is_name else given, known, n=1)
        others = f"leave it out, or set one of {', '.join(sorted(known - {''}))}"
        raise UserError(
            f"{given if is_name else f'the scope {given}/'} is set, but nothing reads it: "
            + (f"did you mean {near[0]}?" if near else others)
        )


# Whether another value is bound where specjax's or T5X's files bind the name.
def _is_overridden(name: str, config: Mapping[tuple[str, str], Any]) -> bool:
    bound = [f".{selector}.{parameter}" for (_, selector), by in config.items() for parameter in by]
    for file in _FILES:
        block = ""
        for line in file.read_text(encoding="utf-8").splitlines():
            block = line.rstrip(":") if line.endswith(":") else block
            parameter, _, value = line.partition(" = ")
            if value.split()[:1] == [f"%{name}"]:
                key = f"{block}.{parameter.strip()}" if parameter[0] == " " else parameter
                # Without the module, which each file names differently.
                if any(one.endswith("." + key.partition(".")[2]) for one in bound):
                    return True
    return False


@contextlib.contextmanager
def in_names_of_gin(*kinds: Callable[..., Any]) -> Iterator[None]:
    """Errors use the names that gin files bind to the parameters of `kinds`: RULE for rule."""
    try:
        yield
    except UserError as error:
        text, names, phrases = str(error), {}, dict(_PHRASES)
        for kind in kinds:
            for parameter, value in _bindings(kind).items():
                if (name := str(value)).startswith("%"):
                    names[parameter] = phrases[f"{kind.__name__}.{parameter}"] = name[1:]
        if names:
            for phrase, name in phrases.items():
                text = text.replace(phrase, name)
            text = in_names(text, names)
            text = re.sub(r"\b(?:rules|verification|drafting)\.(?=[A-Z])", "", text)
        raise UserError(text) from None


def _bindings(kind: Callable[..., Any]) -> dict[str, Any]:
    try:
        return _gin.get_bindings(kind, resolve_references=False)
    except ValueError:  # made in Python: gin does not know it
        return {}


@functools.wraps(text.Setting, updated=())
def setting(**values: Any) -> text.Setting:  # noqa: D103  its docstring is that of `Setting`
    with in_names_of_gin(setting):
        return text.Setting(**values)


def check_supported(given: Any) -> None:
    """Refuses what is no setting of T5X's loop."""
    if not isinstance(given, text.Setting):
        raise UserError(
            f"setting must be a specjax.Setting, got {type(given).__name__}: bind "
            "@specjax_t5x.setting()"
        )
    if isinstance(given.part("stopping"), WithParams):
        raise UserError("stopping must be a policy without parameters in T5X, got WithParams(...)")
    for name in ("method", "drafter", "processors", "process_drafts", "widths", "costs"):
        if name in given.given:
            raise UserError(f"{name} must be left out in T5X, got {getattr(given, name)!r}")
    check_single(given)
    drafts = given.part("drafting")
    if isinstance(drafts, Lookup):
        usual = (None, None, 1, 0)
        if (drafts.bigram, drafts.min_match, drafts.copies, drafts.earlier) != usual:
            raise UserError(
                "drafting must be Lookup() without bigram, min_match, copies and earlier in T5X, "
                f"got {given.drafting}"
            )
    elif not isinstance(drafts, WithParams | None):
        raise UserError(
            f"drafting must be Lookup() or WithParams(drafter, params) in T5X, got {given.drafting}"
        )


class PairPart(NamedTuple):
    """Attributes: a language model, and its parameters."""

    model: LanguageModel
    params: Params


def run_loop(
    setting: text.Setting,
    verifier: PairPart,
    drafter: PairPart | None,
    batch: PromptBatch,
    max_new: int,
    call: Call,
) -> DecodeState:
    """Decodes a batch to the end; traced.

    The call adds its seeds, sampling and draft limits to the B prompts, whose outputs have at most
    L = `max_new` tokens. The state has B * n rows; rows of the same prompt are adjacent.
    """
    small = None if drafter is None else drafter.model
    method = method_of(setting, verifier.model, small, rule=call.rule, eos_ids=(call.eos_id,))
    rule, rows = call.rule or setting.part("rule"), batch.inputs.shape[0]
    check_strengths(rule, rows)
    params: Any = MethodParams(verifier.params)
    if call.draft_limit is not None and not isinstance(method, Speculative):
        raise UserError(_NEEDS_DRAFTER.format("draft_limit"))
    if isinstance(method, Speculative):
        _check_draft_limit(method, call.draft_limit)
        own = setting.part("drafting")
        proposer_params = own.params if isinstance(own, WithParams) else ()
        if drafter is not None:
            numbers = jax.tree.map(jnp.asarray, _stopping(setting)[1])
            proposer_params = ChainParams(drafter.params, numbers)
        params = MethodParams(verifier.params, proposer_params, call.by_row(rule))
    if call.max_steps is not None:
        batch = batch._replace(limits=jnp.minimum(batch.limits, call.max_steps))
    return method.traced(
        params,
        batch._replace(
            seeds=call.seed,
            sampling=call.sampling,
            draft_limits=call.draft_limits(rows, method.max_draft),
        ),
        max_new=max_new,
        # A forced prefix, or a decoder-only model's inputs, are part of the L tokens.
        max_length=method.cache_length(1, 0, max_new),
        copies=call.num_decodes,
        place=constrain,
    )


def method_of(
    setting: text.Setting,
    verifier: LanguageModel,
    drafter: LanguageModel | None,
    *,
    rule: Rule | None = None,
    eos_ids: tuple[int, ...] = (),
) -> Method:
    """The method, without a drafter the verifier alone; a `rule` replaces gin's."""
    drafts, longest = setting.part("drafting"), setting.longest
    proposer: Any = None
    if isinstance(drafts, WithParams):
        proposer = drafts.part
    elif isinstance(drafts, Lookup):
        sizes: Any = {"max_copy": drafts.max_copy or longest, "vocab_size": verifier.vocab_size}
        proposer = dataclasses.replace(drafts, **sizes)
    elif drafter is not None:
        stopping = _stopping(setting)[0]
        # A draft of a fixed length continues: so rows do not depend on each other's passes.
        ends = () if stopping.is_fixed else eos_ids
        proposer = Chain(
            drafter,
            longest,
            stopping,
            min_draft=setting.min_draft,
            eos_ids=ends,
            catches_up=catches_up_on(jax.default_backend()),
        )
    if proposer is None:
        if rule is not None:
            raise UserError(_NEEDS_DRAFTER.format("rule"))
        for name in ("rule", *OF_DRAFTS):
            if name in setting.given:
                raise UserError(_NEEDS_DRAFTER.format(name))
        return Autoregressive(verifier, eos_ids=eos_ids)
    method = Speculative(verifier, proposer, setting.part("verification"), eos_ids=eos_ids)
    method.check_rule(rule or setting.part("rule"))
    return method


# The stopping policy, and its numbers.
def _stopping(setting: text.Setting) -> tuple[Any, Any]:
    return (setting.part("stopping") or FixedLength()).bind(None)


def _check_draft_limit(method: Speculative, limit: Any) -> None:
    if limit is None or not method.verification.has_carry:
        return
    traced = isinstance(limit, jax.core.Tracer)
    if traced or np.any(np.asarray(limit) < method.max_draft):
        raise UserError(
            f"draft_limit must be left out, or {method.max_draft} in every row, got "
            f"{'a traced value' if traced else np.asarray(limit).tolist()}: "
            f"{type(method.verification).__name__} needs drafts of a fixed length"
        )


def constrain(tree: Any, axes: Any) -> Any:
    """Constrains arrays to the placement of T5X's partitioner for their logical axes; traced.

    A dimension that the devices do not divide evenly stays whole. Without a partitioner around the
    call there is no constraint.
    """
    mesh = partitioning.pxla.thread_resources.env.physical_mesh
    rules = tuple(get_logical_axis_rules())
    if mesh.empty or not rules:
        return tree

    def place(leaf: Any, names: tuple[str | None, ...]) -> Any:
        spec = partition_spec(leaf.shape, names, mesh, rules)
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(place, tree, axes)


def partition_spec(
    shape: tuple[int, ...],
    names: tuple[str | None, ...],
    mesh: Mesh,
    rules: tuple[tuple[str, Any], ...],
) -> PartitionSpec:
    """The split of an array by T5X's rules, except dimensions that do not divide."""
    wanted = logical_to_mesh_axes([_ALIASES.get(n, n) if n else None for n in names], rules)
    spec: list[Any] = []
    for size, axis in zip(shape, wanted or (), strict=True):
        parts = axis if isinstance(axis, tuple) else (axis,) if axis else ()
        whole = not parts or size % math.prod(mesh.shape[part] for part in parts)
        spec.append(None if whole else axis)
    return PartitionSpec(*spec)
