"""What was measured, as files: the predictions of each seed and the times."""

import gzip
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.runs.lines import Record, line_of, record_of
from specjax.sweeping.measurement import Measured, Times

_TIMES = "times.npz"
_OF_POINT, _OF_VERIFIER = "point", "verifier"


def packed(records: Sequence[Record]) -> bytes:
    """Lines of a `predictions.jsonl`, compressed; the same bytes for the same lines."""
    return gzip.compress(b"".join(map(line_of, records)), mtime=0)


def packed_arrays(named: Mapping[str, np.ndarray]) -> bytes:
    """The content of a file that `np.load` reads."""
    file = io.BytesIO()
    arrays: dict[str, Any] = dict(named)
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """What `packed_arrays` has packed; whatever NumPy and zipfile raise where it was damaged."""
    # From memory: NumPy leaves a damaged file open.
    with np.load(io.BytesIO(path.read_bytes())) as file:
        return dict(file)


def write_predictions(
    directory: Path, seeds: Sequence[int], records: Sequence[Sequence[Record]]
) -> list[str]:
    """Writes the predictions of each seed; returns the names of the files."""
    names = [f"seed{seed}.jsonl.gz" for seed in seeds]
    for name, lines in zip(names, records, strict=True):
        (directory / name).write_bytes(packed(lines))
    return names


def write_measured(directory: Path, measured: Measured) -> None:
    """Writes what was measured into an empty directory."""
    write_predictions(directory, measured.seeds, measured.records)
    both = {_OF_POINT: measured.times, _OF_VERIFIER: measured.verifier_times}
    arrays = {
        f"{name}_{field}": getattr(times, field)
        for name, times in both.items()
        if times is not None
        for field in ("seconds", "tokens")
    }
    counts = {"seeds": measured.seeds, "compiled": [measured.compiled, measured.compiled_late]}
    arrays |= {name: np.asarray(values) for name, values in counts.items()}
    (directory / _TIMES).write_bytes(packed_arrays(arrays))


def read_measured(directory: Path) -> Measured:
    """Reads what `write_measured` has written.

    Raises:
      ValueError: it was changed, or cut.
    """
    try:
        arrays = read_arrays(directory / _TIMES)
        seeds = [int(seed) for seed in arrays["seeds"]]
        records = []
        for seed in seeds:
            lines = gzip.decompress((directory / f"seed{seed}.jsonl.gz").read_bytes())
            records.append([record_of(line) for line in lines.splitlines()])
        times = [
            Times(arrays[f"{name}_seconds"], arrays[f"{name}_tokens"])
            if f"{name}_seconds" in arrays
            else None
            for name in (_OF_POINT, _OF_VERIFIER)
        ]
        compiled, late = (int(count) for count in arrays["compiled"])
    except Exception:  # zlib, zipfile, NumPy and JSON each have errors of their own
        times = [None]
    if times[0] is None:
        raise ValueError(
            f"{directory} was changed or cut: delete it, and run the same command again"
        )
    return Measured(seeds, records, times[0], times[1], compiled, late)
