"""Acceptance rates between models along known texts, and what would be copied there.

Axes: B rows, P prompt length, N longest text, C tokens of context, G longest draft, V vocabulary.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.compilation import jit
from specjax.drafting import MaxGram, lenience
from specjax.sampling import distribution
from specjax.text import TextModel
from specjax.tuning.reading import Rows, batches, read_texts
from specjax.tuning.screening import Copies, Law
from specjax.types import Array, LanguageModel, Params, Sampling


class Compared(NamedTuple):
    """What the texts tell.

    Attributes:
      rates: see `Screening`.
      copies: see `Screening`.
    """

    rates: dict[tuple[int, Law, float], float]
    copies: dict[str, Copies]


class _Copied(NamedTuple):
    """What would be copied at each position; see `Copies`."""

    tokens: Any  # [B, N, G]
    matched: Any  # [B, N]
    drafted: Any  # [B, N]
    on_text: Any  # [B, N]


def compare(
    models: Sequence[TextModel],
    prompts: Sequence[np.ndarray],
    texts: Sequence[np.ndarray],
    *,
    sampling: Sampling,
    leniences: Sequence[float],
    tables: Mapping[str, Params],
    max_draft: int,
) -> Compared:
    """Reads texts with all models.

    A drafter's token is accepted with probability sum_v min(q(v), l p(v)) by a reviewer of lenience
    l, averaged over the positions of the texts. At temperature 0 that is how often the two agree.

    Args:
      models: the verifier, then the drafters, the largest first.
      prompts: the tokens of each row.
      texts: the verifier's tokens, at least one for each row.
      sampling: with one value of each setting.
      leniences: of the drafters that review; 1 is always among what is returned.
      tables: what copies -> its bigram table, or () for none.
      max_draft: G.

    Returns:
      The rates of all pairs, and the copies.

    Raises:
      ValueError: if a model gives NaN.
    """
    vocab = models[0].model.vocab_size
    copier = MaxGram(vocab, max_draft)
    kinds = sorted(tables)  # as JAX orders a dict
    laws = tuple(_laws(len(models), kinds, sorted({1.0, *leniences})))
    sums: dict[Any, np.ndarray] = {}
    copied: dict[str, list[_Copied]] = {kind: [] for kind in tables}
    for part, rows in batches(prompts, texts, vocab, len(models)):
        probs, before = _read(models, rows, sampling)
        found = {kind: _copy(copier, table, rows, before) for kind, table in tables.items()}
        counted = _compare(laws, tuple(probs), found, rows.ends)
        for key, value in zip(_keys(laws, kinds), jax.device_get(counted), strict=True):
            sums[key] = sums.get(key, 0.0) + np.asarray(value, np.float64)
        for kind, here in jax.device_get(found).items():
            copied[kind].append(_Copied(*(x[: part.stop - part.start] for x in here)))
    lengths = np.asarray([len(text) for text in texts])
    rates = {law: float(sums[law] / lengths.sum()) for law in laws}
    for (reviewer, law, _), rate in rates.items():
        if np.isnan(rate):
            raise ValueError(
                f"{models[reviewer].name} or {models[law.place].name} gives NaN: look at the "
                "weights"
            )
    rates = {law: min(max(rate, 0.0), 1.0) for law, rate in rates.items()}
    return Compared(rates, {k: _merged(k, parts, lengths, sums) for k, parts in copied.items()})


def _laws(
    models: int, kinds: Sequence[str], leniences: Sequence[float]
) -> list[tuple[int, Law, float]]:
    """All (reviewer, law, lenience of the reviewer) that a hierarchy may have."""
    found = []
    for place in range(1, models):
        for reviewer in range(place):
            mine = leniences if reviewer else (1.0,)
            found += [(reviewer, Law(place), lenient) for lenient in mine]
            for below in (*range(place + 1, models), *kinds):
                # All levels below the verifier have one lenience.
                found += [
                    (reviewer, Law(place, below, lenient), lenient if reviewer else 1.0)
                    for lenient in leniences
                    if lenient > 1.0
                ]
    return found


def _keys(laws: Sequence[tuple[int, Law, float]], kinds: Sequence[str]) -> list[Any]:
    """What `_compare` returns, in order."""
    return [*laws, *((kind, *who) for kind in kinds for who in (*_reviewers(laws), ("seen",)))]


def _reviewers(laws: Sequence[tuple[int, Law, float]]) -> list[tuple[int, float]]:
    """(place, lenience) of whoever may review copies."""
    leniences = sorted({law.lenience for _, law, _ in laws} | {x for _, _, x in laws} | {1.0})
    drafters = sorted({law.place for _, law, _ in laws})
    return [(0, 1.0), *((place, lenient) for place in drafters for lenient in leniences)]


def _read(models: Sequence[TextModel], rows: Rows, sampling: Sampling) -> tuple[list[Array], Array]:
    """Each model's distributions `[B, N, V]`, and the token before each position `[B, N]`."""
    found = [_laws_along(m.model, m.prepared, *rows[:3], sampling) for m in models]
    return [probs for probs, _ in found], found[0][1]


