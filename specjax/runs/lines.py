"""The lines of `predictions.jsonl`: one JSON object each, with a checksum."""

import hashlib
import json
import math
from typing import Any

from specjax.data import Example
from specjax.text.results import Row, finite

Record = dict[str, Any]
FIRST_KEY = b'{"id": '
# The last key of each line.
_CHECKSUM = b', "checksum": "%s"}'


def record_of_row(example: Example, row: Row) -> Record:
    """The record of a row, without its checksum; see `specjax.runs.inference.infer`."""
    record = {
        **about(example),
        "prediction": row.text,
        "tokens": row.tokens.tolist(),
        "log_prob": finite(row.info.log_p),
        "log_prob_target": finite(row.info.log_target),
        "ended_by": row.ended_by,
        "info": row.info.to_dict(),
    }
    if row.error is not None:
        return {**record, "nan": row.error}
    if math.isnan(row.info.log_p):  # null would be minus infinity
        del record["log_prob"]
    return record


def about(example: Example) -> Record:
    """What a record says of its input."""
    made: Record = {"id": example.id, "inputs": example.inputs}
    return made if example.targets is None else {**made, "targets": example.targets}


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
