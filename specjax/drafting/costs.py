"""What a pass of each model costs, for policies that weigh a drafted token against its time.

Source: SpecDec++ (arXiv 2405.19715), equation 2.1: T = t_draft N_draft + t_target N_target; here
t_target depends on how many tokens the verifier's pass reads.
"""

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import check_path
from specjax.types import Array

# Of the files that `Costs.to_dict` makes.
FORMAT = 1
_HOW = "measure it with specjax bench cost --output FILE"


@dataclasses.dataclass(frozen=True)
class Costs:
    """The seconds of one pass of a pair's models, at some batch sizes and widths; hashable.

    Attributes:
      rows: the batch sizes that were measured, increasing.
      widths: how many tokens a pass of the verifier read, increasing.
      draft: for each of `rows`, the seconds of one pass of the drafter, with all that the loop does
        for a drafted token.
      verifier: for each of `rows` and each of `widths`, the seconds of one pass of the verifier,
        with all that the loop does once a round.
      machine: what they were measured on.
      pair: `Pair.fingerprint`; "" for none.

    Raises:
      TypeError: if a field has another type.
      ValueError: if sizes are missing or do not increase, or a time is negative or not finite.
    """

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    draft: tuple[float, ...]
    verifier: tuple[tuple[float, ...], ...]
    machine: str = ""
    pair: str = ""

    def __post_init__(self) -> None:
        _check_sizes("rows", self.rows)
        _check_sizes("widths", self.widths)
        _check_times("draft", self.draft, len(self.rows), "rows")
        if not isinstance(self.verifier, tuple) or len(self.verifier) != len(self.rows):
            raise TypeError(
                f"verifier must be a tuple of {len(self.rows)} tuples, one for each of rows, got "
                f"{self.verifier!r}"
            )
        for i, times in enumerate(self.verifier):
            _check_times(f"verifier[{i}]", times, len(self.widths), "widths")
            if min(times) <= 0:
                raise ValueError(f"verifier[{i}] must be above 0 seconds, got {min(times)}")
        for name in ("machine", "pair"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be a text, got {getattr(self, name)!r}")

    def draft_seconds(self, batch: int) -> float:
        """The seconds of one pass of the drafter over `batch` rows; see `at`."""
        return self._between(np.asarray(self.draft), batch)

    def verifier_seconds(self, batch: int, widths: Any) -> Array:
        """The seconds of one pass of the verifier; see `at`.

        Args:
          batch: how many rows.
          widths: integers of any shape: how many tokens the pass reads.

        Returns:
          float32, of the shape of `widths`.
        """
        self._check_widths(widths)
        times = self._between(np.asarray(self.verifier), batch)
        known = jnp.asarray(self.widths, jnp.float32)
        asked = jnp.asarray(widths).astype(jnp.float32)
        return jnp.interp(asked, known, jnp.asarray(times, jnp.float32))

    def at(self, batch: int, widths: Any) -> tuple[Array, Array]:
        """The seconds of a pass of the drafter, and of passes of the verifier.

        Between what was measured they are interpolated linearly. A pass is as wide as the least
        compiled width that holds the longest draft of the batch and one token more.

        Args:
          batch: B, how many rows, within the measured batch sizes.
          widths: integers of any shape, at least 1, within the measured widths; traced ones that
            are outside take the cost of the nearest measured width.

        Returns:
          A float32 scalar; float32 of the shape of `widths`.

        Raises:
          ValueError: if a size is outside of what was measured.
        """
        return jnp.float32(self.draft_seconds(batch)), self.verifier_seconds(batch, widths)

    def to_dict(self) -> dict[str, Any]:
        """The costs as JSON values, as `read_costs` reads them from a file."""
        values = dataclasses.asdict(self)
        verifier = [list(times) for times in self.verifier]
        lists = {name: list(values[name]) for name in ("rows", "widths", "draft")}
        return {"format": FORMAT, **values, **lists, "verifier": verifier}

    def _between(self, times: np.ndarray, batch: int) -> Any:
        """`times [rows, ...]` at one batch size."""
        rows = self.rows
        if isinstance(batch, bool) or not isinstance(batch, int | np.integer):
            raise ValueError(f"batch must be a whole number, got {batch!r}")
        if not rows[0] <= batch <= rows[-1]:
            known = f"{rows[0]} rows" if len(rows) == 1 else f"{rows[0]} .. {rows[-1]} rows"
            raise ValueError(
                f"the costs were measured with {known}, but the batch has {batch}: {_HOW} --rows "
                f"{' '.join(map(str, sorted({*rows, int(batch)})))}"
            )
        above = max(1, int(np.searchsorted(rows, batch)))
        if above == len(rows):  # one batch size alone
            return times[-1]
        low, high = rows[above - 1], rows[above]
        share = (batch - low) / (high - low)
        return (1 - share) * times[above - 1] + share * times[above]

    def _check_widths(self, widths: Any) -> None:
        if isinstance(widths, jax.core.Tracer):
            return
        asked = np.asarray(widths)
        if asked.dtype.kind not in "iu":
            raise ValueError(f"widths must be whole numbers, got {asked.dtype}")
        low, high = self.widths[0], self.widths[-1]
        if asked.size and not low <= asked.min() <= asked.max() <= high:
            raise ValueError(
                f"the costs were measured for {low} .. {high} tokens a pass, but {asked.max()} are "
                f"asked for: {_HOW} --max-draft {max(int(asked.max()) - 1, 1)}"
            )


def read_costs(path: str | os.PathLike[str]) -> Costs:
    """Reads a file that `specjax bench cost --output` has written.

    Args:
      path: the file.

    Returns:
      The costs. A `Decoder` checks that they are those of its pair and of this machine.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is no such file.
    """
    check_path(path)
    place = Path(path)
    try:
        values = json.loads(place.read_bytes())
    except OSError as error:
        reason = error.strerror or str(error)
        raise type(error)(f"{place} cannot be read ({reason}): {_HOW}") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{place} is no JSON file: {_HOW}") from None
    return _from_dict(values, place)


def _from_dict(values: Any, path: Path) -> Costs:
    names = [field.name for field in dataclasses.fields(Costs)]
    if not isinstance(values, dict) or "format" not in values:
        raise ValueError(f"{path} is no file of costs: {_HOW}")
    if values["format"] != FORMAT:
        raise ValueError(
            f"{path} has the format {values['format']!r}, but this version reads {FORMAT}: {_HOW}"
        )
    missing = [name for name in names if name not in values]
    if missing:
        raise ValueError(f"{path} has no {missing[0]!r}: {_HOW}")
    try:
        return Costs(**{name: _frozen(values[name]) for name in names})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}: {_HOW}") from None


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _check_sizes(name: str, sizes: Any) -> None:
    whole = isinstance(sizes, tuple) and all(type(size) is int for size in sizes)
    if not whole or not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
        raise ValueError(
            f"{name} must be a tuple of whole numbers that increases from at least 1, got {sizes!r}"
        )


def _check_times(name: str, times: Any, count: int, of: str) -> None:
    numbers = isinstance(times, tuple) and all(type(time) in (int, float) for time in times)
    if not numbers or len(times) != count:
        raise TypeError(
            f"{name} must be a tuple of {count} numbers, one for each of {of}, got {times!r}"
        )
    bad = _bad_times(times)
    if bad:
        raise ValueError(f"{name} must be seconds, finite and at least 0, got {bad[0]}")


def _bad_times(times: Sequence[float]) -> list[float]:
    return [time for time in times if not (math.isfinite(time) and time >= 0)]
