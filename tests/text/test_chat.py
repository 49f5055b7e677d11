"""A chat gives the replies of calls with the whole history, and reads only what is new."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import decoding, drafting, rules
from specjax.decoding.method import jitted_init, jitted_run
from specjax.models import LlamaConfig, model_from_config
from specjax.partitioning import make_mesh
from specjax.text.decoder import Chat
from specjax.tokenizers import ByteTokenizer
from specjax.types import Sampling
from tests.models.tiny import random_params
from tests.variants import variants

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}Question: {{ m.content }}\nAnswer:"
    "{% elif m.role == 'system' %}{{ m.content }}\n\n{% else %}{{ m.content }}\n\n{% endif %}"
    "{% endfor %}"
)
TURNS = ["Ann has 3 hats and 4 coats.", "She buys 2 hats.", "And 5 coats?", "Sum it up."]
SHAPE = {"max_new_tokens": 12, "buckets": (192,), "max_draft": 3}
SAMPLED = Sampling(0.8)


def _llama(seed=0, width=16, mesh=None):
    config = LlamaConfig(
        vocab_size=259, embed_dim=width, num_heads=4, head_dim=8, mlp_dim=24, num_layers=2,
        num_kv_heads=2,
    )  # fmt: skip
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = TEMPLATE
    model = model_from_config(config)
    return specjax.TextModel(model, random_params(model, seed), tokenizer, mesh)


@pytest.fixture(scope="module")
def llamas():
    """The verifier, and drafters whose drafts are often accepted."""
    verifier = _llama()

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
    "pair": {"rule": rules.OPT(0.2)},
    "adaptive": {"stopping": drafting.Confidence(0.5)},
    "lookup": {"drafting": specjax.drafting.Lookup()},
    "cascade": {
        "drafting": specjax.drafting.Cascade(lengths=[[2, 1], [0, 2]], models=("drafter", "small")),
        "max_draft": None,
    },
    "tokens": {"method": decoding.TokenCascade(), "rule": rules.Chow(0.9), "max_draft": None},
    "bild": {
        "method": decoding.BiLDCascade(limit=4), "max_draft": None,
        "rule": rules.FallbackRollback(rules.Chow(0.9), rules.BiLD(2.0)),
    },
    "oracle": {"method": decoding.OracleCascade(), "rule": rules.Diff(0.0), "max_draft": None},
    "kept": {
        "method": decoding.SequenceCascade(), "rule": rules.SequenceChow(1.0), "max_draft": None,
    },
    "deferred": {
        "method": decoding.SequenceCascade(), "rule": rules.SequenceChow(0.0), "max_draft": None,
    },
}  # fmt: skip


def _decoder(models, way):
    return specjax.Decoder(models, **{**SHAPE, **WAYS[way]})


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
    decoder = specjax.Decoder(pair, **SHAPE, sampling=Sampling(0.0))
    chat, rows = _talk(decoder)
    tokens = [len(decoder.encode(chat.messages[:end])) for end in (2, 4, 6, 8)]
    assert rows[0].prefilled == tokens[0]
    for i in (1, 2, 3):
        # The last reply's last tokens are in no cache yet.
        new = tokens[i] - tokens[i - 1] - len(rows[i - 1].tokens)
        assert new <= rows[i].prefilled <= new + SHAPE["max_draft"] + 2
    for own, one in zip(rows, _whole(decoder, chat), strict=True):
        assert own.text == one.text and own.to_dict()["prefilled"] == own.prefilled


def test_later_turns_compile_nothing(pair):
    decoder = specjax.Decoder(pair, **SHAPE, sampling=Sampling(0.0))
    chat = decoder.chat()
    programs = []
    for text in TURNS:
        chat(text)
        programs.append(jitted_init(None).num_programs() + jitted_run(None).num_programs())
    assert programs[1] == programs[2] == programs[3]


def test_states_that_do_not_show_what_was_read(llamas, monkeypatch):
    """Each turn then reads the whole history: the default of a user's own method."""
    decoder = _decoder(llamas, "pair")
    expected = [row.text for row in _talk(decoder, seed=5)[1]]
    monkeypatch.setattr(decoding.Speculative, "committed", decoding.Method.committed)
    chat, rows = _talk(decoder, seed=5)
    assert [row.text for row in rows] == expected
    assert rows[-1].prefilled == len(decoder.encode(chat.messages[:-1]))


