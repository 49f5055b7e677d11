"""The training step and the evaluation step, each a jitted program per batch shape."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from specjax.compilation import jit
from specjax.training.losses import Total
from specjax.training.optimizer import AdamW
from specjax.training.tasks import Task
from specjax.types import Array, Params

# Independent of JAX's default: a resumed run must continue the stream that it began with.
GENERATOR = "threefry2x32"


def root_key(seed: int) -> Array:
    """The key of all randomness of a run on the device."""
    return jax.random.key(seed, impl=GENERATOR)


class TrainState(NamedTuple):
    """Everything that a run must keep to continue.

    Attributes:
      step: scalar int32, updates done; the data's order and the steps' keys follow from it.
      params: the parameters.
      opt_state: the optimiser's state.
      average: the running average of the parameters (the same tree), or None.
    """

    step: Array
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
      loss: scalar float32, the mean over the items.
      grad_norm: scalar float32, before clipping.
      items: scalar int32, the items of the batch, such as target tokens.
    """

    loss: Array
    grad_norm: Array
    items: Array


def init_state(params: Params, optimizer: AdamW, ema_decay: float) -> TrainState:
    """The state before the first update.

    Args:
      params: the initial parameters; copied.
      optimizer: the optimiser.
      ema_decay: the decay of the average; 0 for none.

    Returns:
      A `TrainState` at step 0.
    """
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

    Args:
      task: the loss.
      optimizer: the optimiser.
      seed: the seed of the steps' keys.
      ema_decay: the decay of the running average; see `TrainerConfig`.

    Returns:
      The step.
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
    """Builds `step(params, constants, batch) -> totals`, jitted.

    Args:
      task: the loss.

    Returns:
      The step; the same task gives the same function.
    """
    return jit(task.evaluate)
