"""What a tuning run weighs, and how long it measures."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from specjax.checks import check_path, one_number, whole_number
from specjax.types import Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """What is weighed, and how long it is measured.

    Attributes:
      temperature: of decoding.
      top_k: likewise; None for all tokens.
      top_p: likewise.
      batch_size: B.
      max_new_tokens: the longest text.
      screened: how many prompts are read with all models.
      measured: how many others are decoded with the best.
      candidates: how many of the best expected ones are measured, besides the verifier alone and
        the best single drafter.
      max_draft: G, the most tokens that one drafter adds to a block.
      leniences: of the drafters that review for the verifier, at least 1 each; without effect at
        temperature 0.
      levels: the most drafters of a cascade, copies included: 1, 2 or 3.
      bigram: the directory of a bigram table for copies, "built-in", or None.
      repeats: how often each decoder is timed.
      seed: of all draws.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: for one out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    batch_size: int = 1
    max_new_tokens: int = 128
    screened: int = 32
    measured: int = 32
    candidates: int = 5
    max_draft: int = 10
    leniences: Sequence[float] = (1.0, 2.0, 4.0)
    levels: int = 2
    bigram: str | os.PathLike[str] | None = None
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        temperature = one_number("temperature", self.temperature, low=0.0, open_high=True)
        object.__setattr__(self, "temperature", temperature)
        Sampling(temperature, self.top_k, self.top_p)  # its checks
        for name in ("batch_size", "max_new_tokens", "screened", "candidates", "max_draft"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), low=1))
        for name in ("measured", "repeats", "levels"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), low=1))
        object.__setattr__(self, "seed", whole_number("seed", self.seed, low=0))
        if self.levels > 3:
            raise ValueError(f"levels must be 1, 2 or 3, got {self.levels}")
        if self.measured < 2 * self.batch_size:
            raise ValueError(
                f"measured must be at least twice batch_size = {self.batch_size}, so that there is "
                f"an interval, got {self.measured}"
            )
        if isinstance(self.leniences, str) or not isinstance(self.leniences, Sequence):
            raise TypeError(f"leniences must be a tuple such as (1.0, 2.0), got {self.leniences!r}")
        leniences = [one_number("leniences", x, low=1.0, open_high=True) for x in self.leniences]
        if not leniences:
            raise ValueError("leniences must have at least one number: give (1.0,) for none")
        object.__setattr__(self, "leniences", tuple(sorted(set(leniences))))
        if self.bigram is not None:
            check_path(self.bigram, "bigram=")

    @property
    def sampling(self) -> Sampling:
        """Of decoding."""
        return Sampling(self.temperature, self.top_k, self.top_p)

    @property
    def used_leniences(self) -> Sequence[float]:
        """At temperature 0 distributions are one-hot, and lenience does nothing."""
        return self.leniences if self.temperature > 0.0 else (1.0,)

    @property
    def decoding(self) -> dict[str, Any]:
        """The options of a `Decoder`."""
        names = ("temperature", "top_k", "top_p", "batch_size", "max_new_tokens")
        return {name: getattr(self, name) for name in names}
