"""The optimiser with its learning rate, as a frozen configuration."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from specjax.checks import check_flag, checked
from specjax.errors import UserError
from specjax.types import Array

DECAYS = ("inverse_sqrt", "cosine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay on matrices, after clipping the gradient's global norm.

    The learning rate grows linearly, then falls. For your own learning rate, derive a frozen
    dataclass from this class and define another `rate`.

    Attributes:
      learning_rate: the highest rate, at `warmup_steps`.
      warmup_steps: updates of linear growth.
      decay: "inverse_sqrt": with the inverse square root of the step; it has no end, so that a run
        can be prolonged. "cosine": half a cosine down to `floor` at `total_steps`.
      total_steps: of "cosine", the update at which the rate reaches `floor`; it stays there.
      floor: of "cosine", the last rate, at most `learning_rate`.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: times the learning rate; norms' scales and position biases are exempt.
      clip_norm: the largest global norm of a gradient.
      relative: multiply each array's rate by the root mean square of its entries (at least 1e-3),
        as Adafactor does for T5. T5's embedding begins at unit scale and its kernels far below;
        with the same absolute rate for all, the embedding hardly moves.

    Raises:
      TypeError: for a value that is not a number.
      ValueError: for a value outside its range, or a warm-up beyond the end.

    Source: Loshchilov and Hutter 2019; for `relative` Shazeer and Stern 2018, section 8; for
    "inverse_sqrt" Vaswani et al. 2017, equation 3.
    """

    learning_rate: float
    warmup_steps: int
    decay: str = "inverse_sqrt"
    total_steps: int | None = None
    floor: float = 0.0
    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-9
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    relative: bool = False

    def __post_init__(self) -> None:
        for name in ("learning_rate", "warmup_steps", "eps", "clip_norm", "total_steps"):
            if name != "total_steps" or self.total_steps is not None:
                value = getattr(self, name)
                checked(f"AdamW: {name}", value, low=0.0, open_low=True, open_high=True)
        for name in ("b1", "b2"):
            checked(f"AdamW: {name}", getattr(self, name), low=0.0, high=1.0, open_high=True)
        checked("AdamW: weight_decay", self.weight_decay, low=0.0, open_high=True)
        checked("AdamW: floor", self.floor, low=0.0, high=self.learning_rate)
        check_flag("AdamW: relative", self.relative)
        if self.decay not in DECAYS:
            raise UserError(f"AdamW: decay must be one of {', '.join(DECAYS)}, got {self.decay!r}")
        if (self.decay == "cosine") != (self.total_steps is not None):
            raise UserError(
                f"AdamW: decay={self.decay!r} and total_steps={self.total_steps}: give total_steps "
                "if and only if decay='cosine'"
            )
        if self.total_steps is not None and self.warmup_steps >= self.total_steps:
            raise UserError(
                f"AdamW: warmup_steps={self.warmup_steps} must be below "
                f"total_steps={self.total_steps}"
            )

    def rate(self, step: Any) -> Array:
        """The learning rate of update `step` (from 0)."""
        done = jnp.asarray(step, jnp.float32) + 1.0
        if self.total_steps is None:
            x = done / self.warmup_steps
            return self.learning_rate * jnp.minimum(x, jax.lax.rsqrt(x))
        x = jnp.clip((done - self.warmup_steps) / (self.total_steps - self.warmup_steps), 0, 1)
        span = self.learning_rate - self.floor
        decayed = self.floor + span * 0.5 * (1.0 + jnp.cos(jnp.pi * x))
        return jnp.minimum(self.learning_rate * done / self.warmup_steps, decayed)

    def transformation(self) -> optax.GradientTransformation:
        """The optax transformation."""
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm),
            optax.scale_by_adam(b1=self.b1, b2=self.b2, eps=self.eps),
            optax.scale_by_param_block_rms(1e-3) if self.relative else optax.identity(),
            optax.add_decayed_weights(self.weight_decay, mask=_decayed),
            optax.scale_by_learning_rate(self.rate),
        )


def _decayed(params: Any) -> Any:
    """True for the matrices: kernels and the embedding."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in ("kernel", "embedding"), params
    )
