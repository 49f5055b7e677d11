"""Some hierarchies side by side: decoders that take turns, and how sure their speed-ups are."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.text import Decoder
from specjax.tuning.hierarchies import ALONE, Hierarchy

_DRAWS = 2000
_LEVELS = (0.025, 0.975)


class Measured(NamedTuple):
    """What decoding took.

    Attributes:
      seconds: `[n]` of each chunk of prompts.
      tokens: `[n]` emitted.
      calls: model's name in the decoder -> `[n]` its passes, summed over rows.
      outputs: the tokens of each prompt.
    """

    seconds: np.ndarray
    tokens: np.ndarray
    calls: Mapping[str, np.ndarray]
    outputs: Sequence[tuple[int, ...]] = ()

    @property
    def tokens_per_call(self) -> float:
        """Emitted for each pass of the verifier."""
        return float(self.tokens.sum() / max(self.calls["verifier"].sum(), 1))


class SpeedUp(NamedTuple):
    """How many times as fast as another decoder.

    Attributes:
      value: by the times of all chunks.
      low: of the interval that holds 95 % of what other draws of the chunks would give.
      high: likewise.
    """

    value: float
    low: float
    high: float


def measure(
    decoders: Mapping[Hierarchy, Decoder],
    prompts: Sequence[np.ndarray],
    *,
    rows: int,
    repeats: int,
    seed: int,
    tell: Callable[[str], None] = lambda _: None,
    names: Sequence[str] = (),
) -> dict[Hierarchy, Measured]:
    """Decodes chunks of prompts with each decoder in turn.

    So noise of the machine that is longer than a chunk disturbs all alike. Each chunk counts with
    the least of its times.

    Args:
      decoders: what is compared.
      prompts: tokens.
      rows: the prompts of a chunk; those that fill none are left out.
      repeats: how often each is timed, after a turn that compiles.
      seed: of all turns.
      tell: is told how far it is.
      names: of the models, for that.

    Returns:
      The times, in the same order.
    """
    starts = range(0, len(prompts) - rows + 1, rows)
    found: dict[Hierarchy, Any] = {}

    def decode(decoder: Decoder, start: int) -> tuple[float, Any]:
        chunk: list[Any] = list(prompts[start : start + rows])
        ids = list(range(start, start + rows))
        begin = time.perf_counter()
        result = decoder(chunk, seed=seed, ids=ids, progress=False)
        return time.perf_counter() - begin, result

    for hierarchy, decoder in decoders.items():
        tell(f"preparing: {hierarchy.described(names)} ...")
        taken = [decode(decoder, start)[1] for start in starts]
        infos = [result.info.rows for result in taken]
        found[hierarchy] = Measured(
            seconds=np.full(len(starts), np.inf),
            tokens=np.asarray([int(info.emitted.sum()) for info in infos]),
            calls={
                name: np.asarray([int(info.calls[name].sum()) for info in infos])
                for name in infos[0].calls
            },
            outputs=[tuple(map(int, row.tokens)) for result in taken for row in result],
        )
    for turn in range(repeats):
        tell(f"measuring: turn {turn + 1} of {repeats} ...")
        for i, start in enumerate(starts):
            for hierarchy, decoder in decoders.items():
                spent, _ = decode(decoder, start)
                least = found[hierarchy].seconds
                least[i] = min(least[i], spent)
    return found


def speedup(one: Measured, other: Measured, seed: int = 0) -> SpeedUp:
    """How many times as fast one is as another, by tokens per second.

    Args:
      one: times of the chunks.
      other: those of the same chunks.
      seed: of the bootstrap over chunks.

    Returns:
      It, with an interval of 95 %.
    """
    count = len(one.seconds)
    draws = np.random.default_rng(seed).integers(count, size=(_DRAWS, count))

    def ratio(which: Any) -> Any:
        speeds = [m.tokens[which].sum(-1) / m.seconds[which].sum(-1) for m in (one, other)]
        return speeds[0] / speeds[1]

    low, high = np.quantile(ratio(draws), _LEVELS)
    return SpeedUp(float(ratio(np.arange(count))), float(low), float(high))


def choose(measured: Mapping[Hierarchy, Measured]) -> tuple[Hierarchy, str]:
    """The one to decode with, and why.

    The fastest, if it is surely faster than the verifier alone: the lower end of its interval is
    above 1. Else the verifier alone.

    Args:
      measured: with `ALONE` among them.

    Returns:
      It and a sentence.
    """
    found = {one: speedup(times, measured[ALONE]) for one, times in measured.items()}
    best = max(found, key=lambda one: found[one].value)
    gain = found[best]
    told = (
        f"{gain.value:.3g} times as fast as the verifier alone ({gain.low:.3g} to {gain.high:.3g})"
    )
    if best == ALONE:
        return ALONE, "nothing was faster than the verifier alone: do not draft"
    if gain.low <= 1.0:
        return ALONE, f"the fastest was {told}, which may be chance: do not draft"
    return best, f"it was {told}"
