"""Which rows of a run each of several processes decodes and writes."""

import sys
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from specjax.runs import processes
from specjax.runs.lines import Record
from specjax.runs.processes import Part
from specjax.text import Decoder


def own_ids(
    decoder: Decoder, prompts: Mapping[int, Any], failed: Mapping[int, str], part: Part | None
) -> Collection[int]:
    """The ids of the rows that this process may write.

    Args:
      decoder: the decoder.
      prompts: the tokens of all inputs that can be decoded, by id.
      failed: the errors of the others, by id.
      part: this process; None for one alone.

    Returns:
      All without a part; of a replica its own; of a program all, but for failed inputs, which are
      the first process's.
    """
    everything = {*prompts, *failed}
    if part is None:
        return everything
    errors = failed if part.index == 0 else ()
    if part.together:
        return {*prompts, *errors}
    ids = list(prompts)
    own = {ids[place] for place in decoder.parts(list(prompts.values()), part.count)[part.index]}
    if not own:
        print(
            f"specjax: warning: process {part.index} of {part.count} has no rows: the input has "
            "fewer plans than there are processes; a smaller BATCH_SIZE makes more",
            file=sys.stderr,
        )
    return {*own, *errors}


def known_rounds(
    prompts: Mapping[int, Any], own: Collection[int], done: Mapping[int, Record], part: Part | None
) -> dict[int, int]:
    """The places of the prompts that are not to be decoded here, and the rounds they took.

    Args:
      prompts: see `own_ids`.
      own: its ids.
      done: the rows that this process has written.
      part: see `own_ids`. All processes of a program must call it, and learn of all rows.

    Returns:
      Place -> rounds; for the rows of other replicas 1.
    """
    known = np.zeros(len(prompts), np.int32)
    for place, i in enumerate(prompts):
        if i in done:
            known[place] = done[i]["info"]["rounds"]
        elif i not in own:
            known[place] = 1  # of another replica, as is all that shares slots with it
    if part is not None and part.together:
        known = processes.gather(known).max(axis=0)
    return {int(place): int(known[place]) for place in np.flatnonzero(known)}
