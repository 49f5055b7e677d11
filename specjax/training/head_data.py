"""The data of an acceptance head: labelled shards of drafted tokens on disk, batches, the task.

Axes: n positions, D the drafter's width, F features.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32
from scipy import special

from specjax.acceptance_head import HeadConfig, apply_head, confidence_features, init_head
from specjax.checks import one_number, whole_number
from specjax.compilation import jit
from specjax.data.examples import Example
from specjax.errors import UserError
from specjax.runs.inputs import tokens_of
from specjax.runs.run_directory import RunDirectory
from specjax.runs.store import Store
from specjax.text import Decoder, Pair
from specjax.text.requests import checked_chat
from specjax.text.teacher_forcing import written
from specjax.training.head_labels import DraftedTokens, label
from specjax.training.losses import Total, masked_total
from specjax.training.progress import say
from specjax.training.samples import covering
from specjax.types import Params, Sampling

DATA_NAME = "head_data"
_COLUMNS = tuple(name for name in DraftedTokens._fields if name != "offsets")
_features = jit(confidence_features)
# The number of positions in a batch is rounded up to a few sizes.
_LEAST = 64
_TINY = 1e-30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Labelling:
    """How prompts are turned into labelled drafted tokens.

    Attributes:
      temperature: of the verifier's texts, and of p and q.
      max_new_tokens: the longest text.
      mixing: r, the share of the verifier's tokens among the tokens that the drafter has read, in
        [0, 1); None: it reads only the verifier's own text. See `head_labels.label`.
      max_input_tokens: longer prompts are skipped.
      chat: whether each prompt is a user's message for the model's chat template; or options of the
        template.
      batch_size: rows decoded and read together.
      shard_rows: prompts of a shard, which an interrupted run repeats at most.
    """

    temperature: float = 1.0
    max_new_tokens: int = 128
    mixing: float | None = 0.15
    max_input_tokens: int = 1024
    chat: bool | Mapping[str, Any] = False
    batch_size: int = 64
    shard_rows: int = 1024

    def __post_init__(self) -> None:
        spans: dict[str, dict[str, Any]] = {"temperature": {"low": 0.0, "open_high": True}}
        if self.mixing is not None:
            spans["mixing"] = {"low": 0.0, "high": 1.0, "open_high": True}
        for name, span in spans.items():
            one_number(f"Labelling: {name}", getattr(self, name), **span)
            object.__setattr__(self, name, float(getattr(self, name)))
        for name in ("max_new_tokens", "max_input_tokens", "batch_size", "shard_rows"):
            value = whole_number(f"Labelling: {name}", getattr(self, name), low=1)
            object.__setattr__(self, name, value)
        checked_chat("Labelling: chat", self.chat)


class HeadData:
    """The drafted tokens of a data set, written shard by shard; resumable.

    Prompts that are empty or too long are skipped, with a message on stderr. `prompts` has the
    tokens of the others. The name is "training" or "validation".
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
        self.prompts: list[np.ndarray] = []
        self._ids: list[int] = []
        self._shards: list[DraftedTokens] = []
        if not examples:
            raise UserError(f"{name} data: the source has no examples; give another source")
        # The last bucket is long and costs nothing here; prompts beyond it are too long.
        decoder = Decoder(pair.verifier, buckets=(labelling.max_input_tokens,), max_new_tokens=1)
        skipped = []
        for example in examples:
            where = f"{name} example {example.id}"
            try:
                text, chat = example.inputs, labelling.chat
                self.prompts.append(tokens_of(decoder, text, where, chat=chat, truncate=None))
            except ValueError as error:
                skipped.append(str(error))
            else:
                self._ids.append(example.id)
        if not self.prompts:
            raise UserError(f"{name} data: no prompt can be decoded; the first error: {skipped[0]}")
        if skipped and progress:
            more = f", and {len(skipped) - 1} more" if len(skipped) > 1 else ""
            count = f"{len(skipped)} of {len(examples)}"
            say(f"{count} {name} prompts were skipped: {skipped[0]}{more}")

    def describe(self) -> dict[str, Any]:
        sha = hashlib.sha256()
        for place, tokens in zip(self._ids, self.prompts, strict=True):
            sha.update(f"{place} {len(tokens)} ".encode() + tokens.astype(np.int32).tobytes())
        return {
            "drafter": self._pair.drafter.fingerprint,
            "verifier": self._pair.verifier.fingerprint,
            "prompts": len(self.prompts),
            "tokens": sha.hexdigest()[:16],
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
            record = store.get(key, mapped=True)
            assert record is not None
            self._shards.append(DraftedTokens(**record.arrays))

    def _label(self, start: int, end: int) -> DraftedTokens:
        """The verifier's texts for some prompts, and drafted tokens along them."""
        settings, ids = self._labelling, self._ids[start:end]
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
