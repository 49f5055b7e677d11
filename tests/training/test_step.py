import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.data.batching import PairBatch
from specjax.models import LlamaConfig
from specjax.training import AdamW, Objective
from specjax.training.step import init_state, make_eval_step, make_train_step
from specjax.training.tasks import TextTask
from tests.training.toy import CONFIG, EOS
from tests.variants import variants

PLAIN = CONFIG.replace(dropout_rate=0.0)
TASK = TextTask(model=PLAIN)
PARAMS = TASK.init(jax.random.key(0))
TEACHER_PARAMS = TASK.init(jax.random.key(1))
OPTIMIZER = AdamW(learning_rate=0.01, warmup_steps=1)
BATCH = PairBatch(
    inputs=jnp.asarray([[5, 6, EOS, 0], [7, EOS, 0, 0]], jnp.int32),
    targets=jnp.asarray([[6, 5, EOS, 0], [EOS, 0, 0, 0]], jnp.int32),
)
TARGETS = np.asarray(BATCH.targets)


def log_probabilities(params):
    logits = np.asarray(TASK.logits(PLAIN, params, BATCH), np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def one_step(task=TASK, *, batch=BATCH, state=None, ema_decay=0.0):
    step = make_train_step(task, OPTIMIZER, seed=0, ema_decay=ema_decay)
    state = init_state(PARAMS, OPTIMIZER, ema_decay) if state is None else state
    return step(state, None if task.teacher is None else TEACHER_PARAMS, batch)


@pytest.mark.parametrize("weight", variants([0.0, 0.3, 1.0], 0.3))
def test_the_loss_mixes_smoothed_cross_entropy_and_divergence(weight):
    objective = Objective(label_smoothing=0.1, distillation_weight=weight)
    task = TextTask(model=PLAIN, objective=objective, teacher=PLAIN if weight else None)
    _, metrics = one_step(task)
    q, p = log_probabilities(PARAMS), log_probabilities(TEACHER_PARAMS)
    target = 0.9 * np.eye(12)[TARGETS] + 0.1 / 12
    loss = -(1 - weight) * (target * q).sum(-1) + weight * (np.exp(p) * (p - q)).sum(-1)
    # Per target token, not per row.
    expected = loss[TARGETS != 0].sum() / 4
    assert float(metrics.loss) == pytest.approx(expected, rel=1e-4)
    assert int(metrics.items) == 4


def test_padding_and_filling_rows_change_nothing():
    _, metrics = one_step()
    padded = jax.tree.map(lambda x: jnp.pad(x, ((0, 2), (0, 3))), BATCH)
    padded = padded._replace(inputs=padded.inputs.at[2:, 0].set(EOS))
    _, other_metrics = one_step(batch=padded)
    assert float(metrics.loss) == pytest.approx(float(other_metrics.loss), rel=1e-5)
    assert float(metrics.grad_norm) == pytest.approx(float(other_metrics.grad_norm), rel=1e-4)
    assert int(metrics.items) == int(other_metrics.items)


def test_the_average_follows_the_parameters():
    state = init_state(PARAMS, OPTIMIZER, 0.5)
    expected = jax.tree.map(np.asarray, PARAMS)
    # It starts smaller: (1 + step) / (10 + step), until that exceeds 0.5 at step 8.
    for decay in [1 / 10, 2 / 11, 3 / 12]:
        state, _ = one_step(state=state, ema_decay=0.5)
        expected = jax.tree.map(
            lambda a, p, d=decay: d * a + (1 - d) * np.asarray(p), expected, state.params
        )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), state.average, expected
    )
    assert state.best_params is state.average
    late = init_state(PARAMS, OPTIMIZER, 0.5)._replace(step=jnp.asarray(100, jnp.int32))
    before = jax.tree.map(np.asarray, late.average)
    late, _ = one_step(state=late, ema_decay=0.5)
    jax.tree.map(
        lambda a, b, p: np.testing.assert_allclose(
            a, (b + np.asarray(p)) / 2, rtol=1e-4, atol=1e-6
        ),
        late.average,
        before,
        late.params,
    )


def test_dropout_follows_from_the_step():
    task = TextTask(model=CONFIG.replace(dropout_rate=0.5))
    losses = []
    for number in (0, 0, 1):
        state = init_state(PARAMS, OPTIMIZER, 0.0)._replace(step=jnp.asarray(number, jnp.int32))
        losses.append(float(one_step(task, state=state)[1].loss))
    assert losses[0] == losses[1] != losses[2]


def test_evaluation_sums_plain_cross_entropy_without_dropout():
    task = TextTask(model=CONFIG.replace(dropout_rate=0.5))
    totals = make_eval_step(task)(PARAMS, None, BATCH)
    each = -np.take_along_axis(log_probabilities(PARAMS), TARGETS[..., None], -1)[..., 0]
    assert float(totals["loss"].sum) == pytest.approx(each[TARGETS != 0].sum(), rel=1e-4)
    assert int(totals["loss"].items) == 4


def test_equal_tasks_share_their_programs():
    again = TextTask(model=PLAIN)
    assert make_eval_step(again) is make_eval_step(TASK)
    options = {"seed": 0, "ema_decay": 0.0}
    assert make_train_step(again, OPTIMIZER, **options) is make_train_step(
        TASK, OPTIMIZER, **options
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pad_id": EOS}, "pad_id=1 is also the end-of-sequence token"),
        (
            {
                "objective": Objective(distillation_weight=1.0),
                "teacher": CONFIG.replace(vocab_size=16),
            },
            "teacher's vocab_size=16 and the network's vocab_size=12 must",
        ),
        (
            {
                "objective": Objective(distillation_weight=1.0),
                "teacher": LlamaConfig(
                    vocab_size=12, embed_dim=8, num_heads=1, num_kv_heads=1, head_dim=8,
                    mlp_dim=8, num_layers=1,
                ),
            },
            "a Llama cannot teach a T5 token by token; set distillation_weight to 0",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_learnt_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        TextTask(model=PLAIN, **changes)
