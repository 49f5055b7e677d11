"""The parts of docs/extending.md, from public names alone, each decoded with `Decoder`."""

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import models, rules, testing, types
from specjax.text.parts import PARTS
from specjax.types import Sampling
from tests import tiny_pair
from tests.pages import run_page

PAGE = "docs/extending.md"
# The shapes of the page, whose programs are compiled by then.
SHAPE = {"max_new_tokens": 8, "batch_size": 2, "buckets": (32,)}
PROMPTS = ["one", "two"]


@pytest.fixture(scope="module")
def pair():
    return specjax.Pair(drafter=tiny_pair.tabular(2), verifier=tiny_pair.tabular(1))


@pytest.fixture(scope="module")
def page(pair):
    """The page, run with a pair that compiles quickly in the place of the built-in one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(specjax, "load_pair", lambda: pair)
        patch.setitem(models.FAMILIES, "biased", models.FAMILIES["llama"])  # taken out again
        patch.setitem(PARTS, "Never", object)  # likewise
        return SimpleNamespace(**run_page(PAGE))


@pytest.mark.exhaustive
def test_the_page_runs_with_the_built_in_pair():
    assert run_page(PAGE)["ended"] == {0: "length"}


def test_the_page_runs_and_has_one_of_each_part(page):
    assert page.pair.verifier.name == "the model"  # not the built-in one
    assert types.Stopping in page.Unsure.__mro__ and types.Verification in page.Never.__mro__
    assert types.Drafter in page.Remembered.__mro__ and types.LanguageModel in page.Counter.__mro__
    assert page.Remembered.traits.fixed_length is False
    assert set(page.ended) == {page.first}


def test_a_rule(pair, page):
    Mixture = page.Mixture
    decoder = specjax.Decoder(pair, rule=Mixture(np.float32(0.0)), max_draft=2, **SHAPE)
    lossless = specjax.Decoder(pair, rule=rules.Lossless(), max_draft=2, **SHAPE)
    assert decoder(PROMPTS, seed=1).texts == lossless(PROMPTS, seed=1).texts
    # Its strengths are traced, per prompt too; at 1 all that is drafted stands.
    result = decoder(PROMPTS, seed=1, rule=Mixture(np.array([0.0, 1.0], np.float32)))
    assert result[0].text == lossless(PROMPTS, seed=1)[0].text
    assert result[1].info.accepted == result[1].info.drafted


def test_a_wrong_rule_is_told_in_one_line(pair, page):
    @types.traced_dataclass
    class Doubled(page.Mixture):
        strength: object

        def __call__(self, q, p, q_conf=None, p_conf=None):
            return 2.0 * p

    with pytest.raises(AssertionError, match="Doubled must sum to 1, got a sum of 2"):
        specjax.Decoder(pair, rule=Doubled(np.float32(0.0)))

    @dataclasses.dataclass(frozen=True)
    class Plain:
        reads_draft: bool = False
        reads_draft_confidence: bool = False
        reads_verifier_confidence: bool = False

        def __call__(self, q, p, q_conf=None, p_conf=None):
            return p

    with pytest.raises(ValueError, match="rule must be a pytree, got Plain: decorate the class"):
        specjax.Decoder(pair, rule=Plain())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stopping_policy(pair, page, temperature):
    def decode(threshold):
        decoder = specjax.Decoder(
            pair,
            max_draft=4,
            stopping=specjax.WithParams(page.Unsure(), jnp.float32(threshold)),
            sampling=Sampling(temperature),
            **SHAPE,
        )
        return decoder(PROMPTS, seed=2)

    eager, careful, always = decode(0.0), decode(0.15), decode(2.0)
    longest, middle, shortest = (
        x.info.per_row.drafted.sum() / x.info.per_row.rounds.sum() for x in (eager, careful, always)
    )
    assert longest > middle >= shortest
    assert careful.info.per_row.drafted_lengths[:, 1:4].any()
    assert not always.info.per_row.drafted_lengths[:, 2:].any()
    if temperature == 0.0:
        assert eager.texts == careful.texts == always.texts


def test_a_language_model_drafts(pair, page):
    both = specjax.Pair(drafter=page.counter, verifier=pair.verifier)
    alone = specjax.Decoder(pair.verifier, sampling=Sampling(0.0), **SHAPE)
    assert (
        specjax.Decoder(both, sampling=Sampling(0.0), **SHAPE)(PROMPTS).texts
        == alone(PROMPTS).texts
    )


@pytest.mark.filterwarnings("ignore:the drafter has")  # scales are numbers too
def test_a_family_and_weights_of_8_bits_draft_and_verify(pair, page):
    """A drafter of stored weights beside a verifier of arrays, and the other way round."""
    stored = dataclasses.replace(page.biased, params=page.stored)
    assert page.one.texts == page.other.texts
    kernel = page.stored["decoder"]["layers_0"]["mlp"]["wo"]["kernel"]
    assert isinstance(kernel, page.Int8) and kernel.values.dtype == jnp.int8
    for verifier, drafter in ((page.biased, stored), (stored, page.biased)):
        both = specjax.Pair(drafter=drafter, verifier=verifier)
        alone = specjax.Decoder(verifier, sampling=page.greedy, **SHAPE)(PROMPTS)
        result = specjax.Decoder(both, max_draft=2, sampling=page.greedy, **SHAPE)(PROMPTS)
        assert result.texts == alone.texts
    axes = page.model.param_axes(page.stored)["decoder"]["layers_0"]["mlp"]["wo"]["kernel"]
    assert (axes.values, axes.scales) == (("mlp", "embed"), (None, None))


def test_a_drafter_that_lags_and_catches_up(pair, page):
    table = np.full((260, 259), -9.0, np.float32)
    table[np.arange(260), 10 + np.arange(260) % 3] = 9.0  # it repeats itself
    looping = specjax.TextModel(
        testing.TabularModel(259, 1), jnp.asarray(table), pair.verifier.tokenizer
    )
    alone = specjax.Decoder(looping, sampling=Sampling(0.0), **(SHAPE | {"max_new_tokens": 24}))
    decoder = specjax.Decoder(
        looping,
        drafting=specjax.WithParams(page.Remembered(3, 259)),
        sampling=Sampling(0.0),
        **(SHAPE | {"max_new_tokens": 24}),
    )
    result = decoder(PROMPTS)
    assert result.texts == alone(PROMPTS).texts
    assert result.info.per_row.accepted.sum() > 0
    assert result.info.per_row.rounds.max() < 24
    # It has no confidence: a rule that reads one is refused.
    with pytest.raises(ValueError, match="Chow reads the drafter's confidence, but Remembered has"):
        decoder(PROMPTS, rule=rules.Chow(0.5))


def test_a_whole_method(pair, page):
    model = pair.verifier
    method = page.Echo(model.model, eos_ids=tuple(model.tokenizer.eos_ids))
    own = specjax.WithParams(method, page.EchoParams(model.params))
    echo = specjax.Decoder(model, method=own, **SHAPE)
    plain = specjax.Decoder(model, sampling=Sampling(0.0), **SHAPE)(PROMPTS)
    doubled = echo(PROMPTS)
    for one, two in zip(plain, doubled, strict=True):
        np.testing.assert_array_equal(np.repeat(one.tokens, 2)[: len(two.tokens)], two.tokens)
    assert doubled.info.tokens_per_verifier_call > 1.5
    with pytest.raises(ValueError, match="rule must be left out, got .*: Echo uses no rule"):
        echo(PROMPTS, rule=rules.Lossless())
    with pytest.raises(ValueError, match="max_draft must be left out: `method` has its own"):
        specjax.Decoder(model, method=own, max_draft=3)


def test_any_number_of_models_has_one_vocabulary(pair):
    models = specjax.Pair(verifier=pair.verifier, middle=tiny_pair.tabular(3), drafter=pair.drafter)
    assert list(models.named) == ["drafter", "verifier", "middle"]
    decoder = specjax.Decoder(models, max_draft=2, **SHAPE)
    # Results depend on the models in use.
    assert set(decoder.describe()["models"]) == {"verifier", "drafter"}
    assert set(decoder(PROMPTS)[0].info.calls) == {"verifier", "drafter"}


def test_what_is_left_out_of_a_part_is_told():
    class Half(types.Drafter):
        max_draft = 2
        vocab_size = 259

        def prefill(self, *args):
            return ()

    with pytest.raises(TypeError, match="abstract .*Half.* (bonus|propose)"):
        Half()

    class Lazy(types.Stopping):
        pass

    with pytest.raises(TypeError, match="abstract .*Lazy.* step"):
        Lazy()


def test_descriptions_tell_own_parameters_apart(pair, page):
    def described(threshold):
        own = specjax.WithParams(page.Unsure(), jnp.float32(threshold))
        return specjax.Decoder(pair, stopping=own, **SHAPE).describe()

    one, two = described(0.1), described(0.2)
    assert one != two and one == described(0.1)
