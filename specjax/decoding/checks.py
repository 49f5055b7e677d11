"""Checks, on the host, of what a method is started with."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import check_part, check_static
from specjax.rules import Budgeted
from specjax.types import (
    Array,
    DecodeState,
    Drafter,
    LanguageModel,
    PromptBatch,
    Rule,
    Verification,
)

# The largest seed and id.
_WORD = 2**32 - 1


def check_prompts(prompts: PromptBatch, *, vocab_size: int, max_draft: int, max_new: int) -> None:
    """Checks shapes, dtypes and ranges of what a method is started with.

    Args:
      prompts: what its rows are asked for.
      vocab_size: V.
      max_draft: G.
      max_new: N.

    Raises:
      ValueError: naming the argument, its value and what it must be.
    """
    if np.ndim(prompts.inputs) != 2:
        raise ValueError(f"inputs must be [B, P], got shape {np.shape(prompts.inputs)}")
    rows, width = np.shape(prompts.inputs)
    _check_shapes(prompts, rows)
    forced = 0 if prompts.prefix is None else np.shape(prompts.prefix)[1]
    last = vocab_size - 1
    spans: list[tuple[str, Any, int, int]] = [
        ("inputs", prompts.inputs, 0, last),
        ("input_lengths", prompts.input_lengths, 1, width),
        ("limits", prompts.limits, 0, max_new),
        ("draft_limits", prompts.draft_limits, 0, max_draft),
        ("seeds", prompts.seeds, 0, _WORD),
        ("ids", prompts.ids, 0, _WORD),
        ("prefix", prompts.prefix, 0, last),
        ("prefix_lengths", prompts.prefix_lengths, 0, forced),
    ]
    for name, value, low, high in spans:
        if value is not None:
            _check_span(name, value, low, high)


def _check_shapes(prompts: PromptBatch, rows: int) -> None:
    per_row = {"input_lengths": prompts.input_lengths, "ids": prompts.ids, "limits": prompts.limits}
    if prompts.draft_limits is not None:
        per_row["draft_limits"] = prompts.draft_limits
    if prompts.prefix is not None:
        shape = np.shape(prompts.prefix)
        if len(shape) != 2 or shape[0] != rows:
            raise ValueError(f"prefix must be [B, F] = [{rows}, F], got shape {shape}")
        if prompts.prefix_lengths is not None:
            per_row["prefix_lengths"] = prompts.prefix_lengths
    elif prompts.prefix_lengths is not None:
        raise ValueError("prefix_lengths without prefix: give both, or neither")
    for name, value in per_row.items():
        if np.shape(value) != (rows,):
            raise ValueError(f"{name} must be [B] = [{rows}], got shape {np.shape(value)}")
    settings = {f"sampling.{n}": getattr(prompts.sampling, n) for n in _SETTINGS}
    for name, value in {"seeds": prompts.seeds, **settings}.items():
        if value is not None and np.shape(value) not in ((), (rows,)):
            raise ValueError(
                f"{name} must be scalar or [B] = [{rows}], got shape {np.shape(value)}"
            )


_SETTINGS = ("temperature", "top_k", "top_p")


def _check_span(name: str, value: Any, low: int, high: int) -> None:
    array = np.asarray(value)
    if array.size and array.dtype.kind not in "iuO":  # O: whole numbers past 64 bits
        raise ValueError(f"{name} must be of an integer dtype, got {array.dtype}")
    bad = (array < low) | (array > high)
    if bad.any():
        where = f" in row {np.argwhere(bad)[0][0]}" if array.ndim else ""
        raise ValueError(f"{name} must lie in [{low}, {high}], got {array[bad][0]}{where}")


def check_parts(verifier: LanguageModel, drafter: Drafter, verification: Verification) -> None:
    """Raises TypeError or ValueError unless the parts of a round fit together."""
    needed = ("draft_limits", "propose", "bonus", "commit")
    check_part("drafter", drafter, needed, "NeuralDrafter(...)")
    check_part(
        "verification",
        verification,
        ("acceptance", "has_carry", "keeps_last_pass"),
        "verification.Block()",
    )
    parts = {"verifier": verifier, "drafter": drafter, "verification": verification}
    for name, part in parts.items():
        check_static(name, part)
    check_vocabularies(verifier, drafter)
    traits = drafter.traits
    verification.check(drafter.max_draft, traits)
    if verification.has_carry and not traits.fixed_length:
        # Its carry-overs would need each earlier block's stopping state; see `still_drafting`.
        raise ValueError(
            f"{type(verification).__name__} needs drafts of a fixed length, but "
            f"{type(drafter).__name__}'s traits say fixed_length=False: use Block or Token "
            "verification, or a drafter whose every block is as long as its limit and says "
            "fixed_length=True"
        )


def check_vocabularies(verifier: Any, drafter: Any) -> None:
    """Raises ValueError unless a verifier and a drafter have one vocabulary size."""
    if verifier.vocab_size != drafter.vocab_size:
        raise ValueError(
            f"the drafter's vocabulary has {drafter.vocab_size} tokens, the verifier's "
            f"{verifier.vocab_size}: they must be one"
        )


def check_names(names: Sequence[str]) -> None:
    """Raises ValueError if two models of a round have one name."""
    if len(set(names)) < len(names):
        raise ValueError(f"models of a round must have different names, got {', '.join(names)}")


def check_nests(verification: Verification) -> None:
    """Raises ValueError if a round with this verification cannot be reviewed by another one."""
    if verification.has_carry:
        raise ValueError(
            f"{type(verification).__name__} is not exact in a round that another round reviews: "
            "use Block or Token verification"
        )


def check_rule(rule: Rule, drafter: Drafter, *, nested: bool = False) -> None:
    """Raises if `rule` is no rule, or reads a confidence that the drafter does not have.

    With `nested` also if it has a budget, which is held where the verifier reviews.
    """
    if nested and isinstance(rule, Budgeted):
        raise ValueError(
            f"rule must be without a budget in a round that another round reviews, got {rule!r}: "
            "hold the budget where the verifier reviews"
        )
    check_part(
        "rule",
        rule,
        ("reads_draft", "reads_draft_confidence", "reads_verifier_confidence"),
        "rules.OPT(alpha=0.2)",
    )
    if any(leaf is rule for leaf in jax.tree.leaves(rule)):
        raise TypeError(
            f"rule must be a pytree, got {type(rule).__name__}: decorate the class with "
            "specjax.types.traced_dataclass"
        )
    if rule.reads_draft_confidence and not drafter.has_confidence:
        raise ValueError(
            f"{type(rule).__name__} reads the drafter's confidence, but "
            f"{type(drafter).__name__} has none: choose another rule"
        )


def check_strengths(rule: Any, rows: int) -> None:
    """Raises ValueError unless every strength of a rule is scalar or `[B]`."""
    for name, leaf in jax.tree_util.tree_leaves_with_path(rule):
        if jnp.shape(leaf) not in ((), (rows,)):
            raise ValueError(
                f"rule{jax.tree_util.keystr(name)} must be scalar or [B] = ({rows},), got shape "
                f"{jnp.shape(leaf)}"
            )


def check_eos_ids(eos_ids: tuple[int, ...], vocab_size: int) -> None:
    """Raises unless `eos_ids` is a tuple of token ids."""
    if not isinstance(eos_ids, tuple):
        raise TypeError(f"eos_ids must be a tuple of token ids, got {eos_ids!r}: write (1,)")
    for eos in eos_ids:
        if not 0 <= eos < vocab_size:
            raise ValueError(f"eos_ids must lie in [0, {vocab_size - 1}], got {eos}")


def check_stops(
    state: DecodeState, stop_after: int | Array, until_finished: int | Array | None
) -> tuple[Any, Any]:
    """When a loop returns, as int32 scalars; all rows must be finished if nothing is said.

    Raises:
      ValueError: unless both are at least 1: a loop of no steps never ends.
    """
    # Not of `finished`, which would be a program of its own.
    rows = state.ended_by.shape[0]
    until_finished = rows if until_finished is None else until_finished
    for name, value in (("stop_after", stop_after), ("until_finished", until_finished)):
        if int(value) < 1:
            raise ValueError(f"{name} must be at least 1, got {int(value)}")
    return np.int32(stop_after), np.int32(until_finished)


def check_table(state: DecodeState, table: Any) -> None:
    """Raises ValueError unless there is an automaton of stop strings just where a state has one."""
    if (state.stop is None) != (table is None):
        does, must = ("no", "left out") if state.stop is None else ("a", "given")
        raise ValueError(f"stop_table must be {must}: the state has {does} field stop")
