"""`specjax serve`: what it refuses before models are read, and its end by SIGTERM."""

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


def test_a_stream_is_finished_after_sigterm():
    words = ["--port=0", "--batch-size=2", "--max-new-tokens=64", "--prompt-length=64"]
    command = [sys.executable, "-m", "specjax", "serve", *words]
    environment = {**os.environ, "SPECJAX_API_KEY": "secret"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        ready = process.stdout.readline()
        port = int(re.search(r"Ready: built-in at http://127\.0\.0\.1:(\d+)/v1", ready)[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        body = {"prompt": "A man rides a bicycle.", "max_tokens": 64, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        headers = {"Authorization": "Bearer secret"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        with connection.getresponse() as response:
            first = response.readline()
            process.send_signal(signal.SIGTERM)
            rest = response.read().decode()
        connection.close()
        shown = process.stdout.read()
        assert process.wait(60) == 0
    assert first.startswith(b"data: {") and rest.rstrip().endswith("data: [DONE]")
    usage = rest.rstrip().splitlines()[-3]  # before an empty line and the end
    assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 64
    assert "curl" in shown and "secret" not in shown
