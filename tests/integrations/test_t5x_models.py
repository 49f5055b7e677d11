"""The model classes against T5X's own, which decode with the verifier alone."""

import functools
import itertools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.integrations.with_t5x import import_t5x

import_t5x()
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("as_t5x_runs"),
]

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from t5x import decoding, models
from t5x.examples.scalable_t5 import network as scalable

from specjax import drafting, rules, testing
from specjax.integrations import t5x as specjax_t5x
from specjax.integrations.t5x.decoding import method_of, partition_spec
from specjax.integrations.t5x.model_classes import rank
from specjax.text import WithParams
from specjax.verification import Token
from tests.integrations.t5x_networks import (
    BATCH,
    DECODER_BATCH,
    KEY,
    PROMPTS,
    L,
    V,
    decoder,
    params_of,
    predict,
    t5,
    vocabulary,
)

GREEDY = functools.partial(decoding.temperature_sample, temperature=0.0)
DRAFTS = specjax_t5x.setting(temperature=0.0, max_draft=2)
RAW = {"decoder_params": {"rescale_log_probs": False, "max_decode_steps": 4}}


@pytest.mark.parametrize(
    "make",
    [
        t5,
        functools.partial(t5, module=scalable, scan_layers=True),
        functools.partial(t5, logits_via_embedding=True),
    ],
    ids=["minimal", "scanned", "tied"],
)
def test_greedy_outputs_and_plain_scores_are_t5x_s_own(make):
    words = (vocabulary(), vocabulary())
    pair = specjax_t5x.EncoderDecoderModel(make(2), *words, drafter_module=make(1), setting=DRAFTS)
    alone = models.EncoderDecoderModel(make(2), *words, None, decode_fn=GREEDY)
    params = params_of(pair, BATCH)
    options = {"prompt_with_targets": True, "num_decodes": 2, "return_all_decodes": True, **RAW}
    out, aux = predict(pair, params, BATCH, **options)
    expected, known = predict(alone, params["verifier"], BATCH, **options)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_allclose(aux["scores"], known["scores"], rtol=1e-4)
    # The forced beginnings, without their end; then what was decoded.
    assert out.shape == (3, 2, L)
    np.testing.assert_array_equal(out[0, 0, :3], [5, 4, 3])
    assert out[1, 0, 0] == 7
    assert (aux["length"] <= 4).all() and (aux["accepted"] <= aux["drafted"]).all()
    assert all(value.shape == (3, 2) for value in aux.values())


@pytest.mark.parametrize(
    ("bidirectional", "tied"), [(False, True), (True, False)], ids=["causal-tied", "prefix-untied"]
)
def test_greedy_outputs_of_a_decoder_are_t5x_s_own(bidirectional, tied):
    options = {"inputs_bidirectional_attention": bidirectional}
    large, small = decoder(2, tied), decoder(1, tied)
    pair = specjax_t5x.DecoderOnlyModel(
        large, vocabulary(), drafter_module=small, setting=DRAFTS, **options
    )
    alone = models.DecoderOnlyModel(large, vocabulary(), None, decode_fn=GREEDY, **options)
    params = params_of(pair, DECODER_BATCH)
    asked = {"decoder_params": {"rescale_log_probs": False}}
    asked |= {"num_decodes": 2, "return_all_decodes": True}
    out, aux = predict(pair, params, DECODER_BATCH, **asked)
    assert out.shape == (3, 2, L)
    expected, known = predict(alone, params["verifier"], DECODER_BATCH, **asked)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_allclose(aux["scores"], known["scores"], rtol=1e-4)


def test_losses_and_scores_are_the_verifier_s():
    words = (vocabulary(), vocabulary())
    pair = specjax_t5x.EncoderDecoderModel(t5(2), *words, drafter_module=t5(1))
    alone = models.EncoderDecoderModel(t5(2), *words, None)
    params = params_of(pair, BATCH)
    batch = {
        **BATCH,
        "decoder_target_tokens": PROMPTS,
        "decoder_loss_weights": (PROMPTS > 0).astype(np.int32),
    }
    found = jax.jit(pair.score_batch)(params, batch)
    np.testing.assert_array_equal(found, jax.jit(alone.score_batch)(params["verifier"], batch))


