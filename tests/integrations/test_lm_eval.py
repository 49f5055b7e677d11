"""lm-eval scores and writes the same with the adapter and through the endpoint."""

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed")
api_models = pytest.importorskip("lm_eval.models.openai_completions")

from lm_eval.api.instance import Instance

from specjax.integrations import lm_eval as adapter
from specjax.text import Decoder
from tests import tiny_pair
from tests.serving.conftest import serving

PAIRS = [("The sea is", " blue"), ("", "Two dogs"), ("One and one is ", "two")]


@pytest.fixture(scope="module")
def models():
    return tiny_pair.llamas()


@pytest.fixture(scope="module")
def ours(models):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "load_pair", lambda **_: models)
        return adapter.SpecjaxLM(max_gen_toks=12, max_length=64, batch_size=4)


@pytest.fixture(scope="module")
def theirs(models, ours):
    decoder = Decoder(models, max_new_tokens=12, batch_size=4, buckets=(64,))
    with serving(decoder) as client, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", "a key")
        remote = api_models.OpenAICompletionsAPI(
            model="tiny",
            base_url=f"http://127.0.0.1:{client.port}/v1/completions",
            tokenizer_backend=None,
            tokenized_requests=True,
            max_length=64,
            num_concurrent=1,
        )
        yield remote


def requests(kind, *args):
    return [Instance(kind, {}, each, i) for i, each in enumerate(args)]


def test_scores_are_the_same(ours, theirs):
    mine = ours.loglikelihood(requests("loglikelihood", *PAIRS), disable_tqdm=True)
    tokens = []
    for context, continuation in PAIRS:
        if context:
            tokens.append((None, *ours._encode_pair(context, continuation)))
        else:
            ids = ours.tok_encode(continuation, add_special_tokens=False)
            tokens.append((None, [ours.eot_token_id], ids))
    remote = theirs._loglikelihood_tokens(tokens, disable_tqdm=True)
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in remote]
    np.testing.assert_allclose([x for x, _ in mine], [x for x, _ in remote], atol=1e-4)


def test_a_long_text_is_scored_in_windows(ours):
    text = "The sea is blue and the ships go by. " * 6
    ids = ours.tok_encode(text)
    assert len(ids) > 64
    (total,) = ours.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)))
    first = ours._decoder.score([[ours.eot_token_id]], [ids[:64]]).totals[0]
    assert total < first < 0


def test_outputs_end_at_the_strings_of_the_task(ours):
    prompts = ["The sea is", "Two dogs"]
    whole = ours.generate_until(
        requests("generate_until", *((x, {"until": []}) for x in prompts)), disable_tqdm=True
    )
    stop = whole[0][3:5]
    cut = ours.generate_until(
        requests("generate_until", *((x, {"until": [stop], "max_gen_toks": 8}) for x in prompts)),
        disable_tqdm=True,
    )
    assert cut[0] == whole[0][: whole[0].index(stop)]
    assert whole[1].startswith(cut[1]) and cut[1] != whole[1]
