"""Bigram tables on disk: a directory with `bigram.json` and `bigram.safetensors`."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from specjax.checkpoints.hf import write_json
from specjax.checksums import CHECKSUMS_NAME, find_damage, write_checksums
from specjax.drafting import Bigram
from specjax.tokenizers.model_files import read_json
from specjax.writing import new_directory

_CONFIG, _ARRAYS = "bigram.json", "bigram.safetensors"
# By the version: the second has longer contexts.
_NAMES = {1: ("successors",), 2: ("successors", "contexts", "followers")}
_AGAIN = "copy the table again, or make it again (specjax train_bigram)"


def save_bigram(directory: str | os.PathLike[str], bigram: Bigram) -> None:
    """Writes a table into a new or empty directory.

    Args:
      directory: takes the files.
      bigram: the table; ids below 2**16 - 1 take two bytes each. One without longer contexts is
        written as specjax has always read it.

    Raises:
      FileExistsError: the directory is not empty, or a file.
      OSError: it cannot be written.
    """
    size = bigram.successors.size
    kind = np.uint16 if size < 2**16 else np.uint32
    version = 1 if bigram.order == 2 else 2
    arrays = {name: getattr(bigram, name) for name in _NAMES[version]}
    # The number of ids stands for none.
    stored = {name: np.where(ids < 0, size, ids).astype(kind) for name, ids in arrays.items()}
    with new_directory(Path(directory)) as partial:
        # Not save_file, whose files only their owner can read.
        (partial / _ARRAYS).write_bytes(safetensors.numpy.save(stored))
        write_json(
            partial / _CONFIG,
            {
                "version": version,
                "ids": size,
                "tokenizer_fingerprint": bigram.tokenizer_fingerprint,
                "notes": dict(bigram.notes),
            },
        )
        write_checksums(partial)


def load_bigram(directory: str | os.PathLike[str], *, check_weights: bool = True) -> Bigram:
    """Reads a table.

    Args:
      directory: what `save_bigram` has written.
      check_weights: whether to compare the files with their checksums.

    Returns:
      The table. Whether it is a model's, `Bigram.table` tells.

    Raises:
      FileNotFoundError: there is none, or a file of it is missing.
      OSError: a file cannot be read.
      ValueError: a file is damaged.
    """
    place = Path(directory)
    if not (place / _CONFIG).is_file():
        raise FileNotFoundError(
            f"{place}: no bigram table is there: make one with `specjax train_bigram`"
        )
    if check_weights and (why := find_damage(place)):
        raise ValueError(
            f"{place}: {why}: {_AGAIN}; if you have changed it yourself, load it with "
            f"check_weights=False, not without {CHECKSUMS_NAME}"
        )
    values = read_json(place / _CONFIG)
    version = values.get("version")
    if version not in tuple(_NAMES):
        raise ValueError(
            f"{place / _CONFIG}: version={version!r} must be 1 or 2 for this specjax to read it; "
            "use the specjax that wrote it"
        )
    mark, notes = values.get("tokenizer_fingerprint"), values.get("notes")
    if not isinstance(mark, str) or not isinstance(notes, dict):
        raise ValueError(
            f"{place / _CONFIG}: tokenizer_fingerprint must be a text and notes an object: {_AGAIN}"
        )
    path = place / _ARRAYS
    stored = _arrays(path, _NAMES[version])
    size = stored["successors"].size
    try:
        return Bigram(
            tokenizer_fingerprint=mark,
            notes=notes,
            **{n: np.where(ids >= size, -1, ids.astype(np.int32)) for n, ids in stored.items()},
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}: {_AGAIN}") from None


def _arrays(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    try:
        found = safetensors.numpy.load(path.read_bytes())
        stored = {name: found[name] for name in names}
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file: {_AGAIN}") from None
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error.strerror}): correct that") from None
    except (safetensors.SafetensorError, KeyError) as error:  # KeyError: another name or dtype
        raise ValueError(f"{path} is cut short or damaged ({error}): {_AGAIN}") from None
    for name, ids in stored.items():
        shape, axes = ("a table", 2) if name == "contexts" else ("one row", 1)
        if ids.ndim != axes or ids.dtype not in (np.uint16, np.uint32):
            raise ValueError(f"{path}: {name} must be {shape} of uint16 or uint32: {_AGAIN}")
    return stored
