"""What the compiled loop does not do: copy a cache, call the host, or run in pieces."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import compilation, decoding, drafting, rules
from specjax.decoding.method import jitted_run
from specjax.models import model_from_config
from specjax.testing import TabularModel
from specjax.types import PromptBatch, Sampling
from tests.decoding.helpers import alone, begin, pair
from tests.decoding.policies import AfterTokenOne
from tests.decoding.trees import Likeliest, Walk
from tests.models.tiny import CONFIGS, random_params

ROWS, PROMPT, NEW = 3, 5, 12
# A size that no other axis of these networks has.
LENGTH = 37
VOCAB = 48


def arguments(loop, params):
    return begin(
        loop,
        params,
        jnp.ones((ROWS, PROMPT), jnp.int32),
        jnp.full((ROWS,), PROMPT),
        seeds=0,
        ids=jnp.arange(ROWS),
        limits=jnp.full((ROWS,), NEW),
        sampling=Sampling(1.0),
        max_new=NEW,
        max_length=LENGTH,
    )


@pytest.fixture(
    scope="module", params=["t5_v1_1", pytest.param("gemma2", marks=pytest.mark.exhaustive)]
)
def programs(request):
    """Jaxpr, compiled program and cache shapes, for each method over one family."""
    model = model_from_config(CONFIGS[request.param])
    params = random_params(model)
    early = drafting.NeuralDrafter(model, 4, AfterTokenOne())
    cascades = {
        "token cascade": (decoding.TokenCascade(4, verifier=model, drafter=model), rules.Chow(0.1)),
        "bild": (
            decoding.BiLDCascade(4, verifier=model, drafter=model),
            rules.FallbackRollback(rules.Chow(0.1), rules.BiLD(1.0)),
        ),
        "oracle": (decoding.OracleCascade(verifier=model, drafter=model), rules.Diff(0.1)),
        "sequence": (
            decoding.SequenceCascade(verifier=model, drafter=model),
            rules.SequenceChow(0.1),
        ),
    }
    methods = {
        "alone": decoding.Autoregressive(model),
        "both": decoding.Speculative(model, drafting.NeuralDrafter(model, 4)),
        "widths": decoding.Speculative(model, early),
        "tree": decoding.Speculative(model, Likeliest(VOCAB, (0, 0, 1, 1)), Walk()),
        **{name: method for name, (method, _) in cascades.items()},
    }
    traced, states = {}, {}
    for name, method in methods.items():
        given = alone(params) if name == "alone" else pair(params, params, rules.OPT(0.1))
        if name == "tree":
            given = decoding.MethodParams(params, jnp.zeros((VOCAB, VOCAB)))
        if name in cascades:
            given = decoding.MethodParams(params, params, cascades[name][1])
        states[name] = arguments(method, given)
        stops = jnp.int32(5), jnp.int32(ROWS)
        traced[name] = jitted_run().trace(method, given, states[name], *stops)
    caches = jax.tree.leaves(states["alone"].inner.verifier.cache._replace(cross=None))
    shapes = {",".join(map(str, x.shape)) for x in caches}
    return {n: (str(t.jaxpr), t.lower().compile().as_text(), shapes) for n, t in traced.items()}


METHODS = ["alone", "both", "widths", "tree", "token cascade", "bild", "oracle", "sequence"]


@pytest.mark.parametrize("name", METHODS)
def test_no_cache_is_copied(programs, name):
    _, text, shapes = programs[name]
    named = "|".join(shapes)
    assert re.search(rf"f32\[(?:{named})\]", text), "no cache is found: the test would see nothing"
    # A copy, or a select over the whole of it.
    assert not re.findall(rf"= f32\[(?:{named})\]\S* (?:copy|select)\(.*", text)


@pytest.mark.parametrize("name", METHODS)
def test_no_host_callback_and_one_loop(programs, name):
    jaxpr, text, _ = programs[name]
    assert "callback" not in jaxpr and "callback" not in text
    # All of the rounds are inside one program: its outermost loop.
    assert jaxpr.count("while[") >= 1 and text.count("ENTRY") == 1


def test_the_state_is_donated():
    model = model_from_config(CONFIGS["t5_v1_1"])
    params = random_params(model)
    loop = decoding.Autoregressive(model)
    state = arguments(loop, alone(params))
    loop.run(alone(params), state, 2)
    assert all(x.is_deleted() for x in jax.tree.leaves(state.inner.verifier.cache.keys))
    assert np.isfinite(params["decoder"]["decoder_norm"]["scale"]).all()  # the caller keeps these


@pytest.mark.parametrize("rule", [rules.Lossless(), rules.Lossy(0.5)])
def test_the_verifiers_own_log_probabilities_cost_nothing_unless_requested(rule):
    size, longest = 4096, 3
    model = TabularModel(size, 0)
    loop = decoding.Speculative(model, drafting.NeuralDrafter(model, longest))
    given = pair(jnp.zeros((1, size)), jnp.zeros((1, size)), rule)
    batch = PromptBatch(
        np.ones((ROWS, PROMPT), np.int32),
        np.full(ROWS, PROMPT),
        np.arange(ROWS),
        np.full(ROWS, NEW),
    )

    def exponentials(**options):
        state = loop.init(given, batch, max_new=NEW, **options)
        lowered = jitted_run().lower(loop, given, state, jnp.int32(5), jnp.int32(ROWS))
        return lowered.compile().cost_analysis()["transcendentals"]

    requested = exponentials(log_probs=True) - exponentials()
    assert requested == pytest.approx(ROWS * (longest + 1) * size, rel=0.01)


def test_loops_take_the_options_that_xla_knows(programs):
    if compilation.step_options(jax.default_backend()):
        assert not any("ynn" in text for _, text, _ in programs.values())


def widths_read(program):
    """How many tokens the passes of a program read: those of the products that give logits."""
    found = re.findall(rf"f32\[(\d+),{VOCAB}\]\S* dot\(", program[1])
    return {int(tokens) // ROWS for tokens in found}


def test_the_verifier_reads_the_width_of_the_drafts(programs):
    # With fixed lengths: one token (draft passes) and the whole block, no width between.
    assert widths_read(programs["both"]) == {1, 5}
    assert widths_read(programs["widths"]) >= {1, 2, 4, 5}
