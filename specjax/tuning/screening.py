"""What one look at a verifier, drafters and texts tells: times of passes and acceptance rates."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.tuning.times import Times


class Law(NamedTuple):
    """What the tokens of a drafter follow.

    Attributes:
      place: the drafter's.
      below: what it reviews leniently, a place or what copies; None where its tokens follow its own
        distribution: it drafts alone, or reviews without lenience.
      lenience: with which it reviews.
    """

    place: int
    below: int | str | None = None
    lenience: float = 1.0


@dataclasses.dataclass(frozen=True)
class Copies:
    """What would be copied at every position of the texts, rows one after the other.

    Attributes:
      matched: `[n]` how many tokens of the ending have occurred before.
      drafted: `[n]` how many tokens would be copied, up to the longest draft G.
      on_text: `[n]` how many of them, from the first, are the text's own.
      offsets: `[texts + 1]`; the positions of text i are `offsets[i] .. offsets[i + 1]`.
      accepted: (a reviewer's place, lenience) -> `[G]`, how likely a copied token is accepted where
        those before it are the text's.
    """

    matched: np.ndarray
    drafted: np.ndarray
    on_text: np.ndarray
    offsets: np.ndarray
    accepted: Mapping[tuple[int, float], np.ndarray]

    def stands(self, reviewer: int, count: int, lenience: float = 1.0) -> np.ndarray:
        """How likely each of `count` copied tokens is accepted if those before it are."""
        return self.accepted[reviewer, lenience][:count]

    def to_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """Figures about them, as JSON values."""
        drafts = self.drafted > 0
        return {
            "matches": float(drafts.mean()),
            "copied": float(self.drafted[drafts].mean()) if drafts.any() else 0.0,
            "on_text": float(self.on_text[drafts].mean()) if drafts.any() else 0.0,
            "accepted": [
                {"reviewer": names[place], "lenience": lenience, "rates": rates.tolist()}
                for (place, lenience), rates in self.accepted.items()
            ],
        }


@dataclasses.dataclass(frozen=True)
class Screening(Times):
    """Times and rates; the verifier's place is 0, those of the drafters follow, largest first.

    Attributes:
      rates: (a reviewer's place, a law, the reviewer's lenience) -> how likely it accepts a token.
      copies: what copies -> how it fares.
      text_lengths: `[texts]` tokens of the verifier's texts.
    """

    rates: Mapping[tuple[int, Law, float], float]
    copies: Mapping[str, Copies]
    text_lengths: np.ndarray

    @property
    def emitted(self) -> int:
        """How many tokens the texts have."""
        return int(self.text_lengths.sum())

    def rate(self, reviewer: int, law: Law, lenience: float = 1.0) -> float:
        """How likely the model at a place accepts a token of a law."""
        return self.rates[reviewer, law, lenience]

    def to_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """All that was measured, as JSON values.

        Args:
          names: of the models.
        """

        def named(place: int | str | None) -> str | None:
            return names[place] if isinstance(place, int) else place

        return {
            **self.told(names),
            "tokens": self.emitted,
            "acceptance": [
                {
                    "reviewer": names[reviewer],
                    "drafter": names[law.place],
                    "which_reviews": named(law.below),
                    "drafter_lenience": law.lenience,
                    "lenience": lenience,
                    "rate": rate,
                }
                for (reviewer, law, lenience), rate in self.rates.items()
            ],
            "copies": {kind: found.to_dict(names) for kind, found in self.copies.items()},
        }
