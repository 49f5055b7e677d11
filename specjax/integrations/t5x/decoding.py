"""Decoding of a pair in T5X: the bindings of gin, and the loop on T5X's batches.

Axes: B rows of T5X's batch, n decodes of each, L longest output, P prompt length.
"""

import contextlib
import dataclasses
import difflib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.core.spmd import get_logical_axis_rules
from flax.linen.partitioning import logical_to_mesh_axes
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from t5x import gin_utils, partitioning

from specjax.checks import in_names, whole_number
from specjax.decoding import Autoregressive, Method, MethodParams, Speculative
from specjax.decoding.method import check_strengths
from specjax.drafting import FixedLength, NeuralDrafter, NeuralDrafterParams
from specjax.drafting.neural import catches_up_on
from specjax.drafting.stopping import check_policy
from specjax.errors import UserError
from specjax.integrations.t5x.call import Call
from specjax.rules import Lossless
from specjax.text.drafts import Lookup
from specjax.text.parts import make_part
from specjax.types import (
    DecodeState,
    Drafter,
    LanguageModel,
    Params,
    PromptBatch,
    Rule,
    Sampling,
    Stopping,
    Verification,
)
from specjax.verification import Block

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
    "because drafting is": "because DRAFTING is",
    "stopping and min_draft": "STOPPING and MIN_DRAFT",
    "LookupDrafter": "Lookup",
    "NeuralDrafter has fixed_length=False": "STOPPING ends them earlier",
}
_NEEDS_DRAFTER = (
    "{} must be left out, because there is no drafter; give drafter_module, or Decoding.drafting"
)
# Options that need a drafter.
_OF_DRAFTS = ("verification", "max_draft", "min_draft", "stopping")
# An axis without a name in T5X is split like another axis.
_ALIASES = {"kv_heads": "heads"}


@_gin.config.register_finalize_hook
def refuse_unread(config: Mapping[tuple[str, str], Any]) -> None:
    """Refuses names and scopes that a pair's gin files and flags set, and that nothing reads."""
    references = list(_gin.config.iterate_references(config))
    if not any(one.configurable.wrapped is Decoding for one in references):
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
def in_names_of_gin(*kinds: type) -> Iterator[None]:
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


