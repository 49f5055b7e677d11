"""Texts coloured by the sources of their tokens."""

import functools
import html
import io
import re

import pytest

import specjax
from specjax.text import results
from specjax.text.results import Shown, split
from specjax.tokenizers import ByteTokenizer, added_text
from tests import tiny_pair

BYTES = functools.partial(added_text, ByteTokenizer(), ())


def ids(text):
    return [byte + 3 for byte in text.encode()]


@pytest.mark.parametrize("text", ["", "plain", "grün 你好 👩‍👩‍👧 e\u0301", "a\n\tb"])
def test_parts_are_the_text_and_break_no_character(text):
    parts = split(text, ids(text), BYTES)
    assert "".join(parts) == text and len(parts) == len(text.encode())
    assert [part for part in parts if part] == list(text)  # bytes of one character are joined


def test_parts_of_bytes_that_are_no_text():
    broken = [*ids("a"), 0xE4 + 3, *ids("b"), 0xF0 + 3]
    assert split("ab", broken, BYTES) == ["a", "", "b", ""]
    replacing = lambda tokens: bytes(i - 3 for i in tokens).decode(errors="replace")  # noqa: E731
    whole = replacing(broken)
    assert "".join(split(whole, broken, replacing)) == whole == "a\ufffdb\ufffd"
    # The second byte completes the character that the first began.
    assert split("ä", ids("ä"), replacing) == ["", "ä"]
    # They end at a stop string, and are ids without a tokenizer.
    assert split("ab", ids("abSTOP"), BYTES) == ["a", "b", "", "", "", ""]
    assert split("", [5, 7], None) == ["5 ", "7 "]


ROW = [
    *(("Ein", "drafter"), (" <b>", "drafter")),
    *((" Haus", "residual"), ("", "bonus"), ("!", "bonus")),
]


def test_marks_are_legible_without_colours():
    shown = Shown((("0", ROW),))
    assert shown.text(False).splitlines() == [
        "0: Ein <b> [Haus]<!>",
        "source of 5 tokens: drafter 2, [residual] 1, <bonus> 2",
    ]
    coloured = shown.text(True)
    assert coloured.count("\x1b[0m") == 6
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == shown.text(False)
    # Several drafters, and a model that writes alone, have marks of their own.
    two = Shown((("0", [("a", "drafter"), ("b", "lookup"), ("c", "verifier"), ("d", "verifier")]),))
    assert two.text(False).startswith("0: a(b){cd}\n")
    assert Shown((("0", [("c", "verifier")]),)).text(False).startswith("0: c\n")


def test_marks_stay_on_one_line():
    texts = ("a", ".\n", "\n\n", "\n", "b")
    sources = ("drafter", "residual", "bonus", "drafter", "bonus")
    shown = Shown((("0", [*zip(texts, sources, strict=True)]),))
    assert shown.text(False).startswith("0: a[.]\n<\\n\\n>\n\n<b>\nsource of")
    assert re.sub(r"\x1b\[[\d;]*m", "", shown.text(True)) == shown.text(False)


def test_html_is_escaped():
    page = Shown((("<0>", [*ROW, ("<script>alert('x')</script>&", "drafter")]),))._repr_html_()
    assert "<script" not in page and "&lt;script&gt;" in page and "&lt;0&gt;" in page
    assert set(re.findall(r"</?(\w+)", page)) == {"div", "span"}
    text = html.unescape(re.sub(r"<[^>]*>", "", page))
    assert text.startswith("<0>: Ein <b> Haus!<script>alert('x')</script>&\n")
    shown = Shown((("0", [("a\x1b[31m\r\x9b\u202eb\n\tc", "drafter")]),))
    for text in (shown.text(True), shown._repr_html_()):
        assert "\\x1b[31m\\r\\x9b\\u202eb\n\tc" in text


def test_only_a_terminal_gets_colours(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert results.has_colours(Terminal()) and not results.has_colours(io.StringIO())
    assert not results.has_colours(object())
    monkeypatch.setattr("sys.stdout", Terminal())
    assert "\x1b[" in repr(Shown((("0", ROW),)))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in repr(Shown((("0", ROW),)))
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "dumb")
    assert not results.has_colours(Terminal())


def test_rows_show_their_texts(pair):
    decoder = specjax.Decoder(pair, max_draft=3, max_new_tokens=12, batch_size=4, buckets=(16, 32))
    prompts = tiny_pair.sentences(5, seed=3)
    result = decoder(prompts, seed=0, sources=True)
    for row in result:
        ((name, parts),) = row.show().rows
        assert name == str(row.index) and "".join(text for text, _ in parts) == row.text
        assert [source for _, source in parts] == list(row.sources)
    assert result.show(2).rows == tuple(row.show().rows[0] for row in result[:2])
    assert [len(one.rows) for one in (result.show(), result.show(9), result.show(0))] == [3, 5, 0]
    for wrong in (-1, "a", None):
        with pytest.raises(ValueError, match="count must be"):
            result.show(wrong)
    samples = decoder(prompts[:2], num_samples=2, sources=True)
    assert [name for name, _ in samples.show(4).rows] == ["0.0", "0.1", "1.0", "1.1"]
    with pytest.raises(ValueError, match=r"decode with decoder\(prompts, sources=True\)"):
        decoder(prompts).show()
    assert "<div" in Shown((("0", []),))._repr_html_()
