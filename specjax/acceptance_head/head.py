"""A trained acceptance head, and the drafter that it belongs to."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from specjax.acceptance_head.network import HeadConfig, init_head
from specjax.checks import one_number
from specjax.errors import UserError
from specjax.types import Params


@dataclasses.dataclass(frozen=True, eq=False)
class Head:
    """An acceptance head as it is saved and loaded.

    Attributes:
      config: its sizes.
      params: its parameters, float32.
      drafter_fingerprint: `TextModel.weights_fingerprint` of the drafter whose hidden states it
        reads.
      rejection_weight: w_rej / w_acc of its loss, above 0; 1 for a head whose output is a chance.
      notes: JSON values about its training.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: if the parameters do not fit the configuration.
    """

    config: HeadConfig
    params: Params = dataclasses.field(repr=False)
    drafter_fingerprint: str
    rejection_weight: float = 1.0
    notes: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: types.MappingProxyType({}), repr=False
    )

    def __post_init__(self) -> None:
        if not isinstance(self.config, HeadConfig):
            raise UserError(f"Head: config must be a HeadConfig, got {self.config!r}")
        if not isinstance(self.drafter_fingerprint, str) or not self.drafter_fingerprint:
            raise UserError(
                "Head: drafter_fingerprint must be TextModel.weights_fingerprint, got "
                f"{self.drafter_fingerprint!r}"
            )
        weight = one_number("Head: rejection_weight", self.rejection_weight, low=0, open_low=True)
        object.__setattr__(self, "rejection_weight", weight)
        expected = head_shapes(self.config)
        found = jax.tree.map(lambda x: (np.shape(x), np.dtype(x.dtype)), self.params)
        wanted = jax.tree.map(lambda x: (x.shape, np.dtype(x.dtype)), expected)
        if found != wanted:
            raise UserError(
                f"Head: params must be the float32 parameters of {self.config}: use init_head, or "
                "the configuration that they were trained with"
            )

    def check_drafter(self, name: str, width: int, fingerprint: str | None) -> None:
        """Checks that a drafter is the drafter that the head was trained for.

        Args:
          name: the drafter's name in messages.
          width: the width of its hidden states.
          fingerprint: the fingerprint of its weights; None: it is not compared.

        Raises:
          ValueError: if it is another drafter.
        """
        remedy = (
            "train a head for this drafter (specjax train head), or load the drafter without it "
            "(head=False)"
        )
        if self.config.width != width:
            raise UserError(
                f"{name}: its acceptance head has width {self.config.width}, but the model's "
                f"hidden states have {width}: {remedy}"
            )
        if fingerprint not in (None, self.drafter_fingerprint):
            raise UserError(
                f"{name}: its acceptance head was trained for weights {self.drafter_fingerprint}, "
                f"but the model has {fingerprint}: {remedy}"
            )


def head_shapes(config: HeadConfig) -> Params:
    """The parameters of a head as `jax.ShapeDtypeStruct`s; it allocates nothing."""
    return jax.eval_shape(lambda: init_head(config, jax.random.key(0)))
