"""Rows that end by stop strings: the same rows, cut at the very token."""

import collections
import itertools
import random

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import decoding, rules, testing, verification
from specjax.partitioning import make_mesh
from specjax.text import stops
from specjax.text.directories import built_in_pair
from specjax.tokenizers import added_text
from specjax.tokenizers.load import load_tokenizer
from specjax.tokenizers.subword import HuggingFaceTokenizer
from specjax.tokenizers.tokenizer import ByteTokenizer, Pieces, Tokenizer
from specjax.types import Sampling
from tests.tables import p_value
from tests.variants import variants

WORDS = ("", "", "a", "b", "c", "ab", "ba", "ca", "bc ", " a", "cc", "\n")
STOPS = ("bab", "\n\n", "c  ac", "c bc b")
SHAPE = {"max_new_tokens": 24, "batch_size": 14, "buckets": (8,)}
PROMPTS = [[3, 4, 2 + i % 10] for i in range(14)]


class Words(Tokenizer):
    """Ids of texts that overlap; 0 pads and 1 ends."""

    eos_ids, pad_id, vocab_size = (1,), 0, len(WORDS)

    def token(self, token_id):
        return f"{token_id}:{WORDS[token_id]}"

    def _encode(self, text):
        return [WORDS.index(letter) for letter in text]

    def _decode(self, ids, skip_special_tokens):
        return "".join(WORDS[i] for i in ids)

    def pieces(self):
        known = [word.encode() for word in WORDS]
        return Pieces(known, known)


def model(seed, mesh=None):
    table = testing.random_table(seed, len(WORDS), 1, scale=0.7)
    table[:, 1] -= 1.0
    words = Words()
    return specjax.TextModel(testing.TabularModel(len(WORDS), 1), jnp.asarray(table), words, mesh)


@pytest.fixture(scope="module")
def pair():
    return specjax.Pair(model(1), model(2))


def end_of(tokens, strings=STOPS):
    """How many tokens a row has, one after the other, and whether a string ends it."""
    for count in range(1, len(tokens) + 1):
        if any(string in Words().decode(tokens[:count]) for string in strings):
            return count, True
    return len(tokens), False


def check_cut(row, whole, unread):
    """A row is the whole one up to its stop string; says whether it has one.

    `unread`: the verifier does not read an end that the drafter writes, up to 10 tokens.
    """
    count, found = end_of(whole.tokens.tolist())
    assert row.tokens.tolist() == whole.tokens[:count].tolist()
    emitted = count + (not found and whole.ended)
    assert row.info.emitted == emitted
    np.testing.assert_array_equal(row.log_probs_target, whole.log_probs_target[:emitted])
    if unread and np.isnan(row.info.log_prob):
        assert not np.isnan(row.log_probs[:-10]).any()
    else:
        np.testing.assert_array_equal(row.log_probs, whole.log_probs[:emitted])
        np.testing.assert_allclose(row.info.log_prob, whole.log_probs[:emitted].sum(), rtol=1e-5)
    assert row.ended_by == ("stop" if found else whole.ended_by)
    text = Words().decode(row.tokens.tolist())
    assert row.text == stops.cut(text, STOPS) and not any(s in row.text for s in STOPS)
    assert found == (row.text != text)
    return found


METHODS = {
    "block": {"rule": rules.Lossless(), "max_draft": 5},
    "token, OPT": {"rule": rules.OPT(0.3), "verification": verification.Token()},
    "greedy block": {"verification": verification.GreedyBlock(), "max_draft": 3},
    "any length": {"stopping": specjax.drafting.Confidence(0.3), "max_draft": 4},
    "lookup": {"drafting": specjax.drafting.Lookup()},
    "alone": {},
    "token cascade": {"method": decoding.TokenCascade(), "rule": rules.Chow(0.7)},
    "oracle": {"method": decoding.OracleCascade(), "rule": rules.Diff(0.1)},
    "BiLD": {
        "method": decoding.BiLDCascade(),
        "rule": rules.FallbackRollback(rules.Chow(0.7), rules.BiLD(2.0)),
    },
}


