"""What may be decoded with: the verifier alone, one drafter, copies, and cascades of these."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from specjax.text import Cascade, Decoder, Lookup, Models, Pair, TextModel

# Most tokens of a drafter in a row of K, within the longest draft.
_COUNTS = (1, 2, 3, 5, 8)
# The same where there are three levels.
_FEW_COUNTS = (2, 4)
_MATCHES = (2, 3, 5)


@dataclasses.dataclass(frozen=True)
class Hierarchy:
    """One way to decode with a verifier, whose place is 0, and the drafters after it.

    Attributes:
      models: the drafters' places, largest first; none where no model drafts.
      lengths: K; one number where one drafter drafts; () for the verifier alone.
      copies: what copies, as the last drafter: "text" (Max-Gram) or "bigram" (with a table); None
        for nothing.
      min_match: copies come first where so many tokens match, and the model drafts elsewhere; 0
        where copies are a level of their own.
      max_copy: the longest copy, with `min_match`.
      lenience: of the levels below the verifier.
    """

    models: tuple[int, ...] = ()
    lengths: tuple[tuple[int, ...], ...] = ()
    copies: str | None = None
    min_match: int = 0
    max_copy: int = 0
    lenience: float = 1.0

    @property
    def is_single(self) -> bool:
        """Whether one model drafts for the verifier, and nothing else does."""
        return len(self.models) == 1 and len(self.lengths) == 1 and not self.copies

    @property
    def kind(self) -> tuple[Any, ...]:
        """What it has in common with those that have other numbers alone."""
        filled = tuple(tuple(count > 0 for count in row) for row in self.lengths)
        return self.models, filled, self.copies, self.min_match > 0

    def reviews(self, level: int) -> bool:
        """Whether the drafter at a level, from 0, reviews what those below it draft."""
        return level + 1 < len(self.lengths) and any(self.lengths[level + 1])

    def described(self, names: Sequence[str]) -> str:
        """In words.

        Args:
          names: of the verifier and the drafters.
        """
        copied = {"text": "copy", "bigram": "copy or bigram"}.get(self.copies or "", "")
        if not self.lengths:
            return "verifier alone"
        drafts = [names[i] for i in self.models]
        if len(self.lengths) > 1:
            levels = ", ".join([*drafts, copied] if copied else drafts)
            matrix = " ".join(str(list(row)).replace(" ", "") for row in self.lengths)
            lenient = "" if self.lenience == 1.0 else f", lenience {self.lenience:g}"
            return f"{levels}: K = {matrix}{lenient}"
        count = self.lengths[0][0]
        if not drafts:
            return f"{copied}: {count}"
        first = f"{copied}: {self.max_copy} where {self.min_match} match, else "
        return f"{first if copied else ''}{drafts[0]}: {count}"

    def decoder(
        self, names: Sequence[str], models: Sequence[TextModel], bigram: Any, **options: Any
    ) -> Decoder:
        """A decoder of it.

        Args:
          names: of the verifier and the drafters.
          models: likewise.
          bigram: the table, where `copies` is "bigram"; see `text.Lookup`.
          **options: other arguments of a `Decoder`.
        """
        verifier = models[0]
        table = bigram if self.copies == "bigram" else None
        if not self.lengths:
            return Decoder(verifier, **options)
        if len(self.lengths) > 1:
            named = {names[i]: models[i] for i in self.models}
            last = Lookup(bigram=table) if self.copies else None
            plan = Cascade(self.lengths, tuple(named), last, self.lenience)
            return Decoder(Models(verifier=verifier, **named), drafting=plan, **options)
        count = self.lengths[0][0]
        if not self.models:
            alone = Models(verifier=verifier)
            return Decoder(alone, drafting=Lookup(bigram=table), max_draft=count, **options)
        pair = Pair(drafter=models[self.models[0]], verifier=verifier)
        first = None
        if self.copies:
            first = Lookup(bigram=table, min_match=self.min_match, max_copy=self.max_copy)
        return Decoder(pair, drafting=first, max_draft=count, **options)


ALONE = Hierarchy()


def hierarchies(
    drafters: int,
    copies: Sequence[str],
    *,
    max_draft: int,
    leniences: Sequence[float] = (1.0,),
    levels: int = 2,
) -> Iterator[Hierarchy]:
    """All that is weighed.

    Args:
      drafters: how many there are; their places are 1, 2, ..., the largest first.
      copies: what may copy.
      max_draft: the most tokens of one drafter in a block.
      leniences: of levels that review for another one.
      levels: the most drafters of a cascade, what copies included; 1, 2 or 3.

    Yields:
      Each once.
    """
    yield ALONE
    lengths = range(1, max_draft + 1)
    places = range(1, drafters + 1)
    for count in lengths:
        yield from (Hierarchy((i,), ((count,),)) for i in places)
        yield from (Hierarchy((), ((count,),), kind) for kind in copies)
    longest = sorted({max(1, max_draft // 2), max_draft})
    # There a table would only make copies longer.
    if "text" in copies:
        for i, count in itertools.product(places, lengths):
            for least, most in itertools.product(_MATCHES, longest):
                yield Hierarchy((i,), ((count,),), "text", least, most)
    for size in range(2, levels + 1):
        grid: Sequence[int] = _COUNTS if size == 2 else _FEW_COUNTS
        counts = sorted({min(count, max_draft) for count in grid})
        matrices = list(_matrices(size, counts))
        for last, matrix in itertools.product((None, *copies), matrices):
            for models in itertools.combinations(places, size - (last is not None)):
                # Where nobody reviews for another there is nothing to be lenient with.
                several = leniences if any(map(any, matrix[1:])) else (1.0,)
                for lenient in several:
                    yield Hierarchy(models, matrix, last, lenience=lenient)


def _matrices(size: int, counts: Sequence[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every K in which the first drafter and each later one has a part."""
    rows = [
        [((0,) * r + row) for row in itertools.product((0, *counts), repeat=size - r)]
        for r in range(size)
    ]
    for matrix in itertools.product(*rows):
        if matrix[0][0] and _all_used(matrix):
            yield matrix


def _all_used(matrix: tuple[tuple[int, ...], ...]) -> bool:
    """Whether each drafter has tokens in a row that counts, and each row with tokens does."""
    used = {i for i, count in enumerate(matrix[0]) if count}
    for r in range(1, len(matrix)):
        if any(matrix[r]):
            if r - 1 not in used:
                return False
            used |= {i for i, count in enumerate(matrix[r]) if count}
    return len(used) == len(matrix)
