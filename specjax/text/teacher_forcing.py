"""Models along given texts: one teacher-forced pass instead of decoding; and scores of outputs.

Axes: B rows, P prompt length, N longest output, T positions read at once, V vocabulary, D width,
m tokens of an output, n outputs.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from specjax.checks import short_repr, whole_number
from specjax.compilation import jit
from specjax.errors import UserError
from specjax.sampling.distributions import confidence, distribution, log_distribution
from specjax.text.requests import as_sampling, encode_output
from specjax.text.results import Row, TopTokens
from specjax.text.text_models import TextModel
from specjax.types import Cache, LanguageModel, Params, Prompts, Sampling

# The most entries of arrays over the vocabulary in memory.
_ENTRIES = 2**27


class KnownTexts(NamedTuple):
    """The tokens of prompts, and of the texts that follow them, with end-of-sequence tokens.

    Each has at least one token.
    """

    prompts: Sequence[np.ndarray]
    outputs: Sequence[np.ndarray]


class KnownRows(NamedTuple):
    """A padded batch of known texts, of the host or traced; `ends` is 0 in rows that fill it."""

    inputs: Int32[Any, "B P"]
    lengths: Int32[Any, " B"]
    outputs: Int32[Any, "B N"]
    ends: Int32[Any, " B"]

    @property
    def real(self) -> Bool[Any, "B N"]:
        """Which positions are part of an output."""
        return np.arange(self.outputs.shape[1], dtype=np.int32)[None] < self.ends[:, None]


class Begun(NamedTuple):
    """A model that has read the prompts, and perhaps a part of the outputs.

    `before` is the token before each position of the outputs; `positions` is the cache position at
    which the first of these belongs.
    """

    cache: Cache
    before: Int32[Array, "B N"]
    positions: Int32[Array, " B"]


class Reading(NamedTuple):
    """A model's outputs along texts: at each position logits for the output's token.

    `before` has the previous tokens, and `hidden` their last hidden states.
    """

    logits: Float32[Array, "B T V"]
    hidden: Float[Array, "B T D"]
    before: Int32[Array, "B T"]

    def probs(self, sampling: Sampling) -> Float32[Array, "B T V"]:
        """The distributions after `sampling`, whose fields are scalars."""
        return _by_position(lambda logits: distribution(logits, sampling), self.logits)

    def confidences(self) -> Float32[Array, "B T V"]:
        """The softmax at temperature 1."""
        return _by_position(confidence, self.logits)

    def log_probs(self, sampling: Sampling) -> Float32[Array, "B T V"]:
        return _by_position(lambda logits: log_distribution(logits, sampling), self.logits)


@dataclasses.dataclass(frozen=True, eq=False)
class OutputScores:
    """The log-probabilities of n outputs, in nats.

    Attributes:
      log_probs: for each output, of its tokens; -inf for impossible tokens.
      prompt_log_probs: for each prompt, of all but its first token; or None.
      top: for each output the most probable tokens at each of its positions, or None.
    """

    log_probs: list[Float32[np.ndarray, " m"]]
    prompt_log_probs: list[Float32[np.ndarray, " m"]] | None = None
    top: list[TopTokens] | None = None

    @property
    def totals(self) -> Float[np.ndarray, " n"]:
        """The log-probability of each output."""
        return np.array([np.sum(row, dtype=np.float64) for row in self.log_probs])

    @property
    def perplexities(self) -> Float[np.ndarray, " n"]:
        """Of each output: exp(-total / tokens)."""
        return np.exp(-self.totals / [len(row) for row in self.log_probs])

    def ranked(self) -> list[int]:
        """Returns the places of the outputs, the most probable first; of equal ones the first."""
        return np.argsort(-self.totals, kind="stable").tolist()


def rows_at_once(texts: KnownTexts, vocab_size: int, arrays: int) -> int:
    """Returns the largest batch, a power of two, for which so many `[B, N, V]` fit into memory.

    The batches of the texts have one shape.
    """
    longest = _rounded(max(map(len, texts.outputs)))
    most = max(1, _ENTRIES // (arrays * longest * vocab_size))
    return 1 << (min(most, len(texts.outputs)).bit_length() - 1)


def batches(
    texts: KnownTexts, rows: int, *, by_length: bool = False
) -> Iterator[tuple[np.ndarray, KnownRows]]:
    """Splits texts into batches of few shapes, each with the indices of its texts.

    The last batch is filled with rows of one token and no output. With `by_length` texts are sorted
    by length, and each batch is padded to its own length; if not, texts stay in order and all
    batches have one shape.
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

    `more` is the number of tokens after the outputs for which the cache has room.
    """
    longest = model.prompt_positions(rows.inputs.shape[1], 0) + rows.outputs.shape[1] + more
    filled = model.prefill(params, Prompts(rows.inputs, rows.lengths), longest)
    before = jnp.concatenate([filled.tokens[:, None], rows.outputs[:, :-1]], axis=1)
    return Begun(filled.cache, before, filled.positions)


def read_on(
    model: LanguageModel, params: Params, begun: Begun, at: Array | int, width: int
) -> tuple[Reading, Begun]:
    """Reads the positions `at .. at + width` of the outputs; to be jitted. `at` is traced."""
    before = jax.lax.dynamic_slice_in_dim(begun.before, at, width, axis=1)
    extended = model.extend(params, begun.cache, before, begun.positions + at)
    return Reading(extended.logits, extended.hidden, before), begun._replace(cache=extended.cache)


def read(model: LanguageModel, params: Params, rows: KnownRows) -> Reading:
    """Reads all positions of the outputs; to be jitted."""
    begun = begin(model, params, rows)
    return read_on(model, params, begun, 0, rows.outputs.shape[1])[0]


def check_read(finite: Any, *models: TextModel) -> None:
    """Refuses models that gave NaN: a checkpoint may be damaged."""
    if not np.all(finite):
        names = " or ".join(model.name for model in models)
        raise UserError(f"{names} gives NaN: check the checkpoint")


def with_top(
    model: TextModel, texts: KnownTexts, sampling: Sampling, top: int
) -> list[tuple[Float32[np.ndarray, " m"], TopTokens]]:
    """Returns each output's log-probabilities by token, and the `top` most probable tokens there.

    The log-probability of an impossible token is -inf. The fields of `sampling` are scalars.
    """
    scores: list[Any] = [None] * len(texts.outputs)
    for places, rows in batches(texts, rows_at_once(texts, model.model.vocab_size, 2)):
        values, best, tokens = map(
            np.asarray, log_probs_of(model.model, top, model.prepared, rows, sampling)
        )
        check_read(~np.isnan(values[rows.real]), model)
        for row, i in enumerate(places):
            end = len(texts.outputs[i])
            scores[i] = values[row, :end], TopTokens(tokens[row, :end], best[row, :end])
    return scores


def score(
    model: TextModel,
    prompts: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    sampling: Sampling | None,
    of_prompts: bool,
    top: int | None,
) -> OutputScores:
    """Returns the scores of outputs; see `Decoder.score`."""
    drawn = as_sampling(sampling)
    if drawn.processors is not None or any(map(np.ndim, jax.tree.leaves(drawn))):
        raise UserError(
            f"sampling must have no processors and a single value per field, got {drawn}"
        )
    check_top(model, top)
    if of_prompts and not model.continues_prompts:
        raise UserError(
            f"prompt_log_probs must be False, because {model.name} is an encoder-decoder, which "
            "gives prompts no probabilities"
        )
    texts, ends = KnownTexts(prompts, outputs), [0] * len(prompts)
    if of_prompts:
        # All but the first token are read as an output.
        pairs = zip(prompts, outputs, strict=True)
        rest = [np.concatenate([prompt[1:], output]) for prompt, output in pairs]
        texts = KnownTexts([prompt[:1] for prompt in prompts], rest)
        ends = [len(prompt) - 1 for prompt in prompts]
    scores = list(zip(with_top(model, texts, drawn, top or 0), ends, strict=True))
    return OutputScores(
        [row[end:] for (row, _), end in scores],
        [row[:end] for (row, _), end in scores] if of_prompts else None,
        [TopTokens(*(x[end:] for x in best)) for (_, best), end in scores] if top else None,
    )


def rows_with_top(
    model: TextModel, prompts: Sequence[np.ndarray], rows: Sequence[Row], top: int
) -> tuple[Row, ...]:
    """Returns the rows with their `top`; the verifier reads the outputs once more.

    A row in which a model gave NaN stays as it is.
    """
    scored = list(rows)
    places = [i for i, row in enumerate(rows) if row.error is None]
    if places:
        outputs = [encode_output(rows[i], f"row {i}", model) for i in places]
        scores = score(model, [prompts[i] for i in places], outputs, None, False, top)
        for i, best in zip(places, scores.top or (), strict=True):
            scored[i] = dataclasses.replace(rows[i], top=best)
    return tuple(scored)


def check_top(model: TextModel, top: Any) -> None:
    """Refuses what is neither None nor a number of the model's tokens."""
    size = model.model.vocab_size
    if top is not None and whole_number("top_log_probs", top, low=1) > size:
        raise UserError(f"top_log_probs must be at most the vocabulary's size {size}, got {top}")


