"""Prompts that begin alike give the same outputs if their beginning is read once."""

import dataclasses

import jax
import numpy as np
import pytest

import specjax
from specjax import drafting, memory, processors, rules, types
from specjax.models.beginnings import continuing
from specjax.partitioning import make_mesh
from specjax.text import requests
from specjax.text.requests import common_of
from tests import tiny_pair

SHOTS = "Question: Ann has 3 apples and buys 4. How many has she?\nAnswer: 3+4=7. #### 7\n\n"
PROMPTS = [
    SHOTS + f"Question: Bob reads {n} pages{' every day' * (n % 3)}. How many in 5 days?\nAnswer:"
    for n in range(3, 9)
]
SHAPE = {"max_new_tokens": 16, "batch_size": 4, "buckets": (128,)}


@pytest.fixture(scope="module")
def pair():
    return tiny_pair.llamas()


DECODERS = {
    "pair": {
        "stopping": drafting.Confidence(0.4),
        "processors": (processors.NoRepeatNgram(3), processors.MinP(0.05)),
    },
    "lookup": {"drafting": specjax.drafting.Lookup()},
    "cascade": {"method": specjax.decoding.TokenCascade(), "rule": rules.Chow(0.3)},
}


@pytest.fixture(scope="module")
def decoder(pair):
    return specjax.Decoder(pair, **SHAPE, rule=rules.OPT(0.2))


RESTS = [prompt[len(SHOTS) :] for prompt in PROMPTS]


@pytest.mark.parametrize("name", DECODERS)
def test_outputs_are_those_without_sharing(pair, name):
    decoder = specjax.Decoder(pair, **DECODERS[name], **SHAPE)
    shared, apart = (decoder(PROMPTS, share_prefix=x) for x in (True, False))
    assert shared.texts == apart.texts
    ours, theirs = (one.info.per_row.log_prob_target for one in (shared, apart))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_samples_refills_and_rows_left_out(pair):
    decoder = specjax.Decoder(pair, **{**SHAPE, "batch_size": 2})
    whole = decoder(PROMPTS, share_prefix=True)
    assert whole.texts == decoder(PROMPTS).texts
    rounds = {row.index: int(row.info.rounds) for row in whole[:3]}
    rest = list(decoder.rows(PROMPTS, done=rounds, share_prefix=True))
    assert {row.index: row.text for row in rest} == {i: whole[i].text for i in (3, 4, 5)}
    samples = decoder(PROMPTS[:2], num_samples=2, share_prefix=True)
    assert samples.texts == decoder(PROMPTS[:2], num_samples=2).texts
    for prompts in (PROMPTS[:1], ["A?", "B!"], [[5], [5]]):  # they share all, or nothing
        assert decoder(prompts, share_prefix=True).texts == decoder(prompts).texts


def test_fewer_tokens_are_read():
    """The program of a refill reads the rest of the prompts, not their beginning."""
    decoder = specjax.Decoder(specjax.load_pair("gsm8k").verifier, **SHAPE)
    tokens = [decoder.encode(prompt) for prompt in PROMPTS]
    start = common_of(tokens)
    assert len(start) > len(decoder.encode(SHOTS)) - 2
    assert all((prompt[: len(start)] == start).all() for prompt in tokens)
    assert len({prompt[len(start)] for prompt in tokens}) > 1  # it is the longest
    batch = types.PromptBatch(
        np.zeros((4, 128), np.int32), np.ones(4, np.int32), np.arange(4), np.full(4, 16)
    )

    # In a single pass, as elsewhere than on CPUs: a loop's turns are not counted.
    model = dataclasses.replace(decoder.method.model, in_passes=False)
    method = dataclasses.replace(decoder.method, model=model)

    def traced(params, prompts, beginning):
        with continuing(beginning):
            return method.prefill(params, prompts, 200)

    begun, whole = (
        jax.jit(traced).lower(decoder.params, batch, one).cost_analysis()["flops"]
        for one in (decoder.method.begin(decoder.params, start), None)
    )
    assert begun < 0.7 * whole


