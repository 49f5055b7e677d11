import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import TextModel, testing
from specjax.data.batching import JoinedLayout, PairBatch, PairLayout
from specjax.models import Seq2SeqLM, model_from_config
from specjax.text.teacher_forcing import KnownTexts
from specjax.tokenizers import ByteTokenizer
from specjax.training import Teacher
from specjax.training.tasks import TextTask
from specjax.training.teacher import (
    SAMPLES_NAME,
    AcceptedTokens,
    accepted_total,
    add_teacher_samples,
    draw_pairs,
    store_pairs,
)
from specjax.training.trainer import run_directory
from tests.training.toy import CONFIG, EOS, LLAMA, Numbers, copy_pairs
from tests.variants import variants

TASKS = {"encoder_decoder": TextTask(model=CONFIG), "decoder_only": TextTask(model=LLAMA)}
INPUTS = [copy_pairs(12, seed=2)[i][0] for i in range(12)]


def models(task):
    """A teacher and a student that often agrees with it."""
    teacher, noise = (task.init(jax.random.key(i)) for i in (3, 4))
    return teacher, jax.tree.map(lambda x, y: x + 0.5 * y, teacher, noise)


def text_model(config, params):
    return TextModel(model_from_config(config), params, Numbers())


@functools.partial(jax.jit, static_argnums=0)
def logits_of(task, params, batch):
    return task.logits(task.model, params, batch)


def probabilities(task, params, source, target):
    """`[T, V]` float64, of one row; padded, so that all rows have one program."""
    first = 0
    if task.model is CONFIG:
        batch = PairLayout().fill([(source, target)], 1, 16)
    else:
        batch = JoinedLayout().fill([(source, target)], 1, 16)
        first = len(source) - 1
    logits = np.asarray(logits_of(task, params, batch)[0, first : first + len(target)], np.float64)
    weights = np.exp(logits)
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
    variants(
        [(name, text) for name in TASKS for text in ("greedy", "sampled")],
        ("decoder_only", "sampled"),
        several=True,
    ),
)
def test_the_figures_are_those_of_their_definitions(name, text):
    task = TASKS[name]
    teacher, student = models(task)
    model = text_model(task.model, teacher)
    temperature = {"greedy": 0.0, "sampled": 1.0}[text]
    pairs = draw_pairs(model, INPUTS, [8] * 12, range(12), temperature=temperature, progress=False)
    calls = []

    def texts():
        calls.append(1)
        return KnownTexts(*zip(*(pairs[i] for i in range(len(pairs))), strict=True))

    figure = AcceptedTokens(task.model, text, 3, texts, model)
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


def test_a_teacher_may_be_of_another_family():
    teacher = text_model(CONFIG, TASKS["encoder_decoder"].init(jax.random.key(3)))
    texts = KnownTexts(INPUTS, INPUTS)
    figure = AcceptedTokens(LLAMA, "sampled", 3, lambda: texts, teacher)
    found = figure(TASKS["decoder_only"].init(jax.random.key(4)))
    assert 0.0 < found["validation_accepted_sampled"] < 3.0


def test_a_figure_that_chooses_is_measured():
    assert Teacher().measured("loss") == Teacher().measured("greedy") == ()
    assert Teacher(accepted=("sampled",)).measured("accepted_greedy") == ("sampled", "greedy")
    assert Teacher(accepted=["sampled"]).measured("accepted_sampled") == ("sampled",)


def test_a_drawn_text_ends_with_the_token_that_ended_it():
    """Chat models have several, of which the first is not that of a turn."""
    first, turn, word = 1, 40, 50
    words = ByteTokenizer()
    words.eos_ids = (first, turn)
    table = np.full((1, words.vocab_size), -np.inf, np.float32)
    table[0, [turn, word]] = 0.0
    model = TextModel(testing.TabularModel(words.vocab_size, 0), jnp.asarray(table), words)
    inputs = [np.array([10, 11], np.int32)] * 8
    pairs = draw_pairs(model, inputs, [6] * 8, range(8), temperature=1.0, progress=False)
    targets = [pairs[i][1].tolist() for i in range(len(pairs))]
    ended = [target for target in targets if target[-1] != word]
    assert ended and all(target[-1] == turn and first not in target for target in ended)


