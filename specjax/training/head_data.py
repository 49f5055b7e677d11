"""The data of an acceptance head: labelled shards of drafted tokens on disk, batches, the task.

Source: SpecDec++ (arXiv 2405.19715), section 3.3. Axes: B rows, N longest text, T positions of a
chunk, V vocabulary, D the drafter's width, n positions of all rows, E = rows + 1 ends, F features.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
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
    decode_texts,
    read_on,
)
from specjax.training.losses import Total, masked_total
from specjax.training.progress import say
from specjax.training.step import root_key
from specjax.training.teacher import ReadPrompts, VerifierTexts, buckets_for
from specjax.types import Cache, Params, Sampling

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


class _Models(NamedTuple):
    """Static: the models; or arrays: their parameters, or their caches."""

    drafter: Any
    verifier: Any


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
    models = _Models(pair.drafter.model, pair.verifier.model)
    params = _Models(pair.drafter.prepared, pair.verifier.prepared)
    along_text = mixing is None
    settings = jnp.float32(temperature), jnp.float32(0.0 if mixing is None else mixing)
    by_row: list[list[np.ndarray]] = [[] for _ in ids]
    for places, rows in batches(texts, batch_size, by_length=True):
        filled = np.zeros(batch_size, np.int32)
        filled[: len(places)] = np.asarray(ids)[places]
        keys = _row_keys(seed, filled)
        # A power of two, so that chunks divide the padded texts.
        entries = rows.outputs.shape[0] * models.drafter.vocab_size
        width = 1 << (max(1, min(_LONGEST_CHUNK, _CHUNK_ENTRIES // entries)).bit_length() - 1)
        states, mixed = _begin(models, along_text, params, rows)
        chunks = []
        for at in range(0, int(rows.ends.max()), width):
            chunk, states, mixed = _read_chunk(
                models, width, along_text, params, states, mixed, rows.outputs, np.int32(at), keys,
                settings,
            )  # fmt: skip
            chunks.append(jax.device_get(chunk))
        *columns, learnt = (np.concatenate(parts, axis=1) for parts in zip(*chunks, strict=True))
        for row, place in enumerate(places):
            inside = learnt[row] & rows.real[row, : learnt.shape[1]]
            by_row[place] = [x[row][inside] for x in columns]
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
) -> tuple[tuple[Array, ...], _Models, Cache]:
    """Labels the positions `at .. at + width` of the texts.

    Returns:
      The columns of `DraftedTokens`, `[B, T]`, and whether Z is Y; the states; the cache of Z.
    """
    temperature, mixing = settings
    drafter, own = read_on(models.drafter, params.drafter, states.drafter, at, width)
    verifier, other = read_on(models.verifier, params.verifier, states.verifier, at, width)
    q, p = (x.probs(Sampling(temperature)) for x in (drafter, verifier))
    # Of each position, independent of the chunks.
    of_place = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    place_keys = jax.vmap(of_place, in_axes=(0, None))(
        keys, at + jnp.arange(width, dtype=jnp.int32)
    )
    count = num_uniforms(models.drafter.vocab_size) + 1
    uniforms = jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (count,))))(place_keys)
    drafted = jax.vmap(jax.vmap(draw))(q, uniforms[..., 1:])
    top, entropy, drawn = jax.vmap(jax.vmap(drawn_confidences))(drafter.confidences(), drafted)
    learnt = jnp.logical_or(along_text, uniforms[..., 0] >= mixing)
    positions = own.positions + at + 1  # of Y
    if along_text:

        def read(place: Array) -> Array:
            """Hidden states of a token of each row, after the cache's entries before it."""
            token = jax.lax.dynamic_slice_in_dim(drafted, place, 1, axis=1)
            model = models.drafter
            return model.score(params.drafter, own.cache, token, positions + place)[1][:, 0]

        each = jax.lax.map(read, jnp.arange(width, dtype=jnp.int32))
        hidden = jnp.swapaxes(each, 0, 1)
    else:
        z = jnp.where(learnt, drafted, jax.lax.dynamic_slice_in_dim(texts, at, width, axis=1))
        _, hidden, mixed = models.drafter.extend(params.drafter, mixed, z, positions)
    labels = jnp.minimum(_of(p, drafted) / _of(q, drafted), 1.0)
    columns = labels, drawn, top, entropy, hidden.astype(jnp.float32), learnt
    return columns, _Models(own, other), mixed


