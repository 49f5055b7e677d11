"""Known texts, and the models' outputs along them, from one pass without decoding.

Axes: B rows, P prompt length, N longest output, T positions read at once, V vocabulary, D width.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.compilation import jit
from specjax.errors import UserError
from specjax.sampling import confidence, distribution, log_distribution
from specjax.text.results import TopTokens
from specjax.text.text_models import TextModel
from specjax.types import Array, Cache, LanguageModel, Params, Prompts, Sampling

if TYPE_CHECKING:
    # A Decoder scores texts.
    from specjax.text.decoder import Decoder

# The most entries of arrays over the vocabulary in memory.
_ENTRIES = 2**27


class KnownTexts(NamedTuple):
    """Prompts and the texts that follow them.

    Attributes:
      prompts: the tokens of each prompt, at least one.
      outputs: the tokens that follow, at least one, end-of-sequence tokens included.
    """

    prompts: Sequence[np.ndarray]
    outputs: Sequence[np.ndarray]


class KnownRows(NamedTuple):
    """A padded batch of known texts.

    Attributes:
      inputs: `[B, P]` int32 prompts.
      lengths: `[B]` int32, the lengths of the prompts.
      outputs: `[B, N]` int32.
      ends: `[B]` int32, the lengths of the outputs; 0 in rows that only fill a batch.
    """

    inputs: Any  # [B, P]
    lengths: Any  # [B]
    outputs: Any  # [B, N]
    ends: Any  # [B]

    @property
    def real(self) -> Any:
        """`[B, N]` bool, which positions are part of an output."""
        return np.arange(self.outputs.shape[1], dtype=np.int32)[None] < self.ends[:, None]


class Begun(NamedTuple):
    """A model that has read the prompts, and perhaps a part of the outputs.

    Attributes:
      cache: its cache.
      before: `[B, N]` int32, the token before each position of the outputs.
      positions: `[B]` int32, the cache position at which the first of these belongs.
    """

    cache: Cache
    before: Array  # [B, N]
    positions: Array  # [B]


class Reading(NamedTuple):
    """A model's outputs along texts, position by position.

    Attributes:
      logits: `[B, T, V]` float32, for the output's token at each position.
      hidden: `[B, T, D]`, the last hidden states of the previous tokens.
      before: `[B, T]` int32, the previous tokens.
    """

    logits: Array  # [B, T, V]
    hidden: Array  # [B, T, D]
    before: Array  # [B, T]

    def probs(self, sampling: Sampling) -> Array:
        """`[B, T, V]` float32, the distributions after `sampling`, whose fields are scalars."""
        return _by_position(lambda logits: distribution(logits, sampling), self.logits)

    def confidences(self) -> Array:
        """`[B, T, V]` float32, the softmax at temperature 1."""
        return _by_position(confidence, self.logits)

    def log_probs(self, sampling: Sampling) -> Array:
        """`[B, T, V]` float32, see `log_distribution`."""
        return _by_position(lambda logits: log_distribution(logits, sampling), self.logits)


def rows_at_once(texts: KnownTexts, vocab_size: int, arrays: int) -> int:
    """Returns the largest batch that fits into memory, a power of two.

    Args:
      texts: the texts of the batches, which have one shape.
      vocab_size: V.
      arrays: the number of arrays `[B, N, V]` in memory.
    """
    longest = _rounded(max(map(len, texts.outputs)))
    most = max(1, _ENTRIES // (arrays * longest * vocab_size))
    return 1 << (min(most, len(texts.outputs)).bit_length() - 1)


def batches(
    texts: KnownTexts, rows: int, *, by_length: bool = False
) -> Iterator[tuple[np.ndarray, KnownRows]]:
    """Splits texts into batches, of few shapes.

    Args:
      texts: at least one text.
      rows: B; the last batch is filled with rows of one token and no output.
      by_length: whether to sort texts by length and pad each batch to its own length; if not, texts
        stay in order and all batches have one shape.

    Yields:
      The indices of the texts in a batch, and the batch.
    """
    lengths = [(len(x), len(y)) for x, y in zip(*texts, strict=True)]
    order = np.arange(len(lengths))
    if by_length:
        order = np.asarray(sorted(range(len(lengths)), key=lengths.__getitem__))
    for begin in range(0, len(order), rows):
        places = order[begin : begin + rows]
        of_shape = places if by_length else order
        width, longest = (
            _rounded(max(lengths[i][column] for i in of_shape)) for column in range(2)
        )
        inputs, sizes = _padded([texts.prompts[i] for i in places], rows, width)
        outputs, ends = _padded([texts.outputs[i] for i in places], rows, longest)
        yield places, KnownRows(inputs, np.maximum(sizes, 1), outputs, ends)


def begin(model: LanguageModel, params: Params, rows: KnownRows, more: int = 0) -> Begun:
    """Reads the prompts; to be jitted.

    Args:
      model: the model.
      params: its prepared parameters.
      rows: the texts.
      more: the number of tokens after the outputs for which the cache has room.

    Returns:
      The state for `read_on`.
    """
    longest = model.prompt_positions(rows.inputs.shape[1], 0) + rows.outputs.shape[1] + more
    filled = model.prefill(params, Prompts(rows.inputs, rows.lengths), longest)
    before = jnp.concatenate([filled.tokens[:, None], rows.outputs[:, :-1]], axis=1)
    return Begun(filled.cache, before, filled.positions)


def read_on(
    model: LanguageModel, params: Params, begun: Begun, at: Array | int, width: int
) -> tuple[Reading, Begun]:
    """Reads the positions `at .. at + width` of the outputs; to be jitted.

    Args:
      model: the model.
      params: its prepared parameters.
      begun: the state up to `at`.
      at: the first position; it is traced.
      width: T.

    Returns:
      The model's outputs there, and the new state.
    """
    before = jax.lax.dynamic_slice_in_dim(begun.before, at, width, axis=1)
    extended = model.extend(params, begun.cache, before, begun.positions + at)
    return Reading(extended.logits, extended.hidden, before), begun._replace(cache=extended.cache)


def read(model: LanguageModel, params: Params, rows: KnownRows) -> Reading:
    """Reads all positions of the outputs; to be jitted."""
    begun = begin(model, params, rows)
    return read_on(model, params, begun, 0, rows.outputs.shape[1])[0]


def check_read(finite: Any, *models: TextModel) -> None:
    """Raises ValueError unless the models' outputs are finite."""
    if not np.all(finite):
        names = " or ".join(model.name for model in models)
        raise UserError(f"{names} gives NaN: check the checkpoint")


