"""Distillation on texts that a model itself has written: drawing them, and keeping them."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.data.pairs import TokenPairs
from specjax.runs.run_directory import RunDirectory
from specjax.text import Decoder, TextModel
from specjax.training.fingerprint import digest
from specjax.training.progress import say
from specjax.training.scoring import covering
from specjax.writing import naming_failures, write_atomically

SAMPLES_NAME = "teacher_samples.npz"


class Writer:
    """A model that writes training or validation targets.

    Args:
      model: the model.
      temperature: 1 draws from its distribution, 0 takes the most probable token.
      longest: the longest target, in tokens.
      longest_input: the longest input.
      seed: of the draws.
      batch_size: rows decoded together.
      progress: whether to show a bar.
    """

    def __init__(
        self,
        model: TextModel,
        *,
        temperature: float = 1.0,
        longest: int,
        longest_input: int,
        seed: int = 0,
        batch_size: int = 64,
        progress: bool = True,
    ):
        self._decoder = Decoder(
            model,
            temperature=temperature,
            max_new_tokens=longest,
            batch_size=batch_size,
            buckets=covering([range(longest_input)]),
        )
        self._eos = np.asarray(model.tokenizer.eos_ids[:1], np.int32)
        self._seed, self._progress = seed, progress

    def __call__(
        self, inputs: Sequence[np.ndarray], limits: Sequence[int], ids: Sequence[int]
    ) -> list[np.ndarray]:
        """Writes one target for each input.

        Args:
          inputs: `[n]` int32 tokens each, at least one.
          limits: the most tokens of each target. One that reaches it is kept without an
            end-of-sequence token, which the model has not written.
          ids: a draw depends on its input, the seed and this number alone.

        Returns:
          The targets, int32.
        """
        if not len(inputs):
            return []
        prompts: Any = inputs
        written = self._decoder(
            prompts,
            seed=self._seed,
            ids=list(ids),
            max_new_tokens=list(limits),
            progress=None if self._progress else False,
        )
        return [
            np.concatenate([output, self._eos]) if ended else output
            for output, ended in zip(written.tokens, written.ended, strict=True)
        ]


def add_teacher_samples(
    pairs: TokenPairs,
    teacher: TextModel,
    *,
    samples: int,
    room: Callable[[int], int],
    seed: int,
    batch_size: int = 64,
    progress: bool = True,
) -> TokenPairs:
    """Adds to each pair further targets, drawn from the teacher at temperature 1.

    A drafter is judged on what its verifier writes, not on the references; so it learns most from
    there.

    Args:
      pairs: the references.
      teacher: the model to draw from.
      samples: targets to add for each input that leaves room for one.
      room: length of an input -> the most tokens of a drawn target. One that reaches it is kept
        without an end-of-sequence token, which the teacher has not drawn.
      seed: of the draws.
      batch_size: rows decoded together.
      progress: whether to tell progress on stderr.

    Returns:
      The pairs, followed by `samples` rounds of pairs with drawn targets. The same arguments give
      the same pairs; the draw of an input depends on the seed, its place and the round alone.

    Source: Kim and Rush 2016; drawn at T = 1 as in Zhou et al. 2024 (DistillSpec).
    """
    limits = {i: room(len(pairs[i][0])) for i in range(len(pairs)) if len(pairs[i][0])}
    limits = {i: limit for i, limit in limits.items() if limit > 0}
    if not limits:
        return pairs
    inputs = [pairs[i][0] for i in limits]
    write = Writer(
        teacher,
        longest=max(limits.values()),
        longest_input=max(map(len, inputs)),
        seed=seed,
        batch_size=batch_size,
        progress=progress,
    )
    drawn = [pairs]
    for sample in range(samples):
        if progress:
            say(f"drawing teacher samples, round {sample + 1} of {samples}")
        ids = [sample * len(pairs) + i for i in limits]
        drawn.append(joined(inputs, write(inputs, list(limits.values()), ids)))
    tokens = np.concatenate([part.tokens for part in drawn]).astype(np.int32)
    lengths = np.concatenate([np.diff(part.offsets) for part in drawn])
    return TokenPairs(tokens, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def joined(inputs: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> TokenPairs:
    """Pairs of inputs and targets, in order."""
    both = [part for pair in zip(inputs, targets, strict=True) for part in pair]
    tokens = np.concatenate([np.zeros(0, np.int32), *both]).astype(np.int32)
    return TokenPairs(tokens, np.cumsum([0, *map(len, both)], dtype=np.int64))


def stored_samples(run: RunDirectory, name: str, draw: Callable[[], TokenPairs]) -> TokenPairs:
    """Pairs with drawn targets, drawn once and then read from the file of the run.

    Args:
      run: the run's directory; claimed.
      name: of the file; its first part is among what the run makes.
      draw: draws them.

    Returns:
      The pairs.

    Raises:
      OSError: the file cannot be written.
      ValueError: it is damaged.
    """
    path = run.path / name
    if path.exists():
        return _read(path)
    grown = draw()
    arrays = {"tokens": grown.tokens, "offsets": grown.offsets}
    stored: dict[str, Any] = {**arrays, "digest": np.asarray(digest(arrays))}
    buffer = io.BytesIO()
    np.savez(buffer, **stored)
    run.keep()
    run.own(Path(name).parts[0])
    with naming_failures(path.parent):
        path.parent.mkdir(exist_ok=True)
    write_atomically(path, buffer.getvalue())
    return grown


def _read(path: Path) -> TokenPairs:
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in ("tokens", "offsets")}
            whole = str(stored["digest"]) == digest(arrays)
    except Exception:  # zipfile, zlib and NumPy raise a dozen kinds
        whole = False
    if not whole:
        raise ValueError(
            f"{path} is damaged: put a copy of it there, or delete it: then it is drawn again, if "
            "what it was drawn from is still there"
        )
    return TokenPairs(**arrays)
