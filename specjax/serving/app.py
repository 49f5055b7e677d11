"""The application: routes, limits, streams and the key."""

import asyncio
import contextlib
import functools
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Send

from specjax.serving.answers import Answer, check_finite
from specjax.serving.counters import Counters
from specjax.serving.engines import Engines, Job, Limits, refusal
from specjax.serving.errors import RefusedError
from specjax.serving.fields import Asked, read_body
from specjax.text import Decoder
from specjax.text.results import Row
from specjax.text.stops import Added

_GONE = 499  # nginx's status of a client that has gone
_PIECE = 1 << 16


def make_app(
    decoder: Decoder, limits: Limits, *, name: str | None = None, api_key: str | None = None
) -> Starlette:
    """Returns the ASGI application of a decoder.

    Args:
      decoder: its setting decodes; its `max_new_tokens` is the longest output, and its
        `batch_size` the number of rows decoded together.
      name: the model's name for clients; by default the verifier's.
      api_key: if it is given, requests of `/v1` must have it as a bearer token.
    """
    server = _Server(decoder, limits, name or decoder.main.name, api_key)
    routes = [
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.models),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/health", server.health),
        Route("/metrics", server.metrics),
    ]
    handlers: Any = {RefusedError: _refused, HTTPException: _no_route}
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=server.lifespan)
    app.state.warm_up = server.warm_up
    return app


