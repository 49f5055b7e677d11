"""The engine: requests enter slots, all slots step together, finished rows leave.

Axes: B slots, L prompt length, N longest output, K numbers of a row.
"""

import bisect
import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from specjax import types
from specjax.checks import check_count
from specjax.compilation import compile_seconds, jit
from specjax.decoding import Method
from specjax.decoding.method import (
    ByToken,
    beginning_of,
    end_row,
    first_state,
    insert_rows,
    watch_stops,
)
from specjax.errors import UserError
from specjax.memory import check_state_fits, explain_full_memory, sizes_in_words, smaller
from specjax.models.beginnings import Beginning
from specjax.text import requests as requests_lib
from specjax.text.earlier import EarlierAnswers
from specjax.text.requests import KeptPrefixes, Limits, Prefix, Request
from specjax.text.results import Row, RowInfo, split_time
from specjax.text.stops import Added, StopBlocks, StreamedText, check_stops, cut
from specjax.text.text_models import TextModel
from specjax.types import DecodeInfo, DecodeState, Params, PromptBatch, Sampling

# Powers of two and a length between them: padding adds at most about half to a row. Longer ones are
# powers of two, because each is another large program.
BUCKETS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# The most prompts per slot in a group.
TURNS = 16
# The same if a resumed run must decode an unfinished group from its start.
TURNS_AGAIN = 4


class Group(NamedTuple):
    """Prompts that share a set of slots.

    Attributes:
      members: the prompts' places, the longest prompt first.
      rows: the number of prompts decoded together.
      refill: the number of finished prompts that are replaced at once.
      length: the length of the bucket.
    """

    members: list[int]
    rows: int
    refill: int
    length: int


def buckets_to(context: int | None) -> tuple[int, ...]:
    """Returns the default bucket lengths for a model that reads so many positions."""
    longer: list[int] = []
    while context is not None and (longest := [*BUCKETS, *longer][-1]) < context:
        longer.append(min(2 * longest, context))
    return (*BUCKETS, *longer)


def row_multiple(method: Method) -> int:
    """Returns the divisor of slots and refills: a mesh spreads rows over several devices."""
    return 1 if method.partitioner is None else method.partitioner.row_multiple


def are_independent(method: Method, requests: Sequence[Request]) -> bool:
    """Whether a row's output does not depend on the rows beside it."""
    longest = (None, method.max_draft)
    return method.independent_rows and all(r.draft_limit in longest for r in requests)


