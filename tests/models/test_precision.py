"""In which precision the products of a network are: read from the programs that XLA gets."""

import re

import jax
import jax.numpy as jnp
import pytest

from specjax import decoding, drafting, rules
from specjax.compilation import product_precision
from specjax.decoding.method import _run
from specjax.models import model_from_config
from specjax.models.weights import float32_logits
from specjax.training.tasks import TextTask
from specjax.types import Prompts
from tests.decoding.helpers import begin, pair
from tests.models.tiny import CONFIGS
from tests.variants import variants

HIGHEST = jax.lax.Precision.HIGHEST
PRODUCT = re.compile(r"stablehlo\.dot_general.*?(precision = \[(\w+), (\w+)\])? : .*-> (\S+)")
VOCAB = 48


def lowered(family, dtype, platform="tpu"):
    """Prefill and loop, as they go to the compiler of a platform that need not be here."""
    model = model_from_config(CONFIGS[family].replace(dtype=dtype, param_dtype=dtype))
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), model.abstract_params())
    loop = decoding.Speculative(model, drafting.Chain(model, 2))
    given = pair(params, params, rules.OPT(0.1))
    prompts, lengths = jnp.ones((2, 5), jnp.int32), jnp.full((2,), 5, jnp.int32)
    state = begin(loop, given, prompts, lengths, seeds=0, ids=jnp.arange(2),
                  limits=jnp.full((2,), 4), max_new=4, max_length=12)  # fmt: skip
    run = jax.jit(_run, static_argnums=0).trace(loop, given, state, jnp.int32(1), jnp.int32(2))
    read = jax.jit(model.prefill, static_argnums=2).trace(params, Prompts(prompts, lengths), 12)
    return "".join(x.lower(lowering_platforms=(platform,)).as_text() for x in (run, read))


def precisions(text):
    found = [match.groups() for match in PRODUCT.finditer(text)]
    assert len(found) == text.count("stablehlo.dot_general") > 20
    # The cumulative sums of a draw are no network's; in its gradients there are none.
    draws = len(re.findall(rf"dot_general.*tensor<{VOCAB}x{VOCAB}xf32>", text))
    exact = [(a, b) for _, a, b, _ in found].count(("HIGHEST", "HIGHEST"))
    return {(a, b) for _, a, b, _ in found} - (
        {("HIGHEST", "HIGHEST")} if exact == draws else set()
    )


@pytest.mark.parametrize("family", variants(CONFIGS, "t5_v1_1", "gemma2"))
def test_products_of_float32_are_of_float32(family):
    assert precisions(lowered(family, "float32")) == {("HIGHEST", "HIGHEST")}


def test_logits_of_a_bfloat16_network_with_float32_matrices_are_of_its_precision():
    x, table = jnp.ones((2, 8), jnp.bfloat16), jnp.ones((VOCAB, 8), jnp.float32)
    traced = jax.jit(float32_logits, static_argnums=2).trace(x, table, 1)
    assert "HIGHEST" not in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_the_gradients_too():
    task = TextTask(model=CONFIGS["t5_v1_1"])
    tokens = jnp.ones((2, 4), jnp.int32)
    params = task.init(jax.random.key(0))

    def loss(params):
        return jnp.sum(task.logits(task.model, params, (tokens, tokens)))

    text = jax.jit(jax.grad(loss)).trace(params).lower(lowering_platforms=("tpu",)).as_text()
    assert precisions(text) == {("HIGHEST", "HIGHEST")}


def test_what_the_user_asks_for_is_respected():
    with jax.default_matmul_precision("bfloat16"):
        assert product_precision(jnp.float32) is None
        found = precisions(lowered("llama", "float32"))
    assert found == {("DEFAULT", "DEFAULT")}
    assert product_precision(jnp.float32) is HIGHEST


def test_other_dtypes_have_none():
    assert product_precision(jnp.bfloat16) is product_precision(jnp.float16) is None
    assert precisions(lowered("llama", "bfloat16")) == {("DEFAULT", "DEFAULT")}


@pytest.mark.parametrize("family", variants(CONFIGS, "t5_v1_1", "gemma2"))
def test_of_bfloat16_the_logits_softmax_and_sums_are_float32(family):
    text = lowered(family, "bfloat16")
    results = {match.group(4) for match in PRODUCT.finditer(text)}
    # Logits are the only products that are as wide as the vocabulary; weights stay bfloat16.
    assert {r.split("x")[-1] for r in results if f"x{VOCAB}x" in r} == {"f32>"}
    assert any(r.endswith("xbf16>") for r in results)
    for name in ("exponential", "divide", "rsqrt", "log"):
        operations = re.findall(rf"stablehlo\.{name} .*", text)
        # The MLP's activations alone stay in its dtype.
        hidden = f"x{CONFIGS[family].mlp_dim}xbf16"
        assert not [x for x in operations if "bf16" in x and hidden not in x], name
    assert "stablehlo.exponential" in text
    sums = re.findall(r"stablehlo\.reduce\(.*applies stablehlo\.add.*", text)
    assert sums and not [line for line in sums if "bf16" in line]
