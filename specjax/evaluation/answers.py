"""Answers in texts: normalised as SQuAD does, and numbers as in GSM8K."""

import collections
import dataclasses
import decimal
import re
import string

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_MARK = "####"
# A minus is a sign right before a number, unless right behind a word: 10-5 ends with 5.
_NUMBER = re.compile(
    r"""(?:(?<![\w)\]])(?P<sign>[-−])[$€£]?)?
    (?<!\w)(?<!\d\.)  # not in the middle of a word or of a number
    (?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\.)\.\d+)""",
    re.VERBOSE,
)


@dataclasses.dataclass(frozen=True)
class AnswerAfter:
    """The answer of a text: what stands behind the last occurrence of a marker, to the line's end.

    Attributes:
      marker: such as "####" or "The answer is".
      without: what a text without it answers: "all" of the text, or "nothing".

    Raises:
      ValueError: if `marker` is no text or empty, or `without` neither.
    """

    marker: str
    without: str = "nothing"

    def __post_init__(self) -> None:
        if not isinstance(self.marker, str) or not self.marker:
            raise ValueError(f"marker must be a text such as 'Answer:', got {self.marker!r}")
        _check_without(self.without)

    def __call__(self, text: str) -> str:
        """The answer, without the space around it."""
        _, found, after = text.rpartition(self.marker)
        if not found:
            return text.strip() if self.without == "all" else ""
        return after.partition("\n")[0].strip()


@dataclasses.dataclass(frozen=True)
class AnswerPattern:
    """The answer of a text: the last match of a regular expression, of its first group if any.

    Attributes:
      pattern: the expression, in which `^` and `$` are the ends of lines.
      without: what a text without a match answers: "all" of the text, or "nothing".

    Raises:
      ValueError: if `pattern` is no regular expression, or `without` neither.
    """

    pattern: str
    without: str = "nothing"

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern, re.MULTILINE)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"pattern must be a regular expression, got {self.pattern!r}: {error}"
            ) from None
        _check_without(self.without)

    def __call__(self, text: str) -> str:
        """The answer, without the space around it."""
        found = list(re.finditer(self.pattern, text, re.MULTILINE))
        if not found:
            return text.strip() if self.without == "all" else ""
        last = found[-1]
        return (last[1] or "" if last.re.groups else last[0]).strip()


def _check_without(value: str) -> None:
    if value not in ("all", "nothing"):
        raise ValueError(f"without must be 'all' or 'nothing', got {value!r}")


def normalized(text: str) -> str:
    """Lower case, without punctuation, English articles and surplus space.

    Args:
      text: an answer.

    Returns:
      Its words with single spaces.

    Source: the evaluation script of SQuAD (Rajpurkar et al. 2016).
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def equal_answers(output: str, reference: str) -> float:
    """1 if two answers are equal once normalised, else 0."""
    return float(normalized(output) == normalized(reference))


def token_f1(output: str, reference: str) -> float:
    """The harmonic mean of precision and recall of an answer's words.

    Args:
      output: an answer.
      reference: the right one; "" where there is none.

    Returns:
      0 to 1. Where one of them has no word, 1 if neither has one.

    Source: the evaluation scripts of SQuAD 1.1 and 2.0.
    """
    ours, theirs = normalized(output).split(), normalized(reference).split()
    if not ours or not theirs:
        return float(ours == theirs)
    common = (collections.Counter(ours) & collections.Counter(theirs)).total()
    return 2.0 * common / (len(ours) + len(theirs))


def answer_number(text: str) -> decimal.Decimal | None:
    """The number that a text answers: the first one behind "####", else the last one.

    Thousands may be separated by commas, and a currency may stand before it: "$1,234.50." is
    1234.5, equal to 1234.50.

    Args:
      text: an answer, perhaps with the way to it.

    Returns:
      The number, exactly; None if there is none.

    Source: GSM8K (Cobbe et al. 2021), whose answers end with "#### 42".
    """
    before, mark, after = text.partition(_MARK)
    if mark and (found := _NUMBER.search(after)):
        return _value(found)
    numbers = list(_NUMBER.finditer(before if mark else text))
    return _value(numbers[-1]) if numbers else None


def equal_numbers(output: str, reference: str) -> float:
    """1 if two texts answer the same number, else 0; see `answer_number`."""
    number = answer_number(output)
    return float(number is not None and number == answer_number(reference))


def _value(found: re.Match[str]) -> decimal.Decimal:
    number = decimal.Decimal(found["digits"].replace(",", ""))
    return -number if found["sign"] else number
