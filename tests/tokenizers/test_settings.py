"""Settings of a wrong type and chat templates without an end are told in one line."""

import concurrent.futures
import json
import marshal
import os
import re
import threading

import pytest

from specjax.errors import UserError
from specjax.tokenizers import chat_renderer, chat_template, load_tokenizer
from specjax.tokenizers.chat_template import render_chat
from specjax.training.vocabulary import write_vocabulary
from tests.variants import variants

CONFIG = "tokenizer_config.json"


@pytest.fixture(scope="module")
def t5_dir(tmp_path_factory):
    place = tmp_path_factory.mktemp("t5") / "words"
    texts = ["a few words", "and some more of them"] * 5
    write_vocabulary(place, None, texts, vocab_size=30, model_type="bpe")
    return place


def _write(directory, name, values):
    (directory / name).write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": [1]},
            "added_tokens_decoder=[1] must be",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"x": {}}},
            "must be an object from ids",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"5": "x"}},
            "must be an object from ids",
        ),
        (CONFIG, {"extra_ids": "x"}, "extra_ids='x' must be in 0 .. 10000"),
        (CONFIG, {"extra_ids": 10**9}, "extra_ids=1000000000 must be in 0 .."),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "ByT5Tokenizer", "extra_ids": "x"},
            "must be in",
        ),
        (CONFIG, {"additional_special_tokens": 5}, "must be a list or an object"),
        (CONFIG, {"added_tokens_decoder": {"9" * 5000: {"content": "x"}}}, "from ids to objects"),
        (CONFIG, {"chat_template": [1]}, "a list of objects with name and template"),
        (CONFIG, {"chat_template": [{"name": []}]}, "a list of objects with name and template"),
        ("added_tokens.json", {"<a>": "x"}, "<a>='x' must be an id"),
        ("specjax.json", {"config": "x"}, "config='x' must be an object"),
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
    ],
)
def test_settings_of_a_wrong_type_are_told(t5_dir, tmp_path, file, values, message):
    (tmp_path / "spiece.model").write_bytes((t5_dir / "spiece.model").read_bytes())
    _write(tmp_path, file, values)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path / file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a": ' + b"1" * 5000 + b"}", b"\xff", b"[]"])
def test_a_file_that_is_no_json_object_is_named(t5_dir, tmp_path, text):
    (tmp_path / "spiece.model").write_bytes((t5_dir / "spiece.model").read_bytes())
    (tmp_path / CONFIG).write_bytes(text)
    with pytest.raises(ValueError, match=f"{CONFIG} .*restore the file"):
        load_tokenizer(tmp_path)


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
    _write(tmp_path, file, values)
    assert load_tokenizer(tmp_path).vocab_size == plain.vocab_size
    _write(tmp_path, CONFIG, {"tokenizer_class": "ByT5Tokenizer", "extra_ids": None})
    assert load_tokenizer(tmp_path).vocab_size == 384


MANY = "{% for i in range(99999) "


LIMITS = [
    (MANY + "%}" + MANY + "%}{% endfor %}{% endfor %}", "it has not ended after 1 seconds"),
    (MANY + "%}" + MANY + "if false %}{% endfor %}{% endfor %}", "it has not ended"),
    (MANY + "recursive %}{{ loop(range(99999)) if loop.depth < 3 }}{% endfor %}", "not ended"),
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
    ("{{ 'a'.zfill(4000000000) }}", "it needs more than 1024 MiB"),
    ("{{ ('a\n' * 10000) | indent(1000000) }}", "it needs more than 1024 MiB"),
    ("{{ messages | tojson(indent=2000000000) }}", "it needs more than 1024 MiB"),
    ("{{ (range(99999) | list * 9999) | sort | length }}", "it needs more than 1024 MiB"),
]
# One of each kind: time in the template, in one operation; text; memory by steps and at once.
QUICK = [LIMITS[i] for i in (0, 4, 5, 7, 8, 12)]


@pytest.mark.parametrize("limit", variants(LIMITS, *QUICK))
def test_a_chat_template_has_a_limit(monkeypatch, limit):
    template, message = limit
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
    stdin = renderer._process.stdin
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


def test_few_templates_are_kept():
    for i in range(40):
        chat_renderer._compiled(f"template {i}")
    assert chat_renderer._compiled.cache_info().currsize <= 16


def test_messages_must_be_json():
    with pytest.raises(ValueError, match="chat messages must be JSON values: .*function"):
        render_chat("a", [{"content": len}])


def test_a_chat_template_may_multiply_numbers():
    template = "{{ 2 * 'ab' }} {{ 1700000000 * 1000 }} {{ 2 ** 3 }} {{ 2 ** -1 }} {{ 1.5 * 2 }}"
    assert render_chat(template, []) == "abab 1700000000000 8 0.5 3.0"


def test_a_loop_of_a_chat_template_keeps_its_words():
    template = (
        "{% macro m(x) %}{{ x }}{{ caller() }}{% endmacro %}"
        "{% for x in 'abc' if x != 'b' %}{{ loop.index }}{% call m(x) %}!{% endcall %}"
        "{% if loop.last %}{% break %}{% endif %}{% else %}none{% endfor %}"
    )
    assert render_chat(template, []) == "1a!2c!"


def test_a_chat_template_that_is_not_utf_8_is_told(t5_dir, tmp_path):
    (tmp_path / "spiece.model").write_bytes((t5_dir / "spiece.model").read_bytes())
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is not UTF-8"):
        load_tokenizer(tmp_path)
