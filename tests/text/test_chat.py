"""A chat gives the replies of calls with the whole history, and reads only what is new."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import decoding, drafting, rules
from specjax.decoding.method import jitted_init, jitted_run
from specjax.partitioning import make_mesh
from specjax.tokenizers import ByteTokenizer
from specjax.types import Sampling
from tests import tiny_pair
from tests.variants import variants

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}Question: {{ m.content }}\nAnswer:"
    "{% elif m.role == 'system' %}{{ m.content }}\n\n{% else %}{{ m.content }}\n\n{% endif %}"
    "{% endfor %}"
)
TURNS = ["Ann has 3 hats and 4 coats.", "She buys 2 hats.", "And 5 coats?", "Sum it up."]
SHAPE = {"max_new_tokens": 12, "buckets": (192,)}
SAMPLED = Sampling(0.8)


def _talking(mesh=None):
    words = ByteTokenizer()
    words.chat_template = TEMPLATE
    return tiny_pair.llama(2, words, mesh)


@pytest.fixture(scope="module")
def llamas():
    """The verifier, and drafters whose drafts are often accepted."""
    verifier = _talking()

    def close(scale, seed):
        rng = np.random.default_rng(seed)
        noisy = lambda x: x + scale * jnp.asarray(rng.normal(size=x.shape), x.dtype)  # noqa: E731
        return dataclasses.replace(verifier, params=jax.tree.map(noisy, verifier.params))

    return specjax.Pair(verifier=verifier, drafter=close(0.01, 1), small=close(0.03, 2))


@pytest.fixture(scope="module")
def pair():
    found = specjax.load_pair("gsm8k")
    found.verifier.tokenizer.chat_template = TEMPLATE
    return found


WAYS = {
    "pair": {"rule": rules.OPT(0.2), "max_draft": 3},
    "adaptive": {"stopping": drafting.Confidence(0.5), "max_draft": 3},
    "lookup": {"drafting": drafting.Lookup(), "max_draft": 3},
    "cascade": {"drafting": drafting.Cascade([[2, 1], [0, 2]], models=("drafter", "small"))},
    "tokens": {"method": decoding.TokenCascade(), "rule": rules.Chow(0.9)},
    "bild": {
        "method": decoding.BiLDCascade(limit=4),
        "rule": rules.FallbackRollback(rules.Chow(0.9), rules.BiLD(2.0)),
    },
    "oracle": {"method": decoding.OracleCascade(), "rule": rules.Diff(0.0)},
    "kept": {"method": decoding.SequenceCascade(), "rule": rules.SequenceChow(1.0)},
    "deferred": {"method": decoding.SequenceCascade(), "rule": rules.SequenceChow(0.0)},
}


def _decoder(models, way):
    return specjax.Decoder(models, **SHAPE, **WAYS[way])


def _greedy(models, **options):
    return specjax.Decoder(models, **{**SHAPE, "max_draft": 3, **options}, sampling=Sampling(0.0))


def _talk(decoder, **options):
    chat = decoder.chat("Do sums.")
    return chat, [chat(text, **options) for text in TURNS]


def _whole(decoder, chat, **options):
    """The rows of calls with the history before each reply."""
    ends = range(2, len(chat.messages), 2)
    return [decoder([chat.messages[:end]], **options)[0] for end in ends]


# One of each kind of cache; "deferred" has the program of "kept".
QUICK = ("pair", "lookup", "cascade", "tokens", "kept", "deferred")
GREEDY = pytest.param(Sampling(0.0), id="greedy", marks=pytest.mark.exhaustive)


@pytest.mark.parametrize("sampling", [GREEDY, pytest.param(SAMPLED, id="sampled")])
@pytest.mark.parametrize("way", variants(WAYS, *QUICK))
def test_replies_are_those_to_the_whole_history(llamas, way, sampling):
    decoder = _decoder(llamas, way)
    options = {"sampling": sampling, "seed": 5}
    chat, rows = _talk(decoder, **options)
    whole = _whole(decoder, chat, **options)
    for own, one in zip(rows, whole, strict=True):
        np.testing.assert_array_equal(own.tokens, one.tokens)
    assert sum(row.prefilled for row in rows) < sum(row.prefilled for row in whole)


@pytest.mark.parametrize("way", variants(WAYS, *QUICK))
def test_kept_caches_are_those_of_reading_the_tokens(llamas, way):
    decoder = _decoder(llamas, way)
    chat, _ = _talk(decoder, seed=5, sampling=SAMPLED)
    kept = chat._prefix
    fresh = decoder.method.begin(decoder.params, kept.tokens)
    assert len(kept.beginning.caches) == len(fresh.caches)

    def worst(length):
        own, other = ([x.keys for x in one.caches] for one in (kept.beginning, fresh))
        gap = lambda x, y: abs(x[:, :, :length] - y[:, :, :length]).max()  # noqa: E731
        return max(map(float, jax.tree.leaves(jax.tree.map(gap, own, other))))

    assert worst(len(kept)) < 1e-4
    # Past them are other tokens.
    assert worst(len(kept) + 1) > 1e-2


def test_only_new_tokens_are_read(pair):
    decoder = _greedy(pair, buckets=(96, 192))
    chat, rows = _talk(decoder)
    tokens = [len(decoder.encode(chat.messages[:end])) for end in (2, 4, 6, 8)]
    assert rows[0].prefilled == tokens[0]
    for i in (1, 2, 3):
        # The last reply's last tokens are in no cache yet.
        new = tokens[i] - tokens[i - 1] - len(rows[i - 1].tokens)
        assert new <= rows[i].prefilled <= new + 5
    for own, one in zip(rows, _whole(decoder, chat), strict=True):
        assert own.text == one.text and own.to_dict()["prefilled"] == own.prefilled


def test_turns_in_any_form(pair, monkeypatch):
    """Streamed, after one that was left unfinished, and where states do not show what was read."""
    decoder = _greedy(pair, stop="coat")
    chat, rows = _talk(decoder)
    streamed, programs = decoder.chat("Do sums."), []
    for row, text in zip(rows, TURNS, strict=True):
        next(streamed.stream(text), None)  # left unfinished
        assert "".join(streamed.stream(text, every=2)) == row.text
        programs.append(jitted_init(None).num_programs() + jitted_run(None).num_programs())
    assert streamed.messages == chat.messages
    assert repr(chat) == "Chat(9 messages)"
    assert programs[1] == programs[2] == programs[3]
    # The default of a user's own method: each turn then reads the whole history.
    monkeypatch.setattr(decoding.Speculative, "committed", decoding.Method.committed)
    chat, whole = _talk(decoder)
    assert [row.text for row in whole] == [row.text for row in rows]
    assert whole[-1].prefilled == len(decoder.encode(chat.messages[:-1]))


def test_a_wrong_cache_changes_replies(pair):
    """The negative control: a turn does use the caches that were kept."""
    decoder = _greedy(pair)
    chat = decoder.chat()
    chat(TURNS[0])
    zeros = jax.tree.map(jnp.zeros_like, chat._prefix.taken)
    chat._prefix = dataclasses.replace(chat._prefix, taken=zeros)
    assert chat(TURNS[1]).text != decoder([chat.messages[:-1]]).texts[0]


def test_history_that_is_rendered_anew(pair, monkeypatch):
    """A template that changes earlier turns leaves only the tokens before them."""
    decoder, words = _greedy(pair), pair.verifier.tokenizer
    monkeypatch.setattr(words, "chat_template", "{{ messages | length }} messages." + TEMPLATE)
    chat, rows = _talk(decoder)
    for own, one in zip(rows, _whole(decoder, chat), strict=True):
        assert own.text == one.text and own.prefilled > 0.8 * one.prefilled


@pytest.mark.parametrize("sizes", [(2, 4), pytest.param((8, 1), marks=pytest.mark.exhaustive)])
def test_a_chat_on_a_mesh(sizes):
    texts = []
    for mesh in (None, make_mesh(*sizes)):
        decoder = specjax.Decoder(_talking(mesh), **SHAPE)
        chat, rows = _talk(decoder, seed=3)
        texts.append([row.text for row in rows])
        assert rows[1].prefilled < len(decoder.encode(chat.messages[:4])) / 2
    assert texts[0] == texts[1]


WRONG_OPTIONS = [
    (3, "chat_template_kwargs must be options by name, such as .*, got 3"),
    *(({x: "x"}, f"must not name '{x}'") for x in ("self", "messages", "template")),
    ({1: 2}, "chat_template_kwargs must be options by name"),
    ({"tools": [len]}, "chat_template_kwargs must be JSON values: got a builtin"),
    ({"continue_final_message": True}, "must be left out of a chat"),
]
WRONG = [
    (3, {}, "the message must be a text that is not empty, got 3"),
    ("a\ud800", {}, "the message has half a surrogate pair at character 2"),
    (" ", {}, "the message must be a text that is not empty, got ' '"),
    ("hat " * 50, {}, "the conversation has .* tokens, the longest bucket"),
    ("Hi", {"num_samples": 2}, "num_samples must be left out of a chat, got 2"),
    ("Hi", {"share_prefix": True}, "share_prefix must be left out of a chat"),
    ("Hi", {"sead": 2}, "sead"),
    *(("Hi", {"chat_template_kwargs": options}, message) for options, message in WRONG_OPTIONS),
]


def test_mistakes_leave_the_conversation_as_it_was(pair):
    decoder = specjax.Decoder(pair, **{**SHAPE, "buckets": (48,)})
    chat = decoder.chat()
    chat(TURNS[0])
    before = chat.messages
    chat.messages.clear()
    for text, options, message in WRONG:
        with pytest.raises((ValueError, TypeError), match=message):
            chat(text, **options)
    assert chat.messages == before
    with pytest.raises(ValueError, match="every must be"):
        chat.stream("Hi", every=0)
    first, second = chat.stream("Hi"), chat.stream("Ho")
    with pytest.raises(ValueError, match="another turn ended during this stream"):
        list(zip(first, [0], strict=False)), list(second), list(first)
    assert chat.messages[-2]["content"] == "Ho"
    with pytest.raises(ValueError, match="system must be a text that is not empty, got 3"):
        decoder.chat(3)
    for options, message in WRONG_OPTIONS:
        with pytest.raises(ValueError, match=message):
            decoder.chat(chat_template_kwargs=options)
    plain = specjax.Decoder(specjax.load_text_model(pair.drafter.name))
    with pytest.raises(ValueError, match="no chat template: put chat_template.jinja into"):
        plain.chat()


MESSAGES = [{"role": "user", "content": "Hi"}]
TOOLS = {"tools": [{"name": "hats"}]}
ALL = {**TOOLS, "loud": True}


def _of_engine(decoder):
    engine = decoder.engine(prompt_length=64, rows=1)
    engine.add(specjax.Request(MESSAGES))
    return tiny_pair.finished_rows(engine)[0, 0].text


WAYS_IN = {
    "a decoder": lambda d: d(**ALL)([MESSAGES])[0].text,
    "a call": lambda d: d(loud=True)([MESSAGES], chat_template_kwargs=TOOLS)[0].text,
    "encoded": lambda d: d()([d().encode(MESSAGES, chat_template_kwargs=ALL)])[0].text,
    "a chat": lambda d: d(loud=True).chat(chat_template_kwargs=TOOLS)("Hi").text,
    "a turn": lambda d: d(loud=True).chat()("Hi", chat_template_kwargs=TOOLS).text,
    "a stream": lambda d: "".join(
        text for _, text in d().stream_tokens([MESSAGES], chat_template_kwargs=ALL)
    ),
    "an engine": lambda d: _of_engine(d(**ALL)),
}


def test_options_of_the_template_come_in(llamas, monkeypatch):
    words = llamas.verifier.tokenizer
    template = (
        "{{ tools | map(attribute='name') | join if tools else 'no tools' }}"
        "{{ '!' if loud }}{{ messages[-1].content }}{{ ':' if add_generation_prompt }}"
    )
    monkeypatch.setattr(words, "chat_template", template)
    shape = {"max_new_tokens": 6, "buckets": (64,), "sampling": Sampling(0.0)}

    def decoder(**options):
        return specjax.Decoder(llamas, **shape, chat_template_kwargs=options)

    wanted = decoder()([words.encode("hats!Hi:", add_special_tokens=False)])[0]
    assert {way: asked(decoder) for way, asked in WAYS_IN.items()} == dict.fromkeys(
        WAYS_IN, wanted.text
    )
    assert decoder()([MESSAGES])[0].text != wanted.text
    assert decoder(**ALL).describe()["chat_template_kwargs"] == ALL
    assert "chat_template_kwargs" not in decoder().describe()
    scored, other = (one.score([MESSAGES], [wanted]) for one in (decoder(**ALL), decoder()))
    assert scored.log_probs[0].sum() > other.log_probs[0].sum()
