"""The lines of `predictions.jsonl`: one JSON object each, with a checksum."""

import hashlib
import json
from typing import Any

Record = dict[str, Any]
FIRST_KEY = b'{"id": '
# The last key of each line.
_CHECKSUM = b', "checksum": "%s"}'


def line_of(record: Record) -> bytes:
    """The line of a record, with the checksum of the rest as its last key."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    # JSON can write half a surrogate pair and UTF-8 cannot, so it is written as JSON's escape.
    body = text.encode(errors="backslashreplace")
    return body[:-1] + _CHECKSUM % _checksum(body) + b"\n"


def record_of(line: bytes) -> Record:
    """The record of a line.

    Raises:
      ValueError: its checksum is not that of the rest.
    """
    length = len(_CHECKSUM % (b"0" * 16))
    body = line[:-length] + b"}"
    if line != body[:-1] + _CHECKSUM % _checksum(body):
        raise ValueError
    return json.loads(body)


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:16].encode()
