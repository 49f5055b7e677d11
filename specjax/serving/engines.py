"""Engines in threads: rows enter from any thread, and their texts come back as events."""

import collections
import dataclasses
import functools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from specjax.errors import UserError
from specjax.serving.errors import RefusedError
from specjax.serving.fields import Asked, Kind
from specjax.text import Decoder, Engine, Request
from specjax.text.stops import Added

_LOG = logging.getLogger("specjax")
# Rounds between two looks at new and aborted rows, where no text is streamed.
_ROUNDS = 4


class Limits(NamedTuple):
    """What a server takes.

    Attributes:
      prompt_length: the longest prompt in tokens.
      waiting: the most rows that wait; more are refused with 429.
      body_bytes: the longest body.
      seconds: the most time of a request.
      prefixes: how many finished rows stay in memory, so that what a prompt has in common with one
        of them (a system prompt, the chat so far) is not read again.
      engines: the most kinds of requests (filters, processors, schemas) at a time; each has slots.
    """

    prompt_length: int
    waiting: int = 256
    body_bytes: int = 4 << 20
    seconds: float = 600.0
    prefixes: int = 8
    engines: int = 4


@dataclasses.dataclass(eq=False)
class Job:
    """A row that a client waits for.

    Attributes:
      put: takes its events, on the engine's thread: texts, at last one with the `Row`; or an error.
      streams: whether texts are wanted before the row is finished.
      sent: the characters of its text that were put.
      again: the characters that a new engine writes again.
    """

    request: Request
    put: Callable[[Added | Exception], None]
    streams: bool
    sent: int = 0
    again: int = 0


class EngineThread:
    """An engine, and the thread that steps it.

    An error in a step ends the engine. Then each of its rows is decoded again, alone, by the same
    seed and id, so to the same text, so that only a row that fails alone gets the error.
    """

    def __init__(self, make: Callable[[Request], Engine], rows: int) -> None:
        # An engine has about as many rows waiting as slots: more would only take memory.
        self._make, self._most = make, 2 * rows
        self._engine: Engine | None = None
        self._inbox: queue.SimpleQueue[tuple[str, Sequence[Job]]] = queue.SimpleQueue()
        self._jobs: dict[int, Job] = {}
        self._waiting: collections.deque[Job] = collections.deque()
        # Rows of an engine that has failed, which are tried one by one.
        self._suspects: collections.deque[Job] = collections.deque()
        self._closing = False
        # Read by other threads: the rows that were submitted and have not ended.
        self.unfinished, self._counting = 0, threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        self._count(len(jobs))
        self._inbox.put(("add", jobs))

    def abort(self, jobs: Sequence[Job]) -> None:
        """Drops rows; those that have ended are ignored."""
        self._inbox.put(("abort", jobs))

    def close(self) -> None:
        """Ends the thread after the rows that it has."""
        self._inbox.put(("close", ()))

    def join(self) -> None:
        self._thread.join()

    def _count(self, rows: int) -> None:
        with self._counting:
            self.unfinished += rows

    def _run(self) -> None:
        while not self._closing or self._jobs or self._suspects or self._waiting:
            self._take()
            if self._suspects:
                if not self._jobs:
                    self._add(self._suspects.popleft())
            else:
                while self._waiting and len(self._jobs) < self._most:
                    self._add(self._waiting.popleft())
            if self._jobs:
                self._step()

    def _take(self) -> None:
        """Reads the inbox; waits if there is nothing to decode."""
        wait = not (self._jobs or self._suspects or self._waiting)
        while wait or not self._inbox.empty():
            what, jobs = self._inbox.get()
            wait = False
            self._closing |= what == "close"
            if what == "add":
                self._waiting.extend(jobs)
            for job in jobs if what == "abort" else ():
                self._drop(job)

    def _add(self, job: Job) -> None:
        try:
            if self._engine is None:
                self._engine = self._make(job.request)
            self._jobs[self._engine.add(job.request)] = job
        except Exception as error:  # of this row, or of making its engine
            self._end(job, error)

    def _drop(self, job: Job) -> None:
        for rest in (self._suspects, self._waiting):
            if job in rest:
                rest.remove(job)
                self._count(-1)
        index = next((index for index, each in self._jobs.items() if each is job), None)
        if index is None:
            return
        del self._jobs[index]
        self._count(-1)
        assert self._engine is not None
        try:
            self._engine.abort(index)
        except Exception as error:
            self._restart(error)

    def _end(self, job: Job, event: Added | Exception) -> None:
        self._count(-1)
        job.put(event)

    def _step(self) -> None:
        assert self._engine is not None
        streams = any(job.streams for job in self._jobs.values())
        try:
            all_added = self._engine.stream_step(every=1 if streams else _ROUNDS)
        except Exception as error:
            self._restart(error)
            return
        for added in all_added:
            job = self._jobs.get(added.index)
            if job is None:  # aborted
                continue
            text, job.again = added.text[job.again :], max(0, job.again - len(added.text))
            job.sent += len(text)
            if added.row is not None:
                text = text if job.streams else added.row.text
                del self._jobs[added.index]
                self._end(job, dataclasses.replace(added, text=text))
            elif text and job.streams:
                job.put(dataclasses.replace(added, text=text))

    def _restart(self, error: Exception) -> None:
        jobs, self._jobs, self._engine = [*self._jobs.values()], {}, None
        _LOG.warning("a step of %d rows failed: %s", len(jobs), error, exc_info=error)
        if len(jobs) == 1:
            self._end(jobs[0], error)
            return
        for job in jobs:
            job.again = job.sent
        self._suspects.extendleft(reversed(jobs))