MODEL = Seq2SeqLM(CONFIG)
PARAMS = MODEL.init(jax.random.key(3))
PAIRS = copy_pairs(6, seed=2)


def sample(pairs=PAIRS, params=PARAMS, **changes):
    options = {"samples": 1, "room": lambda _: 8, "seed": 1, "progress": False}
    teacher = TextModel(MODEL, params, Numbers())
    return add_teacher_samples(pairs, teacher, **(options | changes))


def test_samples_are_drawn_once_and_follow_the_references(tmp_path):
    """A draw depends on its place and its round: fewer rounds or inputs move no other."""
    twice, once = sample(samples=2), sample()
    rows = [
        [target.tolist() for _, target in map(x.__getitem__, range(len(x)))] for x in (twice, once)
    ]
    assert len(rows[0]) == 18 and rows[0][:12] == rows[1] and rows[0][6:12] != rows[0][12:]
    assert rows[0][:6] == [PAIRS[i][1].tolist() for i in range(6)]
    assert all(target[-1] == EOS or len(target) == 8 for target in rows[0])
    for i in range(18):
        np.testing.assert_array_equal(twice[i][0], PAIRS[i % 6][0])
    longest = max(len(PAIRS[i][0]) for i in range(6))
    fewer = sample(room=lambda n: 8 if n < longest else 0)
    kept = [i for i in range(6) if len(PAIRS[i][0]) < longest]
    assert len(fewer) == 6 + len(kept) < 12
    assert [fewer[6 + n][1].tolist() for n in range(len(kept))] == [rows[1][6 + i] for i in kept]
    with run_directory(tmp_path / "run", [SAMPLES_NAME]) as run:
        run.claim({})
        store_pairs(run, "teacher", lambda: twice)
        again = store_pairs(run, "teacher", lambda: pytest.fail("drawn again"))
    np.testing.assert_array_equal(again.tokens, twice.tokens)
    np.testing.assert_array_equal(again.offsets, twice.offsets)


def test_samples_follow_the_models_distribution_at_temperature_1():
    count = 1000
    source = PAIRS[0][0]
    # The same input many times, and one token of each draw.
    many = copy_pairs(1, seed=2)
    many = type(many)(
        np.tile(many.tokens, count), np.cumsum([0, *np.tile(many.lengths()[0], count)])
    )
    drawn = sample(many, room=lambda n: 1)
    first = np.asarray([drawn[count + i][1][0] for i in range(count)])
    batch = PairBatch(jnp.asarray(source)[None], jnp.full((1, 1), EOS, jnp.int32))
    logits = TASKS["encoder_decoder"].logits(CONFIG, PARAMS, batch)
    expected = np.asarray(jax.nn.softmax(logits[0, 0]))
    observed = np.bincount(first, minlength=CONFIG.vocab_size)
    chi2 = float(((observed - count * expected) ** 2 / (count * expected)).sum())
    # 11 degrees of freedom: 31.3 is exceeded with probability 0.001.
    assert chi2 < 31.3


def test_a_sample_that_was_cut_off_does_not_teach_to_end_there():
    endless = jax.tree.map(jnp.array, PARAMS)
    kernel = endless["decoder"]["logits_dense"]["kernel"]
    endless["decoder"]["logits_dense"]["kernel"] = kernel.at[:, EOS].set(0.0).at[:, 5].add(3.0)
    more = sample(params=endless)
    targets = [more[i][1] for i in range(6, 12)]
    assert any(EOS not in target for target in targets)
    for target in targets:
        assert EOS not in target[:-1]
        assert len(target) == 8 or target[-1] == EOS
