"""What the endpoint refuses, each in OpenAI's form, and what ends no other request."""

import contextlib
import dataclasses
import http.client
import json
import socket
import time

import numpy as np
import pytest

from specjax import load_pair
from specjax.processors import MinP
from specjax.serving import Limits, app, engines
from specjax.serving.errors import RefusedError
from specjax.serving.fields import read_body
from specjax.text import Decoder
from specjax.types import Sampling
from tests import tiny_pair
from tests.serving.conftest import KEY, serving

TEXT = {"prompt": "The sea is"}
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
WRONG = {
    "an unknown field": ({**TEXT, "temprature": 1}, "did you mean temperature?", "temprature"),
    "a strange field": ({**TEXT, "beams": 1}, "beams is unknown here: leave it out", "beams"),
    "a field of chats": ({**TEXT, "messages": []}, "a field of /v1/chat/completions", "messages"),
    "no prompt": ({}, "prompt must be", "prompt"),
    "an empty prompt": ({"prompt": ""}, "prompt is empty", "prompt"),
    "a wrong token": ({"prompt": [3, 999]}, "prompt has token 999", "prompt"),
    "a long prompt": ({"prompt": "a" * 99}, "bucket holds 64: shorten it", "prompt"),
    "a long output": ({**TEXT, "max_tokens": 25}, "max_tokens must be a whole", "max_tokens"),
    "a text for a number": ({**TEXT, "temperature": "hot"}, "temperature must be", "temperature"),
    "a flag for a number": ({**TEXT, "seed": True}, "seed must be", "seed"),
    "a huge number": ({**TEXT, "top_k": 10**30}, "top_k", "top_k"),
    "a negative top_p": ({**TEXT, "top_p": -1}, "top_p", "top_p"),
    "too many choices": ({**TEXT, "n": 999}, "n must be", "n"),
    "a wrong bias": ({**TEXT, "logit_bias": {"a": 1}}, "logit_bias must be", "logit_bias"),
    "json of any form": (
        {**TEXT, "response_format": {"type": "json_object"}}, "response_format must be",
        "response_format",
    ),
    "a schema of no regular language": (
        {**TEXT, "response_format": {"type": "json_schema", "json_schema": {
            "schema": {"type": "number", "minimum": 3}}}},
        "minimum", "response_format",
    ),
    "beams": ({**TEXT, "best_of": 3}, "best_of must be", "best_of"),
    "a rule that is none": ({**TEXT, "specjax": {"rule": "Magic()"}}, "Magic", "specjax"),
    "another option": ({**TEXT, "specjax": {"temperature": 3}}, "specjax must be", "specjax"),
    "a long draft": ({**TEXT, "specjax": {"draft_limit": 9}}, "draft_limit must be", None),
    "a stop of numbers": ({**TEXT, "stop": [3]}, "stop must be", "stop"),
    "several numbers": ({**TEXT, "min_p": [0.1, 0.2]}, "min_p must be a number", "min_p"),
    "a rule per row": ({**TEXT, "specjax": {"rule": "Lossy((0.1, 0.2))"}}, "number", "specjax"),
    "a long stop": ({**TEXT, "stop": "a" * 200}, "128 bytes", "stop"),
    "too many prompts": ({"prompt": ["a"] * 999}, "128 choices, got 999", "prompt"),
    "shown specials": (
        {**TEXT, "skip_special_tokens": False}, "must be true", "skip_special_tokens"
    ),
    "no prediction": ({**TEXT, "prediction": "text"}, "prediction must be", "prediction"),
    "an echo in a stream": ({**TEXT, "echo": True, "stream": True}, "echo cannot", "echo"),
    "another stream option": ({**TEXT, "stream_options": {"a": 1}}, "stream_options", None),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("streams", [False, True])
def test_a_wrong_field_is_named(client, name, streams):
    body, message, param = WRONG[name]
    body = {**body, "stream": True} if streams else body
    status, content = client.ask("completions", body)
    error = content["error"]
    assert status == 400 and message in error["message"] and error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_wrong_fields_of_chats_are_named(client):
    for body, message in (
        ({"messages": []}, "messages must be a list"),
        ({**CHAT, "echo": True}, "a field of /v1/completions"),
        ({"messages": ["text"]}, "messages"),
        ({**CHAT, "top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({**CHAT, "tool_choice": "required"}, "tool_choice must be"),
        ({**CHAT, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({**CHAT, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "the name of one of"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
        ({"messages": [{"content": "Hello"}]}, "messages[0] must be an object with a role"),
    ):
        status, content = client.ask("chat/completions", body)
        assert status == 400 and message in content["error"]["message"], content


def test_bodies_that_are_no_bodies(client):
    deep = b"[" * 100_000
    huge = b'{"prompt": "' + b"a" * (5 << 20) + b'"}'
    for body, status in ((b"", 400), (b"{", 400), (b"[]", 400), (deep, 400), (huge, 413)):
        got, content = client.ask("completions", body)
        assert got == status and content["error"]["message"]
    assert client.ask("completions", TEXT, key="wrong")[0] == 401
    status, content = client.ask("responses", {})
    assert status == 404 and "/v1/chat/completions" in content["error"]["message"]
    assert client.send("GET", "/v1/completions")[0] == 405
    assert client.send("GET", "/health", key="")[0] == 200


def test_samples_of_a_score_are_refused(client):
    status, content = client.ask("completions", {**TEXT, "echo": True, "max_tokens": 0, "n": 2})
    assert status == 400 and "n must be 1" in content["error"]["message"]


def test_a_refused_request_leaves_its_kind_as_it_was(client):
    bad = {**TEXT, "logit_bias": {"999": 1}}
    assert client.ask("completions", bad)[0] == 400
    assert client.ask("completions", {**TEXT, "logit_bias": {"99": 1}})[0] == 200
    status, content = client.send("POST", "/v1/completions", b'{"prompt": "a", "\\ud800": 1}')
    assert status == 400 and "unknown" in content


def test_an_encoder_decoder_scores_no_prompts():
    decoder = Decoder(load_pair(**tiny_pair.shared_pair()))
    body = {"prompt": "ba de", "echo": True, "max_tokens": 1}
    assert read_body(body, decoder, "tiny", chat=False).echo
    with pytest.raises(RefusedError, match="logprobs must be left out with echo"):
        read_body({**body, "logprobs": 1}, decoder, "tiny", chat=False)


def unfinished(client):
    counters = client.counters().items()
    return sum(rows for name, rows in counters if name.startswith("specjax:num_requests"))


def left(client):
    """The number of answers that their clients did not take."""
    return client.counters().get('specjax:requests_total{route="/v1/completions",status="499"}', 0)


def becomes(value, function, *args):
    end = time.monotonic() + 60
    while function(*args) != value and time.monotonic() < end:
        time.sleep(0.01)
    return function(*args) == value


def asked_by_a_slow_reader(client, body):
    """A connection that reads little ahead."""
    connection = http.client.HTTPConnection("127.0.0.1", client.port)
    connection.sock = socket.socket()
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    connection.sock.settimeout(120)
    connection.sock.connect(("127.0.0.1", client.port))
    key = {"Authorization": f"Bearer {KEY}"}
    connection.request("POST", "/v1/completions", json.dumps(body), key)
    return contextlib.closing(connection)


# More than the server's buffers hold.
LONG = {**TEXT, "temperature": 0, "max_tokens": 24, "n": 64, "stream": True}
LONG_SCORES = {"prompt": ["a" * 30] * 64, "echo": True, "max_tokens": 0, "logprobs": 1}


def test_clients_that_vanish_free_their_slots(client, decoder):
    expected = decoder(["The sea is"], sampling=Sampling(temperature=0.0)).texts
    body = json.dumps({**TEXT, "ignore_eos": True, "max_tokens": 24, "stream": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a key\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    before = left(client)
    with asked_by_a_slow_reader(client, {**LONG, "n": 128, "stream": False}):
        assert becomes(True, lambda: unfinished(client) > 0)
    assert becomes(before + 1, left, client)
    for i in range(200):
        with socket.create_connection(("127.0.0.1", client.port)) as gone:
            gone.sendall((head + body)[: None if i % 2 else -5])
            if i % 4 == 1:
                gone.recv(20)
    answer = client.answer("completions", **TEXT, temperature=0, max_tokens=24)
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert becomes(0, unfinished, client)


def test_a_full_queue_is_refused(decoder):
    with serving(decoder, waiting=1) as client:
        bodies = [{**TEXT, "n": 5, "max_tokens": 24, "seed": 4}] * 4
        got = client.together("completions", bodies)
        assert {status for status, _ in got} == {200, 429}
        expected = decoder(["The sea is"] * 5, seed=4, max_new_tokens=24).texts
        for content in (content for status, content in got if status == 200):
            assert [choice["text"] for choice in content["choices"]] == list(expected)
        status, content = client.ask("completions", {**TEXT, "n": 6})
        assert status == 429 and content["error"]["type"] == "rate_limit_error"


def test_a_request_that_takes_too_long_is_ended(decoder):
    with serving(decoder, seconds=1e-3) as client:
        assert client.ask("completions", TEXT)[0] == 504
        line = client.send("POST", "/v1/completions", {**TEXT, "stream": True})[1]
        assert "more than 0.001 seconds" in line


@contextlib.contextmanager
def failing_steps(monkeypatch, fails):
    """`fails` tells from the prompts of an engine whether its next step fails."""
    failed = []

    class Failing(engines.Engine):
        def stream_step(self, **options):
            prompts = [x.prompt.tolist() for x in self.unfinished_requests.values()]
            if fails(prompts, len(failed)):
                failed.append(prompts)
                self._end, self.state = "a planted fault", None
                raise FloatingPointError("a planted fault")
            return super().stream_step(**options)

    make = engines.Engines._engine

    def made(self, kind, request):
        engine = make(self, kind, request)
        engine.__class__ = Failing
        return engine

    with monkeypatch.context() as patch:
        patch.setattr(engines.Engines, "_engine", made)
        yield failed


@pytest.mark.parametrize("bad", [None, "wrong"])
def test_a_step_that_fails_ends_only_the_row_that_fails_alone(decoder, monkeypatch, bad):
    prompts = ["The sea is", "Two dogs", "A man", "wrong"]
    tokens = decoder.encode("wrong").tolist()

    def fails(given, before):
        return before == 0 and len(given) == 4 if bad is None else tokens in given

    # The id of each row is 0, so its text is that of the first prompt of a call.
    bodies = [{"prompt": prompt, "seed": 4, "max_tokens": 24} for prompt in prompts]
    with failing_steps(monkeypatch, fails) as failed, serving(decoder) as client:
        got = client.together("completions", bodies)
    assert failed or bad is None
    for prompt, (status, content) in zip(prompts, got, strict=True):
        if prompt == bad:
            assert status == 500 and "FloatingPointError" in content["error"]["message"]
        else:
            assert status == 200
            assert content["choices"][0]["text"] == decoder([prompt], seed=4).texts[0]


def test_a_processor_that_fails_ends_its_own_requests(decoder, monkeypatch):
    def process(self, *_):
        raise FloatingPointError("a planted fault")

    monkeypatch.setattr(MinP, "process", process)
    # No other test has these processors, so that their program is traced here.
    bodies = [TEXT | {"seed": 4, "max_tokens": 24}, TEXT | {"min_p": 0.3, "presence_penalty": 1}]
    with serving(decoder) as client:
        good, bad, again = client.together("completions", [*bodies, bodies[0]])
    assert bad[0] == 500 and "FloatingPointError" in bad[1]["error"]["message"]
    (expected,) = decoder(["The sea is"], seed=4).texts
    assert [content["choices"][0]["text"] for _, content in (good, again)] == [expected] * 2


def test_a_row_with_nan_gets_the_error_alone():
    model = tiny_pair.tabular(1)
    token = 50  # never drawn, and after it there is no distribution
    params = model.params.at[:, token].set(-1e9).at[token].set(np.nan)
    decoder = Decoder(dataclasses.replace(model, params=params), batch_size=4, buckets=(64,))
    prompts = [[40], [40, token], [41]]
    route = 'specjax:requests_total{route="/v1/completions",status="500"}'
    with serving(decoder) as client:
        bodies = [{"prompt": prompt, "seed": 4, "max_tokens": 24} for prompt in prompts]
        good, bad, other = client.together("completions", bodies)
        assert bad[0] == 500 and "NaN" in bad[1]["error"]["message"]
        for prompt, (_, content) in zip(prompts[::2], (good, other), strict=True):
            expected = decoder([prompt], seed=4, max_new_tokens=24).texts
            assert [choice["text"] for choice in content["choices"]] == expected
        line = client.send("POST", "/v1/completions", {**bodies[1], "stream": True})[1]
        assert json.loads(line.removeprefix("data: ")) == bad[1]
        assert client.counters()[route] == 2  # the stream too


def test_clients_that_read_slowly_stop_no_other(client, decoder):
    text = decoder(["The sea is"], sampling=Sampling(temperature=0.0)).texts[0]
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(asked_by_a_slow_reader(client, LONG)) for _ in range(3)]
        slow = [connection.getresponse() for connection in slow]
        answer = client.answer("completions", **TEXT, temperature=0, max_tokens=24)
        assert answer["choices"][0]["text"] == text
        for response in slow:
            chunks = [json.loads(line[6:]) for line in response if line.startswith(b"data: {")]
            parts = [chunk["choices"][0] for chunk in chunks]
            first = [part["text"] for part in parts if part["index"] == 0]
            assert "".join(first) == text and len({part["index"] for part in parts}) == 64


def test_clients_that_stop_reading_are_left(client, monkeypatch):
    def at_once(content, seconds, **options):
        assert seconds == Limits(64).seconds
        return taken(content, 0.0, **options)

    taken = app._Taken
    monkeypatch.setattr(app, "_Taken", at_once)
    before = left(client)
    # Each is asked when the server has sent the one before as far as it can.
    with asked_by_a_slow_reader(client, LONG_SCORES) as whole:
        response = whole.getresponse()
        with asked_by_a_slow_reader(client, LONG) as stream:
            lines = stream.getresponse()
            assert becomes(before + 1, left, client)
            with pytest.raises(http.client.IncompleteRead):
                lines.read()
        with pytest.raises(http.client.IncompleteRead):
            response.read()
