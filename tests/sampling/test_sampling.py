"""Distributions from logits, and draws from them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import kernel_choice, sampling
from specjax.sampling import distributions
from specjax.types import Sampling

distribution = jax.jit(sampling.distributions.distribution)
by_row = jax.jit(jax.vmap(sampling.distributions.distribution, in_axes=(0, None)))
ONE_BELOW = np.float32(1.0) - np.finfo(np.float32).epsneg


def reference(logits, temperature=1.0, top_k=None, top_p=None):
    """The same distribution in float64, by sorting."""
    logits = np.asarray(logits, np.float64)
    if temperature == 0.0:
        return np.eye(len(logits))[np.argmax(logits)]
    weights = np.exp((logits - logits.max()) / temperature)
    if top_k is not None and top_k < len(logits):
        weights[logits < np.sort(logits)[-top_k]] = 0.0
    if top_p is not None and top_p < 1.0:
        above = np.array([weights[weights > w].sum() for w in weights])
        weights[above >= top_p * weights.sum()] = 0.0
    return weights / weights.sum()


SETTINGS = [
    {},
    *({"temperature": x} for x in (0.0, 0.3, 1e-30)),
    *({"top_k": x} for x in (1, 7, 10_000)),
    *({"top_p": x} for x in (0.5, 1.0, 1e-6, 1e-38)),  # the last is below the least normal number
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.3},
]


@pytest.mark.parametrize("kwargs", SETTINGS)
def test_matches_sorting(kwargs):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((20, 600)).astype(np.float32) * 2
    logits[rng.random(logits.shape) < 0.2] = -np.inf
    got = by_row(logits, Sampling(**kwargs))
    want = np.stack([reference(row, **kwargs) for row in logits])
    np.testing.assert_allclose(got, want, atol=2e-6)
    assert (np.asarray(got)[want == 0.0] == 0.0).all()


def test_each_row_has_its_own_settings():
    logits = np.random.default_rng(1).standard_normal((3, 50)).astype(np.float32)
    rows = Sampling([0.0, 0.5, 2.0], top_k=[50, 5, 1], top_p=[0.5, 0.9, 1.0])
    got = jax.jit(jax.vmap(sampling.distributions.distribution))(logits, rows)
    for i, (t, k, p) in enumerate([(0.0, 50, 0.5), (0.5, 5, 0.9), (2.0, 1, 1.0)]):
        np.testing.assert_allclose(got[i], reference(logits[i], t, k, p), atol=1e-6)


def test_ties_at_the_edges_stay():
    logits = jnp.log(jnp.array([0.4, 0.2, 0.2, 0.1, 0.1], jnp.float32))
    top_k = distribution(logits, Sampling(top_k=2))
    np.testing.assert_allclose(top_k, [0.5, 0.25, 0.25, 0, 0], atol=1e-6)
    top_p = distribution(logits, Sampling(top_p=0.5))
    np.testing.assert_allclose(top_p, [0.5, 0.25, 0.25, 0, 0], atol=1e-6)


EXTREME = {
    (-np.inf, 2.0, -np.inf): [0, 1, 0],
    (np.inf, 0.0, np.inf): [0.5, 0, 0.5],
    (-np.inf, -np.inf): [0.5, 0.5],
    (3.4e38, -3.4e38): [1, 0],
    (5.0,): [1],
}


@pytest.mark.parametrize("logits", EXTREME)
@pytest.mark.parametrize("settings", [{}, {"top_k": 1000, "top_p": 0.99}, {"temperature": 0.0}])
def test_extreme_logits(logits, settings):
    want = EXTREME[logits]
    if "temperature" in settings:  # the first of the largest
        want = np.eye(len(want))[np.argmax(want)]
    got = distribution(jnp.array(logits, jnp.float32), Sampling(**settings))
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_a_huge_temperature_is_uniform_over_possible_tokens():
    got = distribution(jnp.array([1.0, -jnp.inf, 0.0]), Sampling(3e38))
    np.testing.assert_allclose(got, [0.5, 0.0, 0.5], atol=1e-6)


@pytest.mark.parametrize("size", [5, 2048])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_give_nan(size, temperature):
    for place in (0, size // 2, size - 1):
        logits = jnp.linspace(-1.0, 1.0, size, dtype=jnp.bfloat16).at[place].set(jnp.nan)
        found = distribution(logits, Sampling(temperature))
        assert np.isnan(found).all() and found.dtype == jnp.float32


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_filter_does_not_hide_nan(sign):
    """Processors give NaN of either sign: inf - inf is a negative NaN on CPUs."""
    nan = np.copysign(np.float32(np.nan), np.float32(sign))
    logits = jnp.asarray(np.array([1.0, nan, 3.0, -2.0], np.float32))
    # Not a constant, in which the sign could be lost.
    rank = jax.jit(distributions.descending_bits)(logits)
    for k in (1, 2):
        assert jax.jit(distributions.in_top_k)(rank, jnp.int32(k))[1]
    for kept in ({"top_k": 1}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.5}):
        assert np.isnan(distribution(logits, Sampling(1.0, **kept))).all()
        # Over many tokens of several rows XLA's maximum loses NaN.
        rows = jnp.linspace(-1.0, 1.0, 3000).at[1500].set(nan)[None].repeat(3, axis=0)
        found = by_row(rows, Sampling(1.0, **kept))
        assert np.isnan(found).all()


def test_close_logits_are_not_ties():
    # Their distances to the largest logit round to one number.
    logits = jnp.array([16.0, 1e-7, 2e-7, 3e-7, -0.0, 0.0], jnp.float32)
    got = distribution(logits, Sampling(8.0, top_k=2))
    np.testing.assert_array_equal(np.asarray(got) > 0, [True, False, False, True, False, False])
    got = distribution(logits, Sampling(8.0, top_k=5))
    assert (np.asarray(got) > 0).all()  # -0 and 0 tie for the fifth place


def test_an_unfiltered_run_has_no_search():
    def primitives(s):
        return str(jax.make_jaxpr(sampling.distributions.distribution)(jnp.zeros((2048,)), s))

    assert "while" not in primitives(Sampling()) and "sort" not in primitives(Sampling())
    assert "while" in primitives(Sampling(top_k=3)) or "scan" in primitives(Sampling(top_k=3))


def thirds(size):
    probs = np.random.default_rng(2).random(size).astype(np.float32)
    probs[np.random.default_rng(3).random(size) < 1 / 3] = 0.0
    return probs / probs.sum(dtype=np.float64).astype(np.float32)


@pytest.mark.parametrize(("size", "draws"), [(1000, 100_000), (262_144, 10_000)])
def test_no_impossible_token_is_drawn(size, draws):
    probs = thirds(size)
    uniforms = np.random.default_rng(4).random(draws, np.float32)
    uniforms[:3] = [0.0, ONE_BELOW, np.float32(0.5)]
    tokens = np.asarray(
        jax.jit(
            lambda u: jax.lax.map(
                lambda x: sampling.draws.draw(jnp.asarray(probs), x), u, batch_size=1000
            )
        )(uniforms)
    )
    assert (probs[tokens] > 0.0).all()
    positive = np.flatnonzero(probs)
    assert tokens[0] == positive[0] and tokens[1] == positive[-1]
    # The draw is the inverse of the cumulative distribution up to rounding.
    cumulative = np.cumsum(probs, dtype=np.float64)
    assert np.abs(cumulative[tokens] - uniforms).max() < probs.max() + 1e-5


@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_a_draw_over_a_large_vocabulary_follows_its_law(spread):
    # The exact law: at each level of the tree the 2**23 values of its uniform, by float32 rounding.
    size = 262_144
    logits = spread * np.random.default_rng(0).standard_normal(size).astype(np.float32)
    probs = np.asarray(sampling.distributions.distribution(jnp.asarray(logits), Sampling()))
    assert np.abs(probs - reference(logits)).sum() < 1e-5
    levels = [probs]
    while levels[-1].size > 64:
        levels.append(levels[-1].reshape(-1, 64).sum(1))
    assert sampling.draws.num_uniforms(size) == len(levels) == 3

    def law(weights):
        edges = np.ceil(np.cumsum(weights) / weights.sum(dtype=np.float32) * 2**23) / 2**23
        return np.diff(np.minimum(edges, 1.0), prepend=0.0)

    chance = law(levels[2])
    for level in (levels[1], levels[0]):
        inside = np.stack([law(block) for block in level.reshape(-1, 64)])
        chance = (chance[:, None] * inside).reshape(-1)
    assert 0.5 * np.abs(chance - probs).sum() < 1e-4
    # The control: one such uniform for the whole vocabulary.
    assert 0.5 * np.abs(law(probs) - probs).sum() > 1e-3


def test_each_level_of_the_tree_follows_its_own_uniform():
    size, draws = 600 * 128 + 64, 20_000
    weights = np.random.default_rng(1).random(size).astype(np.float32)
    uniforms = np.random.default_rng(2).random((draws, 3), np.float32)
    draw = jax.jit(jax.vmap(lambda u: sampling.draws.draw(jnp.asarray(weights), u)))
    tokens = np.asarray(draw(uniforms))
    padded = np.pad(weights, (0, -size % 128**2)).reshape(-1, 128, 128)
    levels = (
        (padded.sum((1, 2))[None], tokens * 0, tokens // 128**2),
        (padded.sum(2), tokens // 128**2, tokens // 128 % 128),
        (padded.reshape(-1, 128), tokens // 128, tokens % 128),
    )
    for level, (nodes, node, index) in enumerate(levels):
        sums = np.cumsum(nodes, axis=1, dtype=np.float64)[node]
        found = (sums > (uniforms[:, level] * sums[:, -1])[:, None]).argmax(1)
        assert (found == index).mean() > 0.999


def test_a_draw_without_positive_weights_is_token_zero():
    assert sampling.draws.draw(jnp.zeros((5,)), jnp.float32(0.5)) == 0


def test_residual():
    p, q = jnp.array([0.2, 0.5, 0.3]), jnp.array([0.5, 0.2, 0.3])
    np.testing.assert_allclose(sampling.draws.residual(p, q), [0, 1, 0], atol=1e-7)
    np.testing.assert_allclose(sampling.draws.residual(p, q, 0.5), [0, 1, 0], atol=1e-7)
    # The residual has no mass: the result is the target, with nothing outside its support.
    np.testing.assert_array_equal(sampling.draws.residual(q, q), q)
    np.testing.assert_array_equal(sampling.draws.residual(q, q, 0.0), q)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", x) for x in (-0.1, float("nan"), float("inf"))),
        *(("top_k", x) for x in (0, 1.5, 2**33 + 2)),
        *(("top_p", x) for x in (0.0, 1.1)),
    ],
)
def test_bad_settings_are_named(name, value):
    with pytest.raises(ValueError, match=name):
        Sampling(**{name: value})


# From the annotations or the assertions.
WRONG = (AssertionError, TypeError)


def test_a_draw_is_of_one_position():
    with pytest.raises(WRONG):
        jax.eval_shape(
            lambda x: sampling.distributions.distribution(x, Sampling()), jnp.zeros((2, 3))
        )
    with pytest.raises(AssertionError, match="a setting per row"):
        sampling.distributions.distribution(jnp.zeros((3,)), Sampling([1.0, 0.1, 2.0]))
    with pytest.raises(WRONG):
        sampling.draws.draw(jnp.ones((5,), jnp.bfloat16), jnp.float32(0.5))
    with pytest.raises(AssertionError, match=r"draw num_uniforms\(1000\) = 2 uniforms"):
        sampling.draws.draw(jnp.ones((1000,)), jnp.zeros((3,)))


@pytest.mark.parametrize("vocab", [100, 1000])
@pytest.mark.parametrize("top_p", [None, 0.9])
def test_distributions_have_gradients_in_compiled_programs(vocab, top_p):
    x, w = jnp.linspace(0.0, 1.0, vocab), jnp.arange(vocab, dtype=jnp.float32)

    def mean(x):
        return jnp.dot(sampling.distributions.distribution(x, Sampling(0.7, top_p=top_p)), w)

    kept = distribution(x, Sampling(0.7, top_p=top_p)) > 0
    softmax = lambda x: jax.nn.softmax(jnp.where(kept, x / 0.7, -jnp.inf))  # noqa: E731
    want = jax.jit(jax.grad(lambda x: jnp.dot(softmax(x), w)))(x)
    np.testing.assert_allclose(jax.jit(jax.grad(mean))(x), want, rtol=1e-4, atol=1e-5)


def test_a_distribution_compiles_once():
    logits = jnp.linspace(0.0, 1.0, 1000)
    sampling.distributions.distribution(logits, Sampling())
    before = kernel_choice._plainly.num_programs()
    sampling.distributions.distribution(logits, Sampling(0.5))
    assert kernel_choice._plainly.num_programs() == before
