"""Learning-rate schedules and the optimiser, as frozen configurations."""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from specjax.checks import checked
from specjax.types import Array


class Schedule(Protocol):
    """A learning rate as a function of the number of updates done."""

    def __call__(self, step: Any) -> Array:
        """The rate of update `step` (from 0)."""


def _check(owner: Any, *names: str, **span: Any) -> None:
    for name in names:
        checked(f"{type(owner).__name__}: {name}", getattr(owner, name), open_high=True, **span)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InverseSqrt:
    """Linear warm-up, then a decay with the inverse square root of the step.

    It needs no end, so that a run can be prolonged.

    Attributes:
      peak: the highest rate, at `warmup_steps`.
      warmup_steps: updates of linear growth.

    Raises:
      TypeError: for a value that is no number.
      ValueError: for a value that is not positive and finite.

    Source: Vaswani et al. 2017, equation 3.
    """

    peak: float
    warmup_steps: int

    def __post_init__(self) -> None:
        _check(self, "peak", "warmup_steps", low=0.0, open_low=True)

    def __call__(self, step: Any) -> Array:
        """The rate of update `step` (from 0)."""
        x = (jnp.asarray(step, jnp.float32) + 1.0) / self.warmup_steps
        return self.peak * jnp.minimum(x, jax.lax.rsqrt(x))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cosine:
    """Linear warm-up, then half a cosine down to `floor` at `total_steps`.

    Attributes:
      peak: the highest rate, at `warmup_steps`.
      warmup_steps: updates of linear growth.
      total_steps: the update at which the rate has come down; it stays there.
      floor: the last rate, at most `peak`.

    Raises:
      TypeError: for a value that is no number.
      ValueError: for a value that is not positive and finite, a floor outside `[0, peak]`, or a
        warm-up beyond the end.
    """

    peak: float
    warmup_steps: int
    total_steps: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check(self, "peak", "warmup_steps", "total_steps", low=0.0, open_low=True)
        checked("Cosine: floor", self.floor, low=0.0, high=self.peak)
        if self.warmup_steps >= self.total_steps:
            raise ValueError(
                f"Cosine: warmup_steps={self.warmup_steps} must be below "
                f"total_steps={self.total_steps}"
            )

    def __call__(self, step: Any) -> Array:
        """The rate of update `step` (from 0)."""
        step = jnp.asarray(step, jnp.float32) + 1.0
        done = jnp.clip((step - self.warmup_steps) / (self.total_steps - self.warmup_steps), 0, 1)
        decayed = self.floor + (self.peak - self.floor) * 0.5 * (1.0 + jnp.cos(jnp.pi * done))
        return jnp.minimum(self.peak * step / self.warmup_steps, decayed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay on matrices, after clipping the gradient's global norm.

    Attributes:
      schedule: the learning rate.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: times the learning rate; norms' scales and position biases are exempt.
      clip_norm: the largest global norm of a gradient.
      relative: multiply each array's rate by the root mean square of its entries (at least 1e-3),
        as Adafactor does for T5. T5's embedding begins at unit scale and its kernels far below;
        with one absolute rate for all of them the embedding hardly moves.

    Raises:
      TypeError: for a value that is no number.
      ValueError: for a value outside its range.

    Source: Loshchilov and Hutter 2019; for `relative` Shazeer and Stern 2018, section 8.
    """

    schedule: Schedule
    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-9
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    relative: bool = False

    def __post_init__(self) -> None:
        _check(self, "eps", "clip_norm", low=0.0, open_low=True)
        _check(self, "b1", "b2", low=0.0, high=1.0)
        _check(self, "weight_decay", low=0.0)
        if not isinstance(self.relative, bool):
            raise TypeError(f"AdamW: relative={self.relative!r} must be True or False")

    def transformation(self) -> optax.GradientTransformation:
        """The optax transformation."""
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm),
            optax.scale_by_adam(b1=self.b1, b2=self.b2, eps=self.eps),
            optax.scale_by_param_block_rms(1e-3) if self.relative else optax.identity(),
            optax.add_decayed_weights(self.weight_decay, mask=_decayed),
            optax.scale_by_learning_rate(self.schedule),
        )


def _decayed(params: Any) -> Any:
    """True for the matrices: kernels and the embedding."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in ("kernel", "embedding"), params
    )
