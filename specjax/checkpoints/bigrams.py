"""Bigram tables on disk: a directory with `bigram.json` and `bigram.safetensors`."""

import os
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from specjax.checkpoints.hf import write_json
from specjax.checksums import CHECKSUMS_NAME, find_damage, write_checksums
from specjax.drafting import Bigram
from specjax.tokenizers.model_files import read_json
from specjax.writing import new_directory

_CONFIG, _ARRAYS, _NAME = "bigram.json", "bigram.safetensors", "successors"
_VERSION = 1
_AGAIN = "copy the table again, or make it again (specjax train_bigram)"


def save_bigram(directory: str | os.PathLike[str], bigram: Bigram) -> None:
    """Writes a table into a new or empty directory.

    Args:
      directory: takes the files.
      bigram: the table; ids below 2**16 - 1 take two bytes each.

    Raises:
      FileExistsError: the directory is not empty, or a file.
      OSError: it cannot be written.
    """
    size = bigram.successors.size
    kind = np.uint16 if size < 2**16 else np.uint32
    # The number of ids stands for none.
    stored = np.where(bigram.successors < 0, size, bigram.successors).astype(kind)
    with new_directory(Path(directory)) as partial:
        # Not save_file, whose files only their owner can read.
        (partial / _ARRAYS).write_bytes(safetensors.numpy.save({_NAME: stored}))
        write_json(
            partial / _CONFIG,
            {
                "version": _VERSION,
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
    if values.get("version") != _VERSION:
        raise ValueError(
            f"{place / _CONFIG}: version={values.get('version')!r} must be {_VERSION} for this "
            "specjax to read it; use the specjax that wrote it"
        )
    mark, notes = values.get("tokenizer_fingerprint"), values.get("notes")
    if not isinstance(mark, str) or not isinstance(notes, dict):
        raise ValueError(
            f"{place / _CONFIG}: tokenizer_fingerprint must be a text and notes an object: {_AGAIN}"
        )
    stored = _array(place / _ARRAYS)
    if stored.ndim != 1 or stored.dtype not in (np.uint16, np.uint32):
        raise ValueError(
            f"{place / _ARRAYS}: {_NAME} must be one row of uint16 or uint32: {_AGAIN}"
        )
    table = stored.astype(np.int32)
    table[stored >= stored.size] = -1
    try:
        return Bigram(table, mark, notes)
    except ValueError as error:
        raise ValueError(f"{place / _ARRAYS}: {error}: {_AGAIN}") from None


def _array(path: Path) -> np.ndarray:
    try:
        return safetensors.numpy.load(path.read_bytes())[_NAME]
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file: {_AGAIN}") from None
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error.strerror}): correct that") from None
    except (safetensors.SafetensorError, KeyError) as error:  # KeyError: another name or dtype
        raise ValueError(f"{path} is cut short or damaged ({error}): {_AGAIN}") from None