def log_probs(model: TextModel, texts: KnownTexts, sampling: Sampling) -> list[np.ndarray]:
    """Returns the log-probability of each token of the outputs.

    Args:
      model: the model.
      texts: the texts.
      sampling: its fields are scalars.

    Returns:
      For each text an array `[n]` float32, -inf for impossible tokens.

    Raises:
      ValueError: the model gives NaN.
    """
    return [found for found, _ in with_top(model, texts, sampling, 0)]


def with_top(
    model: TextModel, texts: KnownTexts, sampling: Sampling, top: int
) -> list[tuple[np.ndarray, TopTokens]]:
    """Returns `log_probs`, and the `top` most probable tokens at each position."""
    found: list[Any] = [None] * len(texts.outputs)
    for places, rows in batches(texts, rows_at_once(texts, model.model.vocab_size, 2)):
        read_now = _log_probs(model.model, top, model.prepared, rows, sampling)
        values, best, tokens = map(np.asarray, read_now)
        check_read(~np.isnan(values[rows.real]), model)
        for row, i in enumerate(places):
            end = len(texts.outputs[i])
            found[i] = values[row, :end], TopTokens(tokens[row, :end], best[row, :end])
    return found


def written(
    decoder: "Decoder",
    prompts: Sequence[np.ndarray],
    *,
    seed: int,
    ids: Sequence[int] | None = None,
) -> KnownTexts:
    """Decodes prompts to known texts.

    Args:
      decoder: the decoder; with the verifier alone, texts follow the verifier's distribution.
      prompts: the tokens of each prompt.
      seed: see `Decoder`.
      ids: see `Decoder`.

    Returns:
      The texts, in order.

    Raises:
      ValueError: a prompt cannot be decoded, or a model gives NaN.
    """
    given: Any = list(prompts)
    outputs: list[np.ndarray] = []
    for row in decoder(given, seed=seed, ids=ids, progress=False):
        if row.error is not None:
            raise UserError(f"prompt {len(outputs)}: {row.error}")
        end = [] if row.eos_id is None else [row.eos_id]
        outputs.append(np.asarray([*row.tokens, *end], np.int32))
    return KnownTexts(prompts, outputs)


@functools.partial(jit, static_argnums=(0, 1))
def _log_probs(
    model: LanguageModel, top: int, params: Params, rows: KnownRows, sampling: Sampling
) -> tuple[Array, Array, Array]:
    """`[B, N]` log-probabilities, and `[B, N, top]` of the most probable tokens."""
    logs = read(model, params, rows).log_probs(sampling)
    values = jnp.take_along_axis(logs, jnp.asarray(rows.outputs)[..., None], axis=-1)[..., 0]
    return values, *jax.lax.top_k(logs, top)


def _by_position(function: Any, logits: Array) -> Array:
    """Applies a function of `[V]` to each position of `[B, T, V]`."""
    return jax.vmap(jax.vmap(function))(logits)


def _padded(tokens: Sequence[np.ndarray], rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """`[rows, width]` int32, padded with token 0, and the lengths `[rows]`."""
    padded, lengths = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
    for i, each in enumerate(tokens):
        padded[i, : len(each)], lengths[i] = each, len(each)
    return padded, lengths


def _rounded(length: int) -> int:
    """The next power of two, at least 16, for few shapes."""
    return max(16, 1 << (length - 1).bit_length())
