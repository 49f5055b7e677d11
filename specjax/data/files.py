"""Reads plain or gzipped text line by line; error messages name the file and the line."""

import gzip
import os
import zlib
from collections.abc import Iterator
from typing import BinaryIO, cast


def read_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    r"""Yields the lines of a UTF-8 file; it is gzipped if its name ends in `.gz`.

    Only `\n` ends a line (a `\r` before it is removed), so that other Unicode separators inside a
    sentence do not shift the lines of aligned files. A byte order mark is removed.

    Args:
      path: the file.

    Yields:
      (line number from 1, text without the line's end).

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is empty, is not valid UTF-8, is a damaged gzip file or a directory.
    """
    path = os.fspath(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such file: check the path")
    if os.path.isdir(path):
        raise ValueError(f"{path} is a directory: give the path of a file")
    number = 0
    with cast(BinaryIO, gzip.open(path) if path.endswith(".gz") else open(path, "rb")) as file:
        try:
            for number, raw in enumerate(file, 1):
                raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                yield number, _decode(raw.removesuffix(b"\n").removesuffix(b"\r"), path, number)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(
                f"{path}: the gzip data are damaged after line {number} ({error}): "
                "write the file again, or remove .gz from its name if it is plain text"
            ) from None
    if number == 0:
        raise ValueError(f"{path} is empty: it must have at least one line")


def _decode(raw: bytes, path: str, number: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}:{number}: byte 0x{raw[error.start]:02x} at column {error.start + 1} is not "
            "UTF-8: convert the file, for example with iconv -t UTF-8"
        ) from None
