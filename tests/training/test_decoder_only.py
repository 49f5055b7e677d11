import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Decoder, TextModel
from specjax.data.batching import Batching, JoinedBatch
from specjax.models import CausalLM, Gemma2Config, LlamaConfig
from specjax.training import Objective
from specjax.training.tasks import TextTask
from specjax.types import Sampling
from tests.training.toy import CONFIG, EOS, Numbers, copies, copy_pairs, train_copies

LLAMA = LlamaConfig(
    vocab_size=12, embed_dim=32, num_heads=2, num_kv_heads=1, head_dim=16, mlp_dim=32, num_layers=1
)
GEMMA = Gemma2Config(
    vocab_size=12, embed_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=16,
    num_layers=2, sliding_window=4,
)  # fmt: skip
PLAIN = Objective(label_smoothing=0.0)
TASK = TextTask(model=LLAMA, objective=PLAIN)
KEY = jax.random.key(0)
PARAMS = TASK.init(KEY)
# Prompts of three and one token; targets with their end; the padding is the end's token too.
BATCH = JoinedBatch(
    tokens=jnp.asarray([[5, 6, 7, 8, 9, EOS, EOS, EOS], [4, 3, EOS, EOS, EOS, EOS, EOS, EOS]]),
    is_target=jnp.asarray([[0, 0, 0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0, 0, 0]], bool),
)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(config, params, batch):
    return TextTask(model=config).logits(config, params, batch)


@functools.partial(jax.jit, static_argnums=0)
def loss_of(task, params, constants, batch):
    return task.loss(params, constants, batch, KEY)


def log_probabilities(params=PARAMS, config=LLAMA, batch=BATCH):
    logits = np.asarray(logits_of(config, params, batch), np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_the_loss_is_of_the_targets_and_their_end_alone():
    total = loss_of(TASK, PARAMS, None, BATCH)
    q = log_probabilities()
    rows = [(0, 2, 8), (0, 3, 9), (0, 4, EOS), (1, 0, 3), (1, 1, EOS)]
    expected = -sum(q[row, place, token] for row, place, token in rows)
    assert float(total.sum) == pytest.approx(expected, rel=1e-4)
    assert int(total.items) == 5
    figures = jax.jit(TASK.evaluate)(PARAMS, None, BATCH)
    assert float(figures["loss"].sum) == pytest.approx(expected, rel=1e-4)
    assert int(figures["accuracy"].items) == 5


def test_padding_changes_nothing():
    total = loss_of(TASK, PARAMS, None, BATCH)
    other = JoinedBatch(
        jnp.pad(
            jnp.where(BATCH.is_target | (BATCH.tokens != EOS), BATCH.tokens, 7), ((0, 1), (0, 3))
        ),
        jnp.pad(BATCH.is_target, ((0, 1), (0, 3))),
    )
    padded = loss_of(TASK, PARAMS, None, other)
    assert float(total.sum) == pytest.approx(float(padded.sum), rel=1e-5)
    assert int(total.items) == int(padded.items)


def test_no_gradient_comes_from_predicting_prompts():
    """Were the prompt learnt, its tokens' rows of the output projection would be pushed up."""

    @jax.jit
    def of_kernel(is_target):
        batch = BATCH._replace(is_target=is_target)
        grads = jax.grad(lambda p: TASK.loss(p, None, batch, KEY).sum)(PARAMS)
        return grads["decoder"]["logits_dense"]["kernel"]

    def gradient(is_target):
        return np.asarray(of_kernel(is_target))

    nothing = jnp.zeros_like(BATCH.is_target)
    assert not gradient(nothing).any()
    assert gradient(BATCH.is_target).any()
    # Prompt tokens 5 and 6 are no target: each column has only the push down of a softmax.
    pushed = gradient(BATCH.is_target.at[0, 1].set(True)) - gradient(BATCH.is_target)
    assert np.abs(pushed[:, 6]).max() > 0.1 * np.abs(pushed).max()


@pytest.mark.parametrize("teacher", [LLAMA, GEMMA])
def test_a_student_learns_from_any_decoder_only_teacher(teacher):
    objective = Objective(label_smoothing=0.0, distillation_weight=1.0)
    task = TextTask(model=LLAMA, objective=objective, teacher=teacher)
    constants = TextTask(model=teacher).init(jax.random.key(1))
    total = loss_of(task, PARAMS, constants, BATCH)
    p, q = log_probabilities(constants, teacher), log_probabilities()
    divergence = (np.exp(p) * (p - q)).sum(-1)
    mask = np.asarray(BATCH.is_target)[:, 1:]
    assert float(total.sum) == pytest.approx(divergence[mask].sum(), rel=1e-4)


def test_a_t5_cannot_teach_it_token_by_token():
    with pytest.raises(ValueError, match="a T5 cannot teach a Llama token by token"):
        TextTask(model=LLAMA, objective=Objective(distillation_weight=1.0), teacher=CONFIG)


def test_a_target_has_the_room_that_its_prompt_leaves():
    assert [TASK.target_room(n, 8) for n in (0, 3, 8, 9)] == [8, 5, 0, 0]


def test_a_trained_network_answers_and_ends(tmp_path):
    """To repeat one token and end is soon learnt, and shows both: the answer, and its end."""
    pairs = copy_pairs(300, longest=1)
    result = train_copies(
        tmp_path,
        task=TASK,
        training_pairs=pairs,
        validation_pairs=copy_pairs(20, seed=1, longest=1),
        batching=Batching(tokens_per_batch=256, bucket_lengths=(8,)),
        num_steps=60,
        checkpoint_every=60,
    )
    decoder = Decoder(
        TextModel(CausalLM(LLAMA), result.params, Numbers()),
        sampling=Sampling(0.0),
        max_new_tokens=8,
    )
    examples = copies(9, seed=3, longest=1)
    decoded = decoder([example.inputs for example in examples], progress=False)
    assert decoded.ended.all()
    # The answer goes on with the prompt, behind a space.
    assert decoded.texts == [f" {example.targets}" for example in examples]