def test_a_prompt_that_begins_otherwise(decoder):
    """It takes the tokens that it has in common; the others share as before."""
    tokens = [decoder.encode(prompt) for prompt in PROMPTS]
    cut = [*tokens[:2], tokens[2][7:], *tokens[3:], tokens[0][:5]]
    assert (common_of(cut) == common_of(tokens)).all()
    found = decoder(cut, share_prefix=True)
    assert found.texts == decoder(cut).texts
    size = common_of(tokens).size
    firsts = [len(one) - row.prefilled for one, row in zip(cut, found, strict=True)]
    # One begins within a sentence, one is a beginning itself.
    assert firsts == [size, size, 0, size, size, size, 4]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_outputs_are_those_of_joined_texts(decoder, temperature):
    sampling = types.Sampling(temperature)
    prefix = decoder.prefix(SHOTS)
    assert repr(prefix) == "Prefix(40 tokens)" and len(prefix) == 40
    apart = decoder(PROMPTS, sampling=sampling, seed=2)
    found = decoder(RESTS, prefix=prefix, sampling=sampling, seed=2)
    assert found.texts == apart.texts
    rest = [len(decoder.encode(prompt)) - len(prefix) for prompt in PROMPTS]
    assert [row.prefilled for row in found] == rest
    assert apart.prefilled - found.prefilled == len(PROMPTS) * len(prefix)
    streamed = [""] * len(RESTS)
    for place, text in decoder.stream_tokens(RESTS, prefix=prefix, sampling=sampling, seed=2):
        streamed[place] += text
    assert streamed == apart.texts


def test_tokens_follow_their_own_kind(decoder):
    tokens = decoder.encode(SHOTS)
    prefix = decoder.prefix(tokens)
    rest = [decoder.encode(prompt)[len(tokens) :] for prompt in PROMPTS]
    assert all((decoder.encode(prompt)[: len(tokens)] == tokens).all() for prompt in PROMPTS)
    assert decoder(rest, prefix=prefix).texts == decoder(PROMPTS).texts


def test_a_word_that_goes_on_after_the_prefix(decoder):
    """The tokens are those of the joined text, also if the prefix ends within one of them."""
    whole = SHOTS + "Question: Bob has twelve apples. How many has he?\nAnswer:"
    for cut in range(len(SHOTS), len(SHOTS) + 30, 3):
        prefix = decoder.prefix(whole[:cut])
        (row,) = decoder([whole[cut:]], prefix=prefix)
        assert row.text == decoder([whole]).texts[0]
        assert 0 <= row.prefilled - (len(decoder.encode(whole)) - len(prefix)) < 4
    (row,) = decoder([""], prefix=decoder.prefix(whole))
    assert row.text == decoder([whole]).texts[0] and row.prefilled == 1


def test_the_caches_of_a_prefix_count_as_memory(pair, monkeypatch):
    needed = []
    monkeypatch.setattr(memory, "check_fits", lambda _, size, *__: needed.append(size))
    decoder = specjax.Decoder(pair, **SHAPE)
    prefix = decoder.prefix(SHOTS)
    for more in ({}, {"prefix": prefix}, {"prefix": prefix}):  # the sizes that fit are known
        decoder.rows(RESTS[:1], **more)
    kept = memory.nbytes(prefix.beginning.caches)
    assert needed == [needed[0], needed[0] + kept] and kept > 1e3
    # Before it is read, its bytes follow from its shapes.
    unread = decoder._whole_prefix(decoder.encode(SHOTS * 2))
    assert unread.nbytes == memory.nbytes(unread.beginning.caches) > kept


def test_a_wrong_cache_changes_outputs(decoder):
    """The negative control: rows do use the prefix's caches."""
    prefix = decoder.prefix(SHOTS)
    zeros = jax.tree.map(lambda x: x * 0, prefix.beginning)
    zeros = dataclasses.replace(zeros, lengths=prefix.beginning.lengths)
    wrong = dataclasses.replace(prefix, taken=zeros)
    assert decoder(RESTS, prefix=wrong).texts != decoder(PROMPTS).texts


def test_requests_of_an_engine_follow_its_prefix(decoder):
    engine = decoder.engine(prompt_length=128, rows=2, prefix=decoder.prefix(SHOTS))
    for i, rest in enumerate(RESTS):
        engine.add(specjax.Request(rest, id=i))
    rows = tiny_pair.finished_rows(engine)
    assert [rows[i, 0].text for i in range(len(RESTS))] == decoder(PROMPTS).texts
    assert all(row.prefilled < 40 for row in rows.values())


