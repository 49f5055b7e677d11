"""Constraints: token automata by brute force, laws, schemas, and outputs of the built-in pair."""

import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import decoding, drafting, processors, rules, testing, types, verification
from specjax.processors import token_automata
from specjax.processors.byte_automata import byte_automaton
from specjax.processors.token_automata import token_automaton
from specjax.tokenizers.tokenizer import Pieces
from tests.laws import Law
from tests.processors.schema_values import SCHEMAS, fits
from tests.tables import targets

# Tokens of a toy: 0 ends; the others add their text, 4 a space that a text does not begin with.
LATER = [b"", b"a", b"b", b"ab", b" a", b"\xc3", b"\xa9", b""]
FIRST = [*LATER[:4], b"a", *LATER[5:]]
PIECES = Pieces(FIRST, LATER)
V, EOS = len(LATER), 0
LONGEST = 4


def walk(made, tokens, state):
    """The state after tokens, or None if one must not follow."""
    for token in tokens:
        state = int(made.table[state, made.classes[token]])
        if state < 0:
            return None
    return state


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("pattern", ["(ab)*", "a( a)*b", "é+", "a|ab|b", "ab a?", "[^b]*"])
def test_tokens_follow_that_can_still_make_a_text(pattern, goes_on):
    """Against all texts of up to as many tokens as the automaton has states."""
    made, (start,) = token_automaton([byte_automaton(pattern)], PIECES, V, (EOS,), goes_on=goes_on)

    def text(tokens):
        parts = [(LATER if i or goes_on else FIRST)[token] for i, token in enumerate(tokens)]
        try:
            return b"".join(parts).decode()
        except UnicodeDecodeError:
            return None

    words = [i for i in range(V) if LATER[i]]
    whole = {
        tokens
        for n in range(LONGEST + 3)
        for tokens in itertools.product(words, repeat=n)
        if text(tokens) is not None and re.fullmatch(pattern, text(tokens))
    }
    for n in range(LONGEST + 1):
        for tokens in itertools.product(words, repeat=n):
            state = walk(made, tokens, start)
            rest = [len(x) - n for x in whole if x[:n] == tokens]
            assert (state is not None) == bool(rest), tokens
            if state is not None:
                assert made.distances[state] == min(rest)
                assert (walk(made, (*tokens, EOS), start) is not None) == (tokens in whole)
                assert walk(made, (*tokens, 7), start) is None  # it adds no text


def test_two_languages_share_a_table_and_an_empty_one_is_refused():
    languages = [byte_automaton("a+"), byte_automaton("b|")]
    made, starts = token_automaton(languages, PIECES, V, (EOS,))
    assert walk(made, (1, 1, 0), starts[0]) is not None and walk(made, (0,), starts[0]) is None
    assert walk(made, (0,), starts[1]) is not None and walk(made, (1,), starts[1]) is None
    assert made.distances[starts].tolist() == [1, 0]
    with pytest.raises(ValueError, match="^entry 1: the tokenizer's tokens can write no text that"):
        token_automaton([byte_automaton("a"), byte_automaton("c")], PIECES, V, (EOS,))


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [("_SECONDS", -1.0, "takes more than -1 s to compile"), ("MOST_BYTES", 8, "takes a table of")],
)
def test_time_and_memory_of_a_table_are_limited(limit, value, message, monkeypatch):
    monkeypatch.setattr(token_automata, limit, value)
    with pytest.raises(ValueError, match=f"the constraint {message}.* use a simpler pattern"):
        token_automaton([byte_automaton("a+")], PIECES, V, (EOS,))


# The law: three tokens, of which 2 ends a text.
TOY = Pieces([b"a", b"b", b""], [b"a", b"b", b""])
N = 3
MODEL = testing.TabularModel(3, 2)
P, Q = (jnp.asarray(testing.random_table(s, 3, 2, scale=1.5)) for s in (1, 2))
LIMITED = "a(ba)?|bb?|aab"


def masked(table, text, limit=N):
    """The distribution after an output, by brute force over the texts that fit into the limit."""
    context = [3, 3, 0, 1, *text][-2:]
    logits = np.asarray(table, np.float64)[context[0] * 4 + context[1]]
    texts = [
        (*tokens, *([2] if n < limit else []))
        for n in range(limit + 1)
        for tokens in itertools.product((0, 1), repeat=n)
        if re.fullmatch(LIMITED, "".join("ab"[i] for i in tokens))
    ]
    allowed = [any(x[: len(text) + 1] == (*text, i) for x in texts) for i in range(3)]
    if not any(allowed):  # after the end, or where no text leads
        allowed = [True] * 3
    weights = np.where(allowed, np.exp(logits - logits.max()), 0.0)
    return weights / weights.sum()


def laws(table):
    texts = itertools.chain(*(itertools.product(range(3), repeat=n) for n in range(N + 1)))
    return np.array([masked(table, text) for text in texts], np.float32)