def _of(probs: Array, tokens: Array) -> Array:
    return jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]


@jit
def _row_keys(seed: Any, ids: Array) -> Array:
    stream = jax.random.fold_in(root_key(seed), _STREAM)
    return jax.vmap(lambda row: jax.random.fold_in(stream, row))(ids)


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


@dataclasses.dataclass(kw_only=True)
class HeadData:
    """The drafted tokens of a data set, made shard by shard and resumable; see `Batches`.

    Attributes:
      name: "training" or "validation".
      seed: of the texts and the drafted tokens.
      rows_per_batch: prompts of a batch.
      order: the seed of a new order of the prompts in each epoch; None keeps their order.
      row_multiple: the number of devices that share the positions of a batch.
      shards: the data, after `make`.
    """

    run: RunDirectory
    pair: Pair
    labelling: Labelling
    prompts: ReadPrompts
    name: str
    seed: int
    rows_per_batch: int
    order: int | None
    row_multiple: int
    progress: bool
    shards: list[DraftedTokens] = dataclasses.field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        return {
            "drafter": self.pair.drafter.fingerprint,
            "verifier": self.pair.verifier.fingerprint,
            "prompts": len(self.prompts.tokens),
            "tokens": self.prompts.fingerprint,
            **dataclasses.asdict(self.labelling),
            "seed": self.seed,
            "rows_per_batch": self.rows_per_batch,
            "order": self.order,
            "row_multiple": self.row_multiple,
        }

    def make(self) -> None:
        """Writes the missing shards and opens all; the directory must be claimed."""
        store, size, count = Store(self.run, DATA_NAME), self.labelling.shard_rows, len(self)
        self.shards = []
        for start in range(0, count, size):
            key = (self.name, start // size)
            if key not in store:
                if self.progress:
                    say(f"labelling {self.name} data: {start:,} of {count:,} prompts")
                store.put(key, None, self._label(start, start + size)._asdict())
            self.shards.append(DraftedTokens(**store.read(key).arrays))

    def _label(self, start: int, end: int) -> DraftedTokens:
        """The verifier's texts for some prompts, and drafted tokens along them."""
        settings, ids, prompts = self.labelling, self.prompts.ids[start:end], self.prompts.tokens
        decoder = Decoder(
            self.pair.verifier,
            sampling=Sampling(settings.temperature),
            max_new_tokens=settings.max_new_tokens,
            batch_size=settings.batch_size,
            buckets=buckets_for(prompts),
        )
        return label(
            self.pair,
            decode_texts(decoder, prompts[start:end], seed=self.seed, ids=ids),
            ids,
            temperature=settings.temperature,
            mixing=settings.mixing,
            seed=self.seed,
            batch_size=settings.batch_size,
        )

    def __len__(self) -> int:
        """The number of prompts."""
        return len(self.prompts.tokens)

    def column(self, name: str) -> np.ndarray:
        """A field of `DraftedTokens` for all positions, in order; not the offsets."""
        assert self.shards, "call make() first"
        return np.concatenate([getattr(shard, name) for shard in self.shards])

    @property
    def batches_per_epoch(self) -> int:
        return -(-len(self) // self.rows_per_batch)

    def batch(self, step: int) -> HeadBatch:
        epoch, index = divmod(step, self.batches_per_epoch)
        order, parts = _order_of(len(self), self.order, epoch), []
        for row in order[index * self.rows_per_batch : (index + 1) * self.rows_per_batch]:
            number, place = divmod(int(row), self.labelling.shard_rows)
            parts.append(
                (self.shards[number], slice(*self.shards[number].offsets[place : place + 2]))
            )
        count = sum(part.stop - part.start for _, part in parts)
        size = _rounded(count, self.row_multiple)

        def padded(name: str) -> np.ndarray:
            values = np.concatenate([getattr(shard, name)[part] for shard, part in parts])
            return np.pad(values, ((0, size - count), *((0, 0),) * (values.ndim - 1)))

        features = _features(padded("top"), padded("entropy"), padded("drawn"))
        return HeadBatch(padded("hidden"), features, padded("labels"), np.arange(size) < count)


@functools.lru_cache(maxsize=2)  # an epoch of each data set
def _order_of(count: int, seed: int | None, epoch: int) -> np.ndarray:
    return (
        np.arange(count)
        if seed is None
        else np.random.default_rng([seed, epoch]).permutation(count)
    )


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
