"""Stopping policies for tests."""

import dataclasses

from specjax.types import Stopping


@dataclasses.dataclass(frozen=True)
class AfterTokenOne(Stopping):
    """Stops a draft after token 1."""

    def step(self, params, state, drawn):
        return drawn.token == 1, state
