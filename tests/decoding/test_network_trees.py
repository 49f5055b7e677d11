"""Networks verify trees in the loop: the greedy texts are the verifier's own."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Sampling, decoding, verification
from tests.decoding.helpers import begin
from tests.decoding.trees import Likeliest
from tests.models.test_trees import INPUTS, LENGTHS, network
from tests.variants import variants

# Three children of the root; its first two have children, too.
BUSH = (0, 0, 0, 1, 1, 2, 4)
NEW = 16
LIMITS = np.array([NEW, 9, 13], np.int32)


def texts(method, params, **given):
    """The state after decoding greedily."""
    start = {"ids": np.arange(3), "limits": LIMITS, "sampling": Sampling(0.0), "max_new": NEW}
    return method.run(params, begin(method, params, INPUTS, LENGTHS, **start, **given), 100)


def successors(tokens):
    """Logits `[V, V]` of the next token: likely where it followed in `tokens`, else random."""
    table = np.random.default_rng(0).normal(size=(48, 48)).astype(np.float32)
    for row in np.asarray(tokens):
        np.add.at(table, (row[:-1], row[1:]), 2.0)
    return jnp.asarray(table)


@pytest.mark.parametrize("platform", variants(["cpu", "tpu"], "cpu"))
@pytest.mark.parametrize("name", variants(["llama", "t5_v1_1", "gemma2"], "llama", "t5_v1_1"))
def test_greedy_trees_are_the_verifiers_own_text(name, platform):
    """Rows of several lengths; limits cut trees, and a row ends with EOS."""
    model, params = network(name, platform)
    free = texts(decoding.Autoregressive(model), decoding.MethodParams(params))
    ends = (int(free.tokens[0, 5]),)  # a token that the first row comes to
    want = texts(decoding.Autoregressive(model, eos_ids=ends), decoding.MethodParams(params))
    assert len(set(np.asarray(want.lengths).tolist())) > 1 and (want.ended_by == 1).any()
    given = decoding.MethodParams(params, successors(free.tokens))
    method = decoding.Speculative(
        model, Likeliest(48, BUSH), verification.Walk(), (4, 8), eos_ids=ends
    )
    for limits in (None, np.array([0, 3, 2], np.int32)):
        state = texts(method, given, draft_limits=limits)
        np.testing.assert_array_equal(state.tokens, want.tokens)
        np.testing.assert_array_equal(state.ended_by, want.ended_by)
        assert int(state.steps.sum()) < int(want.steps.sum())


def test_the_comparison_sees_a_path_that_is_not_kept(monkeypatch):
    model, params = network("t5_v1_1")
    want = texts(decoding.Autoregressive(model), decoding.MethodParams(params))
    given = decoding.MethodParams(params, successors(want.tokens))
    monkeypatch.setattr(type(model), "keep", lambda self, cache, positions, nodes: cache)
    # Another name, so that no compiled program is found.
    method = decoding.Speculative(model, Likeliest(48, (*BUSH, 4)), verification.Walk(), (9,))
    assert (np.asarray(texts(method, given).tokens) != np.asarray(want.tokens)).any()
