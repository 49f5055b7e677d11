"""The benchmark of the divergences of training."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import divergences
from specjax.training import Objective
from specjax.training.step import init_state, make_train_step
from tests.training.test_step import BATCH, OPTIMIZER, PARAMS, PLAIN, TASK, TEACHER_PARAMS

NAMES = ("forward_kl", "lk")


def test_students_that_share_the_teachers_pass_learn_as_if_alone():
    task = dataclasses.replace(TASK, objective=Objective(distillation_weight=1.0), teacher=PLAIN)
    together = divergences.make_step(task, NAMES, OPTIMIZER)
    decay = divergences._EMA_DECAY
    states = jax.tree.map(lambda x: jnp.stack([x, x]), init_state(PARAMS, OPTIMIZER, decay))
    losses = []
    for _ in range(3):
        states, found = together(states, TEACHER_PARAMS, BATCH)
        losses.append(found)
    for number, name in enumerate(NAMES):
        objective = Objective(distillation_weight=1.0, divergence=name)
        alone = dataclasses.replace(task, objective=objective)
        step = make_train_step(alone, OPTIMIZER, seed=0, ema_decay=decay)
        state = init_state(PARAMS, OPTIMIZER, decay)
        for i in range(3):
            state, metrics = step(state, TEACHER_PARAMS, BATCH)
            np.testing.assert_allclose(losses[i][number], metrics.loss, rtol=1e-4)
        for mine, other in zip(
            jax.tree.leaves(states.best_params), jax.tree.leaves(state.best_params), strict=True
        ):
            np.testing.assert_allclose(mine[number], other, atol=1e-4)
    assert abs(float(losses[2][0] - losses[2][1])) > 1e-2


def test_figures_of_seeds_become_a_row():
    found = [
        {"tokens_per_call": x, "standard_error": 0.1, "difference": None, "difference_se": None}
        for x in (2.0, 3.0)
    ]
    means = {"tokens_per_call": 2.5, "tokens_per_call_se": 0.1, "tokens_per_call_sd": 0.5**0.5}
    assert divergences.means(found) == means
