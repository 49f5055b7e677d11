"""`specjax serve`: what it refuses before models are read, and its end by SIGTERM."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from specjax.cli import serve
from specjax.cli.main import main


@pytest.mark.parametrize(
    "words, message",
    [
        (["--host", "0.0.0.0"], "set SPECJAX_API_KEY, which clients then send"),
        (["--port", "99999"], "--port must be in 0 .. 65535, got 99999"),
        (["--batch-size", "0"], "--batch-size must be a whole number"),
        (["--prefixes", "-1"], "--prefixes must be a whole number"),
        (["--timeout", "0"], "--timeout must be"),
        (["--verifier", "nowhere"], "nowhere"),
        (["--rule", "Magic()"], "Magic"),
        (["--warm-up", "ignore_eos"], "--warm-up must be fields such as"),
        (["--warm-up", '{"ignore_eos": 1}'], "--warm-up: ignore_eos must be true or false"),
    ],
)
def test_bad_options_are_named(words, message, capsys, monkeypatch):
    monkeypatch.delenv("SPECJAX_API_KEY", raising=False)
    words = ["--port", "0", *words] if "--port" not in words else words
    assert main(["serve", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(capsys, monkeypatch):
    monkeypatch.setattr(serve, "load_pair", lambda **_: pytest.fail("models were read"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert f"--port {port} cannot be listened at" in capsys.readouterr().err


def test_all_streams_are_finished_after_sigterm():
    words = ["--port=0", "--batch-size=2", "--max-new-tokens=64", "--prompt-length=64"]
    words += ["--warm-up", '{"ignore_eos": true}']
    command = [sys.executable, "-m", "specjax", "serve", *words]
    environment = {**os.environ, "SPECJAX_API_KEY": "secret"}
    body = {"prompt": [9] * 8, "max_tokens": 64, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    headers = {"Authorization": "Bearer secret"}
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process,
        contextlib.ExitStack() as stack,
    ):
        ready = process.stdout.readline()
        port = int(re.search(r"Ready: built-in at http://127\.0\.0\.1:(\d+)/v1", ready)[1])

        def send(method, path, content=None):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            stack.enter_context(contextlib.closing(connection))
            connection.request(method, path, content, headers)
            return connection

        streams = [send("POST", "/v1/completions", json.dumps(body)) for _ in range(6)]
        # All are there, and most of them wait: for a slot, or for their programs.
        metrics = ""
        while "specjax:prompt_tokens_total 48.0" not in metrics:
            metrics = send("GET", "/metrics").getresponse().read().decode()
        process.send_signal(signal.SIGTERM)
        ends = [stream.getresponse().read().decode() for stream in streams]
        shown = process.stdout.read()
        assert process.wait(60) == 0
    for end in ends:
        *_, last, _, done = end.rstrip().splitlines()
        assert done == "data: [DONE]"
        assert json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"] == 64
    assert "curl" in shown and "secret" not in shown
