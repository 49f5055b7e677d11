"""The experts of a layer: their products in every form, on meshes, and their gradients."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas import primitives

from specjax.models import experts, experts_kernel
from specjax.models.config import Routing
from specjax.models.int8 import Int8Weight
from specjax.partitioning import Partitioner, make_mesh
from specjax.platforms import as_on_tpus, compiled_for
from tests.models.test_int8 import in_floats, quantise
from tests.models.tiny import error, quick_jit, tiny
from tests.variants import variants

RNG = np.random.default_rng(0)


def test_rows_of_nan_stay_alone():
    x = jnp.ones((9, 4)).at[4].set(jnp.nan)
    stack, sizes = jnp.ones((2, 4, 3)), jnp.array([5, 4], jnp.int32)
    for form in (lambda *given: experts._in_loop(3, *given), experts._in_kernel):
        found = np.isnan(quick_jit(form)(x, stack, sizes))
        assert found[4].all() and found.sum() == 3


def block(tokens, count, used, renormalised, dtype="float32", width=12, biases=False, shared=None):
    """With biases, as in gpt-oss: many entries reach its limits."""
    routing = Routing(count, used, 10, renormalised, biases, shared)
    activations = ("clamped_swish", "clamped_linear") if biases else ("silu", "linear")
    module = experts.Experts(routing, activations, jnp.dtype(dtype), jnp.dtype(dtype))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, tokens, width)), dtype)
    params = module.init(jax.random.key(0), x)["params"]
    if biases:
        params = {n: jnp.asarray(4 * rng.normal(size=v.shape), dtype) for n, v in params.items()}
    return module, params, x


def expected(routing, params, x):
    """Every expert of every token, in NumPy."""
    x = np.asarray(x, np.float64).reshape(-1, x.shape[-1])
    params = jax.tree.map(lambda value: np.asarray(value, np.float64), params)

    def projected(x, name, number):
        return (
            x @ params[name][number]
            + params.get(f"{name}_bias", np.zeros(len(params[name])))[number]
        )

    weights = np.exp(x @ params["router"] + params.get("router_bias", 0.0))
    weights /= weights.sum(1, keepdims=True)
    chosen = np.argsort(-weights, 1)[:, : routing.per_token]
    out = np.zeros_like(x)
    for row, numbers in enumerate(chosen):
        shares = weights[row, numbers]
        for share, number in zip(shares, numbers, strict=True):
            gate, up = (projected(x[row], name, number) for name in ("wi_0", "wi_1"))
            if routing.biases:
                assert np.abs([gate, up]).max() > 7
                gate, up = np.minimum(gate, 7), np.clip(up, -7, 7) + 1
            hidden = gate / (1 + np.exp(-(1.702 if routing.biases else 1.0) * gate)) * up
            share = share / shares.sum() if routing.renormalised else share
            out[row] += share * projected(hidden, "wo", number)
    if routing.shared_dim is not None:
        gate, up, wo = (params["shared"][name]["kernel"] for name in ("wi_0", "wi_1", "wo"))
        hidden = (x @ gate) / (1 + np.exp(-x @ gate)) * (x @ up)
        out += hidden @ wo / (1 + np.exp(-x @ params["shared_gate"]))
    return out


# Fewer and more rows than experts, and of several tiles.
SHAPES = [(1, 8, 2), (3, 8, 3), (7, 4, 4), (40, 3, 2)]


@pytest.mark.parametrize(
    ("renormalised", "biases", "shared"),
    [(True, False, None), (False, False, 6), (True, True, None), (True, False, 6)],
)
@pytest.mark.parametrize(("tokens", "count", "used"), SHAPES)
def test_a_token_gets_what_its_experts_give(tokens, count, used, renormalised, biases, shared):
    module, params, x = block(tokens, count, used, renormalised, biases=biases, shared=shared)
    wanted = expected(module.routing, params, x).reshape(x.shape)
    apply = lambda x: module.apply({"params": params}, x)  # noqa: E731
    assert error(quick_jit(apply)(x), wanted) <= 1e-6
    with as_on_tpus():
        assert error(quick_jit(lambda x: apply(x))(x), wanted) <= 1e-6
    # Its row alone.
    assert error(quick_jit(apply)(x[:1, :1]), wanted[:1, :1]) <= 1e-6


# Two tiles of 128 columns, the second perhaps cut; a device none of whose experts is in use.
@pytest.mark.parametrize(
    ("tokens", "chosen", "inner", "dtype", "form", "biased"),
    [
        (1, [[3, 1]], 200, "float32", None, False),
        (9, None, 256, "float32", None, True),
        (2, [[7, -1], [9, 7]], 200, "float32", None, True),
        (9, None, 200, "bfloat16", None, False),
        (9, None, 200, "float32", "int8", True),
        (1, [[3, 1]], 256, "bfloat16", "int8", False),
    ],
)
def test_the_kernel_gives_what_groups_give(tokens, chosen, inner, dtype, form, biased, patched):
    """In Pallas' interpreter. Experts below 0 and above 3 are of other devices."""
    patched.setattr(experts_kernel, "_BLOCK", 128 * 24 * (1 if form else jnp.dtype(dtype).itemsize))
    # After an array's end a TPU reads anything.
    patched.setattr(primitives, "uninitialized_value", _filled_with_nan)
    patched.setattr(
        experts, "mixed_few", functools.partial(experts_kernel.mixed_few, interpret=True)
    )
    x = jnp.asarray(RNG.normal(size=(1, tokens, 24)), dtype)
    if chosen is None:
        chosen = RNG.integers(-1, 6, (tokens, 2))
    chosen = jnp.asarray(chosen, jnp.int32)[None]
    shares = jnp.asarray(RNG.uniform(size=chosen.shape), jnp.float32)
    shapes = (4, 24, inner), (4, 24, inner), (4, inner, 24)
    stacks = [RNG.normal(size=shape) / np.sqrt(shape[1]) for shape in shapes]
    if form is None:
        stacks = [jnp.asarray(stack, dtype) for stack in stacks]
    else:
        stacks = [
            Int8Weight(jnp.asarray(40 * x, jnp.int8), jnp.full(x[:, 0].shape, 0.02)) for x in stacks
        ]
    sizes = [(4, inner), (4, inner), (4, 24)]
    biases = [jnp.asarray(RNG.normal(size=size), dtype) for size in sizes] if biased else None
    given = ("silu", "linear"), x, shares, chosen, stacks, biases
    found, wanted = (
        quick_jit(functools.partial(mix, given[0]))(*given[1:])
        for mix in (experts._by_kernel, experts._in_groups)
    )
    assert found.shape == wanted.shape and found.dtype == jnp.float32
    tolerance = 2e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(found, wanted, atol=tolerance)
    plain, kernel = (
        functools.partial(mix, given[0]) for mix in (experts._in_groups, experts._by_kernel)
    )
    slopes = [
        quick_jit(jax.grad(lambda x, mix=mix: jnp.sum(mix(x, *given[2:]))))(x)
        for mix in (plain, experts._with_gradient_of(plain, kernel))
    ]
    np.testing.assert_array_equal(*slopes)


