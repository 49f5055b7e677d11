"""Sequence-level distillation: training targets that the teacher itself has drawn."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from specjax.data.pairs import TokenPairs
from specjax.runs.run_directory import RunDirectory
from specjax.text import Decoder, TextModel
from specjax.training.fingerprint import digest
from specjax.training.progress import say
from specjax.training.scoring import covering

SAMPLES_NAME = "teacher_samples.npz"


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
    prompts: Any = [pairs[i][0] for i in limits]
    decoder = Decoder(
        teacher,
        temperature=1.0,
        max_new_tokens=max(limits.values()),
        batch_size=batch_size,
        buckets=covering(prompts),
    )
    eos = np.asarray(teacher.tokenizer.eos_ids[:1], np.int32)
    chunks, lengths = [pairs.tokens], [np.diff(pairs.offsets)]
    for sample in range(samples):
        if progress:
            say(f"drawing teacher samples, round {sample + 1} of {samples}")
        drawn = decoder(
            prompts,
            seed=seed,
            ids=[sample * len(pairs) + i for i in limits],
            max_new_tokens=list(limits.values()),
            progress=None if progress else False,
        )
        for source, output, ended in zip(prompts, drawn.tokens, drawn.ended, strict=True):
            target = np.concatenate([output, eos]) if ended else output
            chunks += [source, target]
            lengths.append(np.asarray([len(source), len(target)]))
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
    return TokenPairs(np.concatenate(chunks).astype(np.int32), offsets)


def stored_samples(run: RunDirectory, draw: Callable[[], TokenPairs]) -> TokenPairs:
    """Pairs with drawn targets, drawn once and then read from the file of the run.

    Args:
      run: the run's directory; claimed, with `SAMPLES_NAME` among what it makes.
      draw: draws them.

    Returns:
      The pairs.

    Raises:
      OSError: the file cannot be written.
      ValueError: it is damaged.
    """
    path = run.path / SAMPLES_NAME
    if path.exists():
        return _read(path)
    grown = draw()
    arrays = {"tokens": grown.tokens, "offsets": grown.offsets}
    stored: dict[str, Any] = {**arrays, "digest": np.asarray(digest(arrays))}
    buffer = io.BytesIO()
    np.savez(buffer, **stored)
    run.keep()
    run.write(SAMPLES_NAME, buffer.getvalue())
    return grown


def _read(path: Path) -> TokenPairs:
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in ("tokens", "offsets")}
            whole = str(stored["digest"]) == digest(arrays)
    except Exception:  # zipfile, zlib and NumPy raise a dozen kinds
        whole = False
    if not whole:
        raise ValueError(f"{path} is damaged: delete it, and the samples are drawn again")
    return TokenPairs(**arrays)
