"""Sequence-level distillation: training targets that the teacher itself has drawn."""

from collections.abc import Sequence

import jax
import numpy as np

from specjax.data.batching import TokenPairs
from specjax.models import T5
from specjax.training.greedy import generate
from specjax.types import Params


def add_teacher_samples(
    pairs: TokenPairs,
    model: T5,
    params: Params,
    *,
    samples: int,
    bucket_lengths: Sequence[int],
    seed: int,
    eos_id: int,
    pad_id: int,
    progress: bool = True,
) -> TokenPairs:
    """Adds to each pair further targets, drawn from the teacher at temperature 1.

    A drafter is judged on what its verifier writes, not on the references; so it learns most from
    there.

    Args:
      pairs: the references.
      model: the teacher.
      params: its parameters.
      samples: targets to add for each input that fits the buckets.
      bucket_lengths: as in training; the last is also the limit of a drawn target. One that
        reaches it is kept without an end-of-sequence token, which the teacher has not drawn.
      seed: of the draws.
      eos_id: the end-of-sequence token.
      pad_id: pads batches.
      progress: whether to show a progress bar (on a terminal only).

    Returns:
      The pairs, followed by `samples` rounds of pairs with drawn targets. The same arguments give
      the same pairs.

    Source: Kim and Rush 2016; drawn at T = 1 as in Zhou et al. 2024 (DistillSpec).
    """
    limit = bucket_lengths[-1]
    inputs = [pairs[i][0] for i in range(len(pairs))]
    inputs = [tokens for tokens in inputs if len(tokens) <= limit]
    eos = np.asarray([eos_id], np.int32)
    chunks = [pairs.tokens]
    lengths = [np.diff(pairs.offsets)]
    for sample in range(samples):
        outputs = generate(
            model,
            params,
            inputs,
            bucket_lengths=bucket_lengths,
            eos_id=eos_id,
            pad_id=pad_id,
            max_tokens=limit,
            key=jax.random.fold_in(jax.random.key(seed), sample),
            progress=f"teacher samples {sample + 1}/{samples}" if progress else None,
        )
        for source, output in zip(inputs, outputs, strict=True):
            target = np.concatenate([output, eos])[:limit]
            chunks += [source, target]
            lengths.append(np.asarray([len(source), len(target)]))
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
    return TokenPairs(np.concatenate(chunks), offsets)
