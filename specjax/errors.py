"""The errors whose messages are for users, and `tell`; all other errors are faults of specjax."""

import re
import sys

# What is longer than that, in quotes, in brackets or without a space, is shortened.
_LONG = 160
# Of any length, so that what is between two quoted texts is none.
_QUOTED = re.compile(r"""(?<!\w)(['"])(?:\\.|(?!\1)[^\\])*+\1(?!\w)""", re.DOTALL)
_WORD = re.compile(rf"\S{{{_LONG},}}")
# The longest message: lists of what specjax offers have up to a thousand characters.
_LONGEST = 1_500
# A model of Hugging Face's hub, perhaps with its address and a file.
_ON_HUB = re.compile(
    r"(?:https://(?:huggingface\.co|hf\.co)/|hf://)?(\w[\w.-]*/\w[\w.-]*?)"
    r"(?:/(?:(?:resolve|blob|tree)/[\w.-]+/?)?([\w./-]+\.gguf)?)?(?:@[\w.-]+)?"
)
_OPENS, _CLOSES = "([{", ")]}"


def tell(text: str) -> None:
    """Prints a message on stderr."""
    print(f"specjax: {text}", file=sys.stderr, flush=True)


class UserError(ValueError):
    """What a user gave cannot be used; the message names it and says what to do.

    A long value in the message is shortened, not what follows it.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(shorten(str(message)))


class MissingLibraryError(UserError, ImportError):
    """A library that one of specjax's extras installs is absent; the message has the command."""


class UnknownOptionError(UserError, TypeError):
    """A function has no option of this name; the message has the one that was meant."""


class MissingFileError(UserError, FileNotFoundError):
    """A path that a user gave is not there."""


def download(path: object) -> str:
    """For the end of a message about a model's path: the command, if it names one of the hub."""
    hub = _ON_HUB.fullmatch(str(path))
    if hub is None:
        return ""
    repository, file = hub.groups()
    words = ("hf download", repository, file, "--local-dir", repository)
    return f"; to download it from Hugging Face: {' '.join(filter(None, words))}"


# The errors whose message is for users: their value, or the system's word on a file.
REFUSALS = (UserError, OSError)


def shorten(message: str) -> str:
    """Cuts the middle out of the long values of a message: quoted texts, brackets and words."""
    if len(message) <= _LONG:
        return message
    message = _cut(message, 20 * _LONG)  # what follows takes quadratic time
    message = _QUOTED.sub(lambda quoted: _cut(quoted[0]), message)
    for start, end in reversed(_brackets(message)):
        message = message[:start] + _cut(message[start:end]) + message[end:]
    message = _WORD.sub(lambda word: _cut(word[0]), message)
    return message if len(message) <= _LONGEST else _cut(message, 2 * _LONG)


def _cut(text: str, longest: int = _LONG) -> str:
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]}...{text[3 - half :]}"


def _brackets(text: str) -> list[tuple[int, int]]:
    """The start and the end of each outermost bracket that is closed."""
    opened: list[int] = []
    found: list[tuple[int, int]] = []
    for i, character in enumerate(text):
        if character in _OPENS:
            opened.append(i)
        elif character in _CLOSES and opened:
            start = opened.pop()
            while found and found[-1][0] > start:
                found.pop()
            found.append((start, i + 1))
    return found
