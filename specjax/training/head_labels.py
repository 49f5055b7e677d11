"""What an acceptance head learns from: drafted tokens along verifier's texts, and their labels.

Source: SpecDec++ (arXiv 2405.19715), section 3.3. Axes: B rows, P prompt length, N longest text,
T positions of a chunk, S cache length, V vocabulary, D the drafter's width.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.acceptance_head import drawn_confidences
from specjax.compilation import jit
from specjax.sampling import confidence, distribution, draw, num_uniforms
from specjax.text import Pair
from specjax.training.step import root_key
from specjax.types import Array, Cache, LanguageModel, Params, Sampling

# Apart from the streams of decoding, which fold the row's id into the seed's key itself.
_STREAM = 0x41434345
# Entries of one chunk's distributions, and the most positions of a chunk.
_CHUNK_ENTRIES, _LONGEST_CHUNK = 2**25, 16


class Positions(NamedTuple):
    """What is known of drafted tokens, all rows one after the other.

    Attributes:
      labels: `[n]` float32, P = min(1, p(Y) / q(Y)): how likely Y is accepted.
      drawn: `[n]` float32, the drafter's confidence of Y, its softmax at temperature 1.
      top: `[n]` float32, the largest confidence there.
      entropy: `[n]` float32, of the confidences there, in nats.
      hidden: `[n, D]` float32, the drafter's last hidden state of Y.
      offsets: `[rows + 1]` int64; row i's positions are `offsets[i] .. offsets[i + 1]`.
    """

    labels: np.ndarray  # [n]
    drawn: np.ndarray  # [n]
    top: np.ndarray  # [n]
    entropy: np.ndarray  # [n]
    hidden: np.ndarray  # [n, D]
    offsets: np.ndarray  # [rows + 1]


class _Models(NamedTuple):
    """Static: what computes; or arrays: its parameters."""

    drafter: Any
    verifier: Any


class _Reading(NamedTuple):
    """How far the models have read, one cache per text that they read."""

    drafter: Cache
    verifier: Cache
    mixed: Cache  # the drafter's, of Z, or ()
    before: _Models  # [B, N] each, the token before each position
    positions: _Models  # [B] each, where the first of them belongs


class _Chunk(NamedTuple):
    """Of T positions, on the device or the host; see `Positions`."""

    labels: Any  # [B, T]
    drawn: Any  # [B, T]
    top: Any  # [B, T]
    entropy: Any  # [B, T]
    hidden: Any  # [B, T, D]
    learnt: Any  # [B, T] bool, whether Z is Y


def label(
    pair: Pair,
    prompts: Sequence[np.ndarray],
    texts: Sequence[np.ndarray],
    ids: Sequence[int],
    *,
    temperature: float,
    mixing: float | None,
    seed: int,
    batch_size: int = 32,
) -> Positions:
    """Drafts a token at each position of the verifier's texts, and says how likely it is accepted.

    At position i, after the text's tokens X_1 .. X_{i-1}, Y_i is drawn from the drafter's q, and
    its label is P_i = min(1, p(Y_i) / q(Y_i)). The hidden state of Y_i is read

    - with `mixing` r: after Z_1 .. Z_{i-1}, where each Z_j is X_j with probability r and else Y_j,
      in one pass over Z. Only positions with Z_i = Y_i by that draw are returned: a Y_i that
      happens to be X_i does not count, for such tokens are accepted more often.
    - with None: after X_1 .. X_{i-1}, as its label is. That is what decoding reads if the tokens
      before Y_i were accepted. It takes one pass of the drafter per position.

    A row's draws depend on the seed and its id, not on its company.

    Args:
      pair: the models.
      prompts: of each row, its tokens, at least one.
      texts: of each row, the verifier's tokens X, at least one, with the end of sequence.
      ids: of each row, a whole number in 0 .. 2**31 - 1.
      temperature: of p and q.
      mixing: r in [0, 1), or None.
      seed: of the draws.
      batch_size: rows read together.

    Returns:
      The positions, rows in the order given.

    Raises:
      ValueError: if a model gives NaN.
    """
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), len(texts[i])))
    found: list[list[np.ndarray]] = [[] for _ in prompts]
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        padded = rows + rows[:1] * (batch_size - len(rows))
        chunks = _read_batch(
            pair,
            [prompts[i] for i in padded],
            [texts[i] for i in padded],
            np.asarray([ids[i] for i in padded], np.int32),
            temperature=temperature,
            mixing=mixing,
            seed=seed,
        )
        for place, i in enumerate(rows):
            learnt = chunks.learnt[place, : len(texts[i])]
            found[i] = [np.asarray(x[place, : len(texts[i])])[learnt] for x in chunks[:-1]]
    labels, drawn, top, entropies, hidden = (
        np.concatenate(parts).astype(np.float32) for parts in zip(*found, strict=True)
    )
    for name, array in (("the labels", labels), ("the drafter's hidden states", hidden)):
        if np.isnan(array).any():
            raise ValueError(
                f"{name} have NaN: look at the weights of {pair.drafter.name} and "
                f"{pair.verifier.name}"
            )
    offsets = np.cumsum([0, *(len(parts[0]) for parts in found)], dtype=np.int64)
    return Positions(labels, drawn, top, entropies, hidden, offsets)


def _read_batch(
    pair: Pair,
    prompts: Sequence[np.ndarray],
    texts: Sequence[np.ndarray],
    ids: np.ndarray,
    *,
    temperature: float,
    mixing: float | None,
    seed: int,
) -> _Chunk:
    """All positions of these rows, on the host."""
    models = _Models(pair.drafter.model, pair.verifier.model)
    params = _Models(pair.drafter.prepared, pair.verifier.prepared)
    along_text = mixing is None
    width = _chunk_width(len(prompts) * models.drafter.vocab_size)
    inputs, lengths = _padded(prompts, _rounded(max(map(len, prompts))))
    tokens, ends = _padded(texts, _rounded(max(map(len, texts))))
    reading = _begin(models, along_text, params, inputs, lengths, tokens)
    settings = jnp.float32(temperature), jnp.float32(0.0 if mixing is None else mixing)
    keys = _row_keys(seed, ids)
    chunks = []
    for at in range(0, int(ends.max()), width):
        chunk, reading = _read_chunk(
            models, width, along_text, params, reading, tokens, np.int32(at), keys, settings
        )
        chunks.append(jax.device_get(chunk))
    return _Chunk(*(np.concatenate(parts, axis=1) for parts in zip(*chunks, strict=True)))


@functools.partial(jit, static_argnums=(0, 1))
def _begin(
    models: _Models,
    along_text: bool,
    params: _Models,
    inputs: Array,
    lengths: Array,
    tokens: Array,
) -> _Reading:
    """Takes prompts `[B, P]` in, before texts `[B, N]`."""

    def prefill(model: LanguageModel, own: Params) -> Any:
        # One more than the text: Y is read behind it.
        longest = model.prompt_positions(inputs.shape[1], 0) + tokens.shape[1] + 1
        return model.prefill(own, inputs, lengths, longest)

    filled = _Models(*(prefill(m, p) for m, p in zip(models, params, strict=True)))
    before = _Models(
        *(jnp.concatenate([x.tokens[:, None], tokens[:, :-1]], axis=1) for x in filled)
    )
    first = filled.drafter
    mixed = (
        ()
        if along_text
        else models.drafter.extend(
            params.drafter, first.cache, first.tokens[:, None], first.positions
        ).cache
    )
    return _Reading(
        drafter=first.cache,
        verifier=filled.verifier.cache,
        mixed=mixed,
        before=before,
        positions=_Models(*(x.positions for x in filled)),
    )


@functools.partial(jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _read_chunk(
    models: _Models,
    width: int,
    along_text: bool,
    params: _Models,
    reading: _Reading,
    tokens: Array,
    at: Array,
    keys: Array,
    settings: tuple[Array, Array],
) -> tuple[_Chunk, _Reading]:
    """Labels the positions `at .. at + width` of texts `[B, N]`."""
    temperature, mixing = settings

    def extend(which: str, cache: Cache) -> Any:
        before = jax.lax.dynamic_slice_in_dim(getattr(reading.before, which), at, width, axis=1)
        own = getattr(params, which)
        start = getattr(reading.positions, which) + at
        return getattr(models, which).extend(own, cache, before, start)

    drafter = extend("drafter", reading.drafter)
    verifier = extend("verifier", reading.verifier)
    q, p = (
        _by_position(distribution, x.logits, Sampling(temperature)) for x in (drafter, verifier)
    )
    confidences = _by_position(confidence, drafter.logits)
    uniforms = _uniforms(keys, at, width, num_uniforms(models.drafter.vocab_size) + 1)
    drafted = jax.vmap(jax.vmap(draw))(q, uniforms[..., 1:])
    top, entropy, drawn = jax.vmap(jax.vmap(drawn_confidences))(confidences, drafted)
    ratio = _of(p, drafted) / _of(q, drafted)
    learnt = jnp.logical_or(along_text, uniforms[..., 0] >= mixing)
    positions = reading.positions.drafter + at + 1  # of Y
    mixed = reading.mixed
    if along_text:
        hidden = _read_alone(models.drafter, params.drafter, drafter.cache, drafted, positions)
    else:
        own = jax.lax.dynamic_slice_in_dim(tokens, at, width, axis=1)
        z = jnp.where(learnt, drafted, own)
        _, hidden, mixed = models.drafter.extend(params.drafter, mixed, z, positions)
    chunk = _Chunk(
        labels=jnp.minimum(ratio, 1.0),
        drawn=drawn,
        top=top,
        entropy=entropy,
        hidden=hidden.astype(jnp.float32),
        learnt=learnt,
    )
    return chunk, reading._replace(drafter=drafter.cache, verifier=verifier.cache, mixed=mixed)


def _read_alone(
    model: LanguageModel, params: Params, cache: Cache, tokens: Array, positions: Array
) -> Array:
    """Hidden states `[B, T, D]` of tokens `[B, T]`, each after what the cache holds before it."""

    def read(place: Array) -> Array:
        token = jax.lax.dynamic_slice_in_dim(tokens, place, 1, axis=1)
        return model.score(params, cache, token, positions + place)[1][:, 0]

    hidden = jax.lax.map(read, jnp.arange(tokens.shape[1], dtype=jnp.int32))
    return jnp.swapaxes(hidden, 0, 1)


def _by_position(function: Any, x: Array, *same: Any) -> Array:
    """Applies a function of `[V]` to each position of `[B, T, V]`."""
    over = jax.vmap(lambda row: function(row, *same))
    return jax.vmap(over)(x)


def _of(probs: Array, tokens: Array) -> Array:
    """The entries `[B, T]` of `probs [B, T, V]` at `tokens [B, T]`."""
    return jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]


@jit
def _row_keys(seed: Any, ids: Array) -> Array:
    stream = jax.random.fold_in(root_key(seed), _STREAM)
    return jax.vmap(lambda row: jax.random.fold_in(stream, row))(ids)


def _uniforms(keys: Array, at: Array, width: int, count: int) -> Array:
    """`[B, T, count]` in [0, 1): of each position its own, whatever the chunks."""
    places = at + jnp.arange(width, dtype=jnp.int32)

    def of_row(key: Array) -> Array:
        return jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i), (count,)))(places)

    return jax.vmap(of_row)(keys)


def _padded(rows: Sequence[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
    """`[B, length]` int32, filled up with token 0, and the lengths `[B]`."""
    out = np.zeros((len(rows), length), np.int32)
    for place, row in enumerate(rows):
        out[place, : len(row)] = row
    return out, np.asarray([len(row) for row in rows], np.int32)


def _chunk_width(entries: int) -> int:
    """Positions of a chunk, a power of two, where one of them has so many probabilities."""
    return 1 << (max(1, min(_LONGEST_CHUNK, _CHUNK_ENTRIES // entries)).bit_length() - 1)


def _rounded(length: int) -> int:
    """The next power of two from 16 up: few shapes."""
    return max(16, 1 << (length - 1).bit_length())
