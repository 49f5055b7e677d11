import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import T5
from specjax.training import AdamW, InverseSqrt, Objective, init_state, make_train_step
from specjax.training.step import make_eval_step, teacher_forced_logits
from tests.training.toy import CONFIG, EOS

MODEL = T5(CONFIG.replace(dropout_rate=0.0))
PARAMS = MODEL.init(jax.random.key(0))
TEACHER_PARAMS = MODEL.init(jax.random.key(1))
OPTIMIZER = AdamW(schedule=InverseSqrt(peak=0.01, warmup_steps=1))
INPUTS = jnp.asarray([[5, 6, EOS, 0], [7, EOS, 0, 0]], jnp.int32)
TARGETS = jnp.asarray([[6, 5, EOS, 0], [EOS, 0, 0, 0]], jnp.int32)


def log_probabilities(params, model=MODEL):
    logits = teacher_forced_logits(model, params, INPUTS, TARGETS, 0, None)
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def one_step(objective, *, inputs=INPUTS, targets=TARGETS, state=None, model=MODEL, teacher=None):
    step = make_train_step(model, OPTIMIZER, objective, seed=0, teacher=teacher)
    state = init_state(PARAMS, OPTIMIZER, objective) if state is None else state
    return step(state, inputs, targets, None if teacher is None else TEACHER_PARAMS)


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_the_loss_mixes_smoothed_cross_entropy_and_divergence(weight):
    objective = Objective(label_smoothing=0.1, distillation_weight=weight, ema_decay=0.0)
    _, metrics = one_step(objective, teacher=MODEL if weight else None)
    q, p = log_probabilities(PARAMS), log_probabilities(TEACHER_PARAMS)
    target = 0.9 * np.eye(12)[np.asarray(TARGETS)] + 0.1 / 12
    loss = -(1 - weight) * (target * q).sum(-1) + weight * (np.exp(p) * (p - q)).sum(-1)
    # Per target token, not per row.
    expected = loss[np.asarray(TARGETS) != 0].sum() / 4
    assert float(metrics.loss) == pytest.approx(expected, rel=1e-4)
    assert int(metrics.tokens) == 4


def test_padding_and_filling_rows_change_nothing():
    objective = Objective()
    _, metrics = one_step(objective)
    padded = {
        "inputs": jnp.pad(INPUTS, ((0, 2), (0, 3))),
        "targets": jnp.pad(TARGETS, ((0, 2), (0, 3))),
    }
    padded["inputs"] = padded["inputs"].at[2:, 0].set(EOS)
    _, other_metrics = one_step(objective, **padded)
    assert float(metrics.loss) == pytest.approx(float(other_metrics.loss), rel=1e-5)
    assert float(metrics.grad_norm) == pytest.approx(float(other_metrics.grad_norm), rel=1e-4)
    assert int(metrics.tokens) == int(other_metrics.tokens)


def test_the_average_follows_the_parameters():
    objective = Objective(ema_decay=0.5)
    state = init_state(PARAMS, OPTIMIZER, objective)
    expected = jax.tree.map(np.asarray, PARAMS)
    # It starts smaller: (1 + step) / (10 + step), until that exceeds 0.5 at step 8.
    for decay in [1 / 10, 2 / 11, 3 / 12]:
        state, _ = one_step(objective, state=state)
        expected = jax.tree.map(
            lambda a, p, d=decay: d * a + (1 - d) * np.asarray(p), expected, state.params
        )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), state.average, expected
    )
    assert state.best_params is state.average
    late = init_state(PARAMS, OPTIMIZER, objective)._replace(step=jnp.asarray(100, jnp.int32))
    before = jax.tree.map(np.asarray, late.average)
    late, _ = one_step(objective, state=late)
    jax.tree.map(
        lambda a, b, p: np.testing.assert_allclose(
            a, (b + np.asarray(p)) / 2, rtol=1e-4, atol=1e-6
        ),
        late.average,
        before,
        late.params,
    )


def test_dropout_follows_from_the_step():
    model = T5(CONFIG.replace(dropout_rate=0.5))
    objective = Objective(ema_decay=0.0)
    losses = []
    for number in (0, 0, 1):
        state = init_state(PARAMS, OPTIMIZER, objective)._replace(
            step=jnp.asarray(number, jnp.int32)
        )
        losses.append(float(one_step(objective, state=state, model=model)[1].loss))
    assert losses[0] == losses[1] != losses[2]


def test_evaluation_sums_plain_cross_entropy_without_dropout():
    model = T5(CONFIG.replace(dropout_rate=0.5))
    total, tokens = make_eval_step(model)(PARAMS, INPUTS, TARGETS)
    q = log_probabilities(PARAMS)
    targets = np.asarray(TARGETS)
    each = -np.take_along_axis(q, targets[..., None], -1)[..., 0]
    assert float(total) == pytest.approx(each[targets != 0].sum(), rel=1e-4)
    assert int(tokens) == 4
