"""Texts coloured by where each token came from, for terminals and notebooks."""

import collections
import dataclasses
import html
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple


class _Style(NamedTuple):
    """How a source looks: the marks around its text, its ANSI codes, and its CSS."""

    marks: str
    ansi: str
    css: str


# Each style differs from the others without colours too.
_OWN = {
    "residual": _Style("[]", "1;31", "background:#f6c6ad;border:1px solid"),
    "bonus": _Style("<>", "33", "background:#fbe7a1;border:1px dashed"),
    "verifier": _Style("{}", "35", "background:#e3d0ea;border:1px dotted"),
}
_DRAFTERS = (
    _Style("", "4;32", "background:#cfeadb;border-bottom:2px solid"),
    _Style("()", "4;36", "background:#c9e3f5;border-bottom:3px double"),
    _Style("||", "4;34", "background:#d5d8f3;border-bottom:2px dashed"),
    _Style("//", "4;37", "background:#e4e4e4;border-bottom:2px dotted"),
)
_PLAIN = _Style("", "", "")
# Each of these tokens has marks of its own.
_SINGLE = ("residual", "bonus")
# Characters that move the cursor, change colours or reverse the text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

Sourced = list[tuple[str, str]]  # (text, source) of each token


def split(
    text: str, tokens: Sequence[int], text_of: Callable[[Sequence[int]], str] | None
) -> list[str]:
    """Splits a text into the parts that its tokens add, which together are the text.

    A character belongs to the token that completes it. The text may be cut before its last tokens.
    `text_of` returns the text of the first tokens; None: each token's text is its id.
    """
    if text_of is None:
        return [f"{token} " for token in tokens]
    whole, ends = text_of(tokens), [0]
    for count in range(1, len(tokens)):
        so_far = text_of(tokens[:count])
        # Otherwise it ends inside a character.
        fits = whole.startswith(so_far)
        ends.append(max(ends[-1], len(so_far)) if fits else ends[-1])
    ends += [max(len(whole), len(text))] * bool(len(tokens))
    return [text[start:end] for start, end in itertools.pairwise(ends)]


@dataclasses.dataclass(frozen=True, repr=False)
class Shown:
    """Texts with the source of each token: HTML in a notebook, else text with marks.

    The text has colours if it is written to a terminal and `NO_COLOR` is not set.

    Attributes:
      rows: for each text a name, and the text and the source of each token.
    """

    rows: tuple[tuple[str, Sourced], ...]

    def __repr__(self) -> str:
        return self.text(has_colours(sys.stdout))

    def text(self, colours: bool) -> str:
        """Returns the texts and a legend, with ANSI codes if `colours`."""

        def marked(text: str, style: _Style) -> str:
            word = text.strip() or text
            before, _, after = text.partition(word)
            if style.marks and word.isspace() and "\n" in word:
                # Marks around the end of a line would be on two lines.
                word, after = word.replace("\n", "\\n"), "\n"
            word = f"{style.marks[:1]}{word}{style.marks[1:]}"
            if colours and style.ansi:
                word = f"\x1b[{style.ansi}m{word}\x1b[0m"
            return before + word + after

        return "\n".join([f"{name}: {line}" for name, line in self._lines(marked)])

    def _repr_html_(self) -> str:

        def marked(text: str, style: _Style) -> str:
            look = f"color:#000;{style.css}" if style.css else ""
            return f'<span style="{look}">{html.escape(text)}</span>'

        lines = [f"{html.escape(name)}: {line}" for name, line in self._lines(marked)]
        style = "white-space:pre-wrap;line-height:1.6"
        return f'<div style="{style}">' + "\n".join(lines) + "</div>"

    def _lines(self, marked: Callable[[str, _Style], str]) -> Iterator[tuple[str, str]]:
        """The name and the marked text of each row, then the legend."""
        counts = collections.Counter(source for _, row in self.rows for _, source in row)
        styles = _styles(list(counts))
        for name, row in self.rows:
            yield name, "".join(marked(_visible(text), styles[of]) for text, of in _runs(row))
        total = sum(counts.values())
        shares = [f"{marked(of, styles[of])} {count}" for of, count in counts.items()]
        yield f"source of {total} tokens", ", ".join(shares) or "none"


def _styles(sources: Sequence[str]) -> dict[str, _Style]:
    drafters = [name for name in sources if name not in _OWN]
    if len(sources) == 1:
        return {sources[0]: _PLAIN}
    return _OWN | {name: _DRAFTERS[i % len(_DRAFTERS)] for i, name in enumerate(drafters)}


def _runs(row: Sourced) -> Sourced:
    """The row with the successive tokens of a drafter joined, and without empty texts."""
    runs: Sourced = []
    for text, source in row:
        if runs and runs[-1][1] == source and source not in _SINGLE:
            runs[-1] = (runs[-1][0] + text, source)
        elif text:
            runs.append((text, source))
    return runs


def _visible(text: str) -> str:
    """The text with its control characters as escapes; tabs and new lines stay."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def has_colours(stream: Any) -> bool:
    """Returns whether a stream is a terminal that shows colours."""
    refused = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not refused and bool(getattr(stream, "isatty", bool)())
