"""Checks of decoding: prompts, whether parts fit together, and the values that parts return.

Prompts and parts are checked on the host; returned values while a program is traced.

Axes: B rows, P prompt length, F prefix length, G longest block, T committed tokens, V vocabulary,
D width.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import check_array, check_count, check_like, check_part, check_static, unpacked
from specjax.errors import UserError
from specjax.rules import Budgeted
from specjax.rules.target import check_is_rule
from specjax.types import (
    Array,
    Bonus,
    DecodeState,
    DraftBlock,
    Drafter,
    LanguageModel,
    Params,
    PromptBatch,
    Rule,
    Sampling,
    Verification,
)

# The largest seed and id.
_WORD = 2**32 - 1


def check_prompts(
    prompts: PromptBatch, vocab_size: int, min_draft: int, max_draft: int, max_new: int
) -> None:
    """Raises ValueError, naming the argument, for a wrong shape, dtype or value."""
    if np.ndim(prompts.inputs) != 2:
        raise UserError(f"inputs must be [B, P], got shape {np.shape(prompts.inputs)}")
    rows, width = np.shape(prompts.inputs)
    if prompts.prefix is None and prompts.prefix_lengths is not None:
        raise UserError("prefix_lengths was given without prefix: give both or neither")
    prefix = () if prompts.prefix is None else np.shape(prompts.prefix)
    forced, last = prefix[-1] if prefix else 0, vocab_size - 1
    sizes = {"[B, P]": (rows, width), "[B, F]": (rows, forced), **dict.fromkeys(_BY_ROW, (rows,))}
    known = [
        ("inputs", "[B, P]", 0, last),
        ("input_lengths", "[B]", 1, width),
        ("limits", "[B]", 0, max_new),
        ("draft_limits", "[B]", min_draft, max_draft),
        ("seeds", "scalar or [B]", 0, _WORD),
        ("ids", "[B]", 0, _WORD),
        ("prefix", "[B, F]", 0, last),
        ("prefix_lengths", "[B]", 0, forced),
    ]
    for name, axes, low, high in known:
        if (value := getattr(prompts, name)) is not None:
            _check_shape(name, value, axes, sizes[axes])
            _check_span(name, value, low, high)
    for name in ("temperature", "top_k", "top_p"):
        if (value := getattr(prompts.sampling, name)) is not None:
            _check_shape(f"sampling.{name}", value, "scalar or [B]", (rows,))
    for path, leaf in jax.tree_util.tree_leaves_with_path(prompts.sampling.processors):
        name = f"sampling.processors{jax.tree_util.keystr(path)}"
        _check_shape(name, leaf, "scalar or [B]", (rows,))


def check_copies(prompts: PromptBatch, copies: Any) -> None:
    """Raises ValueError for a number of copies below 1, or ids that are too large for it."""
    check_count("copies", copies, "give the number of rows of each prompt")
    last = (_WORD + 1) // copies - 1
    if copies > 1 and np.max(prompts.ids, initial=0) > last:
        raise UserError(
            f"ids must be at most {last} for {copies} copies, got {np.max(prompts.ids)}"
        )


_BY_ROW = ("[B]", "scalar or [B]")


def _check_shape(name: str, value: Any, axes: str, shape: tuple[int, ...]) -> None:
    found = np.shape(value)
    if found != shape and not (found == () and axes.startswith("scalar")):
        raise UserError(f"{name} must be {axes} = {shape}, got shape {found}")


def _check_span(name: str, value: Any, low: int, high: int) -> None:
    array = np.asarray(value)
    if array.size and array.dtype.kind not in "iuO":  # O: whole numbers of more than 64 bits
        raise UserError(f"{name} must be of an integer dtype, got {array.dtype}")
    bad = (array < low) | (array > high)
    if bad.any():
        where = f" in row {np.argwhere(bad)[0][0]}" if array.ndim else ""
        raise UserError(f"{name} must lie in [{low}, {high}], got {array[bad][0]}{where}")


def check_stops(
    state: DecodeState, stop_after: Any, until_finished: Any, table: Any
) -> tuple[np.int32, np.int32]:
    """When a loop returns, as int32 numbers; by default when all rows are finished.

    Raises:
      ValueError: if a number is below 1 (the loop would never end), or a table of stop strings is
        given without a state that uses it, or missing.
    """
    if (state.stop is None) != (table is None):
        does, must = ("no", "left out") if state.stop is None else ("a", "given")
        raise UserError(f"stop_table must be {must}: the state has {does} field `stop`")
    # The shape of `finished` would need its own program.
    until_finished = state.ended_by.shape[0] if until_finished is None else until_finished
    for name, value in (("stop_after", stop_after), ("until_finished", until_finished)):
        if int(value) < 1:
            raise UserError(f"{name} must be at least 1, got {int(value)}")
    return np.int32(stop_after), np.int32(until_finished)


def check_eos_ids(eos_ids: tuple[int, ...], vocab_size: int) -> None:
    """Raises unless `eos_ids` is a tuple of token ids."""
    if not isinstance(eos_ids, tuple):
        raise UserError(f"eos_ids must be a tuple of token ids, got {eos_ids!r}: write (1,)")
    for eos in eos_ids:
        if not 0 <= eos < vocab_size:
            raise UserError(f"eos_ids must lie in [0, {vocab_size - 1}], got {eos}")


def check_model(name: str, model: Any) -> None:
    """Raises TypeError unless `model` is a language model; `name` is the argument's name."""
    needed = ("vocab_size", "prefill", "score", "write", "extend")
    check_part(name, model, needed, "models.model_from_config(config)")


