"""The training data of an acceptance head: drafted tokens along verifier's texts, and labels.

Source: SpecDec++ (arXiv 2405.19715), section 3.3. Axes: B rows, N longest text, T positions of a
chunk, V vocabulary, D the drafter's width, n positions of all rows, E = rows + 1 ends.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int64

from specjax.acceptance_head import drawn_confidences
from specjax.compilation import jit
from specjax.errors import UserError
from specjax.sampling import draw, num_uniforms
from specjax.text import Pair
from specjax.text.teacher_forcing import Begun, KnownRows, KnownTexts, batches, begin, read_on
from specjax.training.step import root_key
from specjax.types import Cache, LanguageModel, Params, Sampling

# Separate from the streams of decoding, which fold the row's id into the seed's key directly.
_STREAM = 0x41434345
# Entries of a chunk's distributions, and the most positions of a chunk.
_CHUNK_ENTRIES, _LONGEST_CHUNK = 2**25, 16


class DraftedTokens(NamedTuple):
    """Drafted tokens with their labels and features, all rows in sequence.

    Attributes:
      labels: P = min(1, p(Y) / q(Y)): the chance that Y is accepted.
      drawn: the drafter's confidence of Y: its softmax at temperature 1.
      top: the largest confidence there.
      entropy: of the confidences there, in nats.
      hidden: the drafter's last hidden state of Y.
      offsets: row i's tokens are `offsets[i] .. offsets[i + 1]`.
    """

    labels: Float32[np.ndarray, " n"]
    drawn: Float32[np.ndarray, " n"]
    top: Float32[np.ndarray, " n"]
    entropy: Float32[np.ndarray, " n"]
    hidden: Float32[np.ndarray, "n D"]
    offsets: Int64[np.ndarray, " E"]


class _Models(NamedTuple):
    """Static: the models; or arrays: their parameters, or their caches."""

    drafter: Any
    verifier: Any


class _Chunk(NamedTuple):
    """T positions, on the device or the host; see `DraftedTokens`. `learnt`: whether Z is Y."""

    labels: Float32[Any, "B T"]
    drawn: Float32[Any, "B T"]
    top: Float32[Any, "B T"]
    entropy: Float32[Any, "B T"]
    hidden: Float32[Any, "B T D"]
    learnt: Bool[Any, "B T"]


def label(
    pair: Pair,
    texts: KnownTexts,
    ids: Sequence[int],
    *,
    temperature: float,
    mixing: float | None,
    seed: int,
    batch_size: int = 32,
) -> DraftedTokens:
    """Drafts a token at each position of the verifier's texts, with its chance of acceptance.

    At position i, after the text's tokens X_1 .. X_{i-1}, Y_i is drawn from the drafter's q, and
    its label is P_i = min(1, p(Y_i) / q(Y_i)). The hidden state of Y_i is read

    - with `mixing` r: after Z_1 .. Z_{i-1}, where each Z_j is X_j with probability r, else Y_j, in
      a single pass. Only positions where this draw gave Z_i = Y_i are returned: a Y_i that equals
      X_i by chance does not count, because such tokens are accepted more often.
    - with None: after X_1 .. X_{i-1}, like its label. Decoding reads this if the tokens before Y_i
      were accepted. It takes a pass of the drafter per position.

    A row's draws depend only on the seed and its id, not on other rows.
    """
    by_row: list[list[np.ndarray]] = [[] for _ in ids]
    for places, rows in batches(texts, batch_size, by_length=True):
        filled = np.zeros(batch_size, np.int32)
        filled[: len(places)] = np.asarray(ids)[places]
        chunk = _read_batch(pair, rows, _row_keys(seed, filled), temperature, mixing)
        for row, place in enumerate(places):
            learnt = chunk.learnt[row] & rows.real[row, : chunk.learnt.shape[1]]
            by_row[place] = [np.asarray(x[row])[learnt] for x in chunk[:-1]]
    labels, drawn, top, entropies, hidden = (
        np.concatenate(parts).astype(np.float32) for parts in zip(*by_row, strict=True)
    )
    for name, array in (("the labels", labels), ("the drafter's hidden states", hidden)):
        if np.isnan(array).any():
            raise UserError(
                f"{name} have NaN: check the checkpoints {pair.drafter.name} and "
                f"{pair.verifier.name}"
            )
    offsets = np.cumsum([0, *(len(parts[0]) for parts in by_row)], dtype=np.int64)
    return DraftedTokens(labels, drawn, top, entropies, hidden, offsets)


def _read_batch(
    pair: Pair, rows: KnownRows, keys: Array, temperature: float, mixing: float | None
) -> _Chunk:
    """All positions of these rows, on the host."""
    models = _Models(pair.drafter.model, pair.verifier.model)
    params = _Models(pair.drafter.prepared, pair.verifier.prepared)
    along_text = mixing is None
    # A power of two, so that chunks divide the padded texts.
    entries = rows.outputs.shape[0] * models.drafter.vocab_size
    width = 1 << (max(1, min(_LONGEST_CHUNK, _CHUNK_ENTRIES // entries)).bit_length() - 1)
    states, mixed = _begin(models, along_text, params, rows)
    settings = jnp.float32(temperature), jnp.float32(0.0 if mixing is None else mixing)
    chunks = []
    for at in range(0, int(rows.ends.max()), width):
        chunk, states, mixed = _read_chunk(
            models, width, along_text, params, states, mixed, rows.outputs, np.int32(at), keys,
            settings,
        )  # fmt: skip
        chunks.append(jax.device_get(chunk))
    return _Chunk(*(np.concatenate(parts, axis=1) for parts in zip(*chunks, strict=True)))


@functools.partial(jit, static_argnums=(0, 1))
def _begin(
    models: _Models, along_text: bool, params: _Models, rows: KnownRows
) -> tuple[_Models, Cache]:
    """Both models after the prompts, and the drafter's cache of Z, or ()."""
    # A position more than the text, for reading Y after it.
    states = _Models(*(begin(m, p, rows, more=1) for m, p in zip(models, params, strict=True)))
    if along_text:
        return states, ()
    first: Begun = states.drafter
    read = models.drafter.extend(params.drafter, first.cache, first.before[:, :1], first.positions)
    return states, read.cache