@pytest.mark.parametrize("name", variants(METHODS, "block", "token cascade"))
def test_rows_are_those_without_stop_strings_up_to_them(pair, name):
    models = pair.verifier if name == "alone" else pair
    decoders = [specjax.Decoder(models, stop=x, **METHODS[name], **SHAPE) for x in ((), STOPS)]
    for temperature in (0.0, 1.0):
        asked = {
            "seed": [3 * i for i in range(14)],
            "log_probs": True,
            "sampling": Sampling(temperature),
        }
        whole, stopped = (decoder(PROMPTS, **asked) for decoder in decoders)
        unread = name == "token cascade"
        found = [check_cut(*rows, unread=unread) for rows in zip(stopped, whole, strict=True)]
        assert any(found) and (not temperature or not all(found))
        # Rows that have ended cost nothing more.
        assert stopped.info.per_row.rounds.sum() < whole.info.per_row.rounds.sum()


def test_a_row_ends_inside_a_block(pair):
    """Accepted tokens past the stop string are not emitted."""
    options = {"max_draft": 6, "sampling": Sampling(0.0), **SHAPE}
    same = specjax.Pair(pair.verifier, pair.verifier)  # everything is accepted
    whole = specjax.Decoder(same, **options)(PROMPTS)
    stopped = specjax.Decoder(same, stop=STOPS, **options)(PROMPTS)
    inside = [row for row in stopped if row.ended_by == "stop" and row.info.emitted % 7]
    assert inside
    for row in inside:
        rounds = -(-int(row.info.emitted) // 7)
        assert row.info.rounds == rounds and row.info.accepted == 6 * rounds
        assert len(whole[row.index].tokens) > len(row.tokens)


@pytest.mark.parametrize("name", ["token cascade", "BiLD"])
def test_a_draft_ends_at_its_stop_string(pair, name):
    """Nothing past it is drafted or counted; the token cascade's verifier does not read it."""
    rule = rules.Chow(1.0)  # the drafter never defers
    if name == "BiLD":
        rule = rules.FallbackRollback(rule, rules.BiLD(np.inf))
    options = METHODS[name] | {"rule": rule, "sampling": Sampling(0.0), **SHAPE}
    whole, stopped = (specjax.Decoder(pair, stop=x, **options)(PROMPTS) for x in ((), STOPS))
    assert max(row.info.drafter_calls for row in whole) > 10
    inside = [row for row in stopped if row.ended_by == "stop" and row.info.emitted % 11]
    assert inside
    for row in inside:
        written, rest = divmod(int(row.info.emitted), 11)  # 10 of the drafter, 1 of the verifier
        drafts = 10 * written + rest if name == "BiLD" else 0  # what nobody can reject is no draft
        assert row.info.drafted == row.info.accepted == drafts
        assert row.info.drafter_calls == 11 * written + rest
        assert row.info.verifier_calls == written + (name == "BiLD")


def test_a_mesh_slots_and_resuming_change_nothing(pair):
    options = {"stop": STOPS, "rule": rules.OPT(0.3)}
    whole = specjax.Decoder(pair, **options, **SHAPE)(PROMPTS, seed=4)
    rounds = {row.index: int(row.info.rounds) for row in whole if row.index % 3}
    few = specjax.Decoder(pair, **options, **{**SHAPE, "batch_size": 3})
    rest = {row.index: row for row in few.rows(PROMPTS, seed=4, done=rounds)}
    assert rest.keys() == set(range(14)) - rounds.keys()
    mesh = make_mesh(data=2, model=1)
    spread = specjax.Pair(model(1, mesh), model(2, mesh))
    there = specjax.Decoder(spread, **options, **SHAPE)(PROMPTS, seed=4)
    for row in (*rest.values(), *there):
        assert row.tokens.tolist() == whole[row.index].tokens.tolist()
        assert (row.text, row.ended_by) == (whole[row.index].text, whole[row.index].ended_by)
    assert {"stop", "eos"} <= set(whole.ended_by)
    assert few.describe()["stop"] == [*STOPS]
    assert "stop" not in specjax.Decoder(pair, **SHAPE).describe()


def test_the_sequence_cascade_decides_about_the_cut_response(pair):
    options = {**SHAPE, "sampling": Sampling(0.0)}
    alone = [
        specjax.Decoder(one, stop=STOPS, **options)(PROMPTS)
        for one in (pair.verifier, pair.drafter)
    ]
    for strength, result in zip((0.0, 1.0), alone, strict=True):
        decoder = specjax.Decoder(
            pair, method=decoding.SequenceCascade(), rule=rules.SequenceChow(strength), stop=STOPS,
            **options,
        )  # fmt: skip
        cascade = decoder(PROMPTS)
        assert cascade.texts == result.texts and cascade.ended_by == result.ended_by
    assert "stop" in alone[0].ended_by and "stop" in alone[1].ended_by


def test_the_law_of_stopped_rows_is_the_stopped_law(pair):
    """By enumeration: the verifier's law of texts, each cut at its stop string."""
    strings, longest, rows = ("ab", "c"), 3, 4000

    def law(model):
        table = np.asarray(model.prepared, np.float64)
        probs = np.exp(table - np.logaddexp.reduce(table, axis=-1, keepdims=True))
        found = collections.defaultdict(float)
        for tokens in itertools.product(range(len(WORDS)), repeat=longest):
            chance, last = 1.0, 2
            for token in tokens:
                chance, last = chance * probs[last, token], token
            whole = tokens[: tokens.index(1)] if 1 in tokens else tokens
            count, stopped = end_of(list(whole), strings)
            ended = "stop" if stopped else "eos" if 1 in tokens else "length"
            found[whole[:count], ended] += chance
        return found

    decoder = specjax.Decoder(
        pair, stop=strings, max_new_tokens=longest, batch_size=500, buckets=(8,), max_draft=2
    )
    result = decoder([[2]] * rows, seed=11)
    seen = collections.Counter((tuple(row.tokens.tolist()), row.ended_by) for row in result)
    assert p_value(seen, law(pair.verifier), rows) > 1e-5
    assert p_value(seen, law(pair.drafter), rows) < 1e-12, "a control"


def llama_like(directory, decoders, vocabulary):
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.decoder = decoders
    made.add_special_tokens(["</s>", "<unk>"])
    made.add_tokens(["<tool>"])
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return HuggingFaceTokenizer(directory / "tokenizer.json", directory)


def kinds(directory):
    from tokenizers import decoders

    words = ["</s>", "<unk>", "▁a", "▁", "ab", "b", "\n", "▁▁", "ba", "é", "<0xC3>", "<0xA9>"]
    spaced = {word: i for i, word in enumerate(words)}
    levels = ["</s>", "<unk>", "Ġa", "Ġ", "ab", "b", "Ċ", "Ã", "©", "ba", "Ã©"]
    byte_level = {word: i for i, word in enumerate(levels)}
    fallback = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    (directory / "x").mkdir()
    yield load_tokenizer(built_in_pair("multi30k_ende") / "verifier"), ("ein", ".", " in der", "ö")
    yield ByteTokenizer(5), ("a", "bc", " ")
    ends = (" a", "b\n", "é", "aba", "><")
    for decoder, vocabulary in (
        (decoders.Sequence(fallback), spaced),
        (decoders.Sequence([*fallback, decoders.Strip(" ", 1, 0)]), spaced),
        (decoders.Metaspace(), spaced),
        (decoders.Metaspace(prepend_scheme="never"), spaced),
        (decoders.ByteLevel(), byte_level),
    ):
        yield llama_like(directory / "x", decoder, vocabulary), ends


@pytest.mark.parametrize("goes_on", [False, True])
def test_the_automaton_knows_the_text_of_every_tokenizer(tmp_path, goes_on):
    rng = random.Random(0)
    for words, strings in kinds(tmp_path):
        table = stops.token_table(strings, words, words.vocab_size + 3, goes_on=goes_on)
        prompt = [next(i for i, x in enumerate(words.pieces().later) if x.isalpha())] * goes_on
        assert table.dtype == np.int16
        hits = 0
        drawn = range(words.vocab_size + 3)
        if isinstance(words, ByteTokenizer):
            # Bytes that are no UTF-8 are not in the text.
            drawn = [i for i in drawn if not 131 <= i < 259]
        for _ in range(1500):
            tokens, state = [], 0
            for _ in range(9):
                tokens.append(rng.choice(drawn))
                state = table[state, tokens[-1]]
                text = added_text(words, prompt, tokens)
                if state < len(table) - 1 and "\N{REPLACEMENT CHARACTER}" in text:
                    continue
                if "\N{REPLACEMENT CHARACTER}" in text:
                    break  # one byte that is no UTF-8 hides a whole run of them
                found = any(string in text for string in strings)
                assert (state == len(table) - 1) == found, (words, tokens, text)
                hits += found
                if found:
                    break
        assert 20 < hits < 1500


@pytest.mark.parametrize("name", variants(METHODS, "block", "token cascade"))
def test_a_special_token_ends_rows(pair, name):
    models = pair.verifier if name == "alone" else pair
    options = {**METHODS[name], **SHAPE}
    whole = specjax.Decoder(models, **options)(PROMPTS, seed=3)
    # Token 0 adds no text; "0:" is its own.
    stopped = specjax.Decoder(models, stop=("0:", "bab"), **options)(PROMPTS, seed=3)
    ended = 0
    for row, other in zip(stopped, whole, strict=True):
        tokens = other.tokens.tolist()
        places = [tokens.index(0) + 1] if 0 in tokens else []
        count, found = end_of(tokens, ("bab",))
        places += [count] if found else []
        assert row.tokens.tolist() == tokens[: min(places, default=len(tokens))]
        assert row.ended_by == ("stop" if places else other.ended_by)
        assert row.text == stops.cut(Words().decode(row.tokens), ("bab",))
        ended += places != [] and row.tokens[-1] == 0
    assert ended > 3


@pytest.mark.parametrize("goes_on", [False, True])
def test_the_automaton_knows_special_tokens(tmp_path, goes_on):
    from tokenizers import decoders

    words = {"</s>": 0, "<unk>": 1, "a": 2, "<": 3, "unk": 4, ">": 5}
    built_in = load_tokenizer(built_in_pair("multi30k_ende") / "verifier")
    for tokenizer, text, spelt in (
        (llama_like(tmp_path, decoders.Fuse(), words), "<unk>", [3, 4, 5]),
        (ByteTokenizer(5), "<extra_id_3>", ByteTokenizer()._encode("<extra_id_3>")),
        (built_in, "<unk>", None),
    ):
        size = tokenizer.vocab_size + 2
        (special,) = (i for i in range(tokenizer.vocab_size) if tokenizer.token(i) == text)
        table = stops.token_table((text, "never"), tokenizer, size, goes_on=goes_on)
        others = [i for i in range(size) if i != special]
        assert (table[:-1, special] == len(table) - 1).all()
        assert (table[0, others] < len(table) - 1).all()
        state = 0
        for token in spelt or []:  # its text in other tokens
            state = table[state, token]
        assert spelt is None or state == len(table) - 1
        with pytest.warns(UserWarning, match=f"give '{text}' alone, which ends a row"):
            table = stops.token_table((f"a{text}",), tokenizer, size, goes_on=goes_on)
        state = 0
        for token in [*tokenizer.encode("a", add_special_tokens=False), *(spelt or [])]:
            assert state < len(table) - 1
            state = table[state, token]
        assert spelt is None or state == len(table) - 1


def test_a_decoder_that_looks_at_neighbours_is_refused(tmp_path):
    from tokenizers import decoders

    words = llama_like(tmp_path, decoders.WordPiece(), {"</s>": 0, "<unk>": 1, "a": 2})
    with pytest.raises(ValueError, match="decoder \\(WordPiece\\) does not join the texts"):
        words.pieces()
    with pytest.raises(ValueError, match="Tokenizer does not define what each token adds"):
        Tokenizer.pieces(ByteTokenizer())


def test_the_first_complete_string_cuts_and_of_several_the_longest():
    assert stops.cut("x abc y", ("abc", "b")) == "x a"
    assert stops.cut("x abc y", ("abc", "bc", "c y")) == "x "
    assert stops.cut("none", ("abc",)) == "none"
    assert stops.cut("aaa", ("aa",)) == ""
    assert not any(np.diff(stops.automaton([b"ab", b"b"])[-1]))  # once found, found


def test_the_automaton_finds_what_find_finds():
    rng = random.Random(3)
    for _ in range(40):
        strings = [bytes(rng.choices(b"ab", k=rng.randint(1, 4))) for _ in range(3)]
        steps = stops.automaton(strings)
        for _ in range(40):
            read, state = b"", 0
            for _ in range(10):
                read += bytes([rng.choice(b"abc")])
                state = steps[state, read[-1]]
                assert (state == len(steps) - 1) == any(s in read for s in strings)


def test_a_state_and_its_table_belong_together(pair):
    decoder = specjax.Decoder(pair.verifier, stop="Q", **SHAPE)
    engine, table = decoder.engine(prompt_length=8), jnp.zeros((3, len(WORDS)), jnp.int16)
    engine.add(specjax.Request(np.ones(3, np.int32)))
    engine.step()
    state = engine.state
    with pytest.raises(AssertionError, match="stop_table must match state.stop"):
        decoder.method.run(decoder.params, state, 1)
    with pytest.raises(AssertionError, match="stop_table must match state.stop"):
        decoder.method.run(decoder.params, state._replace(stop=None), 1, stop_table=table)
