"""Reads plain or gzipped text line by line."""

import gzip
import os
import stat
import sys
import zlib
from collections.abc import Iterator
from typing import BinaryIO, cast

from specjax.errors import UserError
from specjax.memory import host_bytes, in_words

# The largest ratio of a gzipped file: texts shrink 3 to 10 times, a malicious file 1,032 times.
# LEAST_ROOM bytes are always allowed.
MOST_UNPACKED = 100
LEAST_ROOM = 64 * 2**20
# The longest line; a file such as /dev/zero has no end of a line.
MOST_LINE = 64 * 2**20
_ENDLESS = sys.maxsize - 1


def read_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    r"""Yields the lines of a UTF-8 file, gzipped if its name ends in `.gz`.

    Only `\n` ends a line (a `\r` before it is removed), so that other Unicode separators inside a
    sentence do not shift the lines of aligned files. A byte order mark is removed. A message on
    stderr tells when it waits for the writer of a pipe.

    Args:
      path: the file.

    Yields:
      (line number from 1, text without the line's end).

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: the file is empty, not valid UTF-8, a directory, a damaged gzip file, unpacks to
        more than `MOST_UNPACKED` times its size, or has a line longer than `MOST_LINE`.
    """
    path = os.fspath(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such file: check the path")
    if os.path.isdir(path):
        raise UserError(f"{path} is a directory: give the path of a file")
    if stat.S_ISFIFO(os.stat(path).st_mode):
        # Opening a pipe blocks until a process writes.
        message = f"specjax: {path} is a pipe: waiting for input"
        print(message, file=sys.stderr, flush=True)
    packed = path.endswith(".gz")
    left = room = _room(path) if packed else _ENDLESS
    number = 0
    with cast(BinaryIO, gzip.open(path) if packed else open(path, "rb")) as file:
        try:
            # The extra byte shows that there is too much.
            while raw := file.readline(min(left, MOST_LINE) + 1):
                number += 1
                left -= len(raw)
                if left < 0:
                    raise _too_much(path, room)
                if len(raw) > MOST_LINE:
                    raise UserError(
                        f"{path}:{number}: the line is longer than {in_words(MOST_LINE)}: give a "
                        "text file with a prompt or a record per line"
                    )
                raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                yield number, _decode(raw.removesuffix(b"\n").removesuffix(b"\r"), path, number)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(
                f"{path}: the gzip data are damaged after line {number} ({error}): "
                "compress the file again, or remove .gz from its name if it is plain text"
            ) from None
    if number == 0:
        raise UserError(f"{path} is empty: it must have at least one line")


def _room(path: str) -> int:
    """The most bytes that a gzipped file may unpack to, so that it does not fill the memory."""
    if not os.path.isfile(path):
        return _ENDLESS  # a pipe has no size
    return min(max(LEAST_ROOM, MOST_UNPACKED * os.path.getsize(path)), host_bytes(), _ENDLESS)


def _too_much(path: str, room: int) -> ValueError:
    return ValueError(
        f"{path} unpacks to more than {in_words(room)}, which is more than {MOST_UNPACKED} times "
        "its size or does not fit into memory: if it is the right file, unpack it, or split it"
    )


def _decode(raw: bytes, path: str, number: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}:{number}: byte 0x{raw[error.start]:02x} at column {error.start + 1} is not "
            "UTF-8: convert the file, for example with iconv -t UTF-8"
        ) from None