def test_a_wrong_cache_changes_replies(pair):
    """The negative control: a turn does use the caches that were kept."""
    decoder = specjax.Decoder(pair, **SHAPE, sampling=Sampling(0.0))
    chat = decoder.chat()
    chat(TURNS[0])
    kept = chat._prefix
    zeros = jax.tree.map(jnp.zeros_like, kept.taken)
    chat._prefix = dataclasses.replace(kept, taken=zeros)
    wrong = chat(TURNS[1])
    assert wrong.text != decoder([chat.messages[:-1]]).texts[0]


def test_history_that_is_rendered_anew(pair):
    """A template that changes earlier turns leaves only the tokens before them."""
    decoder = specjax.Decoder(pair, **SHAPE, sampling=Sampling(0.0))
    tokenizer = pair.verifier.tokenizer
    tokenizer.chat_template = "{{ messages | length }} messages." + TEMPLATE
    try:
        chat, rows = _talk(decoder)
        whole = _whole(decoder, chat)
    finally:
        tokenizer.chat_template = TEMPLATE
    assert [row.text for row in rows] == [row.text for row in whole]
    assert all(own.prefilled > 0.8 * one.prefilled for own, one in zip(rows, whole, strict=True))


def test_streamed_turns_and_turns_left_unfinished(pair):
    decoder = specjax.Decoder(pair, **SHAPE, sampling=Sampling(0.0), stop="coat")
    chat, rows = _talk(decoder)
    streamed = decoder.chat("Do sums.")
    for row, text in zip(rows, TURNS, strict=True):
        next(streamed.stream(text), None)  # left unfinished
        pieces = list(streamed.stream(text, every=2))
        assert "".join(pieces) == row.text
    assert streamed.messages == chat.messages
    assert repr(chat) == "Chat(9 messages)"


def test_longer_turns_take_other_buckets(pair):
    shape = {**SHAPE, "buckets": (96, 192)}
    decoder = specjax.Decoder(pair, **shape, sampling=Sampling(0.0))
    chat, rows = _talk(decoder)
    assert [row.text for row in rows] == [row.text for row in _whole(decoder, chat)]
    assert rows[-1].prefilled < 40


@pytest.mark.parametrize("sizes", [(2, 4), pytest.param((8, 1), marks=pytest.mark.exhaustive)])
def test_a_chat_on_a_mesh(sizes):
    texts = []
    for mesh in (None, make_mesh(*sizes)):
        decoder = specjax.Decoder(_llama(mesh=mesh), **{**SHAPE, "max_draft": None})
        chat, rows = _talk(decoder, seed=3)
        texts.append([row.text for row in rows])
        assert rows[1].prefilled < len(decoder.encode(chat.messages[:4])) / 2
    assert texts[0] == texts[1]


def test_mistakes_leave_the_conversation_as_it_was(pair):
    decoder = specjax.Decoder(pair, **{**SHAPE, "buckets": (48,)})
    chat = decoder.chat()
    chat(TURNS[0])
    before = chat.messages
    chat.messages.clear()
    for text, options, error, message in (
        (3, {}, ValueError, "the message must be a text that is not empty, got 3"),
        ("a\ud800", {}, ValueError, "the message has half a surrogate pair at character 2"),
        (" ", {}, ValueError, "the message must be a text that is not empty, got ' '"),
        ("hat " * 50, {}, ValueError, "the conversation has .* tokens, the longest bucket"),
        ("Hi", {"num_samples": 2}, ValueError, "num_samples must be left out of a chat, got 2"),
        ("Hi", {"share_prefix": True}, ValueError, "share_prefix must be left out of a chat"),
        ("Hi", {"sead": 2}, TypeError, "sead"),
    ):
        with pytest.raises(error, match=message):
            chat(text, **options)
    with pytest.raises(ValueError, match="every must be"):
        chat.stream("Hi", every=0)
    first, second = chat.stream("Hi"), chat.stream("Ho")
    with pytest.raises(ValueError, match="another turn ended during this stream"):
        list(zip(first, [0], strict=False)), list(second), list(first)
    assert chat.messages[-2]["content"] == "Ho"
    chat._messages = before
    with pytest.raises(ValueError, match="system must be a text that is not empty, got 3"):
        decoder.chat(3)
    plain = specjax.Decoder(specjax.load_text_model(pair.drafter.name))
    with pytest.raises(ValueError, match="no chat template: put chat_template.jinja into"):
        plain.chat()
    assert isinstance(chat, Chat)


