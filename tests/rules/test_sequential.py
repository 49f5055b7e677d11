"""Rules of sequential cascades: aggregation, decisions and their checks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import rules

RNG = np.random.default_rng(0)
LOGS = np.log(RNG.uniform(0.05, 1.0, (40, 9))).astype(np.float32)
LOGS[3, 1] = LOGS[4, :2] = -np.inf
SIZES = RNG.integers(1, 10, 40).astype(np.int32)


def decided(rule, logs=LOGS, sizes=SIZES):
    return np.asarray(
        jax.jit(jax.vmap(type(rule).defers_response, (None, 0, 0)))(rule, logs, sizes)
    )


def aggregated(how, logs=LOGS, sizes=SIZES):
    return np.asarray(jax.jit(jax.vmap(how))(logs, sizes))


@pytest.mark.parametrize("level", [0.0, 0.3, 0.5, 1.0])
def test_aggregations_are_numpys(level):
    texts = [logs[:size] for logs, size in zip(LOGS, SIZES, strict=True)]
    np.testing.assert_allclose(aggregated(rules.Sum()), [x.sum() for x in texts], rtol=1e-5)
    np.testing.assert_allclose(aggregated(rules.Mean()), [x.mean() for x in texts], rtol=1e-5)
    with np.errstate(invalid="ignore"):
        finite = [i for i, x in enumerate(texts) if np.isfinite(x).all()]
        wanted = [np.quantile(texts[i], level) for i in finite]
    found = aggregated(rules.Quantile(level))
    np.testing.assert_allclose(found[finite], wanted, rtol=1e-4, atol=1e-6)
    assert not np.isnan(found).any()


def test_what_is_past_a_response_changes_nothing():
    padded = LOGS.copy()
    padded[np.arange(9)[None] >= SIZES[:, None]] = np.nan
    for how in (rules.Sum(), rules.Mean(), rules.Quantile(0.4)):
        np.testing.assert_array_equal(aggregated(how, padded), aggregated(how))


def test_the_two_scales_decide_alike():
    for how in (rules.Sum(), rules.Mean(), rules.Quantile(0.2)):
        one = decided(rules.SequenceChow(0.7, how))
        np.testing.assert_array_equal(one, decided(rules.SequenceChowLog(-np.log(0.3), how)))
        np.testing.assert_array_equal(one, np.exp(aggregated(how)) < 0.3)
        assert one.any() and not one.all()


def test_the_ends_keep_or_defer_all():
    sure = np.zeros((1, 3), np.float32)
    for rule in (rules.SequenceChow(1.0), rules.SequenceChowLog(np.inf)):
        assert not decided(rule).any()
    for rule in (rules.SequenceChow(0.0), rules.SequenceChowLog(0.0)):
        assert decided(rule).all() and not decided(rule, sure, np.array([3], np.int32)).any()


def test_deferral_rules_say_what_they_read():
    q = jnp.array([0.5, 0.5])
    for rule, defers in ((rules.Chow(0.4), True), (rules.ChowLog(1.0), False)):
        assert not rule.reads_verifier
        assert bool(rule.defers(q, None, q, None)) == defers
    alone = {rule.__name__ for rule in rules.ALL_RULES if not getattr(rule, "reads_verifier", True)}
    assert alone == {"Chow", "ChowLog"}


BAD = [
    (
        lambda: rules.SequenceChow(0.5, "median"),
        r"aggregation must be like rules.Sum\(\), .* got 'median'",
    ),
    (
        lambda: rules.SequenceChow(0.5, rules.Mean),
        r"aggregation must be an instance, got the class Mean: write Mean\(...\)",
    ),
    (
        lambda: rules.FallbackRollback(rules.Diff(0.1), rules.BiLD(1.0)),
        "fallback must read only the drafter, got Diff",
    ),
    (
        lambda: rules.FallbackRollback(rules.Chow(0.1), 2.0),
        r"rollback must be like rules.BiLD\(strength=1.0\), got 2.0",
    ),
    (
        lambda: rules.FallbackRollback(rules.Lossless(), rules.BiLD(1.0)),
        r"fallback must be like rules.Chow\(strength=0.3\).*it has no defers",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
