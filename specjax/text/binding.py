"""Processors of a `Decoder`: bound to its model, in their order."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.checks import check_part, check_static
from specjax.decoding import Method, Speculative
from specjax.errors import UserError
from specjax.processors import Constraint, JsonSchema, Regex
from specjax.rules import Learnt, Mixture
from specjax.text.options import Own
from specjax.text.text_models import TextModel
from specjax.types import Params, Processor, Rule, Sampling


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


def bind_processors(given: Any, model: TextModel) -> BoundProcessors:
    """Binds processors to the model whose tokens they change.

    Args:
      given: a sequence of processors, or of `Own(processor, params)`; or None.
      model: the verifier.

    Raises:
      TypeError: an entry is not a processor.
      ValueError: an entry does not fit the model.
    """
    if given is None:
        return BoundProcessors()
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise UserError(
            "processors must be a tuple such as (processors.MinP(0.05),), in gin files "
            f"(@MinP(),), got {given!r}"
        )
    where = model.partitioner
    place = jax.device_put if where is None else where.replicate
    pairs = [(bound, place(shared)) for bound, shared in _bound(given, model)]
    processors, shared = zip(*pairs, strict=True) if pairs else ((), ())
    return BoundProcessors(tuple(processors) or None, tuple(shared))


def bind_request(sampling: Sampling, model: TextModel) -> Sampling:
    """The sampling of a request with bound processors; the engine has their arrays already."""
    bound = tuple(processor for processor, _ in _bound(sampling.processors or (), model))
    return dataclasses.replace(sampling, processors=bound or None)


def _bound(given: Any, model: TextModel) -> list[tuple[Processor, Params]]:
    pairs: list[tuple[Processor, Params]] = []
    for i, entry in enumerate(given):
        part = entry.part if isinstance(entry, Own) else entry
        needed = ("bind", "init", "process", "advance", "check_limit", "order", "forbids")
        check_part(f"processors[{i}]", part, needed, "processors.MinP(0.05)")
        leaves, structure = jax.tree.flatten(part)
        if any(leaf is part for leaf in leaves):
            raise UserError(
                f"processors[{i}] must be a pytree, got {part!r}: decorate {type(part).__name__} "
                "with @types.traced_dataclass"
            )
        check_static(f"processors[{i}]", structure)
        bound, shared = (part, entry.params) if isinstance(entry, Own) else part.bind(model)
        pairs.append((bound, shared))
    check_one_constraint([x for x, _ in pairs])
    return sorted(pairs, key=lambda pair: pair[0].order)


def warn_of_ignored(model: TextModel, processors: Sequence[Processor]) -> None:
    """Warns of settings of the model's generation that these processors do not apply."""
    if not model.settings:
        return
    # Imported here to keep `import specjax` fast: importing Orbax takes long.
    from specjax.checkpoints.ignored import warn_of_settings

    names = {type(one).__name__ for one in processors}
    has_encoder = not model.continues_prompts
    warn_of_settings(model.name, model.settings, has_encoder=has_encoder, processors=names)


def check_one_constraint(processors: Sequence[Processor]) -> None:
    """Raises ValueError for several constraints."""
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
    """Raises ValueError if a rule could emit a token that a processor forbids."""
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
