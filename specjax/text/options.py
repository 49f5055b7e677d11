"""What can be known of a decoder's arguments before its models are read, which may take minutes."""

from collections.abc import Mapping
from typing import Any

from specjax.checks import whole_number
from specjax.text.prompts import BUCKETS, check_buckets
from specjax.text.stops import check_stops
from specjax.types import Sampling

_DRAWN = ("temperature", "top_k", "top_p")
# The whole numbers, and the least of each; methods may leave the lengths of drafts open.
_COUNTS = ("max_new_tokens", 1), ("batch_size", 1)
_LENGTHS = ("max_draft", 1), ("min_draft", 0)
CHECKED = ("stop", "buckets", *_DRAWN, *(name for name, _ in (*_COUNTS, *_LENGTHS)))


def check_decoding(options: Mapping[str, Any]) -> None:
    """Checks stop strings, buckets, sampling and whole numbers as `Decoder` does.

    Args:
      options: some of its arguments by name; those not in `CHECKED` are not looked at.

    Raises:
      TypeError: a value of the wrong type.
      ValueError: one out of range.
    """
    check_stops(options.get("stop"))
    check_buckets(options.get("buckets", BUCKETS))
    Sampling(**{name: options[name] for name in _DRAWN if options.get(name) is not None})
    for name, low in _COUNTS:
        whole_number(name, options.get(name, low), low=low)
    for name, low in _LENGTHS:
        if options.get(name) is not None:
            whole_number(name, options[name], low=low)
