"""What the compiled loop does not do: copy a cache, call the host, or run in pieces."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding, drafting, rules
from specjax.decoding import autoregressive as _autoregressive
from specjax.decoding import compilation as _compile
from specjax.decoding import speculative as _speculative
from specjax.models import model_from_config
from specjax.sampling import Sampling
from tests.models.tiny import CONFIGS, random_params

ROWS, PROMPT, NEW = 3, 5, 12
# A size that no other axis of these networks has.
LENGTH = 37


def arguments(loop, params):
    return loop.init(
        params,
        jnp.ones((ROWS, PROMPT), jnp.int32),
        jnp.full((ROWS,), PROMPT),
        seed=0,
        ids=jnp.arange(ROWS),
        limits=jnp.full((ROWS,), NEW),
        sampling=Sampling(1.0),
        max_new=NEW,
        max_length=LENGTH,
    )


@pytest.fixture(scope="module", params=["t5_v1_1", "gemma2"])
def programs(request):
    """Jaxpr, compiled program and cache shapes, for both loops over one family."""
    model = model_from_config(CONFIGS[request.param])
    params = random_params(model)
    alone = decoding.Autoregressive(model)
    both = decoding.Speculative(model, drafting.NeuralDrafter(model, 4))
    pair = (params, (params, ()))
    stops = jnp.int32(5), jnp.int32(ROWS)
    run_alone, run_both = _autoregressive.jitted_run(), _speculative.jitted_run()
    traced = {
        "alone": run_alone.trace(alone, params, arguments(alone, params), *stops),
        "both": run_both.trace(both, pair, rules.OPT(0.1), arguments(both, pair), *stops),
    }
    caches = jax.tree.leaves(arguments(alone, params).inner.cache._replace(cross=None))
    shapes = {",".join(map(str, x.shape)) for x in caches}
    return {n: (str(t.jaxpr), t.lower().compile().as_text(), shapes) for n, t in traced.items()}


@pytest.mark.parametrize("name", ["alone", "both"])
def test_no_cache_is_copied(programs, name):
    _, text, shapes = programs[name]
    named = "|".join(shapes)
    assert re.search(rf"f32\[(?:{named})\]", text), "no cache is found: the test would see nothing"
    # A copy, or a select over the whole of it.
    assert not re.findall(rf"= f32\[(?:{named})\]\S* (?:copy|select)\(.*", text)


@pytest.mark.parametrize("name", ["alone", "both"])
def test_no_host_callback_and_one_loop(programs, name):
    jaxpr, text, _ = programs[name]
    assert "callback" not in jaxpr and "callback" not in text
    # All of the rounds are inside one program: its outermost loop.
    assert jaxpr.count("while[") >= 1 and text.count("ENTRY") == 1


def test_the_state_is_donated():
    model = model_from_config(CONFIGS["t5_v1_1"])
    params = random_params(model)
    loop = decoding.Autoregressive(model)
    state = arguments(loop, params)
    loop.run(params, state, 2)
    assert all(x.is_deleted() for x in jax.tree.leaves(state.inner.cache.keys))
    assert np.isfinite(params["decoder"]["decoder_norm"]["scale"]).all()  # the caller keeps these


def test_loops_take_the_options_that_xla_knows(programs, monkeypatch):
    if jax.default_backend() == "cpu":
        assert _compile.step_options("cpu")
        assert not any("ynn" in text for _, text, _ in programs.values())
    known = _compile.step_options.__wrapped__
    assert known("tpu") is None and known("gpu") is None
    monkeypatch.setattr(_compile, "_CPU_OPTIONS", {"xla_cpu_no_such_option": ""})
    assert known("cpu") is None
    monkeypatch.setattr(_compile, "_CPU_OPTIONS", {"xla_cpu_enable_fast_math": False})
    assert known("cpu") == {"xla_cpu_enable_fast_math": False}
