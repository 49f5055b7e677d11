"""The loss of pairs of texts, of both kinds of networks, and an update."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.data.batching import JoinedBatch, PairBatch
from specjax.models import Gemma2Config
from specjax.training import AdamW, Objective
from specjax.training.step import init_state, make_eval_step, make_train_step
from specjax.training.tasks import TextTask
from tests.training.toy import CONFIG, EOS, LLAMA
from tests.variants import variants

PLAIN = CONFIG.replace(dropout_rate=0.0)
GEMMA = Gemma2Config.of(12, 16, 2, 1, 8, 16, 2, sliding_window=4)
TASK = TextTask(model=PLAIN)
PARAMS = TASK.init(jax.random.key(0))
TEACHER_PARAMS = TASK.init(jax.random.key(1))
OPTIMIZER = AdamW(learning_rate=0.01, warmup_steps=1)
BATCH = PairBatch(
    inputs=jnp.asarray([[5, 6, EOS, 0], [7, EOS, 0, 0]], jnp.int32),
    targets=jnp.asarray([[6, 5, EOS, 0], [EOS, 0, 0, 0]], jnp.int32),
)
# Prompts of three and one token; targets with their end; the padding is the end's token too.
JOINED = JoinedBatch(
    tokens=jnp.asarray([[5, 6, 7, 8, 9, EOS, EOS, EOS], [4, 3, EOS, EOS, EOS, EOS, EOS, EOS]]),
    is_target=jnp.asarray([[0, 0, 0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0, 0, 0]], bool),
)
# A network, a batch, and the row, the place and the token of each target.
KINDS = {
    "encoder_decoder": (PLAIN, BATCH, [(0, 0, 6), (0, 1, 5), (0, 2, EOS), (1, 0, EOS)]),
    "decoder_only": (
        LLAMA,
        JOINED,
        [(0, 2, 8), (0, 3, 9), (0, 4, EOS), (1, 0, 3), (1, 1, EOS)],
    ),
}


@functools.partial(jax.jit, static_argnums=0)
def logits_of(config, params, batch):
    return TextTask(model=config).logits(config, params, batch)


def log_probabilities(config, params, batch):
    logits = np.asarray(logits_of(config, params, batch), np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def one_step(task=TASK, *, batch=BATCH, state=None, ema_decay=0.0, constants=None):
    step = make_train_step(task, OPTIMIZER, seed=0, ema_decay=ema_decay)
    state = init_state(PARAMS, OPTIMIZER, ema_decay) if state is None else state
    return step(state, constants, batch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weight", variants([0.0, 0.3, 1.0], 0.3))
def test_the_loss_is_of_the_targets_alone(kind, weight):
    """It mixes smoothed cross entropy and the divergence, per target token, not per row."""
    config, batch, targets = KINDS[kind]
    objective = Objective(label_smoothing=0.1, distillation_weight=weight)
    task = TextTask(model=config, objective=objective, teacher=config if weight else None)
    params, theirs = (task.init(jax.random.key(i)) for i in (0, 1))
    state = init_state(params, OPTIMIZER, 0.0)
    _, metrics = one_step(task, batch=batch, state=state, constants=theirs if weight else None)
    q, p = (log_probabilities(config, x, batch) for x in (params, theirs))
    expected = 0.0
    for row, place, token in targets:
        smoothed = 0.9 * np.eye(12)[token] + 0.1 / 12
        at = q[row, place]
        expected -= (1 - weight) * (smoothed * at).sum()
        expected += weight * (np.exp(p[row, place]) * (p[row, place] - at)).sum()
    assert float(metrics.loss) == pytest.approx(expected / len(targets), rel=1e-4)
    assert int(metrics.items) == len(targets)
    totals = make_eval_step(TextTask(model=config))(params, None, batch)
    plain = -sum(q[row, place, token] for row, place, token in targets)
    assert float(totals["loss"].sum) == pytest.approx(plain, rel=1e-4)
    assert int(totals["loss"].items) == int(totals["accuracy"].items) == len(targets)


def test_a_decoder_only_teacher_may_be_of_another_family():
    objective = Objective(label_smoothing=0.0, distillation_weight=1.0)
    task = TextTask(model=LLAMA, objective=objective, teacher=GEMMA)
    params, theirs = (TextTask(model=x).init(jax.random.key(0)) for x in (LLAMA, GEMMA))
    total = jax.jit(task.loss)(params, theirs, JOINED, jax.random.key(0))
    p, q = log_probabilities(GEMMA, theirs, JOINED), log_probabilities(LLAMA, params, JOINED)
    divergence = (np.exp(p) * (p - q)).sum(-1)
    mask = np.asarray(JOINED.is_target)[:, 1:]
    assert float(total.sum) == pytest.approx(divergence[mask].sum(), rel=1e-4)


def longer(kind):
    """A batch with more padding, of other tokens where it may be; and with rows of nothing."""
    if kind == "encoder_decoder":
        batch = jax.tree.map(lambda x: jnp.pad(x, ((0, 2), (0, 3))), BATCH)
        return batch._replace(inputs=batch.inputs.at[2:, 0].set(EOS))
    real = JOINED.is_target | (JOINED.tokens != EOS)
    filled = JoinedBatch(jnp.where(real, JOINED.tokens, 7), JOINED.is_target)
    return jax.tree.map(lambda x: jnp.pad(x, ((0, 2), (0, 3))), filled)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_filling_rows_change_nothing(kind):
    config, batch, _ = KINDS[kind]
    task = TextTask(model=config)
    params = task.init(jax.random.key(0))
    one, other = (
        one_step(task, batch=each, state=init_state(params, OPTIMIZER, 0.0))[1]
        for each in (batch, longer(kind))
    )
    assert float(one.loss) == pytest.approx(float(other.loss), rel=1e-5)
    assert float(one.grad_norm) == pytest.approx(float(other.grad_norm), rel=1e-4)
    assert int(one.items) == int(other.items)


@pytest.mark.parametrize("first", [0, 100])
def test_the_average_follows_the_parameters(first):
    """Its decay starts smaller: (1 + step) / (10 + step), until that exceeds 0.5 at step 8."""
    state = init_state(PARAMS, OPTIMIZER, 0.5)._replace(step=jnp.asarray(first, jnp.int32))
    expected = jax.tree.map(np.asarray, PARAMS)
    for decay in [1 / 10, 2 / 11, 3 / 12] if first == 0 else [0.5]:
        state, _ = one_step(state=state, ema_decay=0.5)
        expected = jax.tree.map(
            lambda a, p, d=decay: d * a + (1 - d) * np.asarray(p), expected, state.params
        )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), state.average, expected
    )
    assert state.best_params is state.average


def test_dropout_follows_from_the_step_and_does_not_count_in_evaluation():
    task = TextTask(model=CONFIG.replace(dropout_rate=0.5))
    losses = []
    for number in (0, 0, 1):
        state = init_state(PARAMS, OPTIMIZER, 0.0)._replace(step=jnp.asarray(number, jnp.int32))
        losses.append(float(one_step(task, state=state)[1].loss))
    assert losses[0] == losses[1] != losses[2]
    dropped, plain = (make_eval_step(x)(PARAMS, None, BATCH)["loss"].sum for x in (task, TASK))
    assert float(dropped) == pytest.approx(float(plain), rel=1e-6)


def test_equal_tasks_share_their_programs():
    again, options = TextTask(model=PLAIN), {"seed": 0, "ema_decay": 0.0}
    assert make_eval_step(again) is make_eval_step(TASK)
    steps = {make_train_step(task, OPTIMIZER, **options) for task in (again, TASK)}
    assert len(steps) == 1


def test_a_target_has_the_room_that_its_prompt_leaves():
    for config, rooms in ((LLAMA, [8, 5, 0, 0]), (PLAIN, [8, 8, 8, 0])):
        task = TextTask(model=config)
        assert [task.target_room(n, 8) for n in (0, 3, 8, 9)] == rooms


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (PLAIN, {"pad_id": EOS}, "pad_id=1 is also the end-of-sequence token"),
        (PLAIN, {"teacher": CONFIG.replace(vocab_size=16)}, "teacher's vocab_size=16 and the netw"),
        (PLAIN, {"teacher": LLAMA}, "a Llama cannot teach a T5 token by token; set distillation_w"),
        (LLAMA, {"teacher": CONFIG}, "a T5 cannot teach a Llama token by token"),
    ],
)
def test_what_cannot_be_learnt_is_refused(model, changes, message):
    weight = float("teacher" in changes)
    with pytest.raises(ValueError, match=message):
        TextTask(model=model, objective=Objective(distillation_weight=weight), **changes)
