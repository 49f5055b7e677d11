"""Prompts that begin alike give the same outputs if their beginning is read once."""

import jax
import numpy as np
import pytest

import specjax
from specjax import drafting, processors, rules, types
from specjax.partitioning import make_mesh
from specjax.text.directories import built_in_pair

SHOTS = "Question: Ann has 3 apples and buys 4. How many has she?\nAnswer: 3+4=7. #### 7\n\n"
PROMPTS = [
    SHOTS + f"Question: Bob reads {n} pages{' every day' * (n % 3)}. How many in 5 days?\nAnswer:"
    for n in range(3, 9)
]
SHAPE = {"max_new_tokens": 16, "batch_size": 4, "buckets": (128,)}


@pytest.fixture(scope="module")
def pair():
    return specjax.load_pair("gsm8k")


DECODERS = {
    "pair": {"rule": rules.OPT(0.2)},
    "adaptive": {"stopping": drafting.Confidence(0.4)},
    "lookup": {"drafting": specjax.Lookup()},
    "processors": {"processors": (processors.NoRepeatNgram(3), processors.MinP(0.05))},
    "cascade": {"method": specjax.TokenCascade(), "rule": rules.Chow(0.3)},
}


@pytest.mark.parametrize("name", DECODERS)
def test_outputs_are_those_without_sharing(pair, name):
    decoder = specjax.Decoder(pair, **DECODERS[name], **SHAPE)
    shared = decoder(PROMPTS, share_prefix=True)
    apart = decoder(PROMPTS)
    assert shared.texts == apart.texts
    np.testing.assert_allclose(
        shared.info.per_row.log_prob, apart.info.per_row.log_prob, rtol=1e-4, atol=1e-4
    )


def test_samples_refills_and_rows_left_out(pair):
    decoder = specjax.Decoder(pair, **{**SHAPE, "batch_size": 2})
    whole = decoder(PROMPTS, share_prefix=True)
    assert whole.texts == decoder(PROMPTS).texts
    rounds = {row.index: int(row.info.rounds) for row in whole[:3]}
    rest = list(decoder.rows(PROMPTS, done=rounds, share_prefix=True))
    assert {row.index: row.text for row in rest} == {i: whole[i].text for i in (3, 4, 5)}
    samples = decoder(PROMPTS[:2], num_samples=2, share_prefix=True)
    assert samples.texts == decoder(PROMPTS[:2], num_samples=2).texts


def test_fewer_tokens_are_read(pair):
    """The program of a refill reads the rest of the prompts, not their beginning."""
    decoder = specjax.Decoder(pair.verifier, **SHAPE)
    tokens = [decoder.encode(prompt) for prompt in PROMPTS]
    start = decoder._common_beginning(tokens)
    assert len(start) > len(decoder.encode(SHOTS)) - 2
    assert all((prompt[: len(start)] == start).all() for prompt in tokens)
    assert len({prompt[len(start)] for prompt in tokens}) > 1  # it is the longest

    def flops(**shared):
        batch = types.PromptBatch(
            np.zeros((4, 128), np.int32), np.ones(4, np.int32), np.arange(4), np.full(4, 16)
        )
        call = lambda *given: decoder.method.prefill(*given, 200)  # noqa: E731
        from specjax.models.beginnings import continuing

        def traced(params, prompts, beginning):
            with continuing(beginning):
                return call(params, prompts)

        lowered = jax.jit(traced).lower(decoder.params, batch, shared.get("beginning"))
        return lowered.cost_analysis()["flops"]

    begun = decoder.method.begin(decoder.params, start, 200)
    assert flops(beginning=begun) < 0.7 * flops()


@pytest.mark.parametrize("prompts", [PROMPTS[:1], ["A?", "B!"], [[5], [5]]])
def test_prompts_that_share_all_or_nothing(pair, prompts):
    decoder = specjax.Decoder(pair, **SHAPE)
    assert decoder(prompts, share_prefix=True).texts == decoder(prompts).texts


def test_models_that_cannot_share_say_so(pair):
    with pytest.raises(ValueError, match="share_prefix must be False, because an encoder reads"):
        specjax.Decoder(specjax.load_pair(), **SHAPE)(["A dog."], share_prefix=True)
    with pytest.raises(TypeError, match="share_prefix must be True or False, got 3"):
        specjax.Decoder(pair, **SHAPE)(PROMPTS, share_prefix=3)
    mesh = make_mesh(2, 1, devices=jax.devices()[:2])
    alone = specjax.load_text_model(built_in_pair("gsm8k") / "drafter", mesh=mesh)
    with pytest.raises(ValueError, match="share_prefix must be False on a mesh"):
        specjax.Decoder(alone, **SHAPE)(PROMPTS, share_prefix=True)
