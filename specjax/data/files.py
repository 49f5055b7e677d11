"""Reads plain or gzipped text line by line; error messages name the file and the line."""

import gzip
import os
import stat
import sys
import zlib
from collections.abc import Iterator
from typing import BinaryIO, cast

from specjax.memory import host_bytes, in_words

# A gzipped file may hold so many times its size: texts become 3 to 10 times smaller, and at most
# 1,032 times is possible. Small files may hold the other number of bytes in any case.
MOST_UNPACKED = 100
LEAST_ROOM = 64 * 2**20
_ENDLESS = sys.maxsize - 1


def read_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    r"""Yields the lines of a UTF-8 file; it is gzipped if its name ends in `.gz`.

    Only `\n` ends a line (a `\r` before it is removed), so that other Unicode separators inside a
    sentence do not shift the lines of aligned files. A byte order mark is removed. Before it waits
    for the writer of a pipe, it says so on stderr.

    Args:
      path: the file.

    Yields:
      (line number from 1, text without the line's end).

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is empty, is not valid UTF-8, is a damaged gzip file, one that holds more
        than `MOST_UNPACKED` times its size, or a directory.
    """
    path = os.fspath(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such file: check the path")
    if os.path.isdir(path):
        raise ValueError(f"{path} is a directory: give the path of a file")
    if stat.S_ISFIFO(os.stat(path).st_mode):
        # Opening it blocks until somebody writes, for ever if nobody does.
        message = f"specjax: {path} is a pipe: waiting until something is written into it"
        print(message, file=sys.stderr, flush=True)
    packed = path.endswith(".gz")
    left = room = _room(path) if packed else _ENDLESS
    number = 0
    with cast(BinaryIO, gzip.open(path) if packed else open(path, "rb")) as file:
        try:
            # One byte more than there is room for tells that there is too much.
            while raw := file.readline(left + 1):
                number += 1
                left -= len(raw)
                if left < 0:
                    raise _too_much(path, room)
                raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                yield number, _decode(raw.removesuffix(b"\n").removesuffix(b"\r"), path, number)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(
                f"{path}: the gzip data are damaged after line {number} ({error}): "
                "write the file again, or remove .gz from its name if it is plain text"
            ) from None
    if number == 0:
        raise ValueError(f"{path} is empty: it must have at least one line")


def _room(path: str) -> int:
    """The bytes that a gzipped file may hold; its lines could fill the memory."""
    if not os.path.isfile(path):
        return _ENDLESS  # a pipe has no size
    return min(max(LEAST_ROOM, MOST_UNPACKED * os.path.getsize(path)), host_bytes(), _ENDLESS)


def _too_much(path: str, room: int) -> ValueError:
    return ValueError(
        f"{path} holds more than {in_words(room)} once it is unpacked, which is more than "
        f"{MOST_UNPACKED} times its size or does not fit into memory: if it is the right "
        "file, unpack it and give the plain one, or split it"
    )


def _decode(raw: bytes, path: str, number: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}:{number}: byte 0x{raw[error.start]:02x} at column {error.start + 1} is not "
            "UTF-8: convert the file, for example with iconv -t UTF-8"
        ) from None
