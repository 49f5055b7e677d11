"""Answers in texts: normalised like SQuAD, and numbers like GSM8K."""

import collections
import dataclasses
import decimal
import re
import string

from specjax.errors import UserError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_MARK = "####"
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

    Raises:
      ValueError: `marker` is not a text or is empty, or `without` is neither of these.
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

    Raises:
      ValueError: `pattern` is not a regular expression, or `without` is neither of these.
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

    Args:
      text: an answer.

    Source: the evaluation script of SQuAD (Rajpurkar et al. 2016).
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def equal_answers(output: str, reference: str) -> float:
    """Returns 1 if the normalised answers are equal, otherwise 0."""
    return float(normalized(output) == normalized(reference))


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

    Commas may separate thousands, and a currency sign may precede: "$1,234.50." is 1234.5.

    None if the text has no number.

    Source: GSM8K (Cobbe et al. 2021), whose answers end with "#### 42".
    """
    before, mark, after = text.partition(_MARK)
    if mark and (number := _NUMBER.search(after)):
        return _value(number)
    numbers = list(_NUMBER.finditer(before if mark else text))
    return _value(numbers[-1]) if numbers else None


def equal_numbers(output: str, reference: str) -> float:
    """Returns 1 if two texts answer the same number, otherwise 0; see `answer_number`."""
    number = answer_number(output)
    return float(number is not None and number == answer_number(reference))


def _value(match: re.Match[str]) -> decimal.Decimal:
    number = decimal.Decimal(match["digits"].replace(",", ""))
    return -number if match["sign"] else number
