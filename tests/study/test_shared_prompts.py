"""Settings of a few-shot task read the examples once, all alike."""

import dataclasses

import jax
import numpy as np
import pytest

import specjax
from specjax.data.examples import Example
from specjax.data.few_shot import FewShot
from specjax.decoding import Method
from specjax.evaluation import Bootstrap
from specjax.study import Measuring, Setting, Texts, measure
from specjax.study.comparison import _bench, _configuration
from specjax.study.texts import Prompting
from tests.variants import variants

SHOTS = "Question: Ann has 3 apples and buys 4. How many has she?\nAnswer: 3+4=7. #### 7\n\n"
INPUTS = [SHOTS + f"Question: Bob reads {n} pages. How many in 5 days?\nAnswer:" for n in (3, 8, 5)]
TEXTS = Texts([Example(i, text) for i, text in enumerate(INPUTS)], [()] * 3)
HOW = Measuring(
    metrics=(), num_samples=1, latency_limit=2, repeats=1, bootstrap=Bootstrap(resamples=100)
)
OPTIONS = {"max_new_tokens": 8, "buckets": (96,)}
ALONE = Setting(method="VerifierAlone", temperature=0.0)
TASK = Prompting(task=FewShot(prompt="{question}"))


@pytest.fixture(scope="module")
def models():
    return specjax.load_pair("gsm8k").named


def _made(models, prompts):
    return _bench(models, TEXTS, HOW, OPTIONS, prompts, one_bucket=False)


def test_only_tasks_of_decoder_only_models_share(models):
    shared = _made(models, TASK)
    size = shared.shared.size
    assert size > 40 and _configuration(shared, TASK)["shared"] == size
    assert all((prompt[:size] == shared.shared).all() for prompt in shared.prompts)
    plain = _made(models, Prompting())
    assert not plain.shared.size and "shared" not in _configuration(plain, Prompting())
    translators = specjax.load_pair().named
    assert not _made(translators, TASK).shared.size


PAIR, DRAFTER = Setting(temperature=0.0), Setting(method="DrafterAlone", temperature=0.0)


@pytest.mark.parametrize("setting", variants([ALONE, PAIR, DRAFTER], PAIR))
def test_outputs_are_those_of_whole_prompts(models, setting, monkeypatch):
    begin, begun = Method.begin, []

    def count(self, params, tokens):
        # Not where only shapes are asked for.
        if not isinstance(jax.tree.leaves(params)[0], jax.core.Tracer):
            begun.append(np.size(tokens))
        return begin(self, params, tokens)

    monkeypatch.setattr(Method, "begin", count)
    bench = _made(models, TASK)
    own = measure(setting, bench)
    # Once for each decoder, with other batch sizes: not in every timed call.
    assert begun == [bench.shared.size] * (2 if setting == ALONE else 3)
    whole = measure(setting, dataclasses.replace(bench, shared=bench.shared[:0]))
    texts = [[row["prediction"] for row in one.rows[0]] for one in (own, whole)]
    assert texts[0] == texts[1]
    assert len(begun) == (2 if setting == ALONE else 3)
