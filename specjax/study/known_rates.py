"""How likely models accept one another's tokens along known texts, and what would be copied there.

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
from specjax.study.clock import VERIFIER
from specjax.study.drafting_plans import Plan
from specjax.text import Lookup, TextModel
from specjax.text.drafts import Ingredients
from specjax.text.known_texts import (
    KnownRows,
    KnownTexts,
    batches,
    check_read,
    read,
    rows_at_once,
)
from specjax.types import Array, LanguageModel, Params, Sampling


class Law(NamedTuple):
    """What the tokens of a drafter follow.

    Attributes:
      name: the drafter's.
      below: what it reviews leniently, a model's name or what copies; None where its tokens follow
        its own distribution: it drafts alone, or reviews without lenience.
      lenience: with which it reviews.
    """

    name: str
    below: str | Lookup | None = None
    lenience: float = 1.0


# A reviewer's name, what drafts for it, and the reviewer's lenience.
Judgement = tuple[str, Law | Lookup, float]


@dataclasses.dataclass(frozen=True)
class Copies:
    """What would be copied at every position of the texts, rows one after the other.

    Attributes:
      matched: `[n]` how many tokens of the ending have occurred before.
      drafted: `[n]` how many tokens would be copied, up to the longest draft G.
      on_text: `[n]` how many of them, from the first, are the text's own.
      offsets: `[texts + 1]`; the positions of text i are `offsets[i] .. offsets[i + 1]`.
    """

    matched: np.ndarray
    drafted: np.ndarray
    on_text: np.ndarray
    offsets: np.ndarray


@dataclasses.dataclass(frozen=True)
class KnownRates:
    """What texts tell of plans.

    Attributes:
      rates: how likely a token is accepted, a number; of copies `[G]`, where those before are the
        text's own.
      copies: what copies -> how it fares.
      text_lengths: `[texts]` tokens of the verifier's texts.
    """

    rates: Mapping[Judgement, Any]
    copies: Mapping[Lookup, Copies]
    text_lengths: np.ndarray

    @property
    def emitted(self) -> int:
        """How many tokens the texts have."""
        return int(self.text_lengths.sum())


class _Copied(NamedTuple):
    """What would be copied at each position; see `Copies`."""

    tokens: Any  # [B, N, G]
    matched: Any  # [B, N]
    drafted: Any  # [B, N]
    on_text: Any  # [B, N]


def judgements(plan: Plan) -> Iterator[Judgement]:
    """All that a plan's expectation asks of texts."""
    for r, row in enumerate(plan.lengths):
        reviewer = plan.models[r - 1] if r else VERIFIER
        lenient = plan.lenience if r else 1.0  # the verifier never is
        for level, count in enumerate(row):
            if count and level < len(plan.models):
                yield reviewer, law_of(plan, level), lenient
            elif count and plan.copies is not None:
                yield reviewer, plan.copies, lenient


def law_of(plan: Plan, level: int) -> Law:
    """The law of the tokens of a model's level, from 0."""
    name = plan.models[level]
    if plan.lenience == 1.0 or not plan.reviews(level):
        return Law(name)
    # Of several drafters below it the one that adds most.
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
    """Reads texts with all models.

    A drafter's token is accepted with probability sum_v min(q(v), l p(v)) by a reviewer of lenience
    l, averaged over the positions of the texts. At temperature 0 that is how often the two agree.

    Args:
      models: by name, the verifier among them.
      texts: what the verifier has written.
      sampling: with one value of each setting.
      plans: of which everything is found out that their expectations need.

    Returns:
      It.

    Raises:
      ValueError: if a model gives NaN.
    """
    asked = tuple(dict.fromkeys(one for plan in plans for one in judgements(plan)))
    known = {one.below for _, one, _ in asked if isinstance(one, Law)} | {x for _, x, _ in asked}
    known |= {plan.copies for plan in plans}
    kinds = sorted((one for one in known if isinstance(one, Lookup)), key=repr)
    vocab_size = models[VERIFIER].model.vocab_size
    longest = max(plan.longest for plan in plans)
    given = Ingredients({VERIFIER: models[VERIFIER]}, longest, _no_model, jnp.asarray)
    tables = [kind.table(given) for kind in kinds]
    needed = {VERIFIER} | {name for plan in plans for name in plan.models}
    read_by = {name: model for name, model in models.items() if name in needed}
    sums: list[np.ndarray] = []
    copied: list[list[_Copied]] = [[] for _ in kinds]
    for places, rows in batches(texts, rows_at_once(texts, vocab_size, len(read_by))):
        said = {
            name: _read(one.model, one.prepared, rows, sampling) for name, one in read_by.items()
        }
        probs = {name: one for name, (one, _) in said.items()}
        found = [
            _copy(kind.copier(vocab_size, longest), table, rows, said[VERIFIER][1])
            for kind, table in zip(kinds, tables, strict=True)
        ]
        sums.append(jax.device_get(_sums(asked, tuple(kinds), probs, found, rows.ends)))
        for own, one in zip(copied, jax.device_get(found), strict=True):
            own.append(_Copied(*(x[: len(places)] for x in one)))
    rates = {}
    for judgement, parts in zip(asked, zip(*sums, strict=True), strict=True):
        accepted, seen = np.sum(np.asarray(parts, np.float64), axis=0)
        check_read(~np.isnan(accepted), *(models[name] for name in _names(judgement)))
        rates[judgement] = np.clip(accepted / np.maximum(seen, 1.0), 0.0, 1.0)
    lengths = np.asarray([len(text) for text in texts.outputs])
    merged = {kind: _merged(parts, lengths) for kind, parts in zip(kinds, copied, strict=True)}
    return KnownRates(rates, merged, lengths)


