"""A server on a free port, over a tiny pair that chats."""

import concurrent.futures
import contextlib
import http.client
import json
import socket
import threading

import pytest
import uvicorn

from specjax.serving import Limits, make_app
from specjax.text import Decoder, Pair
from tests import tiny_pair

KEY = "a key"


@pytest.fixture(scope="session")
def decoder():
    pair = Pair(tiny_pair.chat_model(1), tiny_pair.chat_model(0))
    return Decoder(
        pair,
        drafting="Lookup(min_match=2)",
        max_draft=3,
        max_new_tokens=24,
        batch_size=4,
        buckets=(32, 64),
    )


class Client:
    """Asks a server, without a library of OpenAI's."""

    def __init__(self, port, app):
        self.port, self.app = port, app

    def send(self, method, path, body=None, key=KEY):
        """The status and the content of a response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        with contextlib.closing(connection):
            connection.request(method, path, content, headers)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def ask(self, path, body, key=KEY):
        status, content = self.send("POST", f"/v1/{path}", body, key)
        return status, json.loads(content)

    def answer(self, path, **body):
        status, content = self.ask(path, body)
        assert status == 200, content
        return content

    def together(self, path, bodies):
        """The answers to several bodies that are sent at once, in their order."""
        with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
            return [*pool.map(lambda body: self.ask(path, body), bodies)]

    def counters(self):
        """The numbers of `/metrics` by their names with labels."""
        lines = self.send("GET", "/metrics")[1].splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def stream(self, path, **body):
        status, content = self.send("POST", f"/v1/{path}", {**body, "stream": True})
        lines = [line for line in content.split("\n") if line]
        assert status == 200 and lines.pop() == "data: [DONE]", lines
        return [json.loads(line.removeprefix("data: ")) for line in lines]


@contextlib.contextmanager
def serving(decoder, **limits):
    app = make_app(decoder, Limits(64, **limits), name="tiny", api_key=KEY)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        # Small, so that the server has to wait for clients that do not read.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
            yield Client(listening.getsockname()[1], app)
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="session")
def client(decoder):
    with serving(decoder) as client:
        yield client