def groups_of(
    lengths: Sequence[int],
    buckets: Sequence[int],
    batch_size: int,
    row_multiple: int = 1,
    turns: int = TURNS,
) -> Iterator[Group]:
    """Sorts prompts of these lengths, and splits them into groups of at most `turns * B`.

    The groups depend only on the arguments, and are decoded independently. So a resumed run has
    the same groups, and decodes the missing rows to the same outputs. Fewer prompts than the batch
    size get the next power of four of slots, so that there are few shapes. A group that fills the
    slots ends at the next end of a bucket.
    """
    rows = 1
    while rows < min(batch_size, len(lengths)):
        rows *= 4
    rows = min(rows, batch_size)
    rows += -rows % row_multiple
    refill = max(1, rows // 4)
    refill += -refill % row_multiple
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    sizes = [buckets[bisect.bisect_left(buckets, lengths[place])] for place in order]
    start = 0
    for end in range(1, len(order) + 1):
        count = end - start
        last = end == len(order)
        if last or count == turns * rows or (count >= rows and sizes[end] != sizes[end - 1]):
            yield Group(order[start:end][::-1], rows, refill, int(sizes[end - 1]))
            start = end


@dataclasses.dataclass
class Entry:
    """A sample of a request that waits for a slot or has a slot.

    Attributes:
      id: the id of the row, or of the samples that share its prefill.
      request: the request, its processors bound.
      original: the request as it was added, with its id.
      expected: the tokens of texts that its drafts are copied from.
      idle_steps: the steps for which a row with a known result still has its slot, without
        decoding; None for a row that is decoded.
      since: when it got the slot, in seconds; `compiled`: the seconds of compilation until then.
      streamed: its text so far, if it is streamed.
      prefilled: the number of tokens of its prompt that were read for it; 0 if another sample's
        cache was copied.
    """

    index: int
    sample: int
    id: int
    request: Request
    original: Request
    tokens: Int32[np.ndarray, " L"]
    expected: list[np.ndarray]
    idle_steps: int | None = None
    since: float = 0.0
    compiled: float = 0.0
    steps: int = 0
    streamed: StreamedText | None = None
    prefilled: int = 0


class Slots:
    """B slots, and the requests that wait.

    The rows of a refill share a prefill, and results may depend on a row's place in it. So a row
    with a known result keeps its slot for as many steps as it took, without decoding: all other
    rows then get the same slots and neighbours.
    """

    def __init__(self, rows: int, refill: int) -> None:
        self.held: list[Entry | None] = [None] * rows
        self.waiting: collections.deque[Entry] = collections.deque()
        # The number of slots to fill together, after the first time.
        self.refill, self._was_filled = refill, False

    @property
    def free(self) -> int:
        """The number of free slots."""
        return self.held.count(None)

    def next_group(self) -> tuple[list[int], list[Entry]]:
        """Returns the slots to fill together now, at first all slots, and their requests."""
        count = self.refill if self._was_filled else len(self.held)
        if not self.waiting or self.free < count:
            return [], []
        free = [place for place, entry in enumerate(self.held) if entry is None]
        return free[:count], list(itertools.islice(self.waiting, count))

    def occupy(self, places: Sequence[int], since: float, compiled: float) -> None:
        """Moves the first waiting requests into slots."""
        self._was_filled = True
        for place in places[: len(self.waiting)]:
            # In this order an interrupt loses no request.
            entry = self.held[place] = self.waiting[0]
            self.waiting.popleft()
            entry.since, entry.compiled = since, compiled

    @property
    def requests(self) -> dict[int, Request]:
        """The requests that wait or are decoded, by increasing index."""
        entries = [*filter(None, self.held), *self.waiting]
        return {x.index: x.original for x in sorted(entries, key=lambda x: x.index)}

    def drop(self, index: int) -> tuple[bool, list[int]]:
        """Removes a request; returns whether it was there, and the slots where it was decoded."""
        dropped = [entry for entry in self.waiting if entry.index == index]
        for entry in dropped:
            self.waiting.remove(entry)
        decoded = []
        for place, held in enumerate(self.held):
            if held is not None and held.index == index:
                self.held[place] = None
                decoded += [place] if held.idle_steps is None else []
                dropped.append(held)
        return bool(dropped), decoded

    def idle_steps(self) -> list[int]:
        """Returns the remaining steps of the rows with known results, increasing."""
        return sorted(x.idle_steps for x in self.held if x is not None and x.idle_steps is not None)

    def pass_steps(self, steps: int) -> None:
        """Counts steps, and frees the slots of rows with known results that have none left."""
        for place, entry in enumerate(self.held):
            if entry is not None and entry.idle_steps is not None:
                entry.idle_steps -= steps
                if entry.idle_steps <= 0:
                    self.held[place] = None


class Progress(NamedTuple):
    """The fields of a `DecodeState` that the host reads after a run."""

    tokens: Any
    lengths: Any
    ended_by: Any
    steps: Any
    info: DecodeInfo


# Steps between two returns to the host, so that Ctrl-C works.
STOP_AFTER = 64


class Engine:
    """Decodes requests that may arrive while others run; from `Decoder.engine`.

    An interrupt or an error during a step ends an engine, because its buffers may be lost. The
    engine then only gives back its `unfinished_requests`. An engine is used by one thread at a
    time; several engines may run in several threads.

    An engine's slots have a fixed shape, so each program is compiled once, when it is first needed,
    and shared with other engines of the same method and shape: the loop, and a prefill for each
    bucket. The first request with stop strings of its own compiles the loop again, for a table.

    Up to rounding, the slot of a request and the other requests do not change its text, unless a
    stopping policy reads the other rows (`CostAware`, `Budget`, a shared estimate) or drafts are
    copied from earlier answers. Rounding depends on the bucket that holds all prompts of a refill,
    and may decide a near tie.

    Args:
      method, params: the method with its parameters; the strengths of a field `rule` are scalars.
      model: its tokenizer reads prompts and writes texts.
      rows: B, the number of slots.
      prompt_length: L, the longest prompt in tokens.
      max_new_tokens: N, the longest output.
      refill: the number of free slots to fill together.
      sampling: the scalar defaults of requests. Requests cannot set a field that is None here,
        because its filter is not compiled.
      log_probs: whether to keep log-probabilities token by token, unless a request leaves them out.
      sources: whether to keep where each token came from.
      predictions: whether requests may have a text that drafts are copied from.
      earlier: keeps the answers; drafts of a request of `add` are copied from those that are there
        when it is added. None if no drafter copies them.
      stop, stop_table: a row's text is cut before the first of these strings, and the table ends
        the row there; see `specjax.types.StopState`.
      chat_template_kwargs: options of the chat template, for requests whose prompts are chats.
      num_samples: n, the rows of each request, which share one prefill: its cache is copied into n
        slots. B and `refill` are multiples of n. A request with m samples has m / n prefills.
      prefix: each prompt takes the caches of its first tokens, as far as it begins with them; a
        request of `add` has the rest of its prompt. None for whole prompts.
      kept_prefixes: of so many finished rows the caches stay: a prompt that begins as one of them
        takes the tokens in common from there, where slots are filled one by one (`refill` 1). Each
        takes the memory of a slot.
      buckets: prompts are padded to the first of these lengths that holds all prompts of a refill,
        or to L, if the caches of the models allow it; each is a program to compile.
      contexts: model's name -> the most positions that it was trained for; for a warning.
      named: the options that set its sizes, where others do than those of an engine: rows,
        prompt_length, max_new_tokens and max_draft.
      fitting: the shapes that are known to fit into memory, as engines of the same method and
        parameters share them: the check takes as long as some tokens.

    Raises:
      UserError: the slots cannot fit into memory.
    """

    def __init__(
        self,
        method: Method,
        params: Params,
        model: TextModel,
        *,
        rows: int,
        prompt_length: int,
        max_new_tokens: int,
        refill: int,
        sampling: Sampling,
        log_probs: bool,
        sources: bool,
        predictions: bool,
        earlier: EarlierAnswers | None,
        stop: tuple[str, ...],
        stop_table: types.Array | None,
        chat_template_kwargs: Mapping[str, Any],
        num_samples: int,
        prefix: Prefix | None,
        kept_prefixes: int = 0,
        buckets: Sequence[int] = (),
        contexts: dict[str, int],
        named: Mapping[str, str],
        fitting: set[Any],
    ) -> None:
        multiple = row_multiple(method) * num_samples
        assert 1 <= refill <= rows and rows % multiple == refill % multiple == 0, (rows, refill)
        self.method, self.params, self._model = method, params, model
        self._rows, self._stop, self._named = rows, stop, named
        self._chat_template_kwargs = chat_template_kwargs
        self._by_token = {"log_probs": log_probs, "sources": sources}
        self._stop_table = stop_table
        rule = getattr(params, "rule", None)
        sizes = prompt_length, max_new_tokens
        self._limits = Limits(method, *sizes, sampling, rule, num_samples, log_probs, predictions)
        self._blocks: StopBlocks | None = None
        self._max_length = method.cache_length(prompt_length, 0, max_new_tokens)
        self._prefix, self._contexts, self._earlier = prefix, contexts, earlier
        self._kept = KeptPrefixes(kept_prefixes) if kept_prefixes else None
        self._check_fits(fitting, kept_prefixes)
        widths = (*(x for x in buckets if x < prompt_length), prompt_length)
        same = len(widths) == 1 or self._shapes(widths[0]) == self._shapes(prompt_length)
        self._widths = widths if same else (prompt_length,)
        self._slots = Slots(rows, refill)
        self.state: DecodeState | None = None
        # The packed `Progress` after each run that was not read yet, and the entries during it.
        self._reports: collections.deque[tuple[Array, list[Entry | None]]] = collections.deque()
        self._next_index = 0
        # The id of the next row without one.
        self._next_row = 0
        self._end = ""

    def __repr__(self) -> str:
        running = self._rows - self._slots.free
        state = f"{running} running, {len(self._slots.waiting)} waiting"
        end = f", ended by {self._end}" if self._end else ""
        name = f"{self._model.name}, {type(self.method).__name__}"
        return f"Engine({name}, {self._in_words()}: {state}{end})"

    @property
    def unfinished(self) -> int:
        """The number of rows that wait or run: one per sample of a request."""
        return len(self._slots.waiting) + self._rows - self._slots.free

    @property
    def unfinished_requests(self) -> dict[int, Request]:
        """The requests with rows that wait or run, by the index from `add`.

        Their ids are set: in a new engine they give the rows that they would have given here. A
        request with several samples gives all of them again, also those that were returned.
        """
        return self._slots.requests

    def _check_alive(self) -> None:
        if self._end:
            raise UserError(
                f"this engine was ended by {self._end} during a step: make a new one, and add the "
                "requests of unfinished_requests to it; one with several samples gives all of them "
                "again, so keep those that you do not have"
            )

    def add(self, request: Request) -> int:
        """Adds a request, which waits for free slots.

        Returns:
          The index of its `Row`s: 0, 1, 2, ... in the order of the calls.

        Raises:
          UserError: the request does not fit the engine, which can still be used; or an interrupt
            or an error has ended the engine.
        """
        self._check_alive()
        if not isinstance(request, Request):
            raise UserError(
                f"add takes a Request, got {type(request).__name__}: write Request(prompt)"
            )
        samples = requests_lib.checked_samples(request, self._limits)
        next_id = -(-self._next_row // samples)
        if request.id is None:
            request = dataclasses.replace(request, id=next_id)
        if request.stop is not None:
            request = dataclasses.replace(request, stop=check_stops(request.stop))
        original, drawn = request, requests_lib.as_sampling(request.sampling)
        if drawn.processors is not None:
            # The engine has their arrays already.
            bound, _ = requests_lib.bind_processors(drawn.processors, self._model)
            drawn = dataclasses.replace(drawn, processors=bound)
            request = dataclasses.replace(request, sampling=drawn)
        requests_lib.check_strengths(request, self._limits)
        expected = []
        if request.prediction is not None:
            encoded = requests_lib.encode_output(request.prediction, "prediction", self._model)
            expected.append(encoded)
        name, vocab_size = "the prompt", self.method.vocab_size
        prompt = request.prompt if self._prefix is None else self._prefix.join(request.prompt, name)
        words = self._model.tokenizer
        tokens = requests_lib.encode(prompt, name, vocab_size, words, self._chat_template_kwargs)
        requests_lib.check_request(request, tokens, self._limits)
        if request.stop is not None:
            self._watch(self._stops_of(request))
        requests_lib.warn_beyond(len(tokens), self._contexts)
        self._next_row = (next_id + 1) * samples
        if self._earlier is not None:
            texts, seed = self._earlier.of(tokens, request.seed)
            request, expected = dataclasses.replace(request, seed=seed), [*expected, *texts]
        return self.put(request, tokens, expected, [None] * samples, original)

    def put(
        self,
        request: Request,
        tokens: np.ndarray,
        expected: list[np.ndarray],
        idle_steps: Sequence[int | None],
        original: Request | None = None,
    ) -> int:
        """Adds a checked request with the tokens of its prompt and of the texts to copy from.

        The idle steps are those of its samples.
        """
        assert request.id is not None
        copies, index = self._limits.num_samples, self._next_index
        prefills = len(idle_steps) // copies
        for sample, steps in enumerate(idle_steps):
            entry = Entry(
                index=index,
                sample=sample,
                id=request.id * prefills + sample // copies,
                request=request,
                original=original or request,
                tokens=tokens,
                expected=expected,
                idle_steps=steps,
            )
            self._slots.waiting.append(entry)
        self._next_index += 1
        return index

    def _stops_of(self, request: Request) -> tuple[str, ...]:
        return self._stop if request.stop is None else tuple(request.stop)

    @property
    def _stops(self) -> dict[str, Any]:
        """The options of `Method.run` for the table that ends rows, if there is one."""
        table = self._stop_table if self._blocks is None else self._blocks.table
        return {} if table is None else {"stop_table": table}

    def _watch(self, strings: tuple[str, ...]) -> None:
        """Adds stop strings to the table that ends rows."""
        blocks = self._blocks or StopBlocks(self._model, self._stop)
        used = {self._stops_of(request) for request in self._slots.requests.values()}
        blocks.add(strings, used)
        if self.state is not None and not self._stops:
            self.state = watch_stops(self.state)
        self._blocks = blocks

    def abort(self, index: int) -> bool:
        """Drops a waiting or running request by the index from `add`; its rows are not returned.

        Returns:
          Whether the request was there.
        """
        dropped, places = self._slots.drop(index)
        for place in places:
            if self.state is None:  # the engine was ended
                break
            self.state = end_row(self.state, place, types.ABORTED)
        return dropped

    def step(self, *, until_empty: bool = False) -> list[Row]:
        """Fills free slots and decodes, until a row is finished or `STOP_AFTER` steps are done.

        While requests wait, it decodes until `refill` slots are free. If none waits, `until_empty`
        decodes until all rows are finished.

        Returns:
          The finished rows; each of several processes returns all of them.
        """
        return [x.row for x in self._step(until_empty) if x.row is not None]

    def stream_step(self, *, every: int = 1) -> list[Added]:
        """Like `step`, but returns after a few rounds, with the text that each row got.

        At most `every` rounds are done: a return to the host takes time, so more are faster. The
        next rounds start before the texts are read, so a request that is added now waits for them.
        If no request waits, a row that ends comes after these rounds, with the texts of the others.
        Use `stream_step` for all steps of an engine: the text of a row that `step` finishes is not
        streamed.

        Returns:
          The texts that became certain: without incomplete characters, and without the beginning
          of a possible stop string. Finished rows have the rest of their text, which may be empty.
        """
        check_count("every", every, "give the number of rounds between two texts")
        return self._step(False, every)

    def added(self, every: int | None = None, *, until_empty: bool = False) -> Iterator[Added]:
        """Decodes until no request is unfinished, and yields finished rows.

        With `every` it also yields the texts that rows got after so many rounds; see `stream_step`.
        """
        while self.unfinished:
            yield from self._step(until_empty, every)

    def _step(self, until_empty: bool, every: int | None = None) -> list[Added]:
        """The finished rows; with `every` also the texts that rows got."""
        self._check_alive()
        try:
            with explain_full_memory(self._in_words(), self._smaller()):
                # The next run of a stream starts before a report is read, so that no device waits
                # for the host. If it must wait, for slots to be filled, that run has no steps.
                while len(self._reports) < (1 if every is None else 2):
                    self._fill()
                    steps = self._next_steps(until_empty, every)
                    if steps is None:
                        break
                    self._start(*steps)
                return self._drain(every is not None) if self._reports else []
        except BaseException as error:  # `run` takes the state's buffers
            self._end, self.state = type(error).__name__, None
            self._reports.clear()
            raise

    def _start(self, stop_after: int, until_finished: int) -> None:
        assert self.state is not None
        method, params = self.method, self._params_now()
        self.state = method.run(params, self.state, stop_after, until_finished, **self._stops)
        mesh = None if method.partitioner is None else method.partitioner.mesh
        packed = _packing(mesh)(_progress(self.state))
        packed.copy_to_host_async()
        self._reports.append((packed, [*self._slots.held]))

    def _next_steps(self, until_empty: bool, every: int | None) -> tuple[int, int] | None:
        """The most steps of the next run, and the finished rows that end it; None for no run."""
        free, idle = self._slots.free, self._slots.idle_steps()
        if free == self._rows:
            return None
        finished = self._rows if until_empty or every else free + 1
        finished = max(self._slots.refill, free + 1) if self._slots.waiting else finished
        if free + len(idle) == self._rows:
            # No row is decoded: skip the steps.
            self._slots.pass_steps(idle[finished - free - 1])
            return None
        # The state has idle rows as finished.
        return min([STOP_AFTER, every or STOP_AFTER, *idle]), min(finished + len(idle), self._rows)

    def _fill(self) -> None:
        while (group := self._slots.next_group())[0]:
            places, entries = group
            since, compiled = time.perf_counter(), compile_seconds()
            if any(entry.idle_steps is None for entry in entries):
                self._insert(places, entries)
            self._slots.occupy(places, since, compiled)

    def _insert(self, places: list[int], entries: Sequence[Entry]) -> None:
        """Reads prompts into slots; the last slots may have none, and are finished at once."""
        new = self._init(entries, len(places))
        if self.state is None and len(places) == self._rows:
            self.state = new
            return
        # If all the first rows were idle, there is no state yet.
        state = self._init([], self._rows) if self.state is None else self.state
        self.state = insert_rows(state, jnp.asarray(places, jnp.int32), new)

    def _init(self, entries: Sequence[Entry], rows: int) -> DecodeState:
        copies = self._limits.num_samples
        # A prompt is read once, for a sample that is decoded.
        groups = [entries[i : i + copies] for i in range(0, len(entries), copies)]
        first = [min(group, key=lambda entry: entry.idle_steps is not None) for group in groups]
        state = self.method.init(
            self.params,
            self._batch(first, rows // copies, self._width(entries)),
            max_new=self._limits.max_new_tokens,
            max_length=self._max_length,
            **self._by_token,
            copies=copies,
            beginning=self._beginning(first, rows // copies),
        )
        for row, entry in enumerate(entries):
            if entry.idle_steps is not None and first[row // copies].idle_steps is None:
                state = end_row(state, row, types.ABORTED)
        if not self._stops:
            return state
        starts = np.zeros(rows, np.int32)
        for row, entry in enumerate(entries):
            if self._blocks is not None:
                starts[row] = self._blocks.starts[self._stops_of(entry.request)]
        return watch_stops(state, starts)

    def _width(self, entries: Sequence[Entry]) -> int:
        """The length that the prompts of these entries are padded to."""
        longest = max((len(x.tokens) for x in entries), default=1)
        return next(width for width in self._widths if width >= longest)

    def _shapes(self, length: int) -> Any:
        copies = self._limits.num_samples
        batch = self._batch_shapes(self._rows // copies, length)
        static = self._limits.max_new_tokens, self._max_length, ByToken(*self._by_token.values())
        state, _ = first_state(self.method, (*static, copies), self.params, batch)
        return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]

    def _batch_shapes(self, rows: int, length: int) -> Any:
        # Only shapes, to allocate nothing.
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), self._batch([], 1, 1)
        )
        return batch._replace(inputs=jax.ShapeDtypeStruct((rows, length), np.int32))

    def _beginning(self, entries: Sequence[Entry], rows: int) -> Beginning | None:
        """The prefix with the number of its tokens that each entry takes."""
        for entry in entries:
            entry.prefilled = len(entry.tokens)
        prefix = self._prefix
        if self._kept is not None and rows == len(entries) == 1:
            prefix = self._kept.best(entries[0].tokens)
        if prefix is None or prefix.beginning is None:
            return None
        lengths = [prefix.common(entry.tokens) for entry in entries]
        for entry, length in zip(entries, lengths, strict=True):
            entry.prefilled -= length
        return Beginning(prefix.beginning.caches, _column(rows, lengths, np.int32))

    def prefix_of(self, tokens: np.ndarray, place: int = 0) -> Prefix | None:
        """Returns the caches of the last row of a slot, which has finished, as a `Prefix`.

        `tokens` are those of its prompt and its output.
        """
        assert self.state is not None
        beginning = beginning_of(self.method, self.params, self.state, place)
        if beginning is None:
            return None
        return Prefix(tokens[: int(beginning.lengths)], None, self.method, self.params, beginning)

    def _batch(self, entries: Sequence[Entry], rows: int, length: int) -> PromptBatch:
        """The entries as a batch; the engine's values replace None in requests."""
        requests = [entry.request for entry in entries]
        longest, most = self.method.max_draft, self._limits.max_new_tokens
        inputs = np.full((rows, length), self._model.tokenizer.pad_id, np.int32)
        lengths = np.ones(rows, np.int32)
        for row, entry in enumerate(entries):
            lengths[row] = len(entry.tokens)
            inputs[row, : lengths[row]] = entry.tokens
        # An idle row is in the prefill, but makes no step.
        limits = [0 if entry.idle_steps else entry.request.max_new_tokens for entry in entries]
        drawn: dict[str, Any] = {
            name: self._drawn(name, requests, rows) for name in requests_lib.DRAWN
        }
        predictions = None
        if self._limits.predictions:
            predictions = np.full((rows, self.method.predictions, most), -1, np.int32)
            for row, entry in enumerate(entries):
                for place, text in enumerate(entry.expected[: self.method.predictions]):
                    predictions[row, place, : len(text)] = text[:most]
        chosen = [r.sampling and r.sampling.processors for r in requests]
        leaves = [x and jax.tree.leaves(x) for x in chosen]
        drawn["processors"] = _columns(self._limits.sampling.processors, leaves, rows)
        return PromptBatch(
            inputs=inputs,
            input_lengths=lengths,
            ids=_column(rows, (entry.id for entry in entries), np.uint32),
            limits=_column(rows, (most if x is None else x for x in limits), np.int32),
            seeds=_column(rows, (r.seed for r in requests), np.uint32),
            sampling=Sampling(**drawn),
            draft_limits=_column(
                rows,
                (longest if r.draft_limit is None else r.draft_limit for r in requests),
                np.int32,
                rest=longest,
            ),
            predictions=predictions,
        )

    def _drawn(self, name: str, requests: Sequence[Request], rows: int) -> np.ndarray | None:
        """A field of `Sampling` of each row; None if it is not compiled."""
        default = getattr(self._limits.sampling, name)
        if default is None:
            return None
        # The values that disable a compiled filter.
        off = {"top_k": self.method.vocab_size, "top_p": 1.0}.get(name)
        values = [default if r.sampling is None else getattr(r.sampling, name) for r in requests]
        column = np.full(rows, default)
        column[: len(values)] = [off if value is None else value for value in values]
        return column

    def _params_now(self) -> Params:
        """The parameters with the strengths of the requests in the slots."""
        if self._limits.rule is None:
            return self.params
        strengths = [
            None if x is None or x.request.rule is None else jax.tree.leaves(x.request.rule)
            for x in self._slots.held
        ]
        rule = _columns(self._limits.rule, strengths, self._rows)
        if self.method.partitioner is not None:
            rule = self.method.partitioner.place_rows(rule)
        return self.params._replace(rule=rule)

    def _drain(self, streams: bool) -> list[Added]:
        """Removes the finished rows from their slots; `streams`: also returns others' texts."""
        assert self.state is not None
        packed, held = self._reports.popleft()
        progress = _unpacked(np.asarray(packed), _progress(self.state))
        added, ended = [], []
        now, compiled, passed = time.perf_counter(), compile_seconds(), 0
        for place, entry in enumerate(held):
            # An entry may have lost its slot since the run started.
            if entry is None or entry is not self._slots.held[place]:
                continue
            if entry.idle_steps is not None:
                continue
            passed = max(passed, int(progress.steps[place]) - entry.steps)
            entry.steps = int(progress.steps[place])
            row, text = None, ""
            if progress.ended_by[place]:
                ended.append(place)
                times = split_time(now - entry.since, compiled - entry.compiled)
                row = self._row(entry, place, progress, times)
                text = row.text
                if row.error is None and self._kept is not None:
                    read = np.append(entry.tokens, row.tokens_with_end)
                    if (prefix := self.prefix_of(read, place)) is not None:
                        self._kept.keep(prefix)
                if row.error is None and self._earlier is not None:
                    self._earlier.keep(entry.tokens, row.tokens_with_end)
            if streams:
                if entry.streamed is None:
                    stops = self._stops_of(entry.request)
                    entry.streamed = StreamedText(self._model, entry.tokens, stops)
                if row is None:
                    text = entry.streamed.more(progress.tokens[place, : progress.lengths[place]])
                else:
                    text = entry.streamed.rest(row.text)
            if text or row:
                emitted = int(progress.lengths[place])
                added.append(Added(entry.index, entry.sample, text, emitted, row))
        # At the end, so that an error on the way leaves all of them to be given back.
        for place in ended:
            self._slots.held[place] = None
        self._slots.pass_steps(passed)
        return added

    def _row(self, entry: Entry, place: int, progress: Progress, times: dict[str, Any]) -> Row:
        # Copies: a view would keep the whole batch in memory.
        progress = jax.tree.map(lambda x: np.array(x[place]), progress)
        info, tokens = progress.info, progress.tokens[: progress.lengths].copy()
        ended_by = types.ENDED_BY[progress.ended_by]
        output = tokens[:-1] if ended_by == "eos" else tokens
        error = None
        if progress.ended_by == types.NAN:
            source = self.method.nan_sources[int(info.nan_in)]
            error = f"{source} gave NaN in step {int(progress.steps)}"
        text = self._model.decode(entry.tokens, output)
        logs = types.LogProbs()
        if info.log_probs is not None and entry.request.log_probs is not False:
            logs = types.LogProbs(*(x[: len(tokens)] for x in info.log_probs))
        sources = text_of = None
        if info.sources is not None:
            names = (*self.method.source_names, "unknown")
            sources = tuple(names[code] for code in info.sources[: len(output)])
            text_of = self._model.text_after(entry.tokens)
        return Row(
            index=entry.index,
            text=cut(text, self._stops_of(entry.request)),
            tokens=output,
            ended_by=ended_by,
            info=RowInfo.of(info, progress.lengths, progress.steps),
            **times,
            log_probs=logs.plain,
            log_probs_processed=logs.processed,
            log_probs_target=logs.target,
            error=error,
            eos_id=int(tokens[-1]) if ended_by == "eos" else None,
            sample=entry.sample,
            sources=sources,
            text_of=text_of,
            prefilled=entry.prefilled,
        )

    def _in_words(self) -> str:
        longest, most = self._limits.prompt_length, self._limits.max_new_tokens
        return sizes_in_words(self._rows, longest, self.method.max_draft, most)

    def _smaller(self) -> str:
        sizes = {
            "rows": self._rows,
            "prompt_length": self._limits.prompt_length,
            "max_new_tokens": self._limits.max_new_tokens,
            "max_draft": self.method.max_draft,
        }
        remedy = smaller({self._named.get(name, name): size for name, size in sizes.items()})
        more = [f"{name}=False" for name, is_kept in self._by_token.items() if is_kept]
        more += [] if self._prefix is None else ["a shorter `prefix`"]
        return ", or ".join([remedy, *more])

    def _check_fits(self, fitting: set[Any], kept_prefixes: int) -> None:
        _, length, most, *kinds = self._limits[:5]
        tables = str(jax.tree.map(np.shape, getattr(self.params, "processors", ())))
        beside = 0 if self._prefix is None else self._prefix.nbytes
        flags = (*self._by_token.values(), self._limits.predictions)
        # What a kept prefix takes is less than a row.
        rows = self._rows + kept_prefixes
        key = (rows, length, most, flags, jax.tree.structure(kinds), tables, beside)
        if key in fitting:
            return
        check_state_fits(
            self.method,
            self.params,
            self._batch_shapes(rows, length),
            max_new=most,
            max_length=self._max_length,
            remedy=self._smaller(),
            beside=beside,
            **self._by_token,
        )
        fitting.add(key)


def _column(rows: int, values: Iterable[Any], dtype: Any, rest: int = 0) -> np.ndarray:
    first = list(values)
    column = np.full(rows, rest, dtype)
    column[: len(first)] = first
    return column


def _columns(default: Any, of_rows: Sequence[Any], rows: int) -> Any:
    """A tree with leaves per row: the default's where a row's list of leaves is None or missing."""
    leaves, structure = jax.tree.flatten(default)
    of = [*of_rows, *[None] * (rows - len(of_rows))]
    return jax.tree.unflatten(
        structure,
        [
            np.array([leaf if row is None else row[i] for row in of], np.asarray(leaf).dtype)
            for i, leaf in enumerate(leaves)
        ],
    )


def _progress(state: DecodeState) -> Progress:
    return Progress(*(getattr(state, name) for name in Progress._fields))


@functools.cache
def _packing(mesh: jax.sharding.Mesh | None) -> Callable[[Progress], Array]:
    """`_packed` as a program; on a mesh each process has all rows."""
    everywhere = None if mesh is None else jax.NamedSharding(mesh, jax.P())
    return jit(_packed, out_shardings=everywhere)


def _packed(progress: Progress) -> Int32[Array, "B K"]:
    """The numbers of each row in one array, which a device sends faster than several."""
    leaves = [
        leaf.view(jnp.int32) if leaf.dtype == jnp.float32 else leaf.astype(jnp.int32)
        for leaf in jax.tree.leaves(progress)
    ]
    return jnp.concatenate([leaf.reshape(leaf.shape[0], -1) for leaf in leaves], axis=1)


def _unpacked(packed: Int32[np.ndarray, "B K"], like: Progress) -> Progress:
    """What was packed, with the shapes of `like`."""
    leaves, structure = jax.tree.flatten(like)
    arrays, start = [], 0
    for leaf in leaves:
        end = start + leaf.size // len(packed)
        numbers = packed[:, start:end].reshape(leaf.shape)
        arrays.append(numbers.view(np.float32) if leaf.dtype == np.float32 else numbers)
        start = end
    return jax.tree.unflatten(structure, arrays)
