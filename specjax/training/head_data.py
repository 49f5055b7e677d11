"""The data of an acceptance head: labelled shards of drafted tokens on disk, batches, the task.

Source: SpecDec++ (arXiv 2405.19715), section 3.3. Axes: B rows, N longest text, T positions of a
chunk, V vocabulary, D the drafter's width, n positions of all rows, E = rows + 1 ends, F features.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int64
from scipy import special

from specjax.acceptance_head import (
    HeadConfig,
    apply_head,
    confidence_features,
    drawn_confidences,
    init_head,
)
from specjax.checks import one_number
from specjax.compilation import jit
from specjax.data.examples import Example
from specjax.errors import UserError
from specjax.runs.run_directory import RunDirectory, Store
from specjax.sampling.draws import draw, num_uniforms
from specjax.text import Decoder, Pair
from specjax.text.teacher_forcing import (
    Begun,
    KnownRows,
    KnownTexts,
    batches,
    begin,
    read_on,
    written,
)
from specjax.training.losses import Total, masked_total
from specjax.training.progress import say
from specjax.training.step import root_key
from specjax.training.teacher import ReadPrompts, VerifierTexts, covering
from specjax.types import Cache, LanguageModel, Params, Sampling

DATA_NAME = "head_data"
# Separate from the streams of decoding, which fold the row's id into the seed's key directly.
_STREAM = 0x41434345
# Entries of a chunk's distributions, and the most positions of a chunk.
_CHUNK_ENTRIES, _LONGEST_CHUNK = 2**25, 16
_features = jit(confidence_features)
# The number of positions in a batch is rounded up to a few sizes.
_LEAST = 64
_TINY = 1e-30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Labelling(VerifierTexts):
    """How prompts are turned into labelled drafted tokens; p and q are at the texts' temperature.

    Attributes:
      mixing: r, the share of the verifier's tokens among the tokens that the drafter has read, in
        [0, 1); None: it reads only the verifier's own text. See `label`.
    """

    mixing: float | None = 0.15

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mixing is not None:
            share: dict[str, Any] = {"low": 0.0, "high": 1.0, "open_high": True}
            one_number("Labelling: mixing", self.mixing, **share)
            object.__setattr__(self, "mixing", float(self.mixing))


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


_COLUMNS = tuple(name for name in DraftedTokens._fields if name != "offsets")


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


class HeadData:
    """The drafted tokens of a data set, written shard by shard; resumable.

    The name is "training" or "validation".
    """

    def __init__(
        self,
        run: RunDirectory,
        pair: Pair,
        labelling: Labelling,
        examples: Sequence[Example],
        name: str,
        *,
        seed: int,
        progress: bool,
    ):
        self._run, self._pair, self._labelling = run, pair, labelling
        self._name, self._seed, self._progress = name, seed, progress
        self._shards: list[DraftedTokens] = []
        self._read = ReadPrompts(pair.verifier, labelling, examples, name, progress=progress)

    @property
    def prompts(self) -> list[np.ndarray]:
        return self._read.tokens

    def describe(self) -> dict[str, Any]:
        return {
            "drafter": self._pair.drafter.fingerprint,
            "verifier": self._pair.verifier.fingerprint,
            "prompts": len(self.prompts),
            "tokens": self._read.fingerprint,
            **dataclasses.asdict(self._labelling),
            "seed": self._seed,
        }

    def make(self) -> None:
        """Writes the missing shards and opens all; the directory must be claimed."""
        store, size = Store(self._run, DATA_NAME), self._labelling.shard_rows
        self._shards = []
        for start in range(0, len(self.prompts), size):
            key = (self._name, start // size)
            if key not in store:
                if self._progress:
                    count = f"{start:,} of {len(self.prompts):,}"
                    say(f"labelling {self._name} data: {count} prompts")
                store.put(key, None, self._label(start, start + size)._asdict())
            self._shards.append(DraftedTokens(**store.read(key).arrays))

    def _label(self, start: int, end: int) -> DraftedTokens:
        """The verifier's texts for some prompts, and drafted tokens along them."""
        settings, ids = self._labelling, self._read.ids[start:end]
        decoder = Decoder(
            self._pair.verifier,
            sampling=Sampling(settings.temperature),
            max_new_tokens=settings.max_new_tokens,
            batch_size=settings.batch_size,
            buckets=covering(self.prompts),
        )
        return label(
            self._pair,
            written(decoder, self.prompts[start:end], seed=self._seed, ids=ids),
            ids,
            temperature=settings.temperature,
            mixing=settings.mixing,
            seed=self._seed,
            batch_size=settings.batch_size,
        )

    @property
    def shards(self) -> list[DraftedTokens]:
        """The data, after `make`."""
        assert self._shards, "call make() first"
        return self._shards

    def column(self, name: str) -> np.ndarray:
        """A field of `DraftedTokens` for all positions, in order; not the offsets."""
        return np.concatenate([getattr(shard, name) for shard in self.shards])

    def row(self, index: int) -> DraftedTokens:
        """The positions of a prompt, without offsets."""
        number, place = divmod(index, self._labelling.shard_rows)
        shard = self.shards[number]
        part = slice(*shard.offsets[place : place + 2])
        fields = {name: getattr(shard, name)[part] for name in _COLUMNS}
        return DraftedTokens(**fields, offsets=np.empty(0, np.int64))


