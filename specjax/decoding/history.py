"""The tokens that a model has read of each row, so that it may lag behind and catch up.

Axes: B rows, G longest block, S cache length, T committed tokens, W tokens of a pass.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from specjax.types import Cache, LanguageModel, Params, Prefilled, PrefilledStates


class History(NamedTuple):
    """A row's tokens by cache position, and the part of them that is in the cache.

    Attributes:
      tokens: the token at each cache position, from the prompt's last token on; after the last
        committed token, the tokens that were read last.
      read: cache entries below it belong to `tokens`. In a row that lags, it is less than the
        position of the last committed token. After a row was moved back, it still counts the tokens
        beyond, so that they need not be read again if they are committed.
      drafted: the last block that was read.
    """

    tokens: Int32[Array, "B S"]
    read: Int32[Array, " B"]
    drafted: Int32[Array, "B G"]


def begin(filled: Prefilled | PrefilledStates, max_length: int, max_draft: int) -> History:
    """The history after a prompt, of which all but the last token is read."""
    rows = filled.tokens.shape[0]
    tokens = jnp.zeros((rows, max_length), jnp.int32)
    return History(
        tokens=put_at(tokens, filled.tokens[:, None], filled.positions),
        read=filled.positions,
        drafted=jnp.zeros((rows, max_draft), jnp.int32),
    )


def catch_up(
    model: LanguageModel,
    params: Params,
    cache: Cache,
    positions: Int32[Array, " B"],
    history: History,
    active: Bool[Array, " B"],
    spare: int,
) -> tuple[Cache, History, Array]:
    """Lets active rows read the tokens that they lack, up to the last; G + 1 tokens a pass.

    There is no pass if only other rows lag, or by at most `spare` tokens (static). `positions` are
    those of the last committed tokens. Also returns the number of passes.
    """
    start_of = (cache, history.read, jnp.int32(0))
    width = history.drafted.shape[1] + 1

    def lags(carry: tuple[Cache, Array, Array]) -> Array:
        return jnp.any(active & (carry[1] + spare < positions))

    def step(carry: tuple[Cache, Array, Array]) -> tuple[Cache, Array, Array]:
        cache, read, calls = carry
        cache, _, start = _pass(model, params, cache, positions, history, read, width)
        read = jnp.maximum(read, jnp.minimum(start + width, positions))
        # Entries past the last token were overwritten.
        return cache, jnp.minimum(read, positions + 1), calls + 1

    cache, read, calls = lax.while_loop(lags, step, start_of)
    return cache, history._replace(read=read), calls


class LastRead(NamedTuple):
    """A model's output after its rows' last committed tokens, once it has caught up in passes."""

    cache: Cache
    history: History
    logits: Float32[Array, "B V"]
    hidden: Float[Array, "B D"]
    calls: Int32[Array, ""]


def read_last(
    model: LanguageModel,
    params: Params,
    cache: Cache,
    positions: Int32[Array, " B"],
    history: History,
    active: Bool[Array, " B"],
    width: int,
) -> LastRead:
    """Lets active rows read all tokens that they lack, the last committed token included.

    Some active rows lag; the output of other rows is arbitrary. A pass reads `width` tokens.
    """

    def unread(carry: tuple[Array, LastRead]) -> Array:
        return (carry[1].calls == 0) | jnp.any(active & (carry[0] <= positions))

    def step(carry: tuple[Array, LastRead]) -> tuple[Array, LastRead]:
        read, last = carry
        cache, out, start = _pass(model, params, last.cache, positions, history, read, width)
        at = jnp.clip(positions - start, 0, width - 1)
        row = lambda x: jax.vmap(lambda y, i: lax.dynamic_index_in_dim(y, i, keepdims=False))(x, at)  # noqa: E731
        # Nothing past the last token counts.
        read = jnp.minimum(jnp.maximum(read, start + width), positions + 1)
        logits, hidden = out
        return read, LastRead(cache, history, row(logits), row(hidden), last.calls + 1)

    shapes = jax.eval_shape(
        lambda cache: _pass(model, params, cache, positions, history, history.read, width)[1], cache
    )
    logits, hidden = (jnp.zeros((x.shape[0], x.shape[2]), x.dtype) for x in shapes)
    start_of = LastRead(cache, history, logits, hidden, jnp.int32(0))
    read, last = lax.while_loop(unread, step, (history.read, start_of))
    return last._replace(history=history._replace(read=read))


def _pass(
    model: LanguageModel,
    params: Params,
    cache: Cache,
    positions: Array,
    history: History,
    read: Array,
    width: int,
) -> tuple[Cache, tuple[Array, Array], Array]:
    """Reads `width` tokens of each row from `read [B]` on; also returns the first position."""
    # Rows that do not lag read their last token again, which changes nothing.
    start = jnp.minimum(read, positions)
    place = start[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    # No padding: past the end the last token is repeated.
    place = jnp.minimum(place, positions[:, None])
    tokens = jnp.take_along_axis(history.tokens, place, axis=1, mode="clip")
    logits, hidden, cache = model.extend(params, cache, tokens, start)
    return cache, (logits, hidden), start


class Unread(NamedTuple):
    """The tokens of a pass: tokens that a row lags behind, its last committed token, its draft.

    Attributes:
      starts: the position of the first of them.
      lags: the number of them before the last committed token.
    """

    tokens: Int32[Array, "B W"]
    starts: Int32[Array, " B"]
    lags: Int32[Array, " B"]


def unread(history: History, positions: Array, drafted: Array, width: int) -> Unread:
    """The first `width` tokens that the cache lacks; the drafted tokens `[B, G]` at the end."""
    starts = jnp.minimum(history.read, positions)
    place = starts[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    before = jnp.take_along_axis(history.tokens, place, axis=1, mode="clip")
    new = jnp.take_along_axis(drafted, place - positions[:, None] - 1, axis=1, mode="clip")
    tokens = jnp.where(place <= positions[:, None], before, new)
    return Unread(tokens, starts, positions - starts)


def note_block(
    history: History, positions: Int32[Array, " B"], drafted: Int32[Array, "B G"], count: Array
) -> History:
    """Notes that the last committed token, at `positions`, and a block's first tokens were read.

    `count` is the number of tokens read, with the committed token. Reading in a row that lags does
    not count: it did not see the earlier tokens.
    """
    some = jnp.broadcast_to(count > 0, positions.shape)
    read = jnp.where(some & (history.read >= positions), positions + count, history.read)
    # Unread positions must keep their tokens, which were read before.
    starts = jnp.where(some, positions + 1, history.tokens.shape[1])
    return History(put_at(history.tokens, drafted, starts), read, drafted)


def commit(
    history: History,
    positions: Int32[Array, " B"],
    tokens: Int32[Array, "B T"],
    counts: Int32[Array, " B"],
) -> History:
    """Updates the history after the first `counts` of `tokens` are committed at `positions + 1`.

    Equal tokens need not be read again.
    """
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    place = positions[:, None] + 1 + index
    before = jnp.take_along_axis(history.tokens, place, axis=1, mode="clip")
    agrees = (tokens == before) & (index < counts[:, None])
    same = jnp.cumprod(agrees.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    return history._replace(
        tokens=put_at(history.tokens, tokens, positions + 1),
        read=jnp.minimum(history.read, positions + 1 + same),
    )


def put_at(
    buffer: Array, values: Array, starts: Array, kept: Bool[Array, "B n"] | None = None
) -> Array:
    """Writes values at a place of each row; those past the end are dropped.

    Value i of row b of `values [B, n, ...]` is written at `starts[b] + i` of `buffer [B, T, ...]`,
    if it is in `kept`, by default all.
    """
    place = starts[:, None] + jnp.arange(values.shape[1], dtype=jnp.int32)[None]
    if kept is not None:
        # Other values are written past the end, where they are dropped.
        place = jnp.where(kept, place, buffer.shape[1])
    put = lambda row, at, new: row.at[at].set(new, mode="drop")  # noqa: E731
    return jax.vmap(put)(buffer, place, values)


def put_column(buffer: Array, value: Any, index: Array) -> Array:
    """Writes `value [B, ...]` at `index` of axis 1 of `buffer [B, T, ...]`."""
    return lax.dynamic_update_index_in_dim(buffer, value, index, axis=1)
