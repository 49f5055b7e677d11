import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import TextModel
from specjax.data import Batching, JoinedBatch, PairBatch
from specjax.models import T5, Llama, LlamaConfig
from specjax.training import Acceptance, AcceptedTokens, DecoderOnly, Seq2Seq, accepted_total
from specjax.training.distillation import Writer, joined
from tests.training.toy import CONFIG, Numbers, copy_pairs

LLAMA = LlamaConfig(
    vocab_size=12, embed_dim=32, num_heads=2, num_kv_heads=1, head_dim=16, mlp_dim=32, num_layers=1
)
TASKS = {"seq2seq": Seq2Seq(model=CONFIG), "decoder_only": DecoderOnly(model=LLAMA)}
INPUTS = [copy_pairs(12, seed=2)[i][0] for i in range(12)]


def models(task):
    """A teacher and a student that often agrees with it."""
    teacher, noise = (task.init(jax.random.key(i)) for i in (3, 4))
    return teacher, jax.tree.map(lambda x, y: x + 0.5 * y, teacher, noise)


def written(task, teacher, temperature):
    network = T5(CONFIG) if isinstance(task, Seq2Seq) else Llama(LLAMA)
    write = Writer(
        TextModel(network, teacher, Numbers()),
        temperature=temperature, longest=8, longest_input=8, progress=False,
    )  # fmt: skip
    targets = write(INPUTS, [8] * 12, range(12))
    # An untrained network writes padding, too, which no task counts.
    kept = [i for i in range(12) if 0 not in targets[i]]
    assert len(kept) > 3
    return joined([INPUTS[i] for i in kept], [targets[i] for i in kept])


def probabilities(task, params, source, target):
    """`[T, V]` float64, of one row without padding."""
    if isinstance(task, Seq2Seq):
        logits = task.logits(CONFIG, params, PairBatch(source[None], target[None]))[0]
    else:
        tokens = np.concatenate([source, target])[None]
        logits = task.logits(LLAMA, params, JoinedBatch(tokens, tokens > 0))[0, len(source) - 1 :]
    weights = np.exp(np.asarray(logits, np.float64))
    return weights / weights.sum(-1, keepdims=True)


def blocks(acceptance, draft):
    """For each start: the expected number of tokens that a block there gets accepted."""
    ends = [min(len(acceptance), start + draft) for start in range(len(acceptance))]
    return [np.cumprod(acceptance[start:end]).sum() for start, end in enumerate(ends)]


@pytest.mark.parametrize("draft", [1, 3, 20])
def test_the_total_is_the_sum_over_starts_of_products_of_acceptances(draft):
    rng = np.random.default_rng(0)
    acceptance, mask = rng.random((4, 8)), np.zeros((4, 8), bool)
    expected = 0.0
    for row, (first, end) in enumerate([(0, 5), (3, 4), (0, 8), (2, 2)]):
        mask[row, first:end] = True
        expected += sum(blocks(acceptance[row, first:end], draft))
    total = accepted_total(jnp.asarray(acceptance, jnp.float32), jnp.asarray(mask), draft)
    assert float(total.sum) == pytest.approx(expected, rel=1e-5)
    assert int(total.items) == 14


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param("seq2seq", "greedy", marks=pytest.mark.exhaustive),
        ("decoder_only", "sampled"),
        pytest.param("seq2seq", "sampled", marks=pytest.mark.exhaustive),
        pytest.param("decoder_only", "greedy", marks=pytest.mark.exhaustive),
    ],
)
def test_the_figures_are_those_of_their_definitions(name, text):
    task = TASKS[name]
    teacher, student = models(task)
    pairs = written(task, teacher, {"greedy": 0.0, "sampled": 1.0}[text])
    batching = Batching(tokens_per_batch=64, bucket_lengths=(8, 16))
    calls = []

    def batches():
        calls.append(1)
        return task.batches(pairs, batching, seed=None, row_multiple=1)

    figure = AcceptedTokens(task, text, 3, batches, task.model, teacher)
    means = {}
    for name, params in (("student", student), ("teacher", teacher)):
        found = []
        for source, target in (pairs[i] for i in range(len(pairs))):
            p, q = (probabilities(task, x, source, target) for x in (teacher, params))
            agree = (q.argmax(-1) == p.argmax(-1)).astype(float)
            found += blocks(agree if text == "greedy" else np.minimum(p, q).sum(-1), 3)
        means[name] = np.mean(found)
        assert figure(params) == {
            f"validation_accepted_{text}": pytest.approx(means[name], rel=1e-4)
        }
    # The teacher accepts all of its own drafts: the text is what it would write.
    assert 0.2 < means["student"] < 0.9 * means["teacher"]
    assert calls == [1]


def test_a_teacher_of_another_family_measures_greedy_texts_alone():
    task = TASKS["decoder_only"]
    AcceptedTokens(task, "greedy", 3, list, CONFIG, None)
    with pytest.raises(
        ValueError, match="a T5 cannot teach a Llama .*; measure greedy texts alone"
    ):
        AcceptedTokens(task, "sampled", 3, list, CONFIG, None)


def test_a_figure_that_chooses_is_measured():
    assert Acceptance().with_figure("loss") == Acceptance()
    assert Acceptance().with_figure("greedy") == Acceptance()
    both = Acceptance(texts=("sampled",), draft=2).with_figure("accepted_greedy")
    assert both == Acceptance(texts=("sampled", "greedy"), draft=2)
    assert both.with_figure("accepted_greedy") == both