def check_vocabularies(verifier: Any, drafter: Any) -> None:
    """Raises ValueError unless a verifier and a drafter have the same vocabulary size."""
    if verifier.vocab_size != drafter.vocab_size:
        raise UserError(
            f"the drafter's vocabulary has {drafter.vocab_size} tokens, the verifier's "
            f"{verifier.vocab_size}: they must be the same"
        )


def check_parts(
    verifier: LanguageModel, drafter: Drafter, verification: Verification, nested: bool
) -> None:
    """Raises TypeError or ValueError unless the parts of a round fit together."""
    check_model("verifier", verifier)
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
    verification.check(drafter.max_draft, drafter.traits)
    wrong = _misfit(verifier, drafter, verification, nested)
    if wrong is not None:
        raise UserError(wrong)


def _misfit(
    verifier: LanguageModel, drafter: Drafter, verification: Verification, nested: bool
) -> str | None:
    """A message about parts that do not fit, or None."""
    judge, drafts, traits = type(verification).__name__, type(drafter).__name__, drafter.traits
    if traits.drafts_trees and not verification.walks_trees:
        return (
            f"{judge} cannot verify the trees of {drafts}: use Traversal, or another verification "
            "with `walk`"
        )
    if verification.has_carry and not traits.fixed_length:
        # Carry-overs would need the stopping state of each earlier block; see `still_drafting`.
        return (
            f"{judge} needs drafts of a fixed length, but {drafts} has "
            f"fixed_length=False: use Block or Token verification, or a drafter whose blocks all "
            "have the length of their limit"
        )
    if nested and verification.has_carry:
        return (
            f"{judge} is not exact in an inner round of a cascade: use Block or Token verification"
        )
    if traits.drafts_trees and not verifier.reads_trees:
        return (
            f"{drafts} drafts trees, which {type(verifier).__name__} cannot read: use a drafter of "
            "chains"
        )
    if nested and (traits.drafts_trees or traits.reads_verifier_hidden):
        what = "drafts trees" if traits.drafts_trees else "reads the verifier's hidden states"
        return f"{drafts} {what}: it cannot draft for an inner round of a cascade"
    return None


def check_rule(rule: Rule, drafter: Drafter, *, nested: bool = False) -> None:
    """Raises if `rule` is not a rule, or reads a confidence that the drafter does not have.

    With `nested`, also if the rule has a budget: only the round of the verifier can keep it.
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
    if rule.reads_draft_confidence and not drafter.has_confidence:
        raise UserError(
            f"{type(rule).__name__} reads the drafter's confidence, but "
            f"{type(drafter).__name__} has none: choose another rule"
        )


def check_processors(sampling: Sampling, params: Any) -> None:
    """Raises ValueError unless there are shared arrays for each processor of the sampling."""
    needed, given = len(sampling.processors or ()), len(getattr(params, "processors", ()))
    if needed != given:
        raise UserError(
            f"params.processors must have an entry for each processor, got {given} for {needed}: "
            "give MethodParams(processors=...), an empty tuple for each without arrays of its own"
        )


def check_strengths(rule: Any, rows: int) -> None:
    """Raises ValueError unless every strength of a rule is scalar or `[B]`."""
    for name, leaf in jax.tree_util.tree_leaves_with_path(rule):
        _check_shape(f"rule{jax.tree_util.keystr(name)}", leaf, "scalar or [B]", (rows,))


def check_state(drafter: Drafter, state: Any, rows: int) -> None:
    """Raises TypeError unless the batch is the first axis of every array of an initial state."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.shape(leaf)[:1] != (rows,):
            raise UserError(
                f"{type(drafter).__name__}.prefill: state{jax.tree_util.keystr(path)} must be "
                f"[B, ...] with B = {rows} rows, got shape {list(jnp.shape(leaf))}"
            )


