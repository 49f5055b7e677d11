"""A grown T5 has the outputs of the small one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import T5, T5Config
from specjax.testing import grow_t5

SMALL = T5Config(
    vocab_size=50, embed_dim=12, num_heads=2, head_dim=4, mlp_dim=16,
    num_encoder_layers=1, num_decoder_layers=2,
)  # fmt: skip
SIZES = {
    "embed_dim": 32, "num_heads": 3, "head_dim": 8, "mlp_dim": 24,
    "num_encoder_layers": 2, "num_decoder_layers": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"tie_embeddings": True},
        pytest.param({"mlp_activations": ("relu",)}, marks=pytest.mark.exhaustive),
        pytest.param({}, marks=pytest.mark.exhaustive),
    ],
)
def test_logits_are_equal(change):
    model = T5(SMALL.replace(**change))
    # Far from one, so that a wrong scale or epsilon shows.
    params = jax.tree.map(lambda x: 0.7 * x, model.init(jax.random.key(0)))
    large, grown = grow_t5(model, params, **SIZES)
    assert large.num_params() > 4 * model.num_params()
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 1, 50)
    want = model.apply(params, tokens, tokens)
    got = large.apply(grown, tokens, tokens)
    scale = float(jnp.abs(want).max())
    np.testing.assert_allclose(got, want, atol=1e-5 * scale)
    # The control: without the corrected epsilon and scale the logits differ.
    wrong = T5(large.config.replace(norm_eps=0.1))
    assert float(jnp.abs(wrong.apply(grown, tokens, tokens) - want).max()) > 1e-3 * scale


def test_bad_sizes_are_named():
    model = T5(SMALL)
    params = model.init(jax.random.key(0))
    with pytest.raises(ValueError, match="embed_dim=8 is below the model's 12"):
        grow_t5(model, params, embed_dim=8)
    with pytest.raises(ValueError, match="'vocab_size' cannot grow"):
        grow_t5(model, params, vocab_size=100)
