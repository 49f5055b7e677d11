import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import TextModel
from specjax.data.batching import PairBatch
from specjax.models import Seq2SeqLM
from specjax.training.tasks import TextTask
from specjax.training.teacher import SAMPLES_NAME, add_teacher_samples, stored_pairs
from specjax.training.trainer import run_directory
from tests.training.toy import CONFIG, EOS, Numbers, copy_pairs

MODEL = Seq2SeqLM(CONFIG)
PARAMS = MODEL.init(jax.random.key(3))
PAIRS = copy_pairs(6, seed=2)


def room(length):
    return 8 if length <= 8 else 0


def sample(pairs=PAIRS, params=PARAMS, **changes):
    options = {"samples": 1, "room": room, "seed": 1, "progress": False, "batch_size": 8}
    teacher = TextModel(MODEL, params, Numbers())
    return add_teacher_samples(pairs, teacher, **(options | changes))


def endless():
    """Parameters whose logits hardly ever prefer the end."""
    params = jax.tree.map(jnp.array, PARAMS)
    kernel = params["decoder"]["logits_dense"]["kernel"]
    params["decoder"]["logits_dense"]["kernel"] = kernel.at[:, EOS].set(0.0).at[:, 5].add(3.0)
    return params


@pytest.fixture(scope="module")
def grown():
    return sample(samples=2)


def test_stored_pairs_are_drawn_once(grown, tmp_path):
    with run_directory(tmp_path / "run", [SAMPLES_NAME]) as run:
        run.claim({})
        stored_pairs(run, "teacher", lambda: grown)
        again = stored_pairs(run, "teacher", lambda: pytest.fail("drawn again"))
        np.testing.assert_array_equal(again.tokens, grown.tokens)
        np.testing.assert_array_equal(again.offsets, grown.offsets)


def test_samples_are_reproducible_and_follow_the_references(grown):
    np.testing.assert_array_equal(grown.tokens, sample(samples=2).tokens)
    assert len(grown) == 18
    for i in range(18):
        np.testing.assert_array_equal(grown[i][0], PAIRS[i % 6][0])
        assert grown[i][1][-1] == EOS or len(grown[i][1]) == 8
        if i < 6:
            np.testing.assert_array_equal(grown[i][1], PAIRS[i][1])
    drawn = [[grown[6 * r + i][1].tolist() for i in range(6)] for r in (1, 2)]
    assert drawn[0] != drawn[1]


def test_a_draw_depends_on_its_place_and_round_alone(grown):
    """Fewer rounds, and inputs that leave no room for a target, move no other draw."""
    once = sample(samples=1)
    for i in range(12):
        np.testing.assert_array_equal(once[i][1], grown[i][1])
    longest = max(len(PAIRS[i][0]) for i in range(6))
    fewer = sample(room=lambda n: 8 if n < longest else 0)
    kept = [i for i in range(6) if len(PAIRS[i][0]) < longest]
    assert len(fewer) == 6 + len(kept) < 12
    for place, i in enumerate(kept):
        np.testing.assert_array_equal(fewer[6 + place][1], once[6 + i][1])


def test_samples_follow_the_models_distribution_at_temperature_1():
    count = 1000
    source = PAIRS[0][0]
    # The same input many times, and one token of each draw.
    many = copy_pairs(1, seed=2)
    many = type(many)(
        np.tile(many.tokens, count), np.cumsum([0, *np.tile(many.lengths()[0], count)])
    )
    drawn = sample(many, room=lambda n: 1, batch_size=1000)
    first = np.asarray([drawn[count + i][1][0] for i in range(count)])
    task = TextTask(model=CONFIG)
    batch = PairBatch(jnp.asarray(source)[None], jnp.full((1, 1), EOS, jnp.int32))
    expected = np.asarray(jax.nn.softmax(task.logits(CONFIG, PARAMS, batch)[0, 0]))
    observed = np.bincount(first, minlength=CONFIG.vocab_size)
    chi2 = float(((observed - count * expected) ** 2 / (count * expected)).sum())
    # 11 degrees of freedom: 31.3 is exceeded with probability 0.001.
    assert chi2 < 31.3


def test_a_sample_that_was_cut_off_does_not_teach_to_end_there():
    grown = sample(params=endless())
    targets = [grown[i][1] for i in range(6, 12)]
    cut = [target for target in targets if EOS not in target]
    assert cut
    assert all(len(target) == 8 for target in cut)
    for target in targets:
        assert len(target) <= 8
        assert EOS not in target[:-1]