class Engines:
    """An engine for each kind of request, with the models and the setting of a decoder."""

    def __init__(self, decoder: Decoder, limits: Limits) -> None:
        self._decoder, self._limits = decoder, limits
        self._threads: collections.OrderedDict[Kind, EngineThread] = collections.OrderedDict()
        self._lock, self._closed = threading.Lock(), False

    @property
    def unfinished(self) -> int:
        """The rows that wait or are decoded."""
        with self._lock:
            return sum(thread.unfinished for thread in self._threads.values())

    @property
    def queued(self) -> int:
        """The rows that wait for a slot."""
        rows = self._decoder.batch_size
        with self._lock:
            return sum(max(0, each.unfinished - rows) for each in self._threads.values())

    def submit(self, asked: Asked, jobs: Sequence[Job]) -> EngineThread:
        """Hands rows to the engine of their kind.

        Raises:
          RefusedError: too many rows wait, or engines of other kinds are busy.
        """
        with self._lock:
            if self._closed:
                raise RefusedError("the server is shutting down", status=503)
            unfinished = sum(thread.unfinished for thread in self._threads.values())
            if unfinished + len(jobs) > self._decoder.batch_size + self._limits.waiting:
                raise RefusedError(f"{unfinished} rows wait or run: try again", status=429)
            thread = self._threads.get(asked.kind)
            if thread is None:
                if asked.kind != Kind():
                    self._make_room()
                rows = self._decoder.batch_size
                thread = EngineThread(functools.partial(self._engine, asked.kind), rows)
                self._threads[asked.kind] = thread
            self._threads.move_to_end(asked.kind)
            thread.submit(jobs)
            return thread

    def _make_room(self) -> None:
        """Ends an engine that is idle, but never that of plain requests."""
        others = {kind: x for kind, x in self._threads.items() if kind != Kind()}
        if len(others) < self._limits.engines:
            return
        idle = [kind for kind, thread in others.items() if not thread.unfinished]
        if not idle:
            raise RefusedError(
                f"requests of {self._limits.engines} other kinds (filters, processors, schemas) "
                "are decoded: try again",
                status=429,
            )
        self._threads.pop(idle[0]).close()

    def _engine(self, kind: Kind, request: Request) -> Engine:
        """An engine that is compiled for requests of a kind, of which this is one."""
        decoder = base = self._decoder
        if kind.top_k or kind.top_p or kind.processors or kind.rule is not None:
            sampling: Any = request.sampling
            setting = dataclasses.replace(
                base.setting,
                temperature=1.0,
                top_k=base.method.vocab_size if kind.top_k else None,
                top_p=1.0 if kind.top_p else None,
                processors=sampling.processors or (),
                rule=base.setting.rule if kind.rule is None else request.rule,
            )
            decoder = Decoder(
                base.models,
                setting,
                max_new_tokens=base.max_new_tokens,
                batch_size=base.batch_size,
                buckets=base.buckets,
            )
        return decoder.engine(
            prompt_length=self._limits.prompt_length,
            refill=1,
            log_probs=kind.log_probs,
            predictions=kind.predictions,
            kept_prefixes=self._limits.prefixes,
        )

    def close(self) -> None:
        """Refuses new rows, and returns when those that are here have ended."""
        with self._lock:
            self._closed, threads = True, [*self._threads.values()]
        for thread in threads:
            thread.close()
        for thread in threads:
            thread.join()


def refusal(error: Exception) -> RefusedError:
    """What a client is told about an error."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, UserError):
        return RefusedError(str(error))
    _LOG.error("a request failed: %s", error, exc_info=error)
    return RefusedError(f"decoding failed ({type(error).__name__})", status=500)