def _bindings(kind: type) -> dict[str, Any]:
    try:
        return _gin.get_bindings(kind, resolve_references=False)
    except ValueError:  # made in Python: gin does not know it
        return {}


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Decodes instead of T5X's `decode_fn`; bound in gin.

    A part is an object or a text that names it, such as "OPT(0.2)"; see `specjax.Setting`.

    Attributes:
      rule: the target distribution; `rules.Lossless()` by default.
      verification: the algorithm; `verification.Block()` by default.
      max_draft: G, tokens drafted per round.
      min_draft: the fewest tokens drafted per round, whatever `stopping` decides.
      stopping: the policy that ends drafts before `max_draft`; none by default.
      drafting: `Lookup()`, which copies from the text, instead of the drafting network.
      drafter: another drafter without a network; it has its own `max_draft`.
      drafter_params: its parameters.
      temperature: of sampling; 0 is greedy. A call's `decoder_params` may override it.
      top_k: draw only the k most probable tokens, or None for all; may be overridden too.
      top_p: draw only the nucleus of this probability, or None for all; may be overridden too.
    """

    rule: Rule | None = None
    verification: Verification | None = None
    max_draft: int = 5
    min_draft: int = 0
    stopping: Stopping | None = None
    drafting: Lookup | None = None
    drafter: Drafter | None = None
    drafter_params: Params = ()
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        with in_names_of_gin(Decoding):
            for name in ("rule", "verification", "stopping", "drafting"):
                object.__setattr__(self, name, make_part(name, getattr(self, name)))
            whole_number("max_draft", self.max_draft, low=1)
            whole_number("min_draft", self.min_draft, low=0)
            # It checks them.
            Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
            if self.stopping is not None:
                check_policy(self.stopping)
            copies = self.drafting
            if copies is not None and self.drafter is not None:
                raise UserError("drafter must be left out, because drafting is given")
            if copies is not None and not (
                isinstance(copies, Lookup)
                and (copies.bigram, copies.min_match, copies.copies) == (None, None, 1)
            ):
                raise UserError(
                    "drafting must be Lookup() without bigram, min_match and copies in T5X, got "
                    f"{copies}"
                )
            if self.has_drafter and (self.stopping is not None or self.min_draft):
                raise UserError("stopping and min_draft must be left out: the drafter ignores them")

    @property
    def has_drafter(self) -> bool:
        """Whether no network is needed to draft."""
        return self.drafter is not None or self.drafting is not None


class PairPart(NamedTuple):
    """Attributes: a language model, and its parameters."""

    model: LanguageModel
    params: Params


def run_loop(
    decoding: Decoding,
    verifier: PairPart,
    drafter: PairPart | None,
    batch: PromptBatch,
    max_new: int,
    call: Call,
) -> DecodeState:
    """Decodes a batch to the end; traced.

    Args:
      decoding: the bindings of gin.
      verifier: the large network.
      drafter: the small network; None if there is none.
      batch: B prompts; this function adds the call's seeds, sampling and draft limits.
      max_new: L (static).
      call: the settings of this call.

    Returns:
      The state of B * n rows; rows of the same prompt are adjacent.
    """
    small = None if drafter is None else drafter.model
    method = method_of(decoding, verifier.model, small, rule=call.rule, eos_ids=(call.eos_id,))
    rule, rows = call.rule or decoding.rule or Lossless(), batch.inputs.shape[0]
    check_strengths(rule, rows)
    params: Any = MethodParams(verifier.params)
    if call.draft_limit is not None and not isinstance(method, Speculative):
        raise UserError(_NEEDS_DRAFTER.format("draft_limit"))
    if isinstance(method, Speculative):
        _check_draft_limit(method, call.draft_limit)
        proposer_params = decoding.drafter_params
        if drafter is not None:
            numbers = jax.tree.map(jnp.asarray, _stopping(decoding)[1])
            proposer_params = NeuralDrafterParams(drafter.params, numbers)
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
    decoding: Decoding,
    verifier: LanguageModel,
    drafter: LanguageModel | None,
    *,
    rule: Rule | None = None,
    eos_ids: tuple[int, ...] = (),
) -> Method:
    """The method, without a drafter the verifier alone; a `rule` replaces gin's."""
    rule = rule or decoding.rule
    if drafter is None and not decoding.has_drafter:
        if rule is not None:
            raise UserError(_NEEDS_DRAFTER.format("rule"))
        usual = {field.name: field.default for field in dataclasses.fields(Decoding)}
        for name in _OF_DRAFTS:
            if getattr(decoding, name) not in (None, usual[name]):
                raise UserError(_NEEDS_DRAFTER.format(name))
        return Autoregressive(verifier, eos_ids=eos_ids)
    proposer = decoding.drafter
    if decoding.drafting is not None:
        longest = decoding.drafting.max_copy or decoding.max_draft
        proposer = decoding.drafting.copier(verifier.vocab_size, longest)
    if proposer is None:
        assert drafter is not None
        stopping = _stopping(decoding)[0]
        # A draft of a fixed length continues: so rows do not depend on each other's passes.
        ends = () if stopping.is_fixed else eos_ids
        proposer = NeuralDrafter(
            drafter,
            decoding.max_draft,
            stopping,
            decoding.min_draft,
            eos_ids=ends,
            catches_up=catches_up_on(jax.default_backend()),
        )
    verification = Block() if decoding.verification is None else decoding.verification
    method = Speculative(verifier, proposer, verification, eos_ids=eos_ids)
    method.check_rule(rule or Lossless())
    return method


# The stopping policy, and its numbers.
def _stopping(decoding: Decoding) -> tuple[Any, Any]:
    return (FixedLength() if decoding.stopping is None else decoding.stopping).bind(None)


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
