"""Which variants of a test `make test` runs; `make test-all` runs the others, too."""

from collections.abc import Iterable
from typing import Any

import pytest


def variants(values: Iterable[Any], *quick: Any, several: bool = False) -> list[Any]:
    """All values in order, for `parametrize`; those beside `quick` are exhaustive.

    With `several`, each is a tuple of values for several names.
    """
    found = list(values)
    assert all(value in found for value in quick), f"{quick} must be among {found}"
    marks = [() if value in quick else pytest.mark.exhaustive for value in found]
    each = found if several else [(value,) for value in found]
    return [pytest.param(*value, marks=mark) for value, mark in zip(each, marks, strict=True)]
