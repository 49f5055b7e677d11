"""A grown network has the outputs of the small one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.grown import LLAMA_200M, grow
from specjax.models import CausalLM, LlamaConfig, T5Config, model_from_config

SMALL = T5Config(
    vocab_size=50, embed_dim=12, num_heads=2, head_dim=4, mlp_dim=16,
    num_encoder_layers=1, num_decoder_layers=2,
)  # fmt: skip
SIZES = {
    "embed_dim": 32, "num_heads": 3, "head_dim": 8, "mlp_dim": 24,
    "num_encoder_layers": 2, "num_decoder_layers": 4,
}  # fmt: skip


SMALL_LLAMA = LlamaConfig(
    vocab_size=50, embed_dim=12, num_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=16, num_layers=2
)  # fmt: skip
LLAMA_SIZES = {
    "embed_dim": 32, "num_heads": 6, "num_kv_heads": 3, "mlp_dim": 24, "num_layers": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("small", "sizes", "change"),
    [
        (SMALL, SIZES, {"tie_embeddings": True}),
        pytest.param(SMALL, SIZES, {"mlp_activations": ("relu",)}, marks=pytest.mark.exhaustive),
        pytest.param(SMALL, SIZES, {}, marks=pytest.mark.exhaustive),
        (SMALL_LLAMA, LLAMA_SIZES, {"tie_embeddings": True}),
        pytest.param(SMALL_LLAMA, LLAMA_SIZES, {}, marks=pytest.mark.exhaustive),
    ],
)
def test_logits_are_equal(small, sizes, change):
    model = model_from_config(small.replace(**change))
    # Far from one, so that a wrong scale or epsilon shows.
    params = jax.tree.map(lambda x: 0.7 * x, model.init(jax.random.key(0)))
    large, grown = grow(model, params, **sizes)
    assert large.num_params() > 4 * model.num_params()
    tokens = [jax.random.randint(jax.random.key(1), (2, 9), 1, 50)] * (1 + (small is SMALL))
    want = model.apply(params, *tokens)
    scale = float(jnp.abs(want).max())
    np.testing.assert_allclose(large.apply(grown, *tokens), want, atol=1e-5 * scale)
    # The control: without the corrected epsilon and scale the logits differ.
    wrong = model_from_config(large.config.replace(norm_eps=0.1))
    assert float(jnp.abs(wrong.apply(grown, *tokens) - want).max()) > 1e-3 * scale


def test_its_usual_size_is_200_million():
    config = SMALL_LLAMA.replace(vocab_size=2048, head_dim=64, tie_embeddings=True, **LLAMA_200M)
    assert 195e6 < CausalLM(config).num_params() < 210e6


@pytest.mark.parametrize(
    ("config", "sizes", "told"),
    [
        (SMALL_LLAMA, {"num_heads": 6}, "groups of 2 queries cannot become groups of 3"),
        (SMALL_LLAMA, {"head_dim": 8}, "'head_dim' cannot grow"),
        (SMALL, {"embed_dim": 8}, "embed_dim=8 is smaller than the model's"),
        (None, {}, "a T5 or a Llama can grow, got None"),
    ],
)
def test_a_network_that_cannot_grow_is_told(config, sizes, told):
    with pytest.raises(AssertionError, match=told):
        grow(config and model_from_config(config), {}, **sizes)