def test_variables_are_both_networks_with_their_axes():
    pair = specjax_t5x.EncoderDecoderModel(t5(2), vocabulary(), vocabulary(), drafter_module=t5(1))
    shapes = {name: value.shape for name, value in BATCH.items()}
    variables = jax.eval_shape(lambda key: pair.get_initial_variables(key, shapes), KEY)
    assert set(variables) == {"params", "params_axes"}
    assert set(variables["params"]) == set(variables["params_axes"]) == {"verifier", "drafter"}
    assert "layers_1" in variables["params"]["verifier"]["decoder"]
    assert "layers_1" not in variables["params"]["drafter"]["decoder"]


SMALL, SHORT, DRAWS = 5, 2, 6000


def _small_pair(decoding):
    make = functools.partial(t5, vocab=SMALL)
    words = (vocabulary(SMALL), vocabulary(SMALL))
    return specjax_t5x.EncoderDecoderModel(
        make(1), *words, drafter_module=make(1), setting=decoding
    )


def _law(params, rule, temperature, batch):
    """The exact law of two tokens, from the logits of T5X's own networks."""
    pairs = list(itertools.product(range(SMALL), repeat=SHORT))
    seen = {
        "encoder_input_tokens": np.repeat(batch["encoder_input_tokens"], SMALL, 0),
        "decoder_input_tokens": np.array([[0, first] for first in range(SMALL)], np.int32),
        "decoder_target_tokens": np.ones((SMALL, SHORT), np.int32),
    }
    laws = []
    for name in ("drafter", "verifier"):
        logits = models.EncoderDecoderModel(
            t5(1, vocab=SMALL), vocabulary(SMALL), vocabulary(SMALL), None
        )._compute_logits(params[name], seen)
        laws.append((jax.nn.softmax(logits / temperature), jax.nn.softmax(logits)))
    (q, q_conf), (p, p_conf) = laws
    pi = np.asarray(jax.vmap(jax.vmap(rule))(q, p, q_conf, p_conf))
    # After an end (token 1) comes padding.
    law = {(first, second): pi[first, 0, first] * pi[first, 1, second] for first, second in pairs}
    return {
        **{pair: mass for pair, mass in law.items() if pair[0] != 1},
        (1, 0): pi[0, 0, 1],
    }


@pytest.mark.parametrize("rule", [rules.Lossless(), rules.OPT(0.3)], ids=["Lossless", "OPT"])
def test_drawn_outputs_follow_the_rule_on_t5x_s_logits(rule):
    pair = _small_pair(specjax_t5x.setting(rule=rule, verification=Token(), max_draft=2))
    batch = {
        "encoder_input_tokens": np.array([[3, 2, 4, 1]], np.int32),
        "decoder_input_tokens": np.zeros((1, SHORT), np.int32),
        "decoder_target_tokens": np.zeros((1, SHORT), np.int32),
    }
    params = params_of(pair, batch)
    # As it starts, a T5 is close to uniform.
    for name in ("verifier", "drafter"):
        kernel = params[name]["decoder"]["logits_dense"]
        kernel["kernel"] = kernel["kernel"] * 3.0
    out, aux = predict(
        pair,
        params,
        batch,
        num_decodes=DRAWS,
        return_all_decodes=True,
        decoder_params={"temperature": 0.8},
    )
    law = _law(params, rule, 0.8, batch)
    drawn = dict.fromkeys(law, 0)
    for row in out[0].tolist():
        drawn[tuple(row)] += 1 / DRAWS
    distance = sum(abs(drawn[pair] - law[pair]) for pair in law) / 2
    # Of 6,000 draws of a law over 21 pairs the distance is about .02; of other laws .1 and more.
    assert distance < 0.045
    other = _law(params, rules.Lossless(), 0.4, batch)
    assert sum(abs(drawn[pair] - other[pair]) for pair in law) / 2 > 0.09
    np.testing.assert_allclose(
        np.exp(aux["scores"][0]), [law[tuple(row)] for row in out[0].tolist()], rtol=1e-3
    )
    assert (np.diff(aux["scores"][0]) >= 0).all()