@pytest.mark.parametrize(
    ("judge", "rule"),
    [(verification.Block(), rules.Lossless()), (verification.Token(), rules.OPT(0.2))],
)
def test_the_law_of_constrained_outputs(judge, rule):
    made, (start,) = token_automaton([byte_automaton(LIMITED)], TOY, 3, (2,), goes_on=True)
    one = processors.Constraint(start, 1, "a test")
    drafter = drafting.Chain(MODEL, 2)
    law = Law(decoding.Speculative(MODEL, drafter, judge), processors=(one,))
    shared = jax.tree.map(jnp.asarray, made)
    given = decoding.MethodParams(P, drafting.chain.ChainParams(Q), rule, (shared,))
    p, q = laws(P), laws(Q)
    target = testing.target_law(targets(rule, (q, p, q, p)), N)
    assert testing.total_variation(law(given, (0, 1), N), target) < 1e-5
    # Each text of the language that fits, and no other, with its end.
    found = {x for x, weight in enumerate(target) if weight > 1e-9}
    texts = {np.base_repr(x, 3).zfill(N) for x in found}
    whole = {"".join("ab"[int(i)] for i in x.split("2")[0]) for x in texts}
    assert whole == {"a", "aba", "b", "bb", "aab"}


EXPRESSIONS = (
    *("[0-9]+", "yes|no|yes please", "(a|b)*c", "\\$[0-9]{1,3}(,[0-9]{3})*", "(?s).{5,40}"),
    *("é+|ü", "\\w+( \\w+){2,6}\\.", "- [^\n]+(\n- [^\n]+)*", "[😀-😄]{2}", "\\s+\\S+", ".?"),
    "She has .* apples\\.",
)
QUESTIONS = [
    "Tom has 3 apples and buys 5 more. How many apples does he have?",
    "A train goes 60 miles in 2 hours. How fast is it?",
]
SHAPE = {"max_new_tokens": 40, "batch_size": 2, "buckets": (64,)}


@pytest.fixture(scope="module")
def pair():
    return specjax.load_pair("gsm8k")


def in_one(pair, made, **options):
    """Outputs of all languages together, a row each, sampled and greedy."""
    count = len(made.pattern if isinstance(made, processors.Regex) else made.schema)
    prompts = [QUESTIONS[i % 2] for i in range(count)]
    options = {**SHAPE, "batch_size": 8, **options}
    decoder = specjax.Decoder(pair, processors=(made,), max_draft=4, **options)
    alone = specjax.Decoder(pair.verifier, processors=(made,), **options)
    greedy = types.Sampling(0.0)
    assert decoder(prompts, sampling=greedy).texts == alone(prompts, sampling=greedy).texts
    return decoder(prompts, seed=3).texts + decoder(prompts, sampling=greedy).texts


def test_outputs_of_the_built_in_pair_match_their_expressions(pair):
    made = processors.Regex(EXPRESSIONS, which=np.arange(len(EXPRESSIONS)))
    for text, pattern in zip(in_one(pair, made), EXPRESSIONS * 2, strict=True):
        assert re.fullmatch(pattern, text), (pattern, text)


def test_outputs_of_the_built_in_pair_are_of_their_schemas(pair):
    given = tuple(json.dumps(schema) for schema in SCHEMAS.values())
    texts = in_one(pair, processors.JsonSchema(given, which=np.arange(len(given))))
    for text, schema in zip(texts, [*SCHEMAS.values()] * 2, strict=True):
        assert fits(json.loads(text), schema, schema), (schema, text)
    assert not fits({"who": {}, "age": 1}, SCHEMAS["nested"], SCHEMAS["nested"])


def test_a_limit_below_the_shortest_text_is_refused(pair):
    fifty = (processors.Regex("[0-9]{50}"),)
    with pytest.raises(ValueError, match="max_new_tokens must be at least .*, got 8"):
        specjax.Decoder(pair, processors=fifty, **SHAPE)(QUESTIONS, max_new_tokens=8)


def test_past_its_limit_a_draft_may_go_on():
    made, (start,) = token_automaton([byte_automaton("ab")], TOY, 3, (2,), goes_on=True)
    one, ones = processors.Constraint(start, 2, "a test"), jnp.ones(1, jnp.int32)
    made = jax.tree.map(jnp.asarray, made)
    prompts = types.PromptBatch(ones[None], ones, ones, limits=0 * ones)
    place = one.init(made, prompts, 3, 8)
    assert np.isfinite(one.process(made, place, jnp.zeros((1, 3)))).any()
    # After a token that is not allowed, as in an unprocessed draft, any token may follow.
    place = one.init(made, prompts._replace(limits=5 * ones), 3, 8)
    after = one.advance(made, place, ones)
    assert np.isfinite(one.process(made, after, jnp.zeros((1, 3)))).all()


class Person:
    """Like a model of pydantic."""

    def model_json_schema(self):
        return {}


WRONG = [
    (lambda: processors.Regex(3), "pattern must be like"),
    (lambda: processors.Regex(()), "leave the processor out"),
    (lambda: processors.Regex("("), "is not a regular expression"),
    (lambda: processors.Regex("a", which=1), r"which must be a whole number in"),
    (lambda: processors.JsonSchema("{"), "is not JSON"),
    (lambda: processors.JsonSchema(True), "schema must be like .*, got True"),
    (lambda: processors.JsonSchema(({}, Person)), r"write Person.model_json_schema\(\)"),
    (lambda: processors.JsonSchema("true"), "schema must be an object, got true"),
    (lambda: processors.JsonSchema([{}, {"type": "odd"}]), r"^schema\[1\]\.type must be one of"),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_a_wrong_constraint_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
