"""The times of passes, from rounds of the decoding loop itself.

Axes: B rows, P prompt length.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from specjax.decoding import Autoregressive, AutoregressiveParams, RoundParams, Speculative
from specjax.drafting import MaxGram
from specjax.rules import Lossless
from specjax.text import TextModel
from specjax.types import DecodeState, Method, Params, PromptBatch
from specjax.verification import Block

# A short and a long run tell the cost of a round from that of a call.
_ROUNDS = (2, 10)
_ATTEMPTS = 3


class Passes(NamedTuple):
    """Seconds of passes of models.

    Attributes:
      alone: of each over one token.
      wide: for each: width -> seconds of a pass that reviews.
      prompts: in which each takes the prompts in.
    """

    alone: tuple[float, ...]
    wide: tuple[Mapping[int, float], ...]
    prompts: tuple[float, ...]


def seconds_of_passes(
    models: Sequence[TextModel],
    rows: int,
    widths: Sequence[int],
    *,
    prompt_length: int,
    seconds: float = 5.0,
) -> Passes:
    """Measures a pass of each model, alone and as a reviewer.

    A pass over one token is a step of the model that decodes alone. One over w tokens is a round
    that reviews w - 1 looked-up tokens, which cost next to nothing.

    Args:
      models: of one vocabulary.
      rows: B.
      widths: at least 2 each.
      prompt_length: P of the invented prompts.
      seconds: how long all of them are measured, without compiling; each five times at least.

    Returns:
      The times.

    Raises:
      ValueError: if other work disturbs the measurement so much that a pass seems to take no time.
    """
    methods: dict[tuple[int, int], tuple[Method, Params]] = {}
    for place, one in enumerate(models):
        where = one.partitioner
        alone = Autoregressive(one.model, partitioner=where)
        methods[place, 1] = alone, AutoregressiveParams(one.prepared)
        for width in widths:
            copier = MaxGram(one.model.vocab_size, width - 1)
            method = Speculative(one.model, copier, Block(), (width,), partitioner=where)
            methods[place, width] = method, RoundParams(one.prepared, (), Lossless())
    found, starts = _steady(methods, rows, prompt_length, seconds)
    for (place, width), spent in found.items():
        if spent <= 0.0:
            raise ValueError(
                f"a pass of {models[place].name} over {width} tokens seems to take no time: other "
                "work has disturbed the measurement; repeat it on a quieter machine"
            )
    places = range(len(models))
    for place in places:
        # A pass that takes longer than a wider one was disturbed.
        for wide, narrow in itertools.pairwise((*sorted(widths, reverse=True), 1)):
            found[place, narrow] = min(found[place, narrow], found[place, wide])
    return Passes(
        alone=tuple(found[place, 1] for place in places),
        wide=tuple({width: found[place, width] for width in widths} for place in places),
        prompts=tuple(starts[place, 1] for place in places),
    )


def _steady(
    methods: Mapping[tuple[int, int], tuple[Method, Params]],
    rows: int,
    prompt_length: int,
    seconds: float,
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """The times of rounds, and of taking the prompts in.

    Measures again, up to a point, those of which other work hides what a pass takes.
    """
    words = np.arange(rows * prompt_length, dtype=np.int32).reshape(rows, prompt_length)

    def start(case: tuple[int, int]) -> DecodeState:
        method, params = methods[case]
        longest = _ROUNDS[-1] * case[1]
        prompts = PromptBatch(
            inputs=words % method.vocab_size,
            input_lengths=np.full((rows,), prompt_length, np.int32),
            ids=np.arange(rows, dtype=np.int32),
            limits=np.full((rows,), longest, np.int32),
        )
        return jax.block_until_ready(method.init(params, prompts, max_new=longest))

    least = {(case, rounds): float("inf") for case in methods for rounds in _ROUNDS}

    starts = dict.fromkeys(methods, float("inf"))

    def measure(case: tuple[int, int], rounds: int) -> None:
        method, params = methods[case]
        begin = time.perf_counter()
        state = start(case)
        starts[case] = min(starts[case], time.perf_counter() - begin)
        begin = time.perf_counter()
        jax.block_until_ready(method.run(params, state, rounds))
        least[case, rounds] = min(least[case, rounds], time.perf_counter() - begin)

    left = list(methods)
    for attempt in range(_ATTEMPTS):
        begin, turns = time.perf_counter(), 0
        # The first turn compiles; its times are never the least.
        while turns < 6 or time.perf_counter() - begin < seconds * 3**attempt:
            for case, rounds in itertools.product(left, _ROUNDS):
                measure(case, rounds)
            turns += 1
        short, long = _ROUNDS
        found = {c: (least[c, long] - least[c, short]) / (long - short) for c in methods}
        left = [case for case in methods if found[case] <= 0.0]
        if not left:
            break
    return found, starts