def checked_outputs(model: TextModel, outputs: Any, count: int) -> list[np.ndarray]:
    """Returns the tokens of `count` outputs; see `Decoder.score`."""
    several = isinstance(outputs, Sequence | np.ndarray) and not isinstance(outputs, str)
    if not several or len(outputs) != count:
        raise UserError(
            f"outputs must be {count} texts, lists of token ids or rows, one for each prompt, got "
            f"{short_repr(outputs)}: repeat a prompt for several outputs"
        )
    return [encode_output(output, f"output {i}", model) for i, output in enumerate(outputs)]


def decode_texts(
    decoder: Callable[..., Iterable[Row]],
    prompts: Sequence[np.ndarray],
    *,
    seed: int,
    ids: Sequence[int] | None = None,
) -> KnownTexts:
    """Decodes prompts to known texts by a `Decoder`; see there for `seed` and `ids`.

    With the verifier alone, texts follow the verifier's distribution.
    """
    outputs: list[np.ndarray] = []
    for row in decoder(list(prompts), seed=seed, ids=ids, progress=False):
        if row.error is not None:
            raise UserError(f"prompt {len(outputs)}: {row.error}")
        outputs.append(row.tokens_with_end)
    return KnownTexts(prompts, outputs)


@functools.partial(jit, static_argnums=(0, 1))
def log_probs_of(
    model: LanguageModel, top: int, params: Params, rows: KnownRows, sampling: Sampling
) -> tuple[Array, Array, Array]:
    """The log-probabilities of the outputs' tokens, and the `top` largest with their tokens."""
    logs = read(model, params, rows).log_probs(sampling)
    values = jnp.take_along_axis(logs, jnp.asarray(rows.outputs)[..., None], axis=-1)[..., 0]
    return values, *jax.lax.top_k(logs, top)


def _by_position(function: Any, logits: Array) -> Array:
    """Applies a function of `[V]` to each position of `[B, T, V]`."""
    return jax.vmap(jax.vmap(function))(logits)


def _padded(tokens: Sequence[np.ndarray], rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    padded, lengths = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
    for i, each in enumerate(tokens):
        padded[i, : len(each)], lengths[i] = each, len(each)
    return padded, lengths


def _rounded(length: int) -> int:
    """The next power of two, at least 16, for few shapes."""
    return max(16, 1 << (length - 1).bit_length())