@functools.partial(jit, static_argnums=0)
def _laws_along(
    model: LanguageModel,
    params: Params,
    inputs: Array,
    lengths: Array,
    texts: Array,
    sampling: Sampling,
) -> tuple[Array, Array]:
    said = read_texts(model, params, inputs, lengths, texts)
    of_row = jax.vmap(lambda one: distribution(one, sampling))
    return jax.vmap(of_row)(said.logits), said.before


@functools.partial(jit, static_argnums=0)
def _copy(copier: MaxGram, table: Params, rows: Rows, before: Array) -> _Copied:
    """What is copied after each beginning of each text."""
    longest = rows.texts.shape[1]
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

    rows_args = (rows.inputs, rows.lengths, rows.texts, before)
    return jax.lax.map(lambda one: of_row(*one), jax.tree.map(jnp.asarray, rows_args))


@functools.partial(jit, static_argnums=0)
def _compare(
    laws: tuple[tuple[int, Law, float], ...],
    probs: tuple[Array, ...],
    copied: dict[str, _Copied],
    ends: Array,
) -> list[Array]:
    """Sums over the positions: of each rate, then of what is copied; see `_keys`."""
    place = jnp.arange(probs[0].shape[1], dtype=jnp.int32)[None]
    real = place < ends[:, None]

    def law_of(law: Law) -> Array:
        own = probs[law.place]
        if law.below is None:
            return own
        rule = lenience(law.lenience)
        if isinstance(law.below, int):
            return jax.vmap(jax.vmap(rule))(probs[law.below], own)
        first = copied[law.below]
        q = jax.nn.one_hot(first.tokens[..., 0], own.shape[-1], dtype=jnp.float32)
        pi = jax.vmap(jax.vmap(rule))(q, own)
        return jnp.where((first.drafted > 0)[..., None], pi, own)

    sums = []
    for reviewer, law, lenient in laws:
        both = jnp.minimum(law_of(law), jnp.float32(lenient) * probs[reviewer])
        sums.append(jnp.sum(jnp.where(real, jnp.sum(both, axis=-1), 0.0)))
    for kind in sorted(copied):
        found = copied[kind]
        longest = found.tokens.shape[-1]
        step = jnp.arange(longest, dtype=jnp.int32)[None, None]
        ahead = place[..., None] + step
        # Where those before it stand, and the text has a token there.
        seen = (found.drafted[..., None] > step) & (found.on_text[..., None] >= step)
        seen &= ahead < ends[:, None, None]
        at = jnp.minimum(ahead, place.shape[1] - 1)
        for reviewer, lenient in _reviewers(laws):
            p = jax.vmap(lambda p, at, tokens: p[at, tokens])(
                probs[reviewer], jnp.broadcast_to(at, found.tokens.shape), found.tokens
            )
            stands = jnp.where(seen, jnp.minimum(jnp.float32(lenient) * p, 1.0), 0.0)
            sums.append(jnp.sum(stands, axis=(0, 1)))
        sums.append(jnp.sum(seen.astype(jnp.float32), axis=(0, 1)))
    return sums


def _merged(
    kind: str, parts: Sequence[_Copied], lengths: np.ndarray, sums: Mapping[Any, np.ndarray]
) -> Copies:
    """Copies at the real positions of all texts."""
    real = np.arange(parts[0].matched.shape[1])[None] < lengths[:, None]
    # Past the end of a text nothing is the text's.
    left = lengths[:, None] - np.arange(real.shape[1])[None]
    matched, drafted, on_text = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("matched", "drafted", "on_text")
    )
    seen = np.maximum(sums[kind, "seen"], 1.0)
    accepted = {
        key[1:]: np.clip(total / seen, 0.0, 1.0)
        for key, total in sums.items()
        if key[0] == kind and key[1] != "seen"
    }
    return Copies(
        matched=matched[real],
        drafted=drafted[real],
        on_text=np.minimum(np.minimum(on_text, left), drafted)[real],
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        accepted=accepted,
    )
