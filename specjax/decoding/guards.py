"""Checks of users' values: prompts, parts that do not fit together, rules.

Axes: B rows, P prompt length, F prefix length, G longest block.
"""

from typing import Any

import jax
import numpy as np

from specjax.checks import check_count, check_part, check_static
from specjax.errors import UserError
from specjax.rules import Budgeted
from specjax.rules.target import check_is_rule
from specjax.types import (
    Drafter,
    LanguageModel,
    PromptBatch,
    Rule,
    Verification,
)

# The largest seed and id.
_WORD = 2**32 - 1


def check_prompts(method: Any, prompts: PromptBatch, copies: int, max_new: int) -> None:
    """Raises UserError, naming the argument, for a wrong shape, dtype or value."""
    if np.ndim(prompts.inputs) != 2:
        raise UserError(f"inputs must be [B, P], got shape {np.shape(prompts.inputs)}")
    if prompts.prefix is None and prompts.prefix_lengths is not None:
        raise UserError("prefix_lengths was given without prefix: give both or neither")
    check_count("copies", copies, "give the number of rows of each prompt")
    rows, width = np.shape(prompts.inputs)
    prefix = () if prompts.prefix is None else np.shape(prompts.prefix)
    forced, last = prefix[-1] if prefix else 0, method.vocab_size - 1
    spans = {
        "inputs": ("[B, P]", (rows, width), 0, last),
        "input_lengths": ("[B]", (rows,), 1, width),
        "limits": ("[B]", (rows,), 0, max_new),
        "draft_limits": ("[B]", (rows,), method.min_draft, method.max_draft),
        "seeds": ("scalar or [B]", (rows,), 0, _WORD),
        "ids": ("[B]", (rows,), 0, _WORD),
        "prefix": ("[B, F]", (rows, forced), 0, last),
        "prefix_lengths": ("[B]", (rows,), 0, forced),
    }
    for name, (axes, shape, low, high) in spans.items():
        if (value := getattr(prompts, name)) is not None:
            _check_shape(name, value, axes, shape)
            _check_span(name, value, low, high)
    last = (_WORD + 1) // copies - 1
    if copies > 1 and np.max(prompts.ids, initial=0) > last:
        raise UserError(
            f"ids must be at most {last} for {copies} copies, got {np.max(prompts.ids)}"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(prompts.sampling):
        _check_shape(f"sampling{jax.tree_util.keystr(path)}", leaf, "scalar or [B]", (rows,))


def _check_shape(name: str, value: Any, axes: str, shape: tuple[int, ...]) -> None:
    scalar = axes.startswith("scalar") and np.shape(value) == ()
    if np.shape(value) != shape and not scalar:
        raise UserError(f"{name} must be {axes} = {shape}, got shape {np.shape(value)}")


def _check_span(name: str, value: Any, low: int, high: int) -> None:
    array = np.asarray(value)
    if array.size and array.dtype.kind not in "iuO":  # O: whole numbers of more than 64 bits
        raise UserError(f"{name} must be of an integer dtype, got {array.dtype}")
    bad = (array < low) | (array > high)
    if bad.any():
        where = f" in row {np.argwhere(bad)[0][0]}" if array.ndim else ""
        raise UserError(f"{name} must lie in [{low}, {high}], got {array[bad][0]}{where}")


def check_eos_ids(eos_ids: tuple[int, ...], vocab_size: int) -> None:
    """Raises UserError unless `eos_ids` is a tuple of token ids."""
    if not isinstance(eos_ids, tuple):
        raise UserError(f"eos_ids must be a tuple of token ids, got {eos_ids!r}: write (1,)")
    for eos in eos_ids:
        if not 0 <= eos < vocab_size:
            raise UserError(f"eos_ids must lie in [0, {vocab_size - 1}], got {eos}")


def check_model(name: str, model: Any) -> None:
    """Raises UserError unless the argument `name` is a language model, and hashable."""
    needed = ("vocab_size", "prefill", "score", "write", "extend")
    check_part(name, model, needed, "models.model_from_config(config)")
    check_static(name, model)


def check_drafter(name: str, drafter: Any) -> None:
    """Raises UserError unless the argument `name` is a drafter, and hashable."""
    needed = ("prefill", "draft_limits", "propose", "bonus", "commit", "mark", "rewind")
    check_part(name, drafter, needed, "drafting.NeuralDrafter(...)")
    check_static(name, drafter)


def check_vocabularies(verifier: Any, drafter: Any) -> None:
    """Raises UserError unless a verifier and a drafter have the same vocabulary size."""
    if verifier.vocab_size != drafter.vocab_size:
        raise UserError(
            f"the drafter's vocabulary has {drafter.vocab_size} tokens, the verifier's "
            f"{verifier.vocab_size}: they must be the same"
        )


def check_parts(
    verifier: LanguageModel, drafter: Drafter, verification: Verification, nested: bool
) -> None:
    """Raises UserError unless the parts of a round fit together."""
    check_model("verifier", verifier)
    check_drafter("drafter", drafter)
    needed = ("acceptance", "has_carry", "keeps_last_pass")
    check_part("verification", verification, needed, "verification.Block()")
    check_static("verification", verification)
    check_vocabularies(verifier, drafter)
    verification.check(drafter.max_draft, drafter.traits)
    judge, drafts, traits = type(verification).__name__, type(drafter).__name__, drafter.traits
    if traits.drafts_trees and not verification.walks_trees:
        raise UserError(
            f"{judge} cannot verify the trees of {drafts}: use Traversal, or another verification "
            "with `walk`"
        )
    if verification.has_carry and not traits.fixed_length:
        # Carry-overs would need the stopping state of each earlier block; see `still_drafting`.
        raise UserError(
            f"{judge} needs drafts of a fixed length, but {drafts} has "
            f"fixed_length=False: use Block or Token verification, or a drafter whose blocks all "
            "have the length of their limit"
        )
    if nested and verification.has_carry:
        raise UserError(
            f"{judge} is not exact in an inner round of a cascade: use Block or Token verification"
        )
    if traits.drafts_trees and not verifier.reads_trees:
        raise UserError(
            f"{drafts} drafts trees, which {type(verifier).__name__} cannot read: use a drafter of "
            "chains"
        )
    if nested and (traits.drafts_trees or traits.reads_verifier_hidden):
        what = "drafts trees" if traits.drafts_trees else "reads the verifier's hidden states"
        raise UserError(f"{drafts} {what}: it cannot draft for an inner round of a cascade")


def check_rule(rule: Rule, drafter: Drafter, *, nested: bool = False) -> None:
    """Raises UserError unless `rule` is a rule that fits the drafter.

    In a nested round it must have no budget: only the round of the verifier can keep it.
    """
    if isinstance(rule, Budgeted) and (nested or drafter.traits.drafts_trees):
        where = "inside a cascade" if nested else "over trees"
        raise UserError(
            f"rule must not have a budget in a round {where}, got {rule!r}: use a rule without one"
        )
    check_is_rule("rule", rule)
    reads = rule.reads_draft or rule.reads_draft_confidence
    if reads and not drafter.traits.has_distributions:
        raise UserError(
            f"{type(rule).__name__} reads the drafter's distribution after each token, but the "
            f"branches of {type(drafter).__name__} have different drafters: use a rule that reads "
            "only the verifier, such as Lossless"
        )
    if reads and not drafter.traits.draws_bonus:
        raise UserError(
            f"{type(rule).__name__} reads the drafter's distribution after a whole draft, but "
            f"{type(drafter).__name__} has none after {drafter.max_draft} tokens: set max_draft to "
            f"{drafter.max_draft - 1} or less"
        )
    if rule.reads_draft_confidence and not drafter.has_confidence:
        raise UserError(
            f"{type(rule).__name__} reads the drafter's confidence, but "
            f"{type(drafter).__name__} has none: choose another rule"
        )


def check_strengths(rule: Any, rows: int) -> None:
    """Raises UserError unless every strength of a rule is scalar or `[B]`."""
    for name, leaf in jax.tree_util.tree_leaves_with_path(rule):
        _check_shape(f"rule{jax.tree_util.keystr(name)}", leaf, "scalar or [B]", (rows,))
