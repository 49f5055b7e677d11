"""Answers in texts: normalised as SQuAD does, and numbers as in GSM8K."""

import collections
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