class HeadBatch(NamedTuple):
    """The positions of a batch: NumPy arrays, or JAX arrays inside a step.

    Attributes:
      features: see `acceptance_head.confidence_features`.
      real: false if a position is padding.
    """

    hidden: Float32[Any, "n D"]
    features: Float32[Any, "n F"]
    labels: Float32[Any, " n"]
    real: Bool[Any, " n"]


class HeadBatches:
    """Batches of the positions of some prompts, in a new order each epoch; see `Batches`.

    The data are read when the first batch is made. `seed` None keeps their order; `row_multiple` is
    the number of devices that share the positions.
    """

    def __init__(
        self,
        data: HeadData,
        rows_per_batch: int,
        *,
        width: int,
        seed: int | None,
        row_multiple: int,
    ):
        self._data, self._rows, self._width = data, rows_per_batch, width
        self._seed, self._multiple = seed, row_multiple
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    @property
    def batches_per_epoch(self) -> int:
        return -(-len(self._data.prompts) // self._rows)

    def batch(self, step: int) -> HeadBatch:
        epoch, index = divmod(step, self.batches_per_epoch)
        if self._order[0] != epoch:
            rng = None if self._seed is None else np.random.default_rng([self._seed, epoch])
            rows = np.arange(len(self._data.prompts))
            self._order = epoch, rows if rng is None else rng.permutation(rows)
        members = self._order[1][index * self._rows : (index + 1) * self._rows]
        parts = [self._data.row(int(member)) for member in members]
        count = sum(len(part.labels) for part in parts)
        size = _rounded(count, self._multiple)

        def joined(name: str, *shape: int) -> np.ndarray:
            out = np.zeros((size, *shape), np.float32)
            out[:count] = np.concatenate([getattr(part, name) for part in parts])
            return out

        features = _features(joined("top"), joined("entropy"), joined("drawn"))
        hidden = joined("hidden", self._width)
        return HeadBatch(hidden, features, joined("labels"), np.arange(size) < count)

    def epoch(self) -> Iterator[HeadBatch]:
        return (self.batch(step) for step in range(self.batches_per_epoch))

    def describe(self) -> dict[str, Any]:
        return {
            **self._data.describe(),
            "rows_per_batch": self._rows,
            "order": self._seed,
            "row_multiple": self._multiple,
        }


def _rounded(count: int, multiple: int) -> int:
    """At least `count`: powers of two and a size in between, so that few shapes are compiled."""
    size = _LEAST
    while size < count:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return -(-size // multiple) * multiple


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadTask:
    """Trains an acceptance head on the labels of `HeadBatch`es; a `Task` without constants.

    Attributes:
      head: its sizes.
      rejection_weight: w, the weight of a rejected token; accepted tokens have weight 1.

    Source: SpecDec++ (arXiv 2405.19715), section 3.3.
    """

    head: HeadConfig
    rejection_weight: float

    item_name: ClassVar[str] = "drafted tokens"

    def init(self, key: Array) -> Params:
        return init_head(self.head, key)

    def loss(self, params: Params, constants: Any, batch: HeadBatch, key: Array) -> Total:
        return masked_total(self._per_token(params, batch, self.rejection_weight), batch.real)

    def evaluate(self, params: Params, constants: Any, batch: HeadBatch) -> dict[str, Total]:
        p = batch.labels
        entropy = jax.scipy.special.entr(p) + jax.scipy.special.entr(1.0 - p)
        kl = self._per_token(params, batch, 1.0) - entropy
        loss = self._per_token(params, batch, self.rejection_weight)
        return {"loss": masked_total(loss, batch.real), "kl": masked_total(kl, batch.real)}

    def _per_token(self, params: Params, batch: HeadBatch, weight: float) -> Array:
        log_odds = apply_head(self.head, params, batch.hidden, batch.features)
        accepted = batch.labels * jax.nn.softplus(-log_odds)
        rejected = weight * (1.0 - batch.labels) * jax.nn.softplus(log_odds)
        return jnp.asarray(accepted + rejected)


def constant(data: Mapping[str, HeadData], weight: float) -> dict[str, float]:
    """The validation figures of the best constant of the training data, which needs no head.

    They are those of `HeadTask.evaluate` with the rejection weight `weight`.
    """
    p, learnt = (
        data[name].column("labels").astype(np.float64) for name in ("validation", "training")
    )
    log_odds = np.log(max(learnt.sum(), _TINY) / max(weight * (1.0 - learnt).sum(), _TINY))
    accepted = p * np.logaddexp(0.0, -log_odds)
    rejected = (1.0 - p) * np.logaddexp(0.0, log_odds)
    kl = accepted + rejected - special.entr(p) - special.entr(1.0 - p)
    return {"loss": float(np.mean(accepted + weight * rejected)), "kl": float(np.mean(kl))}