def test_calls_may_ask_for_other_settings():
    pair = _small_pair(specjax_t5x.setting(max_draft=2))
    batch = {name: value[:, :4] % SMALL for name, value in BATCH.items()}
    params = params_of(pair, batch)
    # The networks start alike; these two never agree.
    kernel = params["drafter"]["decoder"]["logits_dense"]
    kernel["kernel"] = -kernel["kernel"]

    @jax.jit
    def run(temperature, topk, limit, steps, strength=0.0):
        asked = {
            "temperature": temperature,
            "topk": topk,
            "draft_limit": limit,
            "max_decode_steps": steps,
            "rule": rules.TokenV3(strength),
        }
        return pair.predict_batch_with_aux(params, batch, KEY, decoder_params=asked)

    cold, aux = run(jnp.float32([0.0, 0.0, 0.0]), 0, jnp.array([0, 1, 2]), 4)
    assert aux["drafted"][0] == 0 and aux["drafted"][1] > 0
    # The most probable token alone; at a temperature below T5X's threshold, likewise.
    for temperature, topk in (([1.0, 2.0, 0.5], 1), ([1e-5] * 3, 0)):
        out, _ = run(jnp.float32(temperature), topk, jnp.array([2, 2, 2]), 4)
        np.testing.assert_array_equal(out, cold)
    short, aux = run(jnp.float32([0.0, 0.0, 0.0]), 0, jnp.array([2, 2, 2]), 2)
    np.testing.assert_array_equal(short[:, :2], cold[:, :2])
    assert not short[:, 2:].any() and (aux["length"] <= 2).all()
    # The rule keeps drafted tokens that top-k takes from the verifier.
    _, aux = run(jnp.float32([1.0, 1.0, 1.0]), 1, jnp.array([2, 2, 2]), 4, 1.0)
    lowest = np.finfo(np.float32).min
    assert (aux["accepted"] > 0).all() and (aux["log_p"] == lowest).all()


def test_without_a_network_to_draft_parameters_are_the_verifier_s_own():
    words = (vocabulary(), vocabulary())
    alone = models.EncoderDecoderModel(t5(1), *words, None, decode_fn=GREEDY)
    params = params_of(alone, BATCH)
    expected, _ = predict(alone, params, BATCH)
    greedily = functools.partial(specjax_t5x.setting, temperature=0.0)
    own = greedily(drafting=WithParams(drafting.Lookup(max_copy=2, vocab_size=V), ()))
    for setting in (own, greedily(drafting="Lookup()", max_draft=2), greedily()):
        model = specjax_t5x.EncoderDecoderModel(t5(1), *words, setting=setting)
        out, aux = predict(model, params, BATCH)
        np.testing.assert_array_equal(out, expected)
        assert "drafter_calls" not in aux


@pytest.mark.parametrize(("plan", "longest"), [("Lookup()", 5), ("Lookup(max_copy=3)", 3)])
def test_copies_are_as_long_as_they_say(plan, longest):
    setting = specjax_t5x.setting(drafting=plan)
    assert method_of(setting, testing.TabularModel(V, 1), None).max_draft == longest


@pytest.mark.parametrize("rescaled", [True, False])
def test_a_row_of_nan_has_the_lowest_score_and_no_nan(rescaled):
    pair = _small_pair(specjax_t5x.setting(max_draft=2))
    batch = {name: value[:, :4] % SMALL for name, value in BATCH.items()}
    batch["encoder_input_tokens"] = np.full((3, 4), 2, np.int32)
    params = params_of(pair, batch)
    # NaN after the tokens 3 and 4, which some rows draw.
    embedder = params["verifier"]["token_embedder"]
    embedder["embedding"] = embedder["embedding"].at[3:].set(np.nan)
    asked = {"num_decodes": 2, "decoder_params": {"rescale_log_probs": rescaled}}
    _, aux = predict(pair, params, batch, return_all_decodes=True, **asked)
    truncated = aux["ended_by"] == 3
    assert truncated.any() and not truncated.all()
    assert (aux["scores"][truncated] == np.finfo(np.float32).min).all()
    json.dumps({name: value.tolist() for name, value in aux.items()}, allow_nan=False)
    if rescaled:
        _, best = predict(pair, params, batch, **asked)
        np.testing.assert_array_equal(best["ended_by"] == 3, truncated.all(axis=1))


