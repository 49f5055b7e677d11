"""Bigram tables on disk, for drafts that are copied."""

import os
from pathlib import Path

import numpy as np

from specjax.checkpoints.attachments import AGAIN, BIGRAM, read_attachment, write_attachment
from specjax.drafting import Bigram
from specjax.errors import UserError

# The arrays of a table by the version: the second has longer contexts.
_TABLES = {1: ("successors",), 2: ("successors", "contexts", "followers")}


def save_bigram(directory: str | os.PathLike[str], bigram: Bigram) -> None:
    """Writes a table into a new or empty directory.

    Args:
      directory: gets `bigram.json` and `bigram.safetensors`.
      bigram: the table; ids below 2**16 - 1 take two bytes each. A table without longer contexts is
        written in version 1 of the format.

    Raises:
      FileExistsError: the directory is not empty, or a file.
      OSError: it cannot be written.
    """
    size = bigram.successors.size
    kind = np.uint16 if size < 2**16 else np.uint32
    version = 1 if bigram.order == 2 else 2
    arrays = {name: getattr(bigram, name) for name in _TABLES[version]}
    # The number of ids stands for "none".
    stored = {name: np.where(ids < 0, size, ids).astype(kind) for name, ids in arrays.items()}
    values = {
        "version": version,
        "ids": size,
        "tokenizer_fingerprint": bigram.tokenizer_fingerprint,
        "notes": dict(bigram.notes),
    }
    write_attachment(Path(directory), BIGRAM, values, stored)


def load_bigram(directory: str | os.PathLike[str], *, check_weights: bool = True) -> Bigram:
    """Reads a table.

    Args:
      directory: written by `save_bigram`.
      check_weights: whether to compare the files with their checksums.

    Returns:
      The table. `Bigram.table` checks that it belongs to a model.

    Raises:
      FileNotFoundError: there is no table, or a file is missing.
      OSError: a file cannot be read.
      ValueError: a file is damaged.
    """
    place = Path(directory)
    if not (place / f"{BIGRAM}.json").is_file():
        raise FileNotFoundError(
            f"{place}: no bigram table found: make a table with `specjax train bigram`"
        )
    values, arrays = read_attachment(place, BIGRAM, tuple(_TABLES), check_weights)
    try:
        stored = {name: arrays[name] for name in _TABLES[values["version"]]}
        size = stored["successors"].size
        for name, ids in stored.items():
            if ids.dtype not in (np.uint16, np.uint32):
                raise UserError(f"{name} must be uint16 or uint32, got {ids.dtype}")
        return Bigram(
            tokenizer_fingerprint=values["tokenizer_fingerprint"],
            notes=values["notes"],
            **{n: np.where(ids >= size, -1, ids.astype(np.int32)) for n, ids in stored.items()},
        )
    except KeyError as error:
        raise UserError(f"{place} lacks {error}: {AGAIN[BIGRAM]}") from None
    except ValueError as error:
        raise UserError(f"{place}: {error}: {AGAIN[BIGRAM]}") from None