@functools.partial(jit, static_argnums=(0, 1, 2), donate_argnums=(4, 5))
def _read_chunk(
    models: _Models,
    width: int,
    along_text: bool,
    params: _Models,
    states: _Models,
    mixed: Cache,
    texts: Array,
    at: Array,
    keys: Array,
    settings: tuple[Array, Array],
) -> tuple[_Chunk, _Models, Cache]:
    """Labels the positions `at .. at + width` of the texts."""
    temperature, mixing = settings
    drafter, own = read_on(models.drafter, params.drafter, states.drafter, at, width)
    verifier, other = read_on(models.verifier, params.verifier, states.verifier, at, width)
    q, p = (x.probs(Sampling(temperature)) for x in (drafter, verifier))
    uniforms = _uniforms(keys, at, width, num_uniforms(models.drafter.vocab_size) + 1)
    drafted = jax.vmap(jax.vmap(draw))(q, uniforms[..., 1:])
    top, entropy, drawn = jax.vmap(jax.vmap(drawn_confidences))(drafter.confidences(), drafted)
    learnt = jnp.logical_or(along_text, uniforms[..., 0] >= mixing)
    positions = own.positions + at + 1  # of Y
    if along_text:
        hidden = _read_each(models.drafter, params.drafter, own.cache, drafted, positions)
    else:
        z = jnp.where(learnt, drafted, jax.lax.dynamic_slice_in_dim(texts, at, width, axis=1))
        _, hidden, mixed = models.drafter.extend(params.drafter, mixed, z, positions)
    chunk = _Chunk(
        labels=jnp.minimum(_of(p, drafted) / _of(q, drafted), 1.0),
        drawn=drawn,
        top=top,
        entropy=entropy,
        hidden=hidden.astype(jnp.float32),
        learnt=learnt,
    )
    return chunk, _Models(own, other), mixed


def _read_each(
    model: LanguageModel, params: Params, cache: Cache, tokens: Array, positions: Array
) -> Array:
    """Hidden states of tokens, each after the cache's entries before it."""

    def read(place: Array) -> Array:
        token = jax.lax.dynamic_slice_in_dim(tokens, place, 1, axis=1)
        return model.score(params, cache, token, positions + place)[1][:, 0]

    hidden = jax.lax.map(read, jnp.arange(tokens.shape[1], dtype=jnp.int32))
    return jnp.swapaxes(hidden, 0, 1)


def _of(probs: Array, tokens: Array) -> Array:
    """The probabilities of the tokens."""
    return jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]


@jit
def _row_keys(seed: Any, ids: Array) -> Array:
    stream = jax.random.fold_in(root_key(seed), _STREAM)
    return jax.vmap(lambda row: jax.random.fold_in(stream, row))(ids)


def _uniforms(keys: Array, at: Array, width: int, count: int) -> Array:
    """`count` per position, independent of the chunks."""
    places = at + jnp.arange(width, dtype=jnp.int32)

    def of_row(key: Array) -> Array:
        return jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i), (count,)))(places)

    return jax.vmap(of_row)(keys)