def test_outputs_are_ranked_by_finite_scores():
    aux = {name: jnp.array([0.0, jnp.nan, -jnp.inf, -2.0]) for name in ("scores", "log_p")}
    aux["ended_by"] = jnp.array([3, 1, 1, 1])
    call = types.SimpleNamespace(num_decodes=2, return_all=True)
    tokens, aux = rank(jnp.arange(4)[:, None], aux, call)
    lowest = np.finfo(np.float32).min
    np.testing.assert_array_equal(tokens[..., 0], [[0, 1], [2, 3]])
    np.testing.assert_array_equal(aux["scores"], [[lowest, lowest], [lowest, -2.0]])
    np.testing.assert_array_equal(aux["log_p"], [[0.0, lowest], [lowest, -2.0]])


OWN = WithParams(drafting.Lookup(max_copy=2, vocab_size=5), ())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"drafting": OWN}, r"drafter_module must be None, because Setting\.drafting is"),
        ({"drafting": OWN, "min_draft": 1}, "min_draft must be left out"),
        ({"max_draft": 0}, "max_draft"),
        (
            {"drafting": "Lookup(min_match=3)"},
            r"drafting must be Lookup\(\) without bigram, min_match",
        ),
        (
            {"drafting": "Tree(depth=2, width=2)"},
            "drafting must be Lookup.* or WithParams.* in T5X",
        ),
        ({"processors": ("MinP(0.1)",)}, "processors must be left out in T5X"),
        ({"method": "VerifierAlone"}, "method must be left out in T5X"),
        ({"rule": "OPTT(0.2)"}, "rule='OPTT': there is no such name; did you mean OPT"),
    ],
    ids=str,
)
def test_a_setting_without_a_meaning_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        _small_pair(specjax_t5x.setting(**values))


def test_what_has_no_meaning_is_refused_in_one_line():
    call = functools.partial(_small_pair(None).predict_batch_with_aux, {}, BATCH)
    with pytest.raises(ValueError, match=r"decoder_params supports only .*, got alpha, brevity"):
        call(decoder_params={"brevity": 1, "alpha": 0.6})
    with pytest.raises(ValueError, match="exclude each other: give one"):
        call(KEY, {"decode_rng": KEY})
    with pytest.raises(ValueError, match="setting must be a .*Setting, got dict"):
        _small_pair({})


def test_a_layer_that_is_missing_is_named():
    pair = specjax_t5x.EncoderDecoderModel(t5(1), vocabulary(), vocabulary(), drafter_module=t5(2))
    params = params_of(pair, BATCH)
    del params["drafter"]["decoder"]["layers_1"]
    with pytest.raises(ValueError, match="the drafter's Transformer: .* missing: decoder/layers_1"):
        pair.predict_batch_with_aux(params, BATCH)


def test_the_rules_decide_but_for_what_does_not_divide():
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "model"))
    axis_rules = (("batch", "data"), ("heads", "model"), ("embed", None), ("kv", None))
    cache = ("batch", "kv_heads", "length", "kv")
    assert partition_spec((8, 4, 16, 8), cache, mesh, axis_rules) == P("data", "model", None, None)
    assert partition_spec((8, 3, 16, 8), cache, mesh, axis_rules) == P("data", None, None, None)
    assert partition_spec((6, 4), ("batch", None), mesh, axis_rules) == P(None, None)
    both = (("batch", ("data", "model")),)
    assert partition_spec((8, 4), ("batch", None), mesh, both) == P(("data", "model"), None)