def _no_model(*_: Any) -> Any:
    raise TypeError("a LookupDrafter takes no model")


def _names(judgement: Judgement) -> list[str]:
    reviewer, one, _ = judgement
    return [reviewer, one.name] if isinstance(one, Law) else [reviewer]


@functools.partial(jit, static_argnums=0)
def _read(
    model: LanguageModel, params: Params, rows: KnownRows, sampling: Sampling
) -> tuple[Array, Array]:
    """The distributions `[B, N, V]`, and the token before each position `[B, N]`."""
    said = read(model, params, rows)
    return said.probs(sampling), said.before


@functools.partial(jit, static_argnums=0)
def _copy(copier: LookupDrafter, table: Params, rows: KnownRows, before: Array) -> _Copied:
    """What is copied after each beginning of each text."""
    longest = rows.outputs.shape[1]
    step = jnp.arange(longest, dtype=jnp.int32)

    def of_row(prompt: Array, length: Array, text: Array, last: Array) -> _Copied:
        inputs, texts = (jnp.broadcast_to(x, (longest, x.size)) for x in (prompt, text))
        lengths = jnp.broadcast_to(length, (longest,))
        state = copier.prefill(table, inputs, lengths, longest, texts, step)
        many = jnp.full((longest,), copier.max_draft, jnp.int32)
        every, none = jnp.ones((longest,), bool), jnp.zeros((longest, 0), jnp.float32)
        block, _ = copier.propose(
            table, state, last, many, none, Sampling(), every, with_confidence=False
        )
        ahead = step[:, None] + jnp.arange(copier.max_draft, dtype=jnp.int32)[None]
        own = jnp.take(text, ahead, mode="clip")
        same = (block.tokens == own) & (ahead < longest)
        on_text = jnp.sum(jnp.cumprod(same.astype(jnp.int32), axis=1), axis=1)
        return _Copied(block.tokens, copier.matched(state), block.num_drafted, on_text)

    rows_args = (rows.inputs, rows.lengths, rows.outputs, before)
    return jax.lax.map(lambda one: of_row(*one), jax.tree.map(jnp.asarray, rows_args))


@functools.partial(jit, static_argnums=(0, 1))
def _sums(
    asked: tuple[Judgement, ...],
    kinds: tuple[Lookup, ...],
    probs: dict[str, Array],
    copied: list[_Copied],
    ends: Array,
) -> list[tuple[Array, Array]]:
    """For each judgement the sum over positions of what is accepted, and of what is looked at."""
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
        # Where those before it stand, and the text has a token there.
        seen = (found.drafted[..., None] > step) & (found.on_text[..., None] >= step)
        seen &= ahead < ends[:, None, None]
        at = jnp.broadcast_to(jnp.minimum(ahead, place.shape[1] - 1), found.tokens.shape)
        p = jax.vmap(lambda p, at, tokens: p[at, tokens])(probs[reviewer], at, found.tokens)
        stands = jnp.where(seen, jnp.minimum(jnp.float32(lenient) * p, 1.0), 0.0)
        return jnp.sum(stands, axis=(0, 1)), jnp.sum(seen.astype(jnp.float32), axis=(0, 1))

    sums = []
    for reviewer, one, lenient in asked:
        if isinstance(one, Lookup):
            sums.append(of_copies(reviewer, copied[kinds.index(one)], lenient))
        else:
            both = jnp.minimum(probs_of(one), jnp.float32(lenient) * probs[reviewer])
            accepted = jnp.sum(jnp.where(real, jnp.sum(both, axis=-1), 0.0))
            sums.append((accepted, jnp.sum(real.astype(jnp.float32))))
    return sums


def _merged(parts: Sequence[_Copied], lengths: np.ndarray) -> Copies:
    """Copies at the real positions of all texts."""
    real = np.arange(parts[0].matched.shape[1])[None] < lengths[:, None]
    # Past the end of a text nothing is the text's.
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
