"""Metrics of output texts against references, all from 0 to 100; the answers in texts.

Each has statistics of every example and a score of their sums, for `Bootstrap`. sacrebleu and
rouge-score are optional, and imported only when they are used.

Axes: n examples, k statistics of an example.
"""

import abc
import collections
import dataclasses
import decimal
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from specjax.checks import require
from specjax.errors import UserError
from specjax.evaluation.bootstrap import Sums, divided

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
# A minus directly before a number is its sign, but not directly after a word: 10-5 ends with 5.
_NUMBER = re.compile(
    r"""(?:(?<![\w)\]])(?P<sign>[-−])[$€£]?)?
    (?<!\w)(?<!\d\.)  # not in the middle of a word or of a number
    (?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\.)\.\d+)""",
    re.VERBOSE,
)


@dataclasses.dataclass(frozen=True)
class AnswerAfter:
    """The answer of a text: from the last occurrence of a marker to the end of its line.

    Attributes:
      marker: such as "####" or "The answer is".
      without: the answer of a text without the marker: "all" of the text, or "nothing".
    """

    marker: str
    without: str = "nothing"

    def __post_init__(self) -> None:
        if not isinstance(self.marker, str) or not self.marker:
            raise UserError(f"marker must be a text such as 'Answer:', got {self.marker!r}")
        _check_without(self.without)

    def __call__(self, text: str) -> str:
        _, marker, after = text.rpartition(self.marker)
        if not marker:
            return text.strip() if self.without == "all" else ""
        return after.partition("\n")[0].strip()


@dataclasses.dataclass(frozen=True)
class AnswerPattern:
    """The answer of a text: the last match of a regular expression, or of its first group.

    Attributes:
      pattern: the expression, in which `^` and `$` match at the ends of lines.
      without: the answer of a text without a match: "all" of the text, or "nothing".
    """

    pattern: str
    without: str = "nothing"

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern, re.MULTILINE)
        except (re.error, TypeError) as error:
            raise UserError(
                f"pattern must be a regular expression, got {self.pattern!r}: {error}"
            ) from None
        _check_without(self.without)

    def __call__(self, text: str) -> str:
        matches = list(re.finditer(self.pattern, text, re.MULTILINE))
        if not matches:
            return text.strip() if self.without == "all" else ""
        last = matches[-1]
        return (last[1] or "" if last.re.groups else last[0]).strip()


def _check_without(value: str) -> None:
    if value not in ("all", "nothing"):
        raise UserError(f"without must be 'all' or 'nothing', got {value!r}")


