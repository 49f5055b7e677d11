"""One training step and one evaluation step, each one jitted program per batch shape."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from specjax.checks import checked
from specjax.models import T5
from specjax.training.losses import cross_entropy, distillation_loss, masked_mean
from specjax.training.optimizer import AdamW
from specjax.types import Array, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """What is minimised.

    Attributes:
      label_smoothing: the uniform share of the target distribution, in [0, 1).
      distillation_weight: the weight of KL(teacher || student), in [0, 1]; the cross entropy of
        the targets has the rest. Above 0 a teacher is needed.
      ema_decay: of the running average of the parameters, which is what is evaluated and
        exported; 0 for none. It starts smaller: min(decay, (1 + step) / (10 + step)).

    Raises:
      TypeError: for a value that is no number.
      ValueError: for a value outside its range.
    """

    label_smoothing: float = 0.1
    distillation_weight: float = 0.0
    ema_decay: float = 0.999

    def __post_init__(self) -> None:
        for name in ("label_smoothing", "distillation_weight", "ema_decay"):
            closed = name == "distillation_weight"
            value = getattr(self, name)
            checked(f"Objective: {name}", value, low=0.0, high=1.0, open_high=not closed)


class TrainState(NamedTuple):
    """All that a run must keep to go on.

    Attributes:
      step: scalar int32, updates done; the data's order and the dropout keys follow from it.
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
    """What one step tells.

    Attributes:
      loss: scalar float32, the objective per target token.
      grad_norm: scalar float32, before clipping.
      tokens: scalar int32, target tokens in the batch.
    """

    loss: Array
    grad_norm: Array
    tokens: Array


def init_state(params: Params, optimizer: AdamW, objective: Objective) -> TrainState:
    """The state before the first update.

    Args:
      params: the initial parameters; copied.
      optimizer: the optimiser.
      objective: tells whether an average is kept.

    Returns:
      A `TrainState` at step 0.
    """
    params = jax.tree.map(jnp.array, params)
    average = jax.tree.map(jnp.array, params) if objective.ema_decay else None
    opt_state = optimizer.transformation().init(params)
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, average)


def teacher_forced_logits(
    model: T5, params: Params, inputs: Array, targets: Array, pad_id: int, key: Array | None
) -> Array:
    """`[B, T, V]` float32 logits of `targets [B, T]` given `inputs [B, P]`."""
    start = jnp.full((targets.shape[0], 1), model.config.decoder_start_token, targets.dtype)
    decoder_inputs = jnp.concatenate([start, targets[:, :-1]], axis=1)
    mask = inputs != pad_id
    return model.apply(params, inputs, decoder_inputs, encoder_mask=mask, dropout_key=key)


@functools.lru_cache(maxsize=8)
def make_train_step(
    model: T5,
    optimizer: AdamW,
    objective: Objective,
    *,
    seed: int,
    pad_id: int = 0,
    teacher: T5 | None = None,
) -> Callable[..., tuple[TrainState, StepMetrics]]:
    """Builds `step(state, inputs, targets, teacher_params) -> (state, metrics)`, jitted.

    The same arguments give the same function, so that a second run compiles nothing. The state is
    donated. Dropout's key is the seed's, folded with the step, so that a resumed run drops what
    the uninterrupted one would have dropped.

    Args:
      model: the network.
      optimizer: the optimiser.
      objective: the loss and the average.
      seed: of dropout.
      pad_id: marks padding in inputs and targets.
      teacher: the network to distil from, or None (then `teacher_params` is None).

    Returns:
      The step; inputs `[B, P]` and targets `[B, T]` are int32.
    """
    transformation = optimizer.transformation()
    use_dropout = model.config.dropout_rate > 0.0

    def loss_fn(params: Params, key: Array | None, inputs: Array, targets: Array, reference: Any):
        mask = targets != pad_id
        logits = teacher_forced_logits(model, params, inputs, targets, pad_id, key)
        weight = objective.distillation_weight
        loss = jnp.zeros(targets.shape, jnp.float32)
        if weight < 1.0:
            loss = (1.0 - weight) * cross_entropy(logits, targets, objective.label_smoothing)
        if weight > 0.0:
            loss = loss + weight * distillation_loss(logits, reference)
        return masked_mean(loss, mask)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, inputs: Array, targets: Array, teacher_params: Params):
        key = jax.random.fold_in(jax.random.key(seed), state.step) if use_dropout else None
        reference = None
        if teacher is not None:
            reference = teacher_forced_logits(
                teacher, teacher_params, inputs, targets, pad_id, None
            )
        loss, grads = jax.value_and_grad(loss_fn)(state.params, key, inputs, targets, reference)
        # optax's Adam mixes int32 counts with float32.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = transformation.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        average = state.average
        if average is not None:
            count = state.step.astype(jnp.float32)
            decay = jnp.minimum(objective.ema_decay, (1.0 + count) / (10.0 + count))
            average = jax.tree.map(
                lambda a, p: a + (1.0 - decay).astype(p.dtype) * (p - a), average, params
            )
        metrics = StepMetrics(
            loss, optax.tree.norm(grads), jnp.sum((targets != pad_id).astype(jnp.int32))
        )
        return TrainState(state.step + 1, params, opt_state, average), metrics

    return step


@functools.lru_cache(maxsize=8)
def make_eval_step(model: T5, *, pad_id: int = 0) -> Callable[..., tuple[Array, Array]]:
    """Builds `step(params, inputs, targets) -> (summed loss, tokens)`, jitted.

    Args:
      model: the network.
      pad_id: marks padding in inputs and targets.

    Returns:
      The step; the loss is the cross entropy in nats, without label smoothing.
    """

    @jax.jit
    def step(params: Params, inputs: Array, targets: Array) -> tuple[Array, Array]:
        logits = teacher_forced_logits(model, params, inputs, targets, pad_id, None)
        mask = targets != pad_id
        loss = jnp.where(mask, cross_entropy(logits, targets), 0.0)
        return jnp.sum(loss), jnp.sum(mask.astype(jnp.int32))

    return step