def _filled_with_nan(shape, dtype):
    return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.floating) else 0, dtype)


def test_sums_of_bfloat16_are_float32():
    module, params, x = block(6, 16, 12, True, "bfloat16", width=64)
    wanted = expected(module.routing, params, x).reshape(x.shape)
    found = module.apply({"params": params}, x)
    assert found.dtype == jnp.bfloat16
    assert error(found, wanted) <= 2**-7


def test_gradients_are_those_of_all_experts():
    module, params, x = block(5, 4, 2, True)

    def loss(params, x):
        return jnp.sum(jnp.sin(module.apply({"params": params}, x)))

    def of_all(params, x):
        weights = jax.nn.softmax(x @ params["router"], axis=-1)
        shares, chosen = jax.lax.top_k(weights, 2)
        shares = shares / shares.sum(-1, keepdims=True)
        hidden = [jnp.einsum("bte,xem->btxm", x, params[name]) for name in ("wi_0", "wi_1")]
        y = jnp.einsum("btxm,xme->btxe", jax.nn.silu(hidden[0]) * hidden[1], params["wo"])
        y = jnp.take_along_axis(y, chosen[..., None], axis=2)
        return jnp.sum(jnp.sin(jnp.sum(shares[..., None] * y, axis=2)))

    found = quick_jit(jax.grad(loss, argnums=(0, 1)))(params, x)
    wanted = quick_jit(jax.grad(of_all, argnums=(0, 1)))(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, wanted)
    with compiled_for(Partitioner(make_mesh(2, 2))):
        spread = quick_jit(jax.grad(lambda *given: loss(*given), argnums=(0, 1)))(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), spread, wanted)


@pytest.mark.parametrize("form", [None, "int8"])
@pytest.mark.parametrize("mesh", [(1, 2), (2, 1), (2, 2), (1, 8)])
@pytest.mark.parametrize("name", variants(("mixtral", "gpt_oss", "qwen3_next"), "mixtral"))
def test_devices_add_what_their_experts_give(name, mesh, form):
    """With eight devices and four experts, each expert is split."""
    t = tiny(name)
    part = Partitioner(make_mesh(*mesh))
    params = quantise(t.params) if form else t.params
    tokens = RNG.integers(0, 48, (2, 9)).astype(np.int32)
    alone = quick_jit(t.model.apply)(in_floats(params), tokens)
    placed = part.place(params, part.param_shardings(t.model, params))
    with compiled_for(part):
        program = jax.jit(lambda *given: t.model.apply(*given)).lower(placed, tokens).compile()
    assert error(program(placed, tokens), alone) <= 1e-5
    # Nothing gathers the experts.
    gathered = re.findall(r"= \w+\[(\d+),\d+,\d+\]\S* all-gather", program.as_text())
    assert "4" not in gathered


def test_the_comparison_sees_experts_that_are_gathered():
    """A program whose devices nobody knows: the compiler gathers what it is not told to split."""
    t, part = tiny("mixtral"), Partitioner(make_mesh(1, 2))
    placed = part.place(t.params, part.param_shardings(t.model, t.params))
    tokens = np.ones((2, 9), np.int32)
    text = jax.jit(t.model.apply).lower(placed, tokens).compile().as_text()
    assert re.findall(r"= \w+\[4,\d+,\d+\]\S* all-gather", text)
