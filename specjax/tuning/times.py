"""What passes and calls take, and what rounds of a batch take by them."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.text import Decoder, TextModel
from specjax.tuning.passes import seconds_of_passes

_CALLS = 6


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds; the verifier's place is 0, those of the drafters follow.

    Attributes:
      rows: B, the batch size of the times.
      alone: of one pass over one token of each model, with what decoding alone takes.
      passes: for each model: width -> of a pass over so many tokens, with the rest of a round that
        reviews a draft.
      call: that B prompts take the verifier alone besides its passes over one token.
      prompts: in which each model takes B prompts in; of the verifier part of `call`. None where
        that is left out.
    """

    rows: int
    alone: tuple[float, ...]
    passes: tuple[Mapping[int, float], ...]
    call: float = dataclasses.field(default=0.0, kw_only=True)
    prompts: tuple[float, ...] | None = dataclasses.field(default=None, kw_only=True)

    def start(self, places: Sequence[int] = ()) -> float:
        """The seconds that B prompts take besides rounds, where these drafters read them too."""
        return self.call + sum(self.prompts[place] for place in places if self.prompts)

    def review(self, place: int, width: int) -> float:
        """The seconds of a model's pass over `width` tokens; between measured widths on a line."""
        if width <= 1:
            return self.alone[place]
        known = self.passes[place]
        if width in known:
            return known[width]
        widths = [1, *sorted(known)]
        times = [self.alone[place], *(known[at] for at in widths[1:])]
        if width < widths[-1]:
            return float(np.interp(width, widths, times))
        slope = (times[-1] - times[-2]) / (widths[-1] - widths[-2])
        return times[-1] + max(slope, 0.0) * (width - widths[-1])

    def longest_review(self, place: int, widths: Sequence[int], lengths: np.ndarray) -> float:
        """The expected seconds of a pass over the rows' longest block, and a token more.

        Args:
          place: the model's.
          widths: increasing, those that its passes may have; the last holds every block.
          lengths: `[n]` probabilities that a row's block has 0, 1, ... tokens.

        Returns:
          Seconds.
        """
        below = np.minimum(np.cumsum(lengths), 1.0) ** self.rows
        spent, before = 0.0, 0.0
        for width in widths:
            upto = float(below[min(width, len(below)) - 1])
            spent += (upto - before) * self.review(place, width)
            before = upto
        return spent

    def most(self, law: np.ndarray) -> float:
        """The expected largest of the rows' numbers; `[n]` probabilities of 0, 1, ..."""
        below = np.minimum(np.cumsum(law), 1.0) ** self.rows
        return float(np.sum(1.0 - below[:-1]))

    def any(self, probability: float) -> float:
        """How likely something happens in any of the rows."""
        return 1.0 - (1.0 - min(max(probability, 0.0), 1.0)) ** self.rows

    def told(self, names: Sequence[str]) -> dict[str, Any]:
        """As JSON values; `names` are those of the models."""
        return {
            "rows": self.rows,
            "call": self.call,
            "prompts": dict(zip(names, self.prompts or (), strict=False)),
            "passes": {
                name: {"1": alone, **{str(width): t for width, t in times.items()}}
                for name, alone, times in zip(names, self.alone, self.passes, strict=True)
            },
        }


def measure_times(
    models: Sequence[TextModel], decoder: Decoder, prompts: Sequence[np.ndarray], max_draft: int
) -> Times:
    """Measures passes of models, and a call of the verifier.

    Args:
      models: the verifier, then the drafters.
      decoder: of the verifier alone; its batch size is B.
      prompts: the tokens of each, at least one.
      max_draft: G, the longest draft.

    Returns:
      The times.

    Raises:
      ValueError: if other work disturbs the measurement too much.
    """
    rows = decoder.batch_size
    usual = max(1, round(float(np.mean([len(prompt) for prompt in prompts]))))
    widths = sorted({*(1 << i for i in range(1, max_draft.bit_length())), max_draft + 1})
    passes = seconds_of_passes(models, rows, widths, prompt_length=usual)
    call = max(_call(decoder, list(prompts[:rows])) - passes.alone[0], 0.0)
    return Times(rows, passes.alone, passes.wide, call=call, prompts=passes.prompts)


def _call(decoder: Decoder, prompts: list[Any]) -> float:
    """The least seconds of a call that emits one token of each prompt."""
    least = math.inf
    for _ in range(_CALLS):
        begin = time.perf_counter()
        decoder(prompts, max_new_tokens=1, progress=False)
        least = min(least, time.perf_counter() - begin)
    return least