def normalized(text: str) -> str:
    """Normalises an answer: lower case, no punctuation, English articles or extra space.

    Source: the evaluation script of SQuAD (Rajpurkar et al. 2016).
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def token_f1(output: str, reference: str) -> float:
    """Returns the harmonic mean of precision and recall of an answer's words, 0 to 1.

    If either has no words, it is 1 if both have none. A question without an answer has the
    reference "".

    Source: the evaluation scripts of SQuAD 1.1 and 2.0.
    """
    ours, theirs = normalized(output).split(), normalized(reference).split()
    if not ours or not theirs:
        return float(ours == theirs)
    common = (collections.Counter(ours) & collections.Counter(theirs)).total()
    return 2.0 * common / (len(ours) + len(theirs))


def answer_number(text: str) -> decimal.Decimal | None:
    """Returns the number that a text answers: the first after "####", otherwise the last.

    Commas may separate thousands, and a currency sign may precede: "$1,234.50." is 1234.5. None if
    the text has no number.

    Source: GSM8K (Cobbe et al. 2021), whose answers end with "#### 42".
    """
    before, mark, after = text.partition("####")
    if mark and (number := _NUMBER.search(after)):
        return _value(number)
    numbers = list(_NUMBER.finditer(before if mark else text))
    return _value(numbers[-1]) if numbers else None


def _value(match: re.Match[str]) -> decimal.Decimal:
    number = decimal.Decimal(match["digits"].replace(",", ""))
    return -number if match["sign"] else number


# The references of an output: a text, or several.
References = str | Sequence[str]


class Metric(abc.ABC):
    """Scores texts; `METRICS` has the named metrics."""

    library: str | None = None  # the module that must be importable

    @abc.abstractmethod
    def statistics(self, outputs: Sequence[str], references: Sequence[Sequence[str]]) -> np.ndarray:
        """`[n, k]` float64, the statistics of n outputs, each with at least one reference."""

    @abc.abstractmethod
    def score(self, sums: np.ndarray) -> np.ndarray:
        """`[m, k]` summed statistics -> `[m]` scores, 0 to 100."""

    def refusal(self, references: Sequence[str]) -> str | None:
        """Returns why an example with these references cannot be scored, or None."""
        return None

    def __call__(self, outputs: Sequence[str], references: Sequence[References]) -> float:
        return figure(self, outputs, references).value


def figure(metric: Metric, outputs: Sequence[str], references: Sequence[References]) -> Sums:
    """Returns a metric of n outputs as a figure for `Bootstrap`.

    Each output has a reference, or several: the best counts (BLEU: all count, see sacreBLEU).

    Raises:
      UserError: the metric's library is not installed, there are no texts, the numbers of outputs
        and references differ, or the metric cannot use a reference.
    """
    if len(outputs) != len(references) or not len(outputs):
        raise UserError(
            f"there are {len(outputs)} outputs and {len(references)} references: give at least one "
            "output, and a reference (or a list of references) for each output"
        )
    several = check_references(metric, references)
    return Sums(metric.statistics(list(outputs), several), metric.score)


def check_references(metric: Metric, references: Sequence[References]) -> list[tuple[str, ...]]:
    """Returns references as tuples of texts; raises UserError if the metric cannot use them."""
    several = [(r,) if isinstance(r, str) else tuple(r) for r in references]
    for i, texts in enumerate(several):
        reason = metric.refusal(texts) if texts else "there are none"
        if reason is not None:
            raise UserError(f"example {i} (from 0) has invalid references: {reason}")
    return several


class SacreBleu(Metric):
    """A metric of sacreBLEU with its default settings.

    Args:
      name: the class in `sacrebleu.metrics`: "BLEU" (13a tokenisation, case sensitive, exponential
        smoothing; k = 10) or "CHRF" (n-grams of up to 6 characters, beta 2; k = 18).

    Source: Papineni et al. 2002; Popović 2015; Post 2018.
    """

    library = "sacrebleu"

    def __init__(self, name: str):
        self._name = name

    def _metric(self) -> Any:
        # `force` silences sacrebleu's warning about tokenised input.
        options = {"force": True} if self._name == "BLEU" else {}
        return getattr(require("sacrebleu", "eval"), self._name)(**options)

    def statistics(self, outputs: Sequence[str], references: Sequence[Sequence[str]]) -> np.ndarray:
        most = max(map(len, references))
        padded = [(*texts, *(None,) * (most - len(texts))) for texts in references]
        streams = list(zip(*padded, strict=True))
        return np.asarray(self._metric()._extract_corpus_statistics(outputs, streams), np.float64)

    def score(self, sums: np.ndarray) -> np.ndarray:
        metric = self._metric()
        return np.asarray(
            [metric._compute_score_from_stats(line.tolist()).score for line in sums], np.float64
        )


class MeanMetric(Metric):
    """The mean over examples of the value for the best reference; k = 2."""

    @abc.abstractmethod
    def values(self, outputs: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
        """A value for each output, 0 to 1."""

    def statistics(self, outputs: Sequence[str], references: Sequence[Sequence[str]]) -> np.ndarray:
        values = np.asarray(self.values(outputs, references), np.float64)
        return np.stack([values, np.ones_like(values)], axis=1)

    def score(self, sums: np.ndarray) -> np.ndarray:
        return 100.0 * divided(sums[:, 0], sums[:, 1])


class BestOf(MeanMetric):
    """The mean of a function of an output and its best reference, 0 to 1 or a truth value."""

    def __init__(self, compare: Callable[[str, str], float], library: str | None = None):
        self._compare, self.library = compare, library

    def values(self, outputs: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
        pairs = zip(outputs, references, strict=True)
        return [max(self._compare(o, text) for text in r) for o, r in pairs]


def _rouge(kind: str) -> BestOf:
    """ROUGE F1 of rouge-score, without stemming (Lin 2004)."""
    library = "rouge_score.rouge_scorer"

    def f1(output: str, reference: str) -> float:
        return require(library, "eval").RougeScorer([kind]).score(reference, output)[kind].fmeasure

    return BestOf(f1, library)


class NumericAccuracy(BestOf):
    """The share of outputs with the number of a reference, the score of GSM8K.

    An output without a number is wrong; a reference must have a number.

    Source: Cobbe et al. 2021; see `answer_number`.
    """

    def __init__(self) -> None:
        super().__init__(lambda output, other: answer_number(output) == answer_number(other))

    def refusal(self, references: Sequence[str]) -> str | None:
        bad = next((text for text in references if answer_number(text) is None), None)
        return None if bad is None else f"{bad[-40:]!r} has no number"


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "bleu": SacreBleu("BLEU"),
        "chrf": SacreBleu("CHRF"),
        # Common words, pairs of words, the longest common subsequence.
        "rouge_1": _rouge("rouge1"),
        "rouge_2": _rouge("rouge2"),
        "rouge_l": _rouge("rougeL"),
        # Equal, apart from surrounding space.
        "exact_match": BestOf(lambda output, reference: output.strip() == reference.strip()),
        # SQuAD (Rajpurkar et al. 2016, 2018); a question without an answer has the reference "".
        "answer_match": BestOf(lambda output, other: normalized(output) == normalized(other)),
        "answer_f1": BestOf(token_f1),
        "numeric_accuracy": NumericAccuracy(),
    }
)


def check_metrics(names: Iterable[str]) -> None:
    """Checks, before long work, that metrics are known and installed."""
    for name in names:
        if name not in METRICS:
            raise UserError(f"`metrics` must be names in {', '.join(METRICS)}, got {name!r}")
        library = METRICS[name].library
        if library is not None:
            require(library, "eval")
