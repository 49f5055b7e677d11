"""What the compiled loop does not do: copy a cache, call the host, or run in pieces."""

import functools
import itertools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import compilation, decoding, drafting, rules, verification
from specjax.decoding.method import jitted_run
from specjax.models import model_from_config
from specjax.testing import TabularModel
from specjax.types import PromptBatch, Sampling
from tests.decoding.helpers import AfterTokenOne, alone, begin, pair
from tests.decoding.trees import Likeliest
from tests.models.tiny import CONFIGS, random_params
from tests.variants import variants

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


class Program(NamedTuple):
    """The jaxpr and the text of a compiled loop, and the shapes of its caches."""

    jaxpr: str
    text: str
    shapes: set[str]


@functools.cache
def program(name, family="t5_v1_1"):
    model = model_from_config(CONFIGS[family])
    params, both = random_params(model), {"verifier": model, "drafter": model}
    early = drafting.Chain(model, 4, AfterTokenOne())
    held = rules.FallbackRollback(rules.Chow(0.1), rules.BiLD(1.0))
    table, rule = jnp.zeros((VOCAB, VOCAB)), rules.OPT(0.1)
    low = drafting.chain.ChainParams(params)
    vertical = decoding.MethodParams(params, low, rules.Lossy(0.5))
    method, given = {
        "alone": lambda: (decoding.Autoregressive(model), alone(params)),
        "both": lambda: (
            decoding.Speculative(model, drafting.Chain(model, 4)),
            pair(params, params, rule),
        ),
        "widths": lambda: (decoding.Speculative(model, early), pair(params, params, rule)),
        "tree": lambda: (
            decoding.Speculative(model, Likeliest(VOCAB, (0, 0, 1, 1)), verification.Walk()),
            decoding.MethodParams(params, table),
        ),
        "vertical": lambda: (
            decoding.Speculative(model, drafting.cascades.VerticalCascade(early, model, 2)),
            decoding.MethodParams(params, vertical, rule),
        ),
        "token cascade": lambda: (
            decoding.TokenCascade(4, **both),
            decoding.MethodParams(params, params, rules.Chow(0.1)),
        ),
        "bild": lambda: (
            decoding.BiLDCascade(4, **both),
            decoding.MethodParams(params, params, held),
        ),
        "oracle": lambda: (
            decoding.OracleCascade(**both),
            decoding.MethodParams(params, params, rules.Diff(0.1)),
        ),
        "sequence": lambda: (
            decoding.SequenceCascade(**both),
            decoding.MethodParams(params, params, rules.SequenceChow(0.1)),
        ),
    }[name]()
    state = arguments(method, given)
    traced = jitted_run().trace(method, given, state, jnp.int32(5), jnp.int32(ROWS))
    read = state.inner.verifier if hasattr(state.inner, "verifier") else state.inner
    caches = jax.tree.leaves(read.cache._replace(cross=None))
    shapes = {",".join(map(str, x.shape)) for x in caches}
    return Program(str(traced.jaxpr), traced.lower().compile().as_text(), shapes)


METHODS = ["alone", "both", "widths", "tree", "vertical"]
METHODS += ["token cascade", "bild", "oracle", "sequence"]
CASES = [*itertools.product(METHODS, ["t5_v1_1", "gemma2"])]
QUICK = [(name, "t5_v1_1") for name in METHODS if name not in ("vertical", "bild", "oracle")]


@pytest.mark.parametrize("case", variants(CASES, *QUICK), ids=str)
def test_no_cache_is_copied(case):
    _, text, shapes = program(*case)
    named = "|".join(shapes)
    assert re.search(rf"f32\[(?:{named})\]", text), "no cache is found: the test would see nothing"
    # A copy, or a select over the whole of it.
    assert not re.findall(rf"= f32\[(?:{named})\]\S* (?:copy|select)\(.*", text)


@pytest.mark.parametrize("case", variants(CASES, *QUICK), ids=str)
def test_no_host_callback_and_one_loop(case):
    jaxpr, text, _ = program(*case)
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
    loop = decoding.Speculative(model, drafting.Chain(model, longest))
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


@pytest.mark.parametrize("case", variants(CASES, *QUICK), ids=str)
def test_loops_take_the_options_that_xla_knows(case):
    if compilation.step_options(jax.default_backend()):
        assert "ynn" not in program(*case).text


def widths_read(name):
    """How many tokens the passes of a program read: those of the products that give logits."""
    found = re.findall(rf"f32\[(\d+),{VOCAB}\]\S* (?:dot|custom-call)\(", program(name).text)
    return {int(tokens) // ROWS for tokens in found}


def test_the_verifier_reads_the_width_of_the_drafts():
    # With fixed lengths: one token (draft passes) and the whole block, no width between.
    assert widths_read("both") == {1, 5}
    assert widths_read("widths") >= {1, 2, 4, 5}
