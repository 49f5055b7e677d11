"""The benchmark of matrices in 8 bits measures what it says; no time is asserted."""

import numpy as np
import pytest

from benchmarks import quantised


def test_errors_and_divergences_are_those_of_their_definitions():
    rng = np.random.default_rng(0)
    logits, noise = rng.normal(size=(2, 5, 7)).astype(np.float32)
    tokens = rng.integers(0, 7, 5)
    found = quantised._compare((logits + noise + 3.0, tokens), (logits, tokens))

    def probs(x):
        return np.exp(x) / np.exp(x).sum(-1, keepdims=True)

    p, q = probs(logits), probs(logits + noise)
    assert found["kl"] == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-5)
    assert found["nats"] == pytest.approx(-np.log(q[np.arange(5), tokens]).mean(), rel=1e-5)
    assert found["best"] == (p.argmax(-1) == q.argmax(-1)).mean()
    # A constant added to all logits is no error.
    shifted = quantised._compare((logits + 3.0, tokens), (logits, tokens))
    assert shifted["error"] == pytest.approx(0, abs=1e-6) and shifted["best"] == 1
    assert found["error"] > 0.5


@pytest.mark.exhaustive
@pytest.mark.parametrize("pair", ["multi30k_ende", "gsm8k"])
def test_each_model_and_form_is_compared_with_the_floats(rows, pair):
    options = ["--pair", pair, "--prompts", "8", "--rows", "4", "--max-new", "24", "--repeats", "1"]
    assert quantised.main(options) == 0
    rows = rows()
    assert [(row["model"], row["weights"]) for row in rows] == [
        (model, form)
        for model in ("verifier", "drafter")
        for form in ("None", "int8", "int8+embedding")
    ]
    for floats, int8, both in (rows[:3], rows[3:]):
        assert (floats["error"], floats["kl"], floats["texts"], floats["time"]) == (0, 0, 1, 1)
        assert floats["MB"] > int8["MB"] > both["MB"]
        for row in (int8, both):
            assert 0 < row["error"] < 0.1 and 0 < row["kl"] < 0.05
            assert row["nats"] == pytest.approx(floats["nats"], abs=0.1)
