"""What a training run tells on stderr: a bar on a terminal, else lines."""

import sys
import time
from typing import Any

import jax
import numpy as np
import tqdm

from specjax.training.step import StepMetrics


def say(text: str) -> None:
    """Writes a line to stderr, above a bar if there is one."""
    tqdm.tqdm.write(f"specjax: {text}", file=sys.stderr)
    sys.stderr.flush()


class Progress:
    """Counts steps, and gives and shows their means, with the items per second."""

    def __init__(self, total: int, start: int, *, items: str, enabled: bool):
        self._items, self._enabled = items, enabled
        self._metrics: list[StepMetrics] = []
        self._bar = tqdm.tqdm(
            total=total, initial=start, disable=not (enabled and sys.stderr.isatty())
        )
        self.restart()

    def add(self, metrics: StepMetrics) -> None:
        self._metrics.append(metrics)
        self._bar.update()

    def restart(self) -> None:
        """Begins the time of the next steps, after work that is no step."""
        self._begin = time.monotonic()

    def means(self, step: int) -> dict[str, Any]:
        """Returns the means of the steps since the last call."""
        values = jax.device_get(self._metrics)
        rate = sum(int(x.items) for x in values) / (time.monotonic() - self._begin)
        self._metrics = []
        self.restart()
        loss, norm = (
            float(np.mean([getattr(x, name) for x in values], dtype=np.float64))
            for name in ("loss", "grad_norm")
        )
        shown = f"loss {loss:.3f}, {rate:,.0f} {self._items}/s"
        self._bar.set_postfix_str(shown)
        if self._enabled and self._bar.disable:
            say(f"step {step:,} of {self._bar.total:,}: {shown}")
        return {"loss": loss, "grad_norm": norm, "items_per_second": round(rate, 1)}

    def close(self) -> None:
        self._bar.close()