MESSAGES = [{"role": "user", "content": "Hi"}]
ASKED = {"tools": [{"name": "hats"}], "loud": True}
WAYS_IN = {
    "a decoder": lambda d: d(**ASKED)([MESSAGES])[0].tokens,
    "a call": lambda d: d()([MESSAGES], chat_template_kwargs=ASKED)[0].tokens,
    "a call and a decoder": lambda d: (
        d(loud=True)([MESSAGES], chat_template_kwargs={"tools": ASKED["tools"]})[0].tokens
    ),
    "encoded": lambda d: d()([d().encode(MESSAGES, chat_template_kwargs=ASKED)])[0].tokens,
    "a chat": lambda d: d().chat(chat_template_kwargs=ASKED)("Hi").tokens,
    "a chat of a decoder": lambda d: d(**ASKED).chat()("Hi").tokens,
    "a turn": lambda d: (
        d(loud=True).chat()("Hi", chat_template_kwargs={"tools": ASKED["tools"]}).tokens
    ),
    "a stream": lambda d: "".join(
        text for _, text in d().stream_tokens([MESSAGES], chat_template_kwargs=ASKED)
    ),
    "an engine": lambda d: _of_engine(d(**ASKED)),
}


def _of_engine(decoder):
    engine = decoder.engine(prompt_length=64, rows=1)
    engine.add(specjax.Request(MESSAGES))
    return next(row for row in iter(engine.step, None) for row in row).tokens


@pytest.mark.parametrize("way", WAYS_IN)
def test_options_of_the_template_come_in(llamas, way):
    template = (
        "{{ tools | map(attribute='name') | join if tools else 'no tools' }}"
        "{{ '!' if loud }}{{ messages[-1].content }}{{ ':' if add_generation_prompt }}"
    )
    words = llamas.verifier.tokenizer
    words.chat_template = template

    def decoder(**options):
        return specjax.Decoder(
            llamas,
            max_new_tokens=6,
            buckets=(64,),
            sampling=Sampling(0.0),
            chat_template_kwargs=options,
        )

    try:
        wanted = decoder()([words.encode("hats!Hi:", add_special_tokens=False)])[0]
        found = WAYS_IN[way](decoder)
        if isinstance(found, str):
            assert found == wanted.text
        else:
            np.testing.assert_array_equal(found, wanted.tokens)
        described = decoder(**ASKED).describe()
        assert described["chat_template_kwargs"] == ASKED
        assert "chat_template_kwargs" not in decoder().describe()
        scored = decoder(**ASKED).score([MESSAGES], [wanted])
        other = decoder().score([MESSAGES], [wanted])
        assert scored.log_probs[0].sum() > other.log_probs[0].sum()
    finally:
        words.chat_template = TEMPLATE


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (3, ValueError, "chat_template_kwargs must be options by name, such as .*, got 3"),
        *(
            ({name: "x"}, ValueError, f"chat_template_kwargs must not name '{name}'")
            for name in ("self", "messages", "template")
        ),
        ({1: 2}, ValueError, "chat_template_kwargs must be options by name"),
        ({"tools": [len]}, ValueError, "chat_template_kwargs must be JSON values: got a builtin"),
        ({"continue_final_message": True}, ValueError, "must be left out of a chat"),
    ],
)
def test_wrong_options_of_the_template_are_told(llamas, options, error, message):
    decoder = specjax.Decoder(llamas, **SHAPE)
    with pytest.raises(error, match=message):
        decoder.chat(chat_template_kwargs=options)
    with pytest.raises(error, match=message):
        decoder.chat()("Hi", chat_template_kwargs=options)