def planned(drafter: Drafter, params: Params, state: Any, limits: Array) -> Array:
    """The limits of `draft_limits`, cut to 0 .. `limits`; both `[B]` int32.

    Raises:
      TypeError: naming the drafter, if it does not return `[B]` int32.
    """
    asked = drafter.draft_limits(params, state, limits)
    where = f"{type(drafter).__name__}.draft_limits"
    check_array(where, asked, "[B]", limits.shape, jnp.int32)
    return jnp.clip(asked, 0, limits)


def checked_block(
    drafter: Drafter, returned: Any, limits: Array, with_confidence: bool
) -> tuple[DraftBlock, Any]:
    """The block and the state that `propose` returned; no block exceeds its row's limit.

    Args:
      drafter: the drafter.
      returned: the result of its `propose`.
      limits: `[B]` int32, known before the draft, so cutting a block there is exact.
      with_confidence: whether the rule reads confidences.

    Raises:
      TypeError: naming the drafter and the field that is of a wrong shape, dtype or type.
    """
    where, traits = f"{type(drafter).__name__}.propose", drafter.traits
    block, state = unpacked(where, returned, ("block", "state"))
    axes = {
        "tokens": "[B, G]",
        "num_drafted": "[B]",
        **({"confidences": "[B, G + 1, V]"} if with_confidence else {}),
        **({"parents": "[B, G]"} if traits.drafts_trees else {}),
    }
    # Of a drafter that draws nothing, and whose nodes' distributions no rule reads.
    unread = traits.drafts_trees and not traits.has_distributions
    certain = drafter.num_uniforms == 0 and (unread or not traits.drafts_trees)
    if not certain or getattr(block, "probs", None) is not None:
        rows = "R" if unread and getattr(block, "drawn_from", None) is not None else "G + 1"
        axes["probs"] = f"[B, {rows}, V]"
    for name in ("laws", "sources", "drawn_from"):
        if getattr(block, name, None) is not None:
            axes[name] = "[B, G]"
    _check_given(where, drafter, block, DraftBlock, axes, limits.size)
    if block.parents is not None and not traits.drafts_trees:
        raise UserError(f"{where}: parents must be None, or the traits say drafts_trees=True")
    return block._replace(num_drafted=jnp.clip(block.num_drafted, 0, limits)), state


def checked_bonus(
    drafter: Drafter, returned: Any, before: Any, rows: int, with_confidence: bool
) -> tuple[Bonus, Any]:
    """The bonus and the state that `bonus` returned; `before` is the state before the call.

    Raises:
      TypeError: naming the drafter and the field that is of a wrong shape, dtype or type.
    """
    where = f"{type(drafter).__name__}.bonus"
    extra, state = unpacked(where, returned, ("bonus", "state"))
    axes = {"probs": "[B, V]", **({"confidences": "[B, V]"} if with_confidence else {})}
    _check_given(where, drafter, extra, Bonus, axes, rows)
    check_like(f"{where}: state", state, before)
    return extra, state


def committed(
    drafter: Drafter,
    state: Any,
    before: Any,
    tokens: Array,
    counts: Array,
    hidden: Array | None = None,
) -> Any:
    """The result of `commit`; raises TypeError unless it is like the state `before` the round."""
    asked = {"hidden": hidden} if drafter.traits.reads_verifier_hidden else {}
    new = drafter.commit(state, tokens, counts, **asked)
    check_like(f"{type(drafter).__name__}.commit: state", new, before)
    return new


def _check_given(
    where: str,
    drafter: Drafter,
    given: Any,
    kind: type[DraftBlock | Bonus],
    axes: dict[str, str],
    rows: int,
) -> None:
    """Raises TypeError unless a drafter returned this kind, with fields of these axes."""
    if not isinstance(given, kind):
        got = type(given).__name__
        raise UserError(f"{where} must return a types.{kind.__name__} first, got {got}")
    longest = drafter.max_draft
    sizes = {"B": rows, "G": longest, "G + 1": longest + 1, "V": drafter.vocab_size}
    sizes["R"] = (*getattr(given.probs, "shape", ()), 0, 0)[1]
    for name, letters in axes.items():
        shape = [sizes[letter] for letter in letters[1:-1].split(", ")]
        dtype = jnp.float32 if letters.endswith("V]") else jnp.int32
        check_array(f"{where}: {name}", getattr(given, name), letters, shape, dtype)
    names, calls = drafter.model_names, given.calls
    if not isinstance(calls, dict) or set(calls) != set(names):
        raise UserError(
            f"{where}: calls must be a dict with the model_names {list(names)} as its keys, got "
            f"{list(calls) if isinstance(calls, dict) else calls}"
        )
