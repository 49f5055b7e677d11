"""The cost of a pass of each model, for policies that compare it with the time saved.

Source: SpecDec++ (arXiv 2405.19715), equation 2.1: T = t_draft N_draft + t_target N_target; here
t_target depends on the number of tokens in the verifier's pass.
"""

import dataclasses
import json
import math
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checks import check_path
from specjax.errors import UserError

# The format of the files that `Costs.to_dict` makes.
FORMAT = 1
_HOW = "measure it with specjax bench --costs FILE"


@dataclasses.dataclass(frozen=True, repr=False)
class Costs:
    """The seconds of a pass of a pair's models, by batch size and width; hashable.

    Attributes:
      rows: the measured batch sizes, increasing.
      widths: the tokens per row of a verifier's pass, increasing.
      draft: for each of `rows`, the seconds of a pass of the drafter, with the loop's work for a
        drafted token.
      verifier: for each of `rows` and each of `widths`, the seconds of a pass of the verifier, with
        the loop's work of a round.
      machine: the machine of the measurement.
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
            raise UserError(
                f"verifier must be a tuple with a tuple for each of {len(self.rows)} rows, got "
                f"{self.verifier!r}"
            )
        for i, times in enumerate(self.verifier):
            _check_times(f"verifier[{i}]", times, len(self.widths), "widths")
            if min(times) <= 0:
                raise UserError(f"verifier[{i}] must be above 0 seconds, got {min(times)}")
        for name in ("machine", "pair"):
            if not isinstance(getattr(self, name), str):
                raise UserError(f"{name} must be a string, got {getattr(self, name)!r}")

    def __repr__(self) -> str:
        times = f"{zlib.crc32(repr((self.draft, self.verifier)).encode()):08x}"
        return (
            f"Costs(rows={self.rows}, widths={self.widths}, pair={self.pair!r}, "
            f"machine={self.machine!r}, times of CRC {times})"
        )

    def at_widths(self, widths: Sequence[int]) -> "Costs":
        """The same costs for other widths of the verifier's passes: those that a loop compiles.

        Times between measured widths are interpolated; beyond the last width they grow as between
        the last two.
        """
        known = np.asarray(self.widths, np.float64)

        def seconds(times: tuple[float, ...]) -> tuple[float, ...]:
            slope = times[-1] / known[-1]
            if len(times) > 1:
                slope = max(0.0, (times[-1] - times[-2]) / (known[-1] - known[-2]))
            beyond = np.maximum(np.asarray(widths) - known[-1], 0.0)
            return tuple((np.interp(widths, known, times) + slope * beyond).tolist())

        verifier = tuple(map(seconds, self.verifier))
        return dataclasses.replace(self, widths=tuple(widths), verifier=verifier)

    def to_dict(self) -> dict[str, Any]:
        """The costs as JSON values, as `read_costs` reads them from a file."""
        values = dataclasses.asdict(self)
        verifier = [list(times) for times in self.verifier]
        lists = {name: list(values[name]) for name in ("rows", "widths", "draft")}
        return {"format": FORMAT, **values, **lists, "verifier": verifier}


def read_costs(path: str | os.PathLike[str]) -> Costs:
    """Reads a file that `specjax bench --costs` wrote.

    Args:
      path: the file.

    Returns:
      The costs. A `Decoder` checks that they belong to its pair and this machine.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is not a valid file of costs.
    """
    check_path(path)
    place = Path(path)
    try:
        values = json.loads(place.read_bytes())
    except OSError as error:
        reason = error.strerror or str(error)
        raise type(error)(f"{place} cannot be read ({reason}): {_HOW}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{place} is not a JSON file: {_HOW}") from None
    return _from_dict(values, place)


def _from_dict(values: Any, path: Path) -> Costs:
    names = [field.name for field in dataclasses.fields(Costs)]
    if not isinstance(values, dict) or "format" not in values:
        raise UserError(f"{path} is not a file of costs: {_HOW}")
    if values["format"] != FORMAT:
        raise UserError(
            f"{path} has the format {values['format']!r}, but this version reads {FORMAT}: {_HOW}"
        )
    missing = [name for name in names if name not in values]
    if missing:
        raise UserError(f"{path} lacks {missing[0]!r}: {_HOW}")
    try:
        return Costs(**{name: _frozen(values[name]) for name in names})
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}: {_HOW}") from None


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _check_sizes(name: str, sizes: Any) -> None:
    whole = isinstance(sizes, tuple) and all(type(size) is int for size in sizes)
    if not whole or not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
        raise UserError(
            f"{name} must be a tuple of whole numbers that increases from at least 1, got {sizes!r}"
        )


def _check_times(name: str, times: Any, count: int, of: str) -> None:
    numbers = isinstance(times, tuple) and all(type(time) in (int, float) for time in times)
    if not numbers or len(times) != count:
        raise UserError(
            f"{name} must be a tuple of {count} numbers, for each of {of}, got {times!r}"
        )
    bad = _bad_times(times)
    if bad:
        raise UserError(f"{name} must be seconds, finite and at least 0, got {bad[0]}")


def _bad_times(times: Sequence[float]) -> list[float]:
    return [time for time in times if not (math.isfinite(time) and time >= 0)]