class _Server:
    def __init__(self, decoder: Decoder, limits: Limits, name: str, api_key: str | None) -> None:
        self._decoder, self._limits, self._name, self._key = decoder, limits, name, api_key
        self._engines = Engines(decoder, limits)
        self._counters = Counters(lambda: self._engines.unfinished, lambda: self._engines.queued)
        self._started = int(time.time())
        self._scoring, self._scores = asyncio.Semaphore(1), 0

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(self._engines.close)

    async def warm_up(
        self, progress: Callable[[int], Any], more: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Compiles the programs of plain requests, and of those with each of the fields in `more`.

        `progress` is told each length of prompts.

        Raises:
          RefusedError: a field is wrong; nothing was compiled.
        """
        lengths = [min(length, self._limits.prompt_length) for length in self._decoder.buckets]
        # The first prompt fills all slots at once, each later one its own. A prompt that is new is
        # read whole; one that was read before is continued, where the models can.
        asked = []
        for fields in ({}, *more):
            for token, length in enumerate((lengths[0], *lengths)):
                # Two equal tokens at its beginning might be those that begin texts.
                prompt = [token, *[token + 1] * (length - 1)]
                body = {**fields, "prompt": prompt, "max_tokens": 1}
                asked.append(read_body(body, self._decoder, self._name, chat=False))
        for each in asked:
            progress(len(each.prompts[0]))
            for _ in range(2):
                async for _ in self._events(each, None):
                    pass

    async def models(self, request: Request) -> Response:
        self._check_key(request)
        one = {"id": self._name, "object": "model", "created": self._started, "owned_by": "specjax"}
        length = self._limits.prompt_length + self._decoder.max_new_tokens
        model = {**one, "max_model_len": length}
        name = request.path_params.get("name")
        if name not in (None, self._name):
            raise RefusedError(f"there is no model {name!r:.80}", status=404, param="model")
        return JSONResponse({"object": "list", "data": [model]} if name is None else model)

    async def health(self, request: Request) -> Response:
        return Response()

    async def metrics(self, request: Request) -> Response:
        content = generate_latest(self._counters.registry)
        return Response(content, media_type=CONTENT_TYPE_LATEST)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, chat=True)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, chat=False)

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        status: int | None = 500
        try:
            self._check_key(request)
            body = await self._in_time(self._body(request), self._limits.seconds)
            asked = await run_in_threadpool(read_body, body, self._decoder, self._name, chat=chat)
            answer = Answer(asked, self._decoder, self._name)
            self._counters.prompt_tokens.inc(sum(map(len, asked.prompts)))
            if asked.scored:
                content = await self._score(answer.scored)
            else:
                events = self._events(asked, request)
                if asked.stream:
                    # The first event may be a refusal, which has a status of its own.
                    first = await anext(events)
                    status = None  # counted at the end of the stream
                    chunks = self._chunks(request.url.path, asked, answer, first, events)
                    return _Taken(chunks, self._limits.seconds, media_type="text/event-stream")
                rows: list[Any] = [None] * len(asked.requests)
                async for place, added in events:
                    if added.row is not None:
                        rows[place] = check_finite(added.row)
                self._counters.count(rows, answer.cached(rows))
                whole = functools.partial(answer.whole, rows)
                content = await (self._score(whole) if asked.top else run_in_threadpool(whole))
            status = 200
            text = await run_in_threadpool(json.dumps, content)
            size = {"Content-Length": str(len(text))}  # JSON is escaped
            seconds = self._limits.seconds
            return _Taken(_pieces(text), seconds, headers=size, media_type="application/json")
        except ClientDisconnect:
            status = _GONE
            return Response(status_code=status)
        except Exception as error:
            refused = refusal(error)
            status = refused.status
            raise refused from None
        finally:
            if status is not None:
                self._counters.requests.labels(request.url.path, status).inc()

    async def _score(self, function: Callable[[], Any]) -> Any:
        """Runs what reads texts with the verifier, one at a time."""
        if self._scores >= self._limits.waiting:
            raise RefusedError("too many prompts are scored: try again", status=429)
        self._scores += 1
        try:
            return await self._in_time(self._alone(function), self._limits.seconds)
        finally:
            self._scores -= 1

    async def _alone(self, function: Callable[[], Any]) -> Any:
        async with self._scoring:
            return await run_in_threadpool(function)

    async def _in_time(self, awaited: Awaitable[Any], seconds: float | None) -> Any:
        """Waits for what a request may take so many seconds for; None: as long as it takes."""
        try:
            async with asyncio.timeout(seconds):
                return await awaited
        except TimeoutError:
            most = self._limits.seconds
            raise RefusedError(f"it took more than {most:g} seconds", status=504) from None

    def _check_key(self, request: Request) -> None:
        if self._key is None:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode("latin-1"), f"Bearer {self._key}".encode()):
            raise RefusedError("the API key is missing or wrong", status=401)

    async def _body(self, request: Request) -> Any:
        content = bytearray()
        async for piece in request.stream():
            content += piece
            if len(content) > self._limits.body_bytes:
                most = self._limits.body_bytes
                raise RefusedError(f"the body must have at most {most:,} bytes", status=413)
        try:
            return await run_in_threadpool(json.loads, bytes(content))
        except (ValueError, RecursionError) as error:
            raise RefusedError(f"the body must be JSON: {error}") from None

    async def _events(
        self, asked: Asked, request: Request | None
    ) -> AsyncIterator[tuple[int, Added]]:
        """The texts of rows by their places, until all are finished; aborts them on the way out.

        Raises:
          ClientDisconnect: the client has gone.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[tuple[int, Added | Exception]] = asyncio.Queue()

        def putting(place: int) -> Callable[[Added | Exception], None]:
            def put(event: Added | Exception) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(events.put_nowait, (place, event))

            return put

        async def watch(request: Request) -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            events.put_nowait((0, ClientDisconnect()))

        streams = asked.stream and asked.top is None
        jobs = [Job(x, putting(i), streams) for i, x in enumerate(asked.requests)]
        start, first = time.perf_counter(), 0.0
        thread = self._engines.submit(asked, jobs)
        watching = None if request is None else asyncio.create_task(watch(request))
        left, emitted = len(jobs), [0] * len(jobs)
        try:
            while left:
                # A limit of each event: a stream goes on in another task.
                rest = start + self._limits.seconds - time.perf_counter()
                # A warm-up takes as long as it takes.
                wait = None if request is None else rest
                place, event = await self._in_time(events.get(), wait)
                if isinstance(event, Exception):
                    raise event
                first = first or time.perf_counter()
                left -= event.row is not None
                emitted[place] = event.emitted
                yield place, event
        finally:
            if watching is not None:
                watching.cancel()
            if left:
                thread.abort(jobs)
            elif request is not None:
                self._counters.time(start, first, sum(emitted))

    async def _chunks(
        self,
        route: str,
        asked: Asked,
        answer: Answer,
        first: tuple[int, Added],
        events: AsyncIterator[tuple[int, Added]],
    ) -> AsyncIterator[str]:
        """The lines of a stream of server-sent events."""
        rows: list[Row | None] = [None] * len(asked.requests)
        tokens, status = [0] * len(rows), _GONE
        try:
            for place in range(len(rows) if asked.chat else 0):
                yield _line(answer.first(place))
            async for place, added in _chained(first, events):
                if added.row is not None:
                    rows[place] = check_finite(added.row)
                tokens[place] = added.emitted
                chunk = functools.partial(answer.chunk, place, added.text, added.row, sum(tokens))
                scores = asked.top and added.row is not None
                yield _line(await self._score(chunk) if scores else chunk())
            finished = [row for row in rows if row is not None]
            self._counters.count(finished, answer.cached(finished))
            if asked.usage_at_end:
                yield _line(answer.end(finished))
            status = 200
            yield "data: [DONE]\n\n"
        except ClientDisconnect:
            return
        except Exception as error:
            refused = refusal(error)
            status = refused.status
            yield _line(refused.body)
        finally:
            self._counters.requests.labels(route, status).inc()
            await events.aclose()  # type: ignore[attr-defined]


class _Taken(StreamingResponse):
    """What a client must take within so many seconds; then the rest is not sent, and is freed."""

    def __init__(self, content: AsyncIterator[str], seconds: float, **options: Any) -> None:
        super().__init__(content, **options)
        self._end = asyncio.get_running_loop().time() + seconds

    async def stream_response(self, send: Send) -> None:
        async def in_time(message: Message) -> None:
            # After the end too, a message that needs no waiting is sent.
            async with asyncio.timeout_at(self._end):
                await send(message)

        with contextlib.suppress(TimeoutError):
            await super().stream_response(in_time)


async def _pieces(text: str) -> AsyncIterator[str]:
    """Parts of a text: the server waits before each until the client has taken those before."""
    for start in range(0, len(text), _PIECE):
        yield text[start : start + _PIECE]


async def _chained(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield first
    async for each in rest:
        yield each


def _line(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


async def _refused(request: Request, error: Exception) -> Response:
    refused = refusal(error)
    headers = {"Retry-After": "1"} if refused.status in (429, 503) else None
    return _json(refused.body, refused.status, headers)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    routes = ", ".join(x.path for x in request.app.routes if "{" not in x.path)
    told = f"{request.method} {request.url.path}: {error.detail}; the routes are {routes}"
    body = RefusedError(told).body
    return _json(body, error.status_code, error.headers)


def _json(body: Any, status: int, headers: Mapping[str, str] | None) -> Response:
    # Escaped: a name that a client gave may be half a surrogate pair.
    return Response(json.dumps(body), status, headers, "application/json")
