"""The expected times of a batch's rounds, from the times of passes that its B rows share."""

from collections.abc import Iterable, Sequence

import numpy as np

from specjax.text.passes import PassTimes

VERIFIER = "verifier"


class Clock:
    """Expected seconds; all are 0 without measured times.

    Args:
      times: the times for a batch of B rows, or None.
      owes: whether a drafter reads the last token of an accepted draft in an extra pass; on devices
        where two tokens cost as much as one, it reads that token together with the next.
    """

    def __init__(self, times: PassTimes | None, *, owes: bool = True):
        self._times, self._owes = times, owes
        self._reviews: dict[tuple[str, str | None, int], float] = {}

    @property
    def rows(self) -> int:
        """B."""
        return 1 if self._times is None else self._times.rows

    def step(self, name: str) -> float:
        """A step of a model that decodes alone."""
        return 0.0 if self._times is None else self._times.steps[name]

    def start(self, drafters: Iterable[str] = ()) -> float:
        """The time of a call without its rounds, if these drafters also read the prompts."""
        if self._times is None:
            return 0.0
        return self._times.call + sum(self._times.prompts[name] for name in drafters)

    def start_alone(self, drafter: str) -> float:
        """The same if the drafter decodes alone."""
        if self._times is None:
            return 0.0
        return self.start([drafter]) - min(self._times.prompts[VERIFIER], self._times.call)

    def draft(self, drafter: str, passes: float = 1.0) -> float:
        """The drafter's passes over a token each."""
        if self._times is None:
            return 0.0
        return passes * self._times.tables[VERIFIER, drafter].draft[0]

    def wider(self, name: str, count: int) -> float:
        """The extra time of a drafter's pass over `count` more tokens."""
        return max(self.review(name, count + 1) - self.review(name, 1), 0.0)

    def last_token(self, whole: float) -> float:
        """The expected extra passes, if a row's whole draft is accepted with this probability."""
        return self.any(whole) * self._owes

    def review(self, reviewer: str, width: int, drafter: str | None = None) -> float:
        """A reviewer's pass over `width` tokens; `drafter`: its drafter, None for copied drafts."""
        if self._times is None:
            return 0.0
        key = reviewer, drafter, width
        if key not in self._reviews:
            table = self._times.tables[reviewer, drafter].at_widths((max(width, 1),))
            self._reviews[key] = table.verifier[0][0]
        return self._reviews[key]

    def longest_review(
        self, reviewer: str, widths: Sequence[int], lengths: np.ndarray, drafter: str | None = None
    ) -> float:
        """A pass over the longest block of the rows and one more token.

        Args:
          reviewer: the model's name.
          widths: the widths of its passes, increasing; the last is enough for every block.
          lengths: `[n]` probabilities that a row's block has 0, 1, ... tokens.
          drafter: see `review`.
        """
        below = np.minimum(np.cumsum(lengths), 1.0) ** self.rows
        spent, before = 0.0, 0.0
        for width in widths:
            upto = float(below[min(width, len(below)) - 1])
            spent += (upto - before) * self.review(reviewer, width, drafter)
            before = upto
        return spent

    def most(self, law: np.ndarray) -> float:
        """The expected maximum of the rows' numbers; `law`: `[n]` probabilities of 0, 1, ..."""
        below = np.minimum(np.cumsum(law), 1.0) ** self.rows
        return float(np.sum(1.0 - below[:-1]))

    def any(self, probability: float) -> float:
        """The probability that an event happens in any of the rows."""
        return 1.0 - (1.0 - min(max(probability, 0.0), 1.0)) ** self.rows
