"""The engine: requests enter slots, all slots step together, finished rows leave.

Axes: B slots, n slots filled at once, L prompt length, N longest output.
"""

import dataclasses
import functools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import check_count
from specjax.compilation import jit
from specjax.decoding import end_row, insert_rows, watch_stops
from specjax.memory import told_if_full
from specjax.partitioning import local_rows
from specjax.text.capacity import check_state_fits, in_words, resized
from specjax.text.requests import SETTINGS, Request, check_request
from specjax.text.results import RowInfo
from specjax.text.slots import Held, Slots, Waiting
from specjax.types import (
    ABORTED,
    ENDED_BY,
    NAN,
    Array,
    DecodeState,
    Method,
    Params,
    PromptBatch,
    Sampling,
)

# Steps between two returns to the host, so that an interrupt is heard.
STOP_AFTER = 64
_REMEDY = (
    "choose a smaller max_new_tokens, batch_size or last bucket (of an Engine: a smaller max_new, "
    "rows or prompt_length)"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Finished:
    """A row that has left the engine.

    Attributes:
      id: what `Engine.add` returned.
      tokens: `[n]` int32, all that it emitted, an end-of-sequence token included.
      ended_by: "eos", "stop", "length" or "nan".
      info: what it took.
      seconds: from its entering a slot until the engine returned it.
      error: for a row that ended by NaN, which model gave it and in which step; else None.
    """

    id: int
    tokens: np.ndarray
    ended_by: str
    info: RowInfo
    seconds: float
    error: str | None = None


class Engine:
    """Decodes requests that may arrive while others run.

    One engine has one shape: all its programs are compiled once, and shared with other engines of
    the same method and shape. Which slot a request gets, and beside whom, does not change its text,
    but where a stopping policy reads the other rows (`CostAware`, `Budget`, a shared estimate).

    Args:
      method: the method.
      params: its parameters; where they have a field `rule`, its strengths are scalars.
      rows: B, the slots.
      prompt_length: L, the longest prompt in tokens; all are padded to it.
      max_new: N, the longest output.
      refill: n, how many free slots are filled at once; a quarter of the slots by default.
      sampling: fields are scalars: what requests do not say. A field that is None cannot be asked
        for: its filter is not compiled in.
      pad_id: pads prompts.
      token_log_probs: whether log-probabilities are kept token by token; NaN where the method
        writes none (see `specjax.decoding.add_log_probs`).
      stop_table: what ends rows by their texts; see `specjax.types.StopState`. A method is told of
        it only where there is one.
      fitting: the shapes for which the memory is known to suffice, this one once it is made; shared
        by engines of one method and parameters, for asking takes as long as some tokens.

    Raises:
      ValueError: if a size is no whole number of at least 1, a mesh does not divide the slots, or
        they cannot fit into the memory.
    """

    def __init__(
        self,
        method: Method,
        params: Params,
        *,
        rows: int,
        prompt_length: int,
        max_new: int,
        refill: int | None = None,
        sampling: Sampling | None = None,
        pad_id: int = 0,
        token_log_probs: bool = False,
        stop_table: Array | None = None,
        fitting: set[Any] | None = None,
    ) -> None:
        check_count("rows", rows, "give a whole number")
        refill = max(1, rows // 4) if refill is None else refill
        sizes = {"refill": refill, "prompt_length": prompt_length, "max_new": max_new}
        for name, size in sizes.items():
            check_count(name, size, "give a whole number")
        if refill > rows:
            raise ValueError(f"refill must be at most rows={rows}, got {refill}")
        partitioner = method.partitioner
        multiple = 1 if partitioner is None else partitioner.row_multiple
        for name, size in (("rows", rows), ("refill", refill)):
            if size % multiple:
                raise ValueError(
                    f"{name} must be a multiple of {multiple}, over which the mesh spreads rows, "
                    f"got {size}"
                )
        self._method, self._params = method, params
        self._rows, self._refill, self._length = rows, refill, prompt_length
        self._max_new, self._pad_id = max_new, pad_id
        self._sampling = Sampling() if sampling is None else sampling
        self._token_log_probs = token_log_probs
        self._stops: dict[str, Any] = {} if stop_table is None else {"stop_table": stop_table}
        self._rule = getattr(params, "rule", None)
        self._max_length = method.cache_length(prompt_length, 0, max_new)
        _check_fits(self, set() if fitting is None else fitting)
        self._slots = Slots(rows, refill)
        self._state: DecodeState | None = None
        self._next_id = 0

    @property
    def unfinished(self) -> int:
        """How many requests wait or run."""
        return len(self._slots.waiting) + self._rows - self._slots.free

    def add(self, request: Request, *, steps: int | None = None) -> int:
        """Takes a request, which waits for a free slot.

        Args:
          request: the request.
          steps: for a row whose result is known, the rounds that it took. It is not decoded and
            will not be among the finished, but has a slot for so many steps: the others are decoded
            in the slots and at the steps at which they would be beside it.

        Returns:
          Its id: 0, 1, 2, ... in the order of the calls.

        Raises:
          TypeError: if it is not a `Request`, or a field is of a wrong type.
          ValueError: if it does not fit the engine, or `steps` is no whole number of at least 1.
            The engine goes on without it.
        """
        check_request(
            request,
            vocab_size=self._method.vocab_size,
            min_draft=self._method.min_draft,
            max_draft=self._method.max_draft,
            prompt_length=self._length,
            max_new=self._max_new,
            sampling=self._sampling,
            rule=self._rule,
        )
        if steps is not None:
            check_count("steps", steps, "leave it out for a row that is to be decoded")
        self._next_id += 1
        self._slots.waiting.append(Waiting(self._next_id - 1, request, steps))
        return self._next_id - 1

    def abort(self, request_id: int) -> bool:
        """Drops a request, whether it waits or runs; it will not be among the finished.

        Args:
          request_id: what `add` returned.

        Returns:
          Whether it was there.
        """
        dropped, place = self._slots.drop(request_id)
        if place is not None:
            assert self._state is not None
            self._state = end_row(self._state, place, ABORTED)
        return dropped

    def step(self, *, until_empty: bool = False) -> list[Finished]:
        """Fills free slots and decodes on, until a row is finished or `STOP_AFTER` steps are done.

        While requests wait, it decodes until `refill` slots are free.

        Args:
          until_empty: if nothing waits, decode until all rows are finished, not one.

        Returns:
          The rows that are finished; of several processes each returns its own.

        Raises:
          ValueError: if the memory does not suffice; this engine can go no further.
        """
        asked = in_words(self._method, self._rows, self._length, self._max_new)
        with told_if_full(asked, _REMEDY):
            return self._step(until_empty)

    def _step(self, until_empty: bool) -> list[Finished]:
        self._fill()
        free, known = self._slots.free, self._slots.known()
        if free == self._rows:
            return []
        wanted = self._rows if until_empty else free + 1
        wanted = max(self._refill, free + 1) if self._slots.waiting else wanted
        if free + len(known) == self._rows:
            # Nothing is decoded, so the time passes at once.
            self._slots.pass_steps(known[wanted - free - 1])
            return []
        assert self._state is not None
        # In the state the known rows are finished.
        wanted = min(wanted + len(known), self._rows)
        stop_after = min([STOP_AFTER, *known])
        asked = self._params_now(), self._state, stop_after, wanted
        self._state = self._method.run(*asked, **self._stops)
        return self._drain()

    def _fill(self) -> None:
        """Gives free slots to waiting requests."""
        while (group := self._slots.next_group())[0]:
            places, asked = group
            since = time.perf_counter()
            if any(one.steps is None for one in asked):
                self._insert(places, asked)
            self._slots.occupy(places, since)

    def _insert(self, places: list[int], asked: Sequence[Waiting]) -> None:
        """Takes prompts in; slots without one, at the end, are finished from the start."""
        new = self._init(asked, len(places))
        if self._state is None and len(places) == self._rows:
            self._state = new
            return
        # Where all the first rows are known, no slot has a state yet.
        state = self._init([], self._rows) if self._state is None else self._state
        self._state = insert_rows(state, jnp.asarray(places, jnp.int32), new)

    def _init(self, asked: Sequence[Waiting], rows: int) -> DecodeState:
        state = self._method.init(
            self._params,
            self._batch(asked, rows, self._length),
            max_new=self._max_new,
            max_length=self._max_length,
            token_log_probs=self._token_log_probs,
        )
        return watch_stops(state) if self._stops else state

    def _batch(self, asked: Sequence[Waiting], rows: int, length: int) -> PromptBatch:
        requests = [one.request for one in asked]
        inputs = np.full((rows, length), self._pad_id, np.int32)
        lengths = np.ones(rows, np.int32)
        for row, request in enumerate(requests):
            lengths[row] = len(request.tokens)
            inputs[row, : lengths[row]] = request.tokens

        def setting(name: str) -> np.ndarray | None:
            own = getattr(self._sampling, name)
            if own is None:
                return None
            values = [getattr(request, name) for request in requests]
            column = np.full(rows, own)
            column[: len(values)] = [own if value is None else value for value in values]
            return column

        longest = self._method.max_draft
        return PromptBatch(
            inputs=inputs,
            input_lengths=lengths,
            ids=_column(rows, (r.stream for r in requests), np.uint32),
            # A known row keeps its place in the prefill, but makes no step.
            limits=_column(rows, (0 if w.steps else w.request.limit for w in asked), np.int32),
            seeds=_column(rows, (r.seed for r in requests), np.uint32),
            sampling=Sampling(*map(setting, SETTINGS)),  # type: ignore[arg-type]
            draft_limits=_column(
                rows,
                (longest if r.draft_limit is None else r.draft_limit for r in requests),
                np.int32,
                rest=longest,
            ),
        )

    def _params_now(self) -> Params:
        """The parameters with the strengths of the requests in the slots."""
        if self._rule is None:
            return self._params
        own, structure = jax.tree.flatten(self._rule)
        asked = [None if slot is None else slot.request.strengths for slot in self._slots.held]
        columns = [
            np.array([own[i] if row is None else row[i] for row in asked], np.asarray(own[i]).dtype)
            for i in range(len(own))
        ]
        rule = jax.tree.unflatten(structure, columns)
        if self._method.partitioner is not None:
            rule = self._method.partitioner.place_rows(rule)
        return self._params._replace(rule=rule)

    def _drain(self) -> list[Finished]:
        """Takes the finished rows out of their slots."""
        assert self._state is not None
        ended_by, steps, places, rows = _read(self._state)
        own = {int(place): i for i, place in enumerate(places)}
        done = []
        now = time.perf_counter()
        passed = 0
        for place, slot in enumerate(self._slots.held):
            if slot is None or slot.left is not None:
                continue
            passed = max(passed, int(steps[place]) - slot.steps)
            slot.steps = int(steps[place])
            if not ended_by[place]:
                continue
            self._slots.held[place] = None
            if place in own:
                code = int(ended_by[place])
                done.append(_finished(self._method, slot, own[place], code, rows, now))
        self._slots.pass_steps(passed)
        return done


def _check_fits(engine: Engine, fitting: set[Any]) -> None:
    """Raises ValueError if the slots certainly cannot fit into the memory."""
    kinds = jax.tree.structure((engine._rule, engine._sampling))
    sizes = (engine._rows, engine._length, engine._max_new, engine._token_log_probs)
    if (kinds, *sizes) not in fitting:
        check_state_fits(
            engine._method,
            engine._params,
            resized(engine._batch([], 1, 1), engine._rows, engine._length),
            max_new=engine._max_new,
            max_length=engine._max_length,
            token_log_probs=engine._token_log_probs,
            remedy=_REMEDY,
        )
    fitting.add((kinds, *sizes))


def _column(rows: int, values: Iterable[Any], dtype: Any, rest: int = 0) -> np.ndarray:
    """`[rows]`, first the values, then `rest`."""
    given = list(values)
    filled = np.full(rows, rest, dtype)
    filled[: len(given)] = given
    return filled


def _finished(method: Method, slot: Held, i: int, code: int, rows: Any, now: float) -> Finished:
    tokens, lengths, steps, info = rows
    # Copies: a view would keep the whole batch in memory.
    values: Any = jax.tree.map(lambda x: np.array(x[i]), info)
    own = RowInfo.of(values, np.array(lengths[i]), np.array(steps[i]))
    error = None
    if code == NAN:
        source = method.nan_sources[int(values.nan_in)]
        error = f"{source} gave NaN in step {int(steps[i])}"
    output = np.array(tokens[i, : lengths[i]])
    return Finished(slot.id, output, ENDED_BY[code], own, now - slot.since, error)


def _read(state: DecodeState) -> tuple[np.ndarray, np.ndarray, np.ndarray, Any]:
    """What the host needs, in one go: all rows' `ended_by` and `steps`, and its own rows.

    Each process learns how long every slot is held, so that all refill the same ones. On an
    accelerator each array read by itself is a round trip.
    """
    known = (state.ended_by, state.steps)
    wanted = (state.tokens, state.lengths, state.steps, state.info)
    if state.ended_by.is_fully_addressable:
        (device, *_) = state.ended_by.devices()
        # On a CPU nothing is copied, and what `device_get` does for it takes four times as long.
        get = functools.partial(jax.tree.map, np.asarray)
        (ended_by, steps), rows = (get if device.platform == "cpu" else jax.device_get)(
            (known, wanted)
        )
        return ended_by, steps, np.arange(len(ended_by)), rows
    everywhere = jax.NamedSharding(state.ended_by.sharding.mesh, jax.P())  # type: ignore[attr-defined]
    ended_by, steps = map(np.asarray, _copy_to(everywhere)(known))
    places, _ = local_rows(state.ended_by)
    return ended_by, steps, places, jax.tree.map(lambda x: local_rows(x)[1], wanted)


@functools.cache
def _copy_to(sharding: Any) -> Any:
    return jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=sharding)
