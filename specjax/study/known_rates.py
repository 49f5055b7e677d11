"""Acceptance rates between models along known texts, and the tokens that would be copied.

Axes: B rows, P prompt length, N longest text, G longest draft, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.compilation import jit
from specjax.drafting import LookupDrafter, lenience
from specjax.errors import UserError
from specjax.study.clock import VERIFIER
from specjax.study.drafting_plans import Plan
from specjax.text import Lookup, TextModel
from specjax.text.drafts import Ingredients
from specjax.text.teacher_forcing import (
    KnownRows,
    KnownTexts,
    batches,
    check_read,
    read,
    rows_at_once,
)
from specjax.types import Array, DraftInputs, LanguageModel, Params, Prompts, Sampling


class Law(NamedTuple):
    """The distribution of a drafter's tokens.

    Attributes:
      name: the drafter's name.
      below: the drafter that it reviews with lenience, a model's name or a `Lookup`; None: tokens
        follow its own distribution, because it reviews nothing or without lenience.
      lenience: the lenience of its reviews.
    """

    name: str
    below: str | Lookup | None = None
    lenience: float = 1.0


# A reviewer's name, its drafter, and the reviewer's lenience.
Judgement = tuple[str, Law | Lookup, float]


@dataclasses.dataclass(frozen=True)
class Copies:
    """The copied drafts at every position of the texts, row by row.

    Attributes:
      matched: `[n]` the number of tokens before the position that have occurred before.
      drafted: `[n]` the number of tokens to copy, up to the longest draft G.
      on_text: `[n]` how many of these, from the first, agree with the text.
      offsets: `[texts + 1]`; the positions of text i are `offsets[i] .. offsets[i + 1]`.
    """

    matched: np.ndarray
    drafted: np.ndarray
    on_text: np.ndarray
    offsets: np.ndarray


@dataclasses.dataclass(frozen=True)
class KnownRates:
    """The acceptance rates for plans.

    Attributes:
      rates: the probability that a token is accepted; for copies `[G]`, if the tokens before it
        agree with the text.
      copies: the copied drafts of each `Lookup`.
      text_lengths: `[texts]` tokens of the verifier's texts.
    """

    rates: Mapping[Judgement, Any]
    copies: Mapping[Lookup, Copies]
    text_lengths: np.ndarray

    @property
    def emitted(self) -> int:
        """The number of tokens of all texts."""
        return int(self.text_lengths.sum())


class _Copied(NamedTuple):
    """The copied draft at each position; see `Copies`."""

    tokens: Any  # [B, N, G]
    matched: Any  # [B, N]
    drafted: Any  # [B, N]
    on_text: Any  # [B, N]


def judgements(plan: Plan) -> Iterator[Judgement]:
    """Yields the acceptance rates that a plan needs."""
    for r, row in enumerate(plan.lengths):
        reviewer = plan.models[r - 1] if r else VERIFIER
        lenient = plan.lenience if r else 1.0  # the verifier has no lenience
        for level, count in enumerate(row):
            if count and level < len(plan.models):
                yield reviewer, law_of(plan, level), lenient
            elif count and plan.copies is not None:
                yield reviewer, plan.copies, lenient


def law_of(plan: Plan, level: int) -> Law:
    """Returns the distribution of the tokens of a level, from 0."""
    name = plan.models[level]
    if plan.lenience == 1.0 or not plan.reviews(level):
        return Law(name)
    # The drafter below that adds most tokens.
    row = plan.lengths[level + 1]
    most = max(range(len(row)), key=lambda i: row[i])
    below = plan.copies if most == len(plan.models) else plan.models[most]
    return Law(name, below, plan.lenience)


def known_rates(
    models: Mapping[str, TextModel],
    texts: KnownTexts,
    sampling: Sampling,
    plans: Sequence[Plan],
) -> KnownRates:
    """Reads texts with all models, and returns the acceptance rates for plans.

    A reviewer with lenience l accepts a drafter's token with probability sum_v min(q(v), l p(v)),
    averaged over the positions of the texts. At temperature 0 this is the rate of agreement.

    Args:
      models: by name, `verifier` among them.
      texts: the verifier's outputs.
      sampling: its fields are scalars.
      plans: the plans.

    Returns:
      The rates.

    Raises:
      ValueError: a model gives NaN.
    """
    needed_rates = tuple(
        dict.fromkeys(judgement for plan in plans for judgement in judgements(plan))
    )
    laws = {law for _, law, _ in needed_rates}
    known = laws | {law.below for law in laws if isinstance(law, Law)}
    known |= {plan.copies for plan in plans}
    kinds = sorted((kind for kind in known if isinstance(kind, Lookup)), key=repr)
    vocab_size = models[VERIFIER].model.vocab_size
    longest = max(plan.longest for plan in plans)
    given = Ingredients({VERIFIER: models[VERIFIER]}, longest, _no_model, jnp.asarray)
    tables = [kind.table(given) for kind in kinds]
    needed = {VERIFIER} | {name for plan in plans for name in plan.models}
    read_by = {name: model for name, model in models.items() if name in needed}
    sums: list[np.ndarray] = []
    copied: list[list[_Copied]] = [[] for _ in kinds]
    for places, rows in batches(texts, rows_at_once(texts, vocab_size, len(read_by))):
        readings = {
            name: _read(model.model, model.prepared, rows, sampling)
            for name, model in read_by.items()
        }
        probs = {name: distributions for name, (distributions, _) in readings.items()}
        found = [
            _copy(kind.copier(vocab_size, longest), table, rows, readings[VERIFIER][1])
            for kind, table in zip(kinds, tables, strict=True)
        ]
        sums.append(jax.device_get(_sums(needed_rates, tuple(kinds), probs, found, rows.ends)))
        for own, batch in zip(copied, jax.device_get(found), strict=True):
            own.append(_Copied(*(x[: len(places)] for x in batch)))
    rates = {}
    for judgement, parts in zip(needed_rates, zip(*sums, strict=True), strict=True):
        accepted, seen = np.sum(np.asarray(parts, np.float64), axis=0)
        check_read(~np.isnan(accepted), *(models[name] for name in _names(judgement)))
        rates[judgement] = np.clip(accepted / np.maximum(seen, 1.0), 0.0, 1.0)
    lengths = np.asarray([len(text) for text in texts.outputs])
    merged = {kind: _merged(parts, lengths) for kind, parts in zip(kinds, copied, strict=True)}
    return KnownRates(rates, merged, lengths)


def _no_model(*_: Any) -> Any:
    raise UserError("a LookupDrafter takes no model")


def _names(judgement: Judgement) -> list[str]:
    reviewer, law, _ = judgement
    return [reviewer, law.name] if isinstance(law, Law) else [reviewer]


@functools.partial(jit, static_argnums=0)
def _read(
    model: LanguageModel, params: Params, rows: KnownRows, sampling: Sampling
) -> tuple[Array, Array]:
    """The distributions `[B, N, V]`, and the token before each position `[B, N]`."""
    readings = read(model, params, rows)
    return readings.probs(sampling), readings.before


@functools.partial(jit, static_argnums=0)
def _copy(copier: LookupDrafter, table: Params, rows: KnownRows, before: Array) -> _Copied:
    """The copied draft at each position of each text."""
    longest = rows.outputs.shape[1]
    step = jnp.arange(longest, dtype=jnp.int32)

    def of_row(prompt: Array, length: Array, text: Array, last: Array) -> _Copied:
        inputs, texts = (jnp.broadcast_to(x, (longest, x.size)) for x in (prompt, text))
        lengths = jnp.broadcast_to(length, (longest,))
        state = copier.prefill(table, Prompts(inputs, lengths, texts, step), longest)
        many = jnp.full((longest,), copier.max_draft, jnp.int32)
        every, none = jnp.ones((longest,), bool), jnp.zeros((longest, 0), jnp.float32)
        given = DraftInputs(last, many, none, Sampling(), every)
        block, _ = copier.propose(table, state, given, with_confidence=False)
        ahead = step[:, None] + jnp.arange(copier.max_draft, dtype=jnp.int32)[None]
        own = jnp.take(text, ahead, mode="clip")
        same = (block.tokens == own) & (ahead < longest)
        on_text = jnp.sum(jnp.cumprod(same.astype(jnp.int32), axis=1), axis=1)
        return _Copied(block.tokens, copier.matched(state), block.num_drafted, on_text)

    rows_args = (rows.inputs, rows.lengths, rows.outputs, before)
    return jax.lax.map(lambda row: of_row(*row), jax.tree.map(jnp.asarray, rows_args))


@functools.partial(jit, static_argnums=(0, 1))
def _sums(
    needed_rates: tuple[Judgement, ...],
    kinds: tuple[Lookup, ...],
    probs: dict[str, Array],
    copied: list[_Copied],
    ends: Array,
) -> list[tuple[Array, Array]]:
    """For each judgement the sums over positions of acceptances, and of the positions' number."""
    place = jnp.arange(probs[VERIFIER].shape[1], dtype=jnp.int32)[None]
    real = place < ends[:, None]

    def probs_of(law: Law) -> Array:
        own = probs[law.name]
        if law.below is None:
            return own
        rule = jax.vmap(jax.vmap(lenience(law.lenience)))
        if isinstance(law.below, str):
            return rule(probs[law.below], own)
        first = copied[kinds.index(law.below)]
        q = jax.nn.one_hot(first.tokens[..., 0], own.shape[-1], dtype=jnp.float32)
        return jnp.where((first.drafted > 0)[..., None], rule(q, own), own)

    def of_copies(reviewer: str, found: _Copied, lenient: float) -> tuple[Array, Array]:
        step = jnp.arange(found.tokens.shape[-1], dtype=jnp.int32)[None, None]
        ahead = place[..., None] + step
        # If the tokens before agree with the text, and the text has a token there.
        seen = (found.drafted[..., None] > step) & (found.on_text[..., None] >= step)
        seen &= ahead < ends[:, None, None]
        at = jnp.broadcast_to(jnp.minimum(ahead, place.shape[1] - 1), found.tokens.shape)
        p = jax.vmap(lambda p, at, tokens: p[at, tokens])(probs[reviewer], at, found.tokens)
        stands = jnp.where(seen, jnp.minimum(jnp.float32(lenient) * p, 1.0), 0.0)
        return jnp.sum(stands, axis=(0, 1)), jnp.sum(seen.astype(jnp.float32), axis=(0, 1))

    sums = []
    for reviewer, law, lenient in needed_rates:
        if isinstance(law, Lookup):
            sums.append(of_copies(reviewer, copied[kinds.index(law)], lenient))
        else:
            both = jnp.minimum(probs_of(law), jnp.float32(lenient) * probs[reviewer])
            accepted = jnp.sum(jnp.where(real, jnp.sum(both, axis=-1), 0.0))
            sums.append((accepted, jnp.sum(real.astype(jnp.float32))))
    return sums


def _merged(parts: Sequence[_Copied], lengths: np.ndarray) -> Copies:
    """The copied drafts at the real positions of all texts."""
    real = np.arange(parts[0].matched.shape[1])[None] < lengths[:, None]
    # Past the end of a text no token agrees.
    left = lengths[:, None] - np.arange(real.shape[1])[None]
    matched, drafted, on_text = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("matched", "drafted", "on_text")
    )
    return Copies(
        matched=matched[real],
        drafted=drafted[real],
        on_text=np.minimum(np.minimum(on_text, left), drafted)[real],
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
    )