def test_prefixes_that_do_not_fit(pair, decoder):
    prefix, of_tokens = decoder.prefix(SHOTS), decoder.prefix(decoder.encode(SHOTS))
    translator = specjax.Decoder(specjax.load_pair(), **SHAPE)
    no_encoder = "without prefix and share_prefix, because an enc"
    for call, prompts, options, message in (
        (decoder, RESTS, {"prefix": of_tokens}, "prompt 0 must be a list of token ids, because"),
        (decoder, [[5, 6]], {"prefix": prefix}, "prompt 0 must be a text, because the prefix is"),
        (decoder, [SHOTS * 4], {"prefix": prefix}, "prompt 0 has .*, the longest bucket holds 128"),
        (decoder, RESTS, {"prefix": prefix, "share_prefix": True}, "give either prefix or share"),
        (specjax.Decoder(pair, **SHAPE), RESTS, {"prefix": prefix}, "prefix must come from this D"),
        (translator, ["A dog."], {"share_prefix": True}, no_encoder),
        (translator.prefix, "A dog", {}, no_encoder),
        (decoder.prefix, SHOTS * 5, {}, "the prefix has .* tokens, the longest bucket holds 128"),
        (decoder.prefix, "", {}, "the prefix is empty"),
        (decoder.prefix, [{"role": "user", "content": "Hi"}], {}, "no chat template"),
    ):
        with pytest.raises(ValueError, match=message):
            call(prompts, **options)


@pytest.mark.exhaustive
def test_matrices_in_8_bits():
    decoder = specjax.Decoder(specjax.load_pair("gsm8k", weights="int8"), **SHAPE)
    greedy = {"sampling": types.Sampling(0.0)}
    found = decoder(RESTS, prefix=decoder.prefix(SHOTS), **greedy)
    assert found.texts == decoder(PROMPTS, **greedy).texts


@pytest.mark.parametrize("sizes", [(2, 4), pytest.param((8, 1), marks=pytest.mark.exhaustive)])
def test_prefixes_on_a_mesh(sizes, decoder):
    pair = tiny_pair.llamas(make_mesh(*sizes))
    on_mesh = specjax.Decoder(pair, **SHAPE, rule=rules.OPT(0.2))
    texts = decoder(PROMPTS).texts
    shared = on_mesh(PROMPTS, share_prefix=True)
    assert shared.texts == texts and shared.prefilled < 40 * len(PROMPTS)
    assert on_mesh(RESTS, prefix=on_mesh.prefix(SHOTS)).texts == texts
    samples = on_mesh(PROMPTS[:2], share_prefix=True, num_samples=2)
    assert samples.texts == decoder(PROMPTS[:2], num_samples=2).texts


@pytest.mark.parametrize("name", DECODERS)
def test_what_finished_rows_have_read_is_kept(pair, name):
    decoder = specjax.Decoder(pair, **DECODERS[name], **SHAPE)

    def decode(kept):
        engine = decoder.engine(
            prompt_length=128, rows=2, refill=1, log_probs=True, kept_prefixes=kept
        )
        rows = {}
        # The last prompt continues the first with its answer, as a chat does.
        for prompt in [*PROMPTS, "Something else?", PROMPTS[0]]:
            ids = decoder.encode(prompt).tolist()
            if len(rows) > len(PROMPTS):
                ids += rows[0].tokens.tolist()[:4]
            engine.add(specjax.Request(ids))
            while engine.unfinished > (0 if len(rows) % 2 else 1):
                rows |= {row.index: row for row in engine.step()}
        rows |= {row.index: row for row in engine.step(until_empty=True)}
        return [rows[i] for i in range(len(rows))]

    with_them, without = decode(3), decode(0)
    assert [row.text for row in with_them] == [row.text for row in without]
    for one, other in zip(with_them, without, strict=True):
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)
    lengths = [row.prefilled for row in without]
    assert all(row.prefilled < lengths[0] / 2 for row in with_them[3:6])
    assert with_them[6].prefilled == lengths[6]  # it begins otherwise
    # The first was left out for others: only the examples are in common.
    assert 8 < with_them[7].prefilled < lengths[7] / 2


def test_the_least_recently_used_prefix_goes():
    kept = requests.KeptPrefixes(2, shortest=2)

    def prefix(*tokens):
        return requests.Prefix(np.array(tokens), None, None, None)

    first, second, third = prefix(1, 2, 3), prefix(4, 5, 6), prefix(7, 8)
    kept.keep(first)
    kept.keep(second)
    assert kept.best(np.array([1, 2, 9])) is first and kept.best(np.array([1, 9, 9])) is None
    # A prompt has one token more than it takes.
    assert kept.best(np.array([4, 5])) is None
    kept.keep(third)
    assert kept.best(np.array([4, 5, 6, 7])) is None and kept.best(np.array([1, 2, 3, 4])) is first
    longer = prefix(1, 2, 3, 4)
    kept.keep(longer)
    assert kept.best(np.array([7, 8, 9])) is third
    assert kept.best(np.array([1, 2, 3, 9])) is longer
