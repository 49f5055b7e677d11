"""An update: the optimiser, the state of a run, and its two jitted steps."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32, Int32, Key

from specjax.checks import check_flag, check_number
from specjax.compilation import jit
from specjax.errors import UserError
from specjax.training.losses import Total
from specjax.training.tasks import Task
from specjax.types import Params

DECAYS = ("inverse_sqrt", "cosine")
# Independent of JAX's default: a resumed run must continue the stream that it began with.
GENERATOR = "threefry2x32"


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
      weight_decay: times the learning rate; norms' scales and position biases are exempt.
      clip_norm: the largest global norm of a gradient.
      relative: multiply each array's rate by the root mean square of its entries (at least 1e-3),
        as Adafactor does for T5. T5's embedding begins at unit scale and its kernels far below;
        with the same absolute rate for all, the embedding hardly moves.

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
        above_0 = {"low": 0.0, "open_low": True, "open_high": True}
        share = {"low": 0.0, "high": 1.0, "open_high": True}
        spans: dict[str, dict[str, Any]] = {
            **dict.fromkeys(("learning_rate", "warmup_steps", "eps", "clip_norm"), above_0),
            **({} if self.total_steps is None else {"total_steps": above_0}),
            **dict.fromkeys(("b1", "b2"), share),
            "weight_decay": {"low": 0.0, "open_high": True},
            "floor": {"low": 0.0, "high": self.learning_rate},
        }
        for name, span in spans.items():
            check_number(f"AdamW: {name}", getattr(self, name), **span)
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
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm),
            optax.scale_by_adam(b1=self.b1, b2=self.b2, eps=self.eps),
            optax.scale_by_param_block_rms(1e-3) if self.relative else optax.identity(),
            optax.add_decayed_weights(self.weight_decay, mask=_decayed),
            optax.scale_by_learning_rate(self.rate),
        )


def _decayed(params: Any) -> Any:
    """True for kernels and the embedding."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in ("kernel", "embedding"), params
    )


def root_key(seed: int) -> Key[Array, ""]:
    """The key of all randomness of a run on the device."""
    return jax.random.key(seed, impl=GENERATOR)


class TrainState(NamedTuple):
    """Everything that a run must keep to continue.

    Attributes:
      step: updates done; the data's order and the steps' keys follow from it.
      average: the running average of the parameters, or None.
    """

    step: Int32[Array, ""]
    params: Params
    opt_state: Any
    average: Params | None

    @property
    def best_params(self) -> Params:
        """The parameters to evaluate and export."""
        return self.params if self.average is None else self.average


class StepMetrics(NamedTuple):
    """The figures of a step.

    Attributes:
      loss: the mean over the items.
      grad_norm: before clipping.
      items: those of the batch, such as target tokens.
    """

    loss: Float32[Array, ""]
    grad_norm: Float32[Array, ""]
    items: Int32[Array, ""]


def init_state(params: Params, optimizer: AdamW, ema_decay: float) -> TrainState:
    """The state before the first update."""
    params = jax.tree.map(jnp.array, params)
    average = jax.tree.map(jnp.array, params) if ema_decay else None
    opt_state = optimizer.transformation().init(params)
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, average)


@functools.lru_cache(maxsize=8)
def make_train_step(
    task: Task, optimizer: AdamW, *, seed: int, ema_decay: float
) -> Callable[..., tuple[TrainState, StepMetrics]]:
    """Builds `step(state, constants, batch) -> (state, metrics)`, jitted.

    The same arguments give the same function, so that a second run compiles nothing. The state is
    donated. The step's key is the seed's, folded with the number of the step, so that a resumed run
    uses the dropout of an uninterrupted run.
    """
    transformation = optimizer.transformation()

    def mean_loss(params: Params, constants: Any, batch: Any, key: Array) -> tuple[Array, Array]:
        total = task.loss(params, constants, batch, key)
        return total.sum / jnp.maximum(total.items.astype(jnp.float32), 1.0), total.items

    @functools.partial(jit, donate_argnums=0)
    def step(state: TrainState, constants: Any, batch: Any) -> tuple[TrainState, StepMetrics]:
        key = jax.random.fold_in(root_key(seed), state.step)
        gradient = jax.value_and_grad(mean_loss, has_aux=True)
        (loss, items), grads = gradient(state.params, constants, batch, key)
        # optax's Adam mixes int32 counts with float32.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = transformation.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        average = state.average
        if average is not None:
            count = state.step.astype(jnp.float32)
            decay = jnp.minimum(ema_decay, (1.0 + count) / (10.0 + count))
            average = jax.tree.map(
                lambda a, p: a + (1.0 - decay).astype(p.dtype) * (p - a), average, params
            )
        metrics = StepMetrics(loss, optax.tree.norm(grads), items)
        return TrainState(state.step + 1, params, opt_state, average), metrics

    return step


@functools.lru_cache(maxsize=8)
def make_eval_step(task: Task) -> Callable[..., Mapping[str, Total]]:
    """Builds `step(params, constants, batch) -> totals`, jitted."""
    return jit(task.evaluate)
