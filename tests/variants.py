"""Which variants of a test `make test` runs; `make test-all` runs the others, too."""

from collections.abc import Iterable
from typing import Any

import pytest


def variants(values: Iterable[Any], *quick: Any) -> list[Any]:
    """All values in order, for `parametrize`; those beside `quick` are exhaustive."""
    found = list(values)
    assert all(value in found for value in quick), f"{quick} must be among {found}"
    return [v if v in quick else pytest.param(v, marks=pytest.mark.exhaustive) for v in found]
