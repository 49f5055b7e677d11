"""Text that comes while rows grow: its pieces are the text of a call."""

import random
import types

import numpy as np
import pytest

import specjax
from specjax import drafting, rules, verification
from specjax.text.directories import built_in_pair
from specjax.text.stops import StreamedText, cut
from specjax.tokenizers import ByteTokenizer, added_text
from specjax.tokenizers.load import load_tokenizer
from specjax.types import Sampling
from tests import tiny_pair
from tests.text.test_stops import kinds
from tests.variants import variants

EMOJI = "a👩‍👧 é ab\n中文 a bc"
STOPS = ("ab", "b\n a", "é", " in der", "中")


def _model(words, goes_on):
    def decode(prompt, output):
        return added_text(words, prompt.tolist() if goes_on else [], output.tolist())

    return types.SimpleNamespace(tokenizer=words, continues_prompts=goes_on, decode=decode)


def _stream(model, prompt, tokens, stop, rng):
    """The pieces of a row that gets its tokens a few at a time; `rest` gives the last."""
    streamed, pieces, count = StreamedText(model, prompt, stop), [], 0
    while count < len(tokens):
        count = min(len(tokens), count + rng.randint(1, 3))
        pieces.append(streamed.more(tokens[:count]))
    whole = cut(model.decode(prompt, tokens), stop)
    return [*pieces, streamed.rest(whole)], whole


@pytest.mark.parametrize("goes_on", [False, True])
def test_the_pieces_are_the_text_of_every_tokenizer(tmp_path, goes_on):
    rng = random.Random(1)
    drafted = load_tokenizer(built_in_pair("gsm8k") / "verifier")
    for words in [*(words for words, _ in kinds(tmp_path)), drafted, ByteTokenizer()]:
        model = _model(words, goes_on)
        spelt = words.encode(EMOJI, add_special_tokens=False)
        early = 0
        for turn in range(400):
            tokens = [rng.randrange(words.vocab_size) for _ in range(rng.randint(1, 12))]
            if turn % 2:
                # Whole characters, and a few tokens that break them.
                tokens = [*spelt, *rng.choices(spelt or [0], k=2), *tokens[:2], *spelt][
                    : rng.randint(1, 60)
                ]
            prompt = np.array([rng.randrange(words.vocab_size) for _ in range(3)], np.int32)
            stop = rng.sample(STOPS, rng.randint(0, 2))
            pieces, whole = _stream(model, prompt, np.array(tokens, np.int32), stop, rng)
            assert "".join(pieces) == whole, (words, tokens, stop)
            early += any(pieces[:-1])
        assert early > 100


def test_characters_and_stop_strings_are_held_back():
    model, words = _model(ByteTokenizer(), False), ByteTokenizer()
    tokens = np.array(words.encode("aé👩b EN.", add_special_tokens=False), np.int32)
    streamed = StreamedText(model, tokens[:1], ("END", "N.x"))
    pieces = [streamed.more(tokens[: i + 1]) for i in range(len(tokens))]
    assert pieces == ["a", "", "é", "", "", "", "👩", "b", " ", "", "", "E"]
    assert streamed.rest("aé👩b EN.") == "N."


def test_a_tokenizer_without_pieces_gives_its_text_at_the_end():
    class Words(ByteTokenizer):
        pieces = specjax.tokenizers.Tokenizer.pieces

    streamed = StreamedText(_model(Words(), False), np.zeros(1, np.int32), ())
    assert streamed.more(np.array([70, 71], np.int32)) == "" and streamed.rest("CD") == "CD"


@pytest.mark.parametrize("name", variants(["multi30k_ende", "gsm8k"], "gsm8k"))
def test_a_row_of_a_built_in_pair_is_its_pieces(name):
    prompts = ["Two dogs play in the snow.", "Ann has 3 apples.", "A man", "3 + 4", "a b"]
    pair = specjax.load_pair(name)
    for models, stop in ((pair, ("the", "n. ", "in ", " =")), (pair.verifier, ())):
        decoder = specjax.Decoder(models, max_new_tokens=20, batch_size=4, stop=stop)
        options = {"seed": 3, "sampling": Sampling(0.7), "num_samples": 2}
        want = decoder(prompts, **options).texts
        for every in (1, 3):
            found, count = [""] * len(want), 0
            for place, text in decoder.stream_tokens(prompts, every=every, **options):
                assert text
                found[place], count = found[place] + text, count + 1
            assert found == want
            assert count > 2 * len(want) or stop or every > 1


@pytest.mark.parametrize(
    "parts",
    [
        {"verification": verification.GreedyBlock(), "max_draft": 3, "stop": ("bab", "\n")},
        {"stopping": drafting.Confidence(0.3), "rule": rules.OPT(0.1)},
        {"method": specjax.decoding.TokenCascade(), "rule": rules.Chow(0.5)},
    ],
    ids=("chain", "adaptive", "cascade"),
)
def test_rows_of_any_method_are_their_pieces(parts):
    models = specjax.Pair(tiny_pair.tabular(2), tiny_pair.tabular(1))
    decoder = specjax.Decoder(models, max_new_tokens=12, batch_size=4, buckets=(16,), **parts)
    prompts, limits = [f"prompt {i}" for i in range(11)], [9, *range(2, 12)]
    want = decoder(prompts, seed=5, max_new_tokens=limits)
    found = [""] * 11
    for place, text in decoder.stream_tokens(prompts, seed=5, max_new_tokens=limits):
        found[place] += text
    assert found == want.texts
    engine = decoder.engine(prompt_length=16, rows=2, refill=1)
    for number, text in enumerate(prompts[:3]):
        engine.add(specjax.Request(text, seed=5, id=number, max_new_tokens=limits[number]))
    texts, rows = [""] * 3, {}
    while engine.unfinished:
        for added in engine.stream_step():
            assert added.index not in rows and added.sample == 0
            texts[added.index] += added.text
            assert want[added.index].text.startswith(texts[added.index])
            rows |= {} if added.row is None else {added.index: added.row.text}
    assert texts == [rows[i] for i in range(3)] == want.texts[:3]
