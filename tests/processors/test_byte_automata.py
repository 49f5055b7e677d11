"""An expression's automaton accepts what `re.fullmatch` does; what it cannot read is refused."""

import random
import re

import numpy as np
import pytest

from specjax.processors import byte_automata
from specjax.processors.byte_automata import FAR, byte_automaton, fewest_steps, plain_expression
from tests.variants import variants

# With letters that make their texts.
PATTERNS = {
    "[0-9]+": "019a",
    "a|ab": "ab",
    "(a|b)*a(a|b){3}": "ab",
    "[^x]{2}": "xaé\nж",
    r"\d{1,3}": "09a٣",
    r"\w+@\w+\.c": "a@.c",
    "é+[à-ü]?": "éàüa",
    ".*": "a\né",
    "(?s).+": "a\né",
    "^ab$": "ab",
    "^a|b$": "ab",
    "(?:ab?)*?c": "abc",
    r"[^\W\d]+": "aé1_",
    r"(-)?(0|[1-9][0-9]*)(\.[0-9]+)?": "-01.9",
    r'"([^"\\\x00-\x1F\x7F-\x9F]|\\["\\/bfnrt]){0,3}"': '"\\na\x85é',
    r"\s\S": " a\t\u00a0",
    "[\u0400-\u04ff]+": "жаa",
    "x{2,}": "xa",
    "": "a",
    "(a{0,2}){2}": "a",
    "(?a)\\d+": "0٣",
    "[\U0001f600-\U0001f64f]?": "\U0001f600\U0001f650a",
    "(a|(b|(c|)))d*": "abcd",
    "[\\x80-\u0800\uffff]": "\x80\u0800\uffffa\x7f",
    "(?x) a b # comment": "ab ",
    "a(?#note)b": "ab",
    "[a-c&-]+": "abc&-d",
    "(ab|a)(bc|c)": "abc",
    "((a*)*)*": "ab",
    r"\$[0-9]{1,3}(,[0-9]{3})*": "$,0",
}
REFUSED = {
    "(a": "is not a regular expression: missing \\)",
    "a{3,2}": "is not a regular expression",
    "(?=a)b": "look-around",
    "(?<!a)b": "look-around",
    r"\bfoo": "an anchor inside",
    "a$b": "an anchor inside",
    "(a^)*": "an anchor inside",
    r"(a)\1": "a back-reference",
    "(a)?(?(1)b)": "a condition",
    "(?i)a": r"a flag that is not supported \(i, m or L\)",
    "(?i:a)b": "flags of a group",
    "(?>a)": "an atomic group",
    "a*+": "a possessive repeat",
    "(a|b)*a(a|b){15}": "takes more than 20000 states",
    "((a{1000}){1000}){1000}": "takes more than 20000 states",
    r"a|[^\s\S]": "a class of no characters",
    "(" * 500 + "a" + ")" * 500: "is nested too deeply: use fewer groups inside groups",
    "a" * 2_100_000: "has more than 2097152 characters",
}


def accepts(automaton, text):
    state = 0
    for byte in text:
        state = automaton.steps[state, byte]
        if state < 0:
            return False
    return bool(automaton.accepting[state])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_are_those_of_re(pattern):
    automaton, draw = byte_automaton(pattern), random.Random(0)
    found = set()
    for _ in range(600):
        text = "".join(draw.choices(PATTERNS[pattern], k=draw.randrange(7)))
        matches = re.fullmatch(pattern, text) is not None
        assert accepts(automaton, text.encode()) == matches, text
        found.add(matches)
    assert found == {True, False}
    # From every state there is a way to a text: a dead end cannot be entered.
    alive = automaton.accepting.copy()
    for _ in alive:
        alive |= (np.append(alive, False)[automaton.steps]).any(axis=1)
    assert alive.all()


def test_bytes_that_are_no_text_are_not_accepted():
    automaton = byte_automaton("(?s).*")
    for wrong in (b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\x80", b"\xc3", b"\0"):
        assert not accepts(automaton, wrong)
    for right in ("\x01", "\x7f", "\x80", "\u07ff", "\u0800", "\ud7ff", "\ue000", "\U0010ffff"):
        assert accepts(automaton, right.encode())


@pytest.mark.parametrize("pattern", variants(REFUSED, *list(REFUSED)[:-3]))
def test_what_is_not_supported_is_refused(pattern):
    with pytest.raises(ValueError, match=REFUSED[pattern]):
        byte_automaton(pattern)
    with pytest.raises(ValueError, match="pattern must be a text"):
        byte_automaton(3)


def test_an_error_shows_the_expression_as_its_user_wrote_it():
    with pytest.raises(ValueError, match=r"^pattern '\(' is not .* at position 0$"):
        byte_automaton("(")
    with pytest.raises(ValueError, match="^whitespace is not a regular expression"):
        byte_automaton("(", name="whitespace")


def test_digits_of_a_schema_are_ascii():
    assert re.fullmatch(plain_expression(r"\d"), "٣")
    assert not re.fullmatch(plain_expression(r"\d", ascii_only=True), "٣")


@pytest.mark.parametrize("pattern", ["(?:){4000000}", "(?:){0,4000000}", "((?:){9999}){9999}"])
def test_empty_repeats_take_no_time(pattern):
    assert byte_automaton(pattern).accepting.tolist() == [True]


@pytest.mark.parametrize(
    "pattern",
    [
        "(a{1000}){1000}",
        "((a{100}){100}){100}b*",
        "(?:a{0,1000}){100}b*",
        "(?:a{0,100000}){100000}",
        "(a|bc){30000,}",
        "a{1,4294967290}",
        "x|(?:[ab]?){100000}",
        r"(?:\w{0,50}\s){10}",
    ],
)
def test_what_takes_far_too_many_states_is_not_compiled(pattern, monkeypatch):
    monkeypatch.setattr(byte_automata, "build", lambda *_, **__: pytest.fail("compiled"))
    with pytest.raises(ValueError, match="takes more than 20000 states: use smaller numbers"):
        byte_automaton(pattern)


@pytest.mark.parametrize(
    ("limit", "value", "pattern", "message"),
    [
        ("_SECONDS", 0.0, "(a?){300}", "takes more than 0 s to compile"),
        ("_MOST_MEMORY", 1 << 20, "(a|b)*a(a|b){12}", "takes more than 1 MB to compile"),
        ("MOST_STATES", 40, "a{40}", "takes more than 40 states"),
    ],
)
def test_time_and_memory_are_limited(limit, value, pattern, message, monkeypatch):
    byte_automata._compile.kept.clear()
    assert byte_automaton(pattern).accepting.any()
    byte_automata._compile.kept.clear()
    monkeypatch.setattr(byte_automata, limit, value)
    with pytest.raises(ValueError, match=message):
        byte_automaton(pattern)


def test_fewest_steps_are_those_of_a_search_from_each_state():
    draw = np.random.default_rng(0)
    for size in range(1, 9):
        edges = draw.random((size, size)) < 0.2
        ends = draw.random(size) < 0.3
        found = fewest_steps(*np.nonzero(edges), ends)
        reached, walks = np.eye(size, dtype=bool), []
        for _ in range(size + 1):
            walks.append((reached & ends).any(axis=1))
            reached = reached @ edges
        expected = np.where(np.any(walks, axis=0), np.argmax(walks, axis=0), FAR)
        assert (found == expected).all()
