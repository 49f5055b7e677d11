"""What a run tells while it trains: a bar on a terminal, else a line now and then."""

import sys
import time

import jax
import numpy as np
import tqdm

from specjax.training.optimizer import Schedule
from specjax.training.step import StepMetrics

# Seconds between two readings of the loss: each waits for the device.
ON_TERMINAL = 2.0
ELSEWHERE = 30.0


def say(text: str) -> None:
    """Writes one line to stderr, above a bar if there is one."""
    tqdm.tqdm.write(f"specjax: {text}", file=sys.stderr)
    sys.stderr.flush()


class Progress:
    """Steps done, loss, items per second and the time left.

    Args:
      total: steps of the run.
      start: steps done by earlier starts.
      items: what the loss is a mean over.
      enabled: whether to tell anything.
      every: seconds between two readings; by default 2 on a terminal and 30 elsewhere.
    """

    def __init__(
        self, total: int, start: int, *, items: str, enabled: bool, every: float | None = None
    ):
        self._enabled, self._items = enabled, items
        self._total, self._start, self._done = total, start, start
        self._terminal = sys.stderr.isatty()
        self._every = every if every is not None else ON_TERMINAL if self._terminal else ELSEWHERE
        self._began = self._told = time.monotonic()
        self._bar = tqdm.tqdm(
            total=total, initial=start, unit="step", disable=not (enabled and self._terminal)
        )

    def update(self) -> bool:
        """Counts one step; says whether it is time to read and tell the loss."""
        self._done += 1
        self._bar.update()
        first = self._done == self._start + 1
        return self._enabled and (first or time.monotonic() - self._told >= self._every)

    def tell(self, loss: float, items_per_second: float | None) -> None:
        """Shows the latest figures; the first step, which compiles, has no rate."""
        now = time.monotonic()
        self._told = now
        figures = f"loss {loss:.3f}"
        if items_per_second is not None:
            figures += f", {items_per_second:,.0f} {self._items}/s"
        if self._terminal:
            self._bar.set_postfix_str(figures)
            return
        if self._done == self._start + 1:
            self._began = now
        else:
            per_step = (now - self._began) / (self._done - self._start - 1)
            figures += f", {_duration(per_step * (self._total - self._done))} left"
        say(f"step {self._done:,} of {self._total:,}: {figures}")

    def close(self) -> None:
        """Takes the bar away."""
        self._bar.close()


class Window:
    """The steps since the last line of the log; read from the device once, at its end."""

    def __init__(self) -> None:
        self._open()

    def _open(self) -> None:
        self._metrics: list[StepMetrics] = []
        self._restart_clock()

    def _restart_clock(self) -> None:
        self._start, self._first_timed = time.monotonic(), len(self._metrics)

    def add(self, metrics: StepMetrics) -> None:
        """Takes in what one step tells, without reading it."""
        self._metrics.append(metrics)

    def forget_past(self) -> None:
        """Leaves what has been done so far out of the rates: compilation, drawing of samples."""
        jax.block_until_ready(self._metrics)
        self._restart_clock()

    def latest(self) -> tuple[float, float | None]:
        """The loss of the last step, and items per second in the window so far."""
        values = jax.device_get(self._metrics)
        return float(values[-1].loss), self._rate(values)

    def close(self) -> dict[str, float | None]:
        """The means of the window, which begins anew; nothing where it has no step."""
        values = jax.device_get(self._metrics)
        row: dict[str, float | None] = {}
        if values:
            row = {
                "loss": float(np.mean([m.loss for m in values], dtype=np.float64)),
                "grad_norm": float(np.mean([m.grad_norm for m in values], dtype=np.float64)),
                "items_per_second": self._rate(values),
            }
        self._open()
        return row

    def _rate(self, values: list[StepMetrics]) -> float | None:
        timed = values[self._first_timed :]
        seconds = max(time.monotonic() - self._start, 1e-9)
        return round(sum(int(m.items) for m in timed) / seconds, 1) if timed else None


def warn_of_warmup(schedule: Schedule, num_steps: int) -> None:
    """Warns where the learning rate would still be rising when the run ends.

    Args:
      schedule: of the optimiser; only one with `warmup_steps` is looked at.
      num_steps: of the run.
    """
    warmup = getattr(schedule, "warmup_steps", 0)
    if warmup > num_steps:
        say(
            f"warning: the warm-up takes {warmup:,} steps, but the run ends after {num_steps:,}, "
            "before the learning rate has reached its peak; lower warmup_steps, or raise num_steps"
        )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
