"""The data of an acceptance head on disk: shards of drafted tokens, each written whole.

A shard is two files: `NAME-00000.npz`, with the small arrays and a digest, and
`NAME-00000.hidden.npy`, the hidden states, which are mapped into memory, not read.
"""

import dataclasses
import hashlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.acceptance_head import confidence_features
from specjax.checks import one_number, whole_number
from specjax.compilation import jit
from specjax.data.examples import Example
from specjax.runs.run_directory import RunDirectory
from specjax.text import Decoder, Pair
from specjax.text.prompts import Prompt
from specjax.training.fingerprint import digest
from specjax.training.head_labels import Positions, label
from specjax.training.progress import say
from specjax.training.scoring import covering
from specjax.writing import write_atomically

DATA_NAME = "head_data"
_COLUMNS = tuple(name for name in Positions._fields if name != "offsets")
_features = jit(confidence_features)
# Positions of a batch are rounded up to one of a few sizes.
_LEAST = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Labelling:
    """How prompts become drafted tokens with labels.

    Attributes:
      temperature: at which the verifier writes its texts, and of p and q.
      max_new_tokens: the longest text.
      mixing: r, the share of the verifier's tokens among those that the drafter has read, in
        [0, 1); None: it reads the verifier's own text alone. See `head_labels.label`.
      max_input_tokens: longer prompts are left out.
      chat: whether each prompt is a user's message for the model's chat template.
      batch_size: rows decoded and read together.
      shard_rows: prompts of one shard: what a killed run has to do again.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: for a value outside its range.
    """

    temperature: float = 1.0
    max_new_tokens: int = 128
    mixing: float | None = 0.15
    max_input_tokens: int = 1024
    chat: bool = False
    batch_size: int = 64
    shard_rows: int = 1024

    def __post_init__(self) -> None:
        self._set("temperature", low=0.0, open_high=True)
        if self.mixing is not None:
            self._set("mixing", low=0.0, high=1.0, open_high=True)
        for name in ("max_new_tokens", "max_input_tokens", "batch_size", "shard_rows"):
            value = whole_number(f"Labelling: {name}", getattr(self, name), low=1)
            object.__setattr__(self, name, value)
        if not isinstance(self.chat, bool):
            raise TypeError(f"Labelling: chat must be True or False, got {self.chat!r}")

    def _set(self, name: str, **span: Any) -> None:
        one_number(f"Labelling: {name}", getattr(self, name), **span)
        object.__setattr__(self, name, float(getattr(self, name)))


class Prompts(NamedTuple):
    """The prompts of one data set that can be decoded.

    Attributes:
      name: of the data set: "training" or "validation".
      tokens: of each prompt.
      ids: of each prompt, its place in the source.
    """

    name: str
    tokens: list[np.ndarray]
    ids: list[int]

    def describe(self) -> dict[str, Any]:
        """What determines them, as JSON values."""
        sha = hashlib.sha256()
        for place, tokens in zip(self.ids, self.tokens, strict=True):
            sha.update(f"{place} {len(tokens)} ".encode() + tokens.astype(np.int32).tobytes())
        return {"prompts": len(self.tokens), "tokens": sha.hexdigest()[:16]}


def read_prompts(
    pair: Pair, labelling: Labelling, examples: Sequence[Example], name: str, *, progress: bool
) -> Prompts:
    """Tokenises prompts; those that are empty or too long are told and left out.

    Args:
      pair: its tokenizer and its vocabulary count.
      labelling: how they are read.
      examples: the prompts; their references are not used.
      name: of the data set.
      progress: whether to tell what is left out.

    Returns:
      The prompts.

    Raises:
      ValueError: there are none, or none can be decoded.
    """
    if not examples:
        raise ValueError(f"{name} data: the source has no examples: give another source")
    # A long last bucket refuses what is too long, and costs nothing here.
    decoder = Decoder(pair.verifier, buckets=(labelling.max_input_tokens,), max_new_tokens=1)
    tokens, ids, failed = [], [], []
    for example in examples:
        chat: Any = [{"role": "user", "content": example.inputs}]
        prompt: Prompt = chat if labelling.chat else example.inputs
        try:
            tokens.append(decoder.encode(prompt, f"{name} example {example.id}"))
        except ValueError as error:
            failed.append(str(error))
        else:
            ids.append(example.id)
    if not tokens:
        raise ValueError(f"{name} data: no prompt can be decoded: {failed[0]}")
    if failed and progress:
        more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        say(f"{len(failed)} of {len(examples)} {name} prompts are left out: {failed[0]}{more}")
    return Prompts(name, tokens, ids)


