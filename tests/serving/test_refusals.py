"""What the endpoint refuses, each in OpenAI's form, and what ends no other request."""

import contextlib
import json
import socket
import threading
import time

import pytest

from specjax.serving import engines
from specjax.types import Sampling
from tests.serving.conftest import serving

TEXT = {"prompt": "The sea is"}
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
WRONG = {
    "an unknown field": ({**TEXT, "temprature": 1}, "temprature is unknown", "temprature"),
    "a field of chats": ({**TEXT, "messages": []}, "messages is unknown", "messages"),
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
    assert client.send("GET", "/v1/nothing")[0] == 404
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


def unfinished(client):
    metrics = client.send("GET", "/metrics")[1].splitlines()
    return sum(
        float(line.split()[1]) for line in metrics if line.startswith("specjax:num_requests")
    )


def test_clients_that_vanish_free_their_slots(client, decoder):
    expected = decoder(["The sea is"], sampling=Sampling(temperature=0.0)).texts
    body = json.dumps({**TEXT, "ignore_eos": True, "max_tokens": 24, "stream": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a key\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    for i in range(40):
        with socket.create_connection(("127.0.0.1", client.port)) as gone:
            gone.sendall((head + body)[: None if i % 2 else -5])
            if i % 4 == 1:
                gone.recv(20)
    answer = client.answer("completions", **TEXT, temperature=0, max_tokens=24)
    assert [choice["text"] for choice in answer["choices"]] == expected
    end = time.monotonic() + 60
    while unfinished(client) and time.monotonic() < end:
        time.sleep(0.05)
    assert unfinished(client) == 0


def test_a_full_queue_is_refused(decoder):
    with serving(decoder, waiting=1) as client:
        statuses = []

        def ask():
            statuses.append(client.ask("completions", {**TEXT, "n": 5, "max_tokens": 24})[0])

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 200 in statuses and set(statuses) == {200, 429}
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

    alone = decoder(prompts, seed=4).texts
    with failing_steps(monkeypatch, fails) as failed, serving(decoder) as client:
        got = {}

        def ask(place):
            # The id of the row is 0, so its text is that of the first prompt of a call.
            got[place] = client.ask("completions", {"prompt": prompts[place], "seed": 4,
                                                    "max_tokens": 24})  # fmt: skip

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failed or bad is None
    assert alone
    for place, prompt in enumerate(prompts):
        status, content = got[place]
        if prompt == bad:
            assert status == 500 and "FloatingPointError" in content["error"]["message"]
        else:
            assert status == 200
            assert content["choices"][0]["text"] == decoder([prompt], seed=4).texts[0]
