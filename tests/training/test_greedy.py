import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.data import tokenize_pairs
from specjax.models import T5
from specjax.training import add_teacher_samples, generate
from specjax.training.step import teacher_forced_logits
from tests.training.toy import CONFIG, EOS, copies, encode

MODEL = T5(CONFIG)
PARAMS = MODEL.init(jax.random.key(3))
INPUTS = [np.asarray([*encode(e.inputs), EOS], np.int32) for e in copies(10, seed=5)]
OPTIONS = {"bucket_lengths": (4, 8), "eos_id": EOS, "rows": 4, "max_tokens": 6}


@pytest.fixture(scope="module")
def logits():
    """Logits of one output given one input, by the whole network at once."""
    jitted = jax.jit(lambda s, t: teacher_forced_logits(MODEL, PARAMS, s, t, 0, None))
    return lambda source, target: np.asarray(jitted(source[None], target[None])[0])


def test_greedy_outputs_are_the_most_likely_tokens(logits):
    outputs = generate(MODEL, PARAMS, INPUTS, **OPTIONS)
    assert len(outputs) == len(INPUTS)
    for source, output in zip(INPUTS, outputs, strict=True):
        padded = np.zeros(8, np.int32)
        padded[: len(source)] = source
        target = np.full(7, EOS, np.int32)
        target[: len(output)] = output
        best = logits(padded, target).argmax(-1)
        np.testing.assert_array_equal(best[: len(output)], output)
        assert len(output) == 6 or best[len(output)] == EOS
        assert EOS not in output


def test_outputs_do_not_depend_on_the_batch():
    together = generate(MODEL, PARAMS, INPUTS, **OPTIONS)
    backwards = generate(MODEL, PARAMS, INPUTS[::-1], **(OPTIONS | {"rows": 3}))[::-1]
    for a, b in zip(together, backwards, strict=True):
        np.testing.assert_array_equal(a, b)


def test_samples_follow_the_models_distribution(logits):
    count = 4000
    outputs = generate(
        MODEL,
        PARAMS,
        INPUTS[:1] * count,
        **(OPTIONS | {"rows": count, "max_tokens": 1}),
        key=jax.random.key(0),
    )
    first = np.asarray([output[0] if len(output) else EOS for output in outputs])
    padded = np.zeros(8, np.int32)
    padded[: len(INPUTS[0])] = INPUTS[0]
    expected = np.asarray(jax.nn.softmax(logits(padded, np.full(7, EOS, np.int32))[0]))
    observed = np.bincount(first, minlength=CONFIG.vocab_size)
    chi2 = float(((observed - count * expected) ** 2 / (count * expected)).sum())
    # 11 degrees of freedom: 31.3 is exceeded with probability 0.001.
    assert chi2 < 31.3


def test_samples_are_reproducible_and_follow_the_references():
    pairs = tokenize_pairs(copies(6, seed=2), encode, EOS)
    options = {"samples": 2, "bucket_lengths": (4, 8), "seed": 1, "eos_id": EOS, "pad_id": 0}
    grown = add_teacher_samples(pairs, MODEL, PARAMS, **options)
    again = add_teacher_samples(pairs, MODEL, PARAMS, **options)
    np.testing.assert_array_equal(grown.tokens, again.tokens)
    assert len(grown) == 18
    for i in range(18):
        np.testing.assert_array_equal(grown[i][0], pairs[i % 6][0])
        assert grown[i][1][-1] == EOS or len(grown[i][1]) == 8
        if i < 6:
            np.testing.assert_array_equal(grown[i][1], pairs[i][1])
    drawn = [[grown[6 * r + i][1].tolist() for i in range(6)] for r in (1, 2)]
    assert drawn[0] != drawn[1]


def test_an_input_past_the_last_bucket_is_told():
    with pytest.raises(ValueError, match=r"input 1 has 9 tokens, more than the last bucket \(8\)"):
        generate(MODEL, PARAMS, [INPUTS[0], np.full(9, 5, np.int32)], **OPTIONS)


def test_an_output_may_fill_its_limit():
    outputs = generate(MODEL, endless(), INPUTS, **OPTIONS)
    assert all(len(output) <= 6 for output in outputs)
    assert max(len(output) for output in outputs) == 6


def endless():
    """Parameters whose logits hardly ever prefer the end."""
    params = jax.tree.map(jnp.array, PARAMS)
    kernel = params["decoder"]["logits_dense"]["kernel"]
    params["decoder"]["logits_dense"]["kernel"] = kernel.at[:, EOS].set(0.0).at[:, 5].add(3.0)
    return params


def test_a_sample_that_was_cut_off_does_not_teach_to_end_there():
    pairs = tokenize_pairs(copies(6, seed=2), encode, EOS)
    options = {"samples": 1, "bucket_lengths": (4, 8), "seed": 1, "eos_id": EOS, "pad_id": 0}
    grown = add_teacher_samples(pairs, MODEL, endless(), **options)
    targets = [grown[i][1] for i in range(6, 12)]
    cut = [target for target in targets if EOS not in target]
    assert cut
    assert all(len(target) == 8 for target in cut)
    for target in targets:
        assert len(target) <= 8
        assert EOS not in target[:-1]
