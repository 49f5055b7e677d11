"""NaN ends a row at once, and its source is named; its neighbours go on."""

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import decoding, drafting, rules, types
from specjax.types import Sampling
from tests import tiny_pair
from tests.decoding.helpers import alone, pair
from tests.tables import VERIFICATIONS

MODEL = specjax.testing.TabularModel(4, 1)
CLEAN = np.zeros((5, 4), np.float32)
# After token 1 comes NaN.
BAD = CLEAN.copy()
BAD[1, 2] = np.nan


@types.traced_dataclass
class NanAfterOne(rules.Lossless):
    def __call__(self, q, p, q_conf=None, p_conf=None):
        return p + jnp.where(p[1] > 0.9, jnp.nan, 0.0)


def _run(method, params, temperature, limits=None):
    prompts = types.PromptBatch(
        inputs=np.array([[0], [1], [2]], np.int32),
        input_lengths=np.ones(3, np.int32),
        ids=np.arange(3),
        limits=np.full(3, 5),
        sampling=Sampling(temperature),
        draft_limits=limits,
    )
    state = method.init(params, prompts, max_new=5)
    return method.run(params, state, 100)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", VERIFICATIONS)
@pytest.mark.parametrize("where", ["verifier", "drafter", "middle", "low"])
def test_a_row_ends_where_a_model_gives_nan(where, name, temperature):
    # Clean rows never come to token 1.
    safe, bad = CLEAN.copy(), BAD.copy()
    safe[[0, 2, 3, 4], 1] = bad[[0, 2, 3, 4], 1] = -np.inf
    models = ("verifier", "drafter", "middle", "low")
    tables = {model: jnp.asarray(bad if model == where else safe) for model in models}
    drafter, own = drafting.Chain(MODEL, 2), drafting.chain.ChainParams(tables["drafter"])
    if where in ("middle", "low"):
        below = drafting.Chain(MODEL, 1, name="low"), drafting.chain.ChainParams(tables["low"])
        drafter = drafting.cascades.VerticalCascade(below[0], MODEL, 2)
        own = decoding.MethodParams(tables["middle"], below[1])
    method = decoding.Speculative(MODEL, drafter, VERIFICATIONS[name])
    state = _run(method, decoding.MethodParams(tables["verifier"], own), temperature)
    assert [types.ENDED_BY[code] for code in state.ended_by] == ["length", "nan", "length"]
    np.testing.assert_array_equal(state.lengths, [5, 0, 5])
    source = method.nan_sources[int(state.info.nan_in[1])]
    assert source == ("verifier" if where == "verifier" else "drafter")
    assert np.isfinite(np.asarray(state.info.token_sum)).all()


def test_one_model_alone_and_a_rule_are_named():
    method = decoding.Autoregressive(MODEL)
    table = BAD.copy()
    table[[0, 2, 3, 4], 1] = -np.inf
    state = _run(method, alone(jnp.asarray(table)), 1.0)
    np.testing.assert_array_equal(state.lengths, [5, 0, 5])
    assert method.nan_sources[int(state.info.nan_in[1])] == "verifier"
    method = decoding.Speculative(MODEL, drafting.Chain(MODEL, 2))
    sure = CLEAN.copy()
    sure[2, 1] = 50.0
    state = _run(method, pair(jnp.asarray(sure), jnp.asarray(sure), NanAfterOne()), 1.0)
    ended = [types.ENDED_BY[code] for code in state.ended_by]
    assert ended[2] == "nan" and method.nan_sources[int(state.info.nan_in[2])] == "rule"


def test_the_decoder_says_which_model_and_step():
    good = tiny_pair.tabular(1)
    table = np.asarray(good.params).copy()
    table[:, 7] = np.nan
    bad = specjax.TextModel(good.model, jnp.asarray(table), good.tokenizer)
    decoder = specjax.Decoder(
        specjax.Pair(drafter=bad, verifier=good), max_new_tokens=4, batch_size=1, buckets=(16,)
    )
    with pytest.warns(
        UserWarning,
        match="row 0: output truncated .drafter gave NaN in step 1.; check the checkpoint",
    ):
        result = decoder(["hello"])
    assert result.ended_by == ["nan"] and result.texts == [""]
    assert result.to_dicts()[0]["error"] == "drafter gave NaN in step 1"
