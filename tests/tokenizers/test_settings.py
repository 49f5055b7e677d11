"""Settings of a wrong type and chat templates without an end are told in one line."""

import concurrent.futures
import json
import marshal
import os
import re
import threading

import pytest

from specjax.errors import UserError
from specjax.tokenizers import chat_template, load_tokenizer
from specjax.tokenizers.chat_template import render_chat
from specjax.training.vocabulary import write_vocabulary

CONFIG = "tokenizer_config.json"


@pytest.fixture(scope="module")
def t5_dir(tmp_path_factory):
    place = tmp_path_factory.mktemp("t5") / "words"
    texts = ["a few words", "and some more of them"] * 5
    write_vocabulary(place, None, texts, vocab_size=30, model_type="bpe")
    return place


JSON = "is not readable as JSON"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (CONFIG, {"added_tokens_decoder": [1]}, "added_tokens_decoder=[1] must be"),
        *[
            (CONFIG, {"added_tokens_decoder": x}, "must be an object from ids to objects")
            for x in ({"x": {}}, {"5": "x"}, {"9" * 5000: {"content": "x"}})
        ],
        (CONFIG, {"extra_ids": "x"}, "extra_ids='x' must be in 0 .. 10000"),
        (CONFIG, {"extra_ids": 10**9}, "extra_ids=1000000000 must be in 0 .."),
        (CONFIG, {"tokenizer_class": "ByT5Tokenizer", "extra_ids": "x"}, "must be in"),
        (CONFIG, {"additional_special_tokens": 5}, "must be a list or an object"),
        (CONFIG, {"chat_template": [1]}, "a list of objects with name and template"),
        (CONFIG, {"chat_template": [{"name": []}]}, "a list of objects with name and template"),
        ("added_tokens.json", {"<a>": "x"}, "<a>='x' must be an id"),
        ("specjax.json", {"config": "x"}, "config='x' must be an object"),
        ("generation_config.json", {"eos_token_id": "</s>"}, "eos_token_id='</s>' must be a token"),
        ("tokenizer.json", {"added_tokens": [1]}, "must be a list of objects with content and id"),
        ("tokenizer.json", {"post_processor": {"type": "x"}}, "its post_processor is wrong"),
        (
            "tokenizer.json",
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
                    "pair": [{"Sequence": {"id": i, "type_id": 0}} for i in "AB"],
                    "special_tokens": {},
                }
            },
            "its post_processor must write a text once",
        ),
        *[
            (CONFIG, text, JSON)
            for text in (b"[" * 100_000, b'{"a": ' + b"1" * 5000 + b"}", b"\xff")
        ],
        (CONFIG, b"[]", "must contain a JSON object, got a list; restore the file"),
        ("chat_template.jinja", b"\xff\xfe", "is not UTF-8"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_settings_of_a_wrong_type_are_told(t5_dir, tmp_path, file, content, message):
    (tmp_path / "spiece.model").write_bytes((t5_dir / "spiece.model").read_bytes())
    content = content if isinstance(content, bytes) else json.dumps(content).encode()
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path / file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "values"),
    [
        (CONFIG, {"extra_ids": None, "added_tokens_decoder": None}),
        ("specjax.json", {"config": None}),
    ],
)
def test_a_setting_that_is_null_is_as_if_it_were_absent(t5_dir, tmp_path, file, values):
    (tmp_path / "spiece.model").write_bytes((t5_dir / "spiece.model").read_bytes())
    plain = load_tokenizer(tmp_path)
    (tmp_path / file).write_text(json.dumps(values))
    assert load_tokenizer(tmp_path).vocab_size == plain.vocab_size


MANY = "{% for i in range(99999) "
# Time in the template, and in one operation; text; memory at once, and by steps.
LIMITS = [
    (MANY + "%}" + MANY + "%}{% endfor %}{% endfor %}", "it has not ended after 1 seconds"),
    (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
        "{{ m(40) }}",
        "it has not ended",
    ),
    ("{{ 9 ** (9 ** 9) }}", "it has not ended"),
    (MANY + "%}{{ 'a' * 9999 }}{% endfor %}", "its text has more than 10,000,000 characters"),
    ("{{ 'a' * 10 ** 10 }}", "it needs more than 1024 MiB"),
    (
        "{% set n = namespace(x='ab') %}{% for i in range(22) %}{% set n.x = n.x ~ n.x ~ n.x %}"
        "{% endfor %}",
        "it needs more than 1024 MiB",
    ),
    ("{{ 'a'.ljust(4000000000) }}", "it needs more than 1024 MiB"),
]


@pytest.mark.parametrize(("template", "message"), LIMITS)
def test_a_chat_template_has_a_limit(monkeypatch, template, message):
    monkeypatch.setattr(chat_template, "MOST_SECONDS", 1.0 if "ended" in message else 60.0)
    with pytest.raises(ValueError, match=re.escape(message)):
        render_chat(template, [{"role": "user", "content": "hello"}])
    assert render_chat("a", []) == "a"


def renderers():
    return chat_template._pools[os.getpid()].all


def test_lost_renderers_are_replaced():
    chat_template._close()
    pool = chat_template._pools[os.getpid()] = chat_template._Pool()
    for renderer in [pool.take(new=True) for _ in range(2)]:
        pool.give_back(renderer)
    for renderer in renderers():
        renderer._process.kill()
    assert render_chat("b", []) == "b"


@pytest.mark.parametrize(
    ("error", "message"), [(EOFError, "it ends the process"), (TimeoutError, "it has not ended")]
)
def test_a_renderer_that_does_not_start_is_one_error(monkeypatch, error, message):
    chat_template._close()

    def ask(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(chat_template._Renderer, "ask", ask)
        with pytest.raises(UserError, match=message):
            render_chat("a", [])
    assert render_chat("a", []) == "a" and len(renderers()) == 1


def test_an_answer_to_another_request_is_not_taken():
    chat_template._close()
    assert render_chat("a", []) == "a"
    (renderer,) = renderers()
    stdin = renderer._stdin
    stdin.write(marshal.dumps({"template": "old", "variables": {}, "number": 99}))
    stdin.flush()
    assert render_chat("new", []) == "new"
    assert renderer not in renderers()


def test_a_template_that_loops_keeps_no_other_waiting(monkeypatch):
    """Other threads' chats end while it still runs."""
    asked, own = threading.Event(), chat_template._Renderer.ask

    def ask(self, request, seconds):
        if request.get("template") == LIMITS[0][0]:
            asked.set()
        return own(self, request, seconds)

    monkeypatch.setattr(chat_template._Renderer, "ask", ask)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        looping = pool.submit(render_chat, LIMITS[0][0], [{"role": "user", "content": "hello"}])
        assert asked.wait(60)
        others = [pool.submit(render_chat, text, []) for text in ("a", "b", "c")]
        assert [other.result() for other in others] == ["a", "b", "c"]
        assert not looping.done()
        monkeypatch.setattr(chat_template, "MOST_SECONDS", 0.5)
        for renderer in [*renderers()]:
            renderer._process.kill()  # does not wait for its end
        with pytest.raises(ValueError, match="it ends the process|it has not ended"):
            looping.result()
    assert len(renderers()) <= chat_template._MOST_IDLE
