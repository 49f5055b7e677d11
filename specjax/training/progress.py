"""Reports of a training run: the log, and on stderr a bar on a terminal, else lines."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import tqdm

from specjax.runs.run_directory import RunDirectory
from specjax.training.step import StepMetrics
from specjax.writing import append

METRICS_NAME = "metrics.jsonl"
# Seconds between two readings of the loss: each waits for the device.
ON_TERMINAL = 2.0
ELSEWHERE = 30.0


def say(text: str) -> None:
    """Writes a line to stderr, above a bar if there is one."""
    tqdm.tqdm.write(f"specjax: {text}", file=sys.stderr)
    sys.stderr.flush()


class Log:
    """Appends a JSON line per report to `metrics.jsonl`."""

    def __init__(self, run: RunDirectory, saved: bytes):
        self._run, self._path = run, run.own(METRICS_NAME)
        present = self._path.read_bytes() if self._path.exists() else b""
        if not present.startswith(saved):
            say(f"warning: {self._path} was changed: it is restored from the checkpoint")
        if present != saved:
            run.write(METRICS_NAME, saved)

    def add(self, row: Mapping[str, Any]) -> None:
        """Appends a line."""
        self._run.keep()
        append(self._path, (json.dumps(row) + "\n").encode())


class Progress:
    """Steps done, loss, items per second and the time left; and the means for the log.

    Work within `apart` (compilation, drawing samples, evaluation) counts neither for the rates nor
    for the time left.
    """

    def __init__(
        self, total: int, start: int, *, items: str, enabled: bool, every: float | None = None
    ):
        self._enabled, self._items = enabled, items
        self._total, self._start, self._done = total, start, start
        self._terminal = sys.stderr.isatty()
        self._every = every if every is not None else ON_TERMINAL if self._terminal else ELSEWHERE
        self._shown = self._mark = time.monotonic()
        # Seconds and steps of the run, and since the last line of the log; without `apart`.
        self._seconds = self._window_seconds = 0.0
        self._steps = 0
        self._metrics: list[StepMetrics] = []
        self._timed: list[StepMetrics] = []
        # The bar's own estimate of the time left would count compilation.
        form = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
        self._bar = tqdm.tqdm(
            total=total, initial=start, bar_format=form, disable=not (enabled and self._terminal)
        )

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Excludes the body from the rates and the time left."""
        jax.block_until_ready(self._metrics[-1:])
        self._count_time()
        try:
            yield
        finally:
            self._mark = time.monotonic()

    def add(self, metrics: StepMetrics, *, timed: bool = True) -> None:
        """Counts a step, and shows the latest figures when it is time."""
        self._done += 1
        self._metrics.append(metrics)
        if timed:
            self._steps += 1
            self._timed.append(metrics)
        self._bar.update()
        first = self._done == self._start + 1
        if self._enabled and (first or time.monotonic() - self._shown >= self._every):
            self._show(float(jax.device_get(metrics.loss)))

    def _show(self, loss: float) -> None:
        self._count_time()
        self._shown = self._mark
        figures = [f"loss {loss:.3f}"]
        rate = self._rate()
        if rate is not None:
            figures.append(f"{rate:,.0f} {self._items}/s")
            left = self._seconds / self._steps * (self._total - self._done)
            figures.append(f"{_duration(left)} left")
        if self._terminal:
            self._bar.set_postfix_str(", ".join(figures))
        else:
            say(f"step {self._done:,} of {self._total:,}: {', '.join(figures)}")

    def means(self) -> dict[str, float | None]:
        """The means of the steps since the last call; empty without a step."""
        values = jax.device_get(self._metrics)
        self._count_time()
        row: dict[str, float | None] = {}
        if values:
            row = {
                "loss": float(np.mean([m.loss for m in values], dtype=np.float64)),
                "grad_norm": float(np.mean([m.grad_norm for m in values], dtype=np.float64)),
                "items_per_second": self._rate(),
            }
        self._metrics, self._timed, self._window_seconds = [], [], 0.0
        return row

    def close(self) -> None:
        self._bar.close()

    def _count_time(self) -> None:
        now = time.monotonic()
        self._seconds += now - self._mark
        self._window_seconds += now - self._mark
        self._mark = now

    def _rate(self) -> float | None:
        items = sum(int(m.items) for m in jax.device_get(self._timed))
        return round(items / max(self._window_seconds, 1e-9), 1) if self._timed else None


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