class HeadData:
    """The drafted tokens of one data set, written shard by shard and continued after a kill.

    Args:
      run: the run's directory, with `DATA_NAME` among what it makes.
      pair: the models.
      labelling: how prompts become labels.
      prompts: the data set.
      seed: of the draws.
    """

    def __init__(
        self, run: RunDirectory, pair: Pair, labelling: Labelling, prompts: Prompts, *, seed: int
    ):
        self._run, self._pair, self._labelling = run, pair, labelling
        self._prompts, self._seed = prompts, seed
        self._shards: list[Positions] | None = None

    @property
    def rows(self) -> int:
        """The number of prompts."""
        return len(self._prompts.tokens)

    @property
    def prompts(self) -> list[np.ndarray]:
        """The tokens of each prompt."""
        return self._prompts.tokens

    def describe(self) -> dict[str, Any]:
        """What determines the data, as JSON values."""
        labelling = dataclasses.asdict(self._labelling)
        models = {"drafter": self._pair.drafter, "verifier": self._pair.verifier}
        return {
            **{name: model.fingerprint for name, model in models.items()},
            **self._prompts.describe(),
            **labelling,
            "seed": self._seed,
        }

    def make(self, *, progress: bool) -> None:
        """Writes the shards that are missing and opens all; the directory must be claimed.

        Args:
          progress: whether to tell progress on stderr.

        Raises:
          OSError: a shard cannot be written.
          ValueError: one is damaged, or a model gives NaN.
        """
        directory = self._run.own(DATA_NAME)
        directory.mkdir(exist_ok=True)
        size = self._labelling.shard_rows
        starts = range(0, self.rows, size)
        shards = []
        for number, start in enumerate(starts):
            place = directory / f"{self._prompts.name}-{number:05d}.npz"
            if not place.exists():
                if progress:
                    say(f"labelling {self._prompts.name} data: {start:,} of {self.rows:,} prompts")
                _write(place, self._label(start, min(start + size, self.rows)))
                self._run.keep()
            shards.append(_read(place))
        self._shards = shards

    def _label(self, start: int, end: int) -> Positions:
        """Of some prompts: the verifier's texts, and drafted tokens along them."""
        settings, pair = self._labelling, self._pair
        tokens, ids = self._prompts.tokens[start:end], self._prompts.ids[start:end]
        prompts: Any = tokens
        decoder = Decoder(
            pair.verifier,
            temperature=settings.temperature,
            max_new_tokens=settings.max_new_tokens,
            batch_size=settings.batch_size,
            buckets=covering(self._prompts.tokens),
        )
        drawn = decoder(prompts, seed=self._seed, ids=ids, progress=False)
        if nan := [row.error for row in drawn if row.ended_by == "nan"]:
            raise ValueError(
                f"{len(nan)} texts of {pair.verifier.name} have NaN ({nan[0]}): look at its weights"
            )
        eos = np.asarray(pair.verifier.tokenizer.eos_ids[:1], np.int32)
        texts = [np.concatenate([row.tokens, eos[: row.ended_by == "eos"]]) for row in drawn]
        return label(
            pair,
            tokens,
            texts,
            ids,
            temperature=settings.temperature,
            mixing=settings.mixing,
            seed=self._seed,
            batch_size=settings.batch_size,
        )

    @property
    def shards(self) -> list[Positions]:
        """The data, once `make` was called."""
        assert self._shards is not None, "make() comes first"
        return self._shards

    def column(self, name: str) -> np.ndarray:
        """One field of `Positions` for all positions, in order; not the offsets."""
        return np.concatenate([getattr(shard, name) for shard in self.shards])

    def row(self, index: int) -> Positions:
        """The positions of one prompt; without offsets."""
        shard = self.shards[index // self._labelling.shard_rows]
        place = index % self._labelling.shard_rows
        part = slice(*shard.offsets[place : place + 2])
        fields = {name: getattr(shard, name)[part] for name in _COLUMNS}
        return Positions(**fields, offsets=np.empty(0, np.int64))


class HeadBatch(NamedTuple):
    """Positions of a batch: NumPy arrays, or JAX arrays inside a step.

    Attributes:
      hidden: `[n, D]` float32.
      features: `[n, F]` float32; see `acceptance_head.confidence_features`.
      labels: `[n]` float32.
      real: `[n]` bool, false where a position only fills the shape.
    """

    hidden: Any  # [n, D]
    features: Any  # [n, F]
    labels: Any  # [n]
    real: Any  # [n]


class HeadBatches:
    """Batches of the positions of so many prompts, in a new order each epoch; see `Batches`.

    Args:
      data: the data; read when the first batch is asked for.
      rows_per_batch: prompts of a batch.
      width: D.
      seed: of the order; None keeps the data's.
      row_multiple: of devices that share the positions.
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
        """How many until all data have been seen once."""
        return -(-self._data.rows // self._rows)

    def batch(self, step: int) -> HeadBatch:
        """The batch of step `step`."""
        epoch, index = divmod(step, self.batches_per_epoch)
        if self._order[0] != epoch:
            rng = None if self._seed is None else np.random.default_rng([self._seed, epoch])
            rows = np.arange(self._data.rows)
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
        """The batches of the first epoch."""
        return (self.batch(step) for step in range(self.batches_per_epoch))

    def describe(self) -> dict[str, Any]:
        """What determines the batches, as JSON values."""
        return {
            **self._data.describe(),
            "rows_per_batch": self._rows,
            "order": self._seed,
            "row_multiple": self._multiple,
        }


def _rounded(count: int, multiple: int) -> int:
    """At least `count`: powers of two and one size in between, so that few shapes are compiled."""
    size = _LEAST
    while size < count:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return -(-size // multiple) * multiple


def _hidden_of(place: Path) -> Path:
    return place.with_name(f"{place.stem}.hidden.npy")


def _write(place: Path, positions: Positions) -> None:
    """The small file last: where it is, the shard is whole."""
    small = positions._asdict()
    buffer = io.BytesIO()
    np.save(buffer, small.pop("hidden"))
    write_atomically(_hidden_of(place), buffer.getvalue())
    sha = hashlib.sha256(buffer.getvalue()).hexdigest()
    small |= {
        "hidden_sha256": np.asarray(sha),
        "digest": np.asarray(digest([*small.values(), sha])),
    }
    buffer = io.BytesIO()
    np.savez(buffer, **small)
    write_atomically(place, buffer.getvalue())


def _read(place: Path) -> Positions:
    names = [name for name in Positions._fields if name != "hidden"]
    hidden = _hidden_of(place)
    try:
        with np.load(io.BytesIO(place.read_bytes()), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in names}
            sha, mark = str(stored["hidden_sha256"]), str(stored["digest"])
        with hidden.open("rb") as file:
            whole = hashlib.file_digest(file, "sha256").hexdigest() == sha
        whole = whole and mark == digest([*arrays.values(), sha])
        # Nothing cannot be mapped.
        mode: Any = "r" if arrays["labels"].size else None
        mapped = np.load(hidden, mmap_mode=mode, allow_pickle=False) if whole else None
    except Exception:  # zipfile, zlib and NumPy raise a dozen kinds
        mapped = None
    if mapped is None:
        raise ValueError(
            f"{place} or {hidden.name} is damaged: delete both, and they are made again"
        )
    return Positions(hidden=mapped, **arrays)
