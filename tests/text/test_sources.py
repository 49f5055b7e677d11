"""Where each token came from: `decoder(prompts, sources=True)`.

The models are tables over bytes. So at temperature 0 a few lines of Python know all drafts.
"""

import collections
import dataclasses
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import rules, verification
from specjax.decoding import method as methods
from specjax.partitioning import make_mesh
from specjax.types import PromptBatch, Sampling
from tests import tiny_pair
from tests.variants import variants

G = 3
SHAPE = {"max_new_tokens": 20, "batch_size": 2, "buckets": (32,)}
GREEDY = {**SHAPE, "sampling": Sampling(0.0)}
PROMPTS = [[100, 50], [7], [200, 9, 31], [44], [150], [91, 91]]
OWN = ("residual", "bonus", "verifier")


@pytest.fixture(scope="module")
def models():
    verifier = tiny_pair.tabular(1)
    # Rows of several rounds.
    verifier = dataclasses.replace(verifier, params=verifier.params.at[:, 1].add(-2.0))
    small = tiny_pair.near(verifier, 6, 0.6)
    return specjax.Pair(tiny_pair.near(verifier, 5, 0.3), verifier, small=small)


@pytest.fixture(scope="module")
def pair(models):
    return specjax.Pair(models.named["drafter"], models.verifier)


def agreeing(model, row):
    """For each token of a row, whether it is the model's own greedy token there."""
    written = [*row.tokens.tolist(), *([row.eos_id] if row.ended else [])]
    before = [PROMPTS[row.index][-1], *written]
    table = np.asarray(model.params)
    return [table[a].argmax() == b for a, b in zip(before, written, strict=False)]


def expected(row, block, drafts):
    """The sources of a greedy row; `drafts(place)` has those of the accepted tokens from there."""
    found = []
    count = len(row.tokens) + row.ended
    while len(found) < count:
        accepted = drafts(len(found))
        found += [*accepted, "bonus" if len(accepted) == block else "residual"]
    return found[: len(row.tokens)]


def one_drafter(agrees, block, name="drafter"):
    def drafts(place):
        ahead = [*agrees[place : place + block], False]
        return [name] * min(ahead.index(False), block)

    return drafts


@pytest.mark.parametrize("name", variants(["Block", "Token", "GreedyBlock"], "Block"))
def test_greedy_tokens_come_from_where_the_drafts_say(models, pair, name):
    judge = getattr(verification, name)()
    decoder = specjax.Decoder(pair, max_draft=G, verification=judge, **GREEDY)
    result, plain = decoder(PROMPTS, sources=True), decoder(PROMPTS)
    assert result.texts == plain.texts and plain[0].sources is None
    found = collections.Counter()
    for row in result:
        agrees = agreeing(models.named["drafter"], row)
        assert list(row.sources) == expected(row, G, one_drafter(agrees, G))
        found.update(row.sources)
    assert min(found[name] for name in ("drafter", "residual", "bonus")) > 0
    # The comparison can fail: blocks of another length have other sources.
    assert any(
        list(row.sources)
        != expected(row, 2, one_drafter(agreeing(models.named["drafter"], row), 2))
        for row in result
    )


def test_counts_agree_with_those_of_rounds(pair):
    decoder = specjax.Decoder(pair, max_draft=G, stop=("e",), **SHAPE)
    limits = [0, 1, 2, 3, 3, 3]
    result = decoder(PROMPTS * 4, seed=3, draft_limit=limits * 4, sources=True)
    assert {row.ended_by for row in result} >= {"length", "stop"}
    for row in result:
        assert len(row.sources) == len(row.tokens)
        found = collections.Counter(row.sources)
        own = sum(found[name] for name in OWN)
        # Each round ends with a token of the verifier, but a row may end before it.
        assert row.info.rounds - 1 - row.ended <= own <= row.info.rounds
        assert found["drafter"] <= row.info.accepted
        assert found["residual"] <= row.info.rollbacks
        assert found["verifier"] <= row.info.drafted_lengths[0]
        if limits[row.index % 6] == 0:
            assert set(row.sources) <= {"verifier"}
    assert decoder(PROMPTS, seed=3, sources=True)[1].sources.count("verifier") == 0


def test_each_position_has_the_name_of_its_drafter(models):
    plan = specjax.drafting.Cascade(((2, 1), (0, 0)), models=("drafter", "small"))
    for row in specjax.Decoder(models, drafting=plan, **GREEDY)(PROMPTS, sources=True):
        large, small = (agreeing(models.named[name], row) for name in ("drafter", "small"))

        def drafts(place, large=large, small=small):
            found = one_drafter(large, 2)(place)
            return found + one_drafter(small, 1, "small")(place + 2) if len(found) == 2 else found

        assert list(row.sources) == expected(row, 3, drafts)


def test_copies_come_from_the_lookup(pair):
    plan = specjax.drafting.Lookup(min_match=3)
    result = specjax.Decoder(pair, drafting=plan, max_draft=G, **GREEDY)(PROMPTS, sources=True)
    copied = 0
    for row in result:
        context = [*PROMPTS[row.index], *row.tokens.tolist()]
        start = len(context) - len(row.tokens)
        for place, name in enumerate(row.sources):
            if name == "lookup" and (place == 0 or row.sources[place - 1] != "lookup"):
                ending = context[start + place - 3 : start + place + 1]
                assert ending in [context[i : i + 4] for i in range(start + place - 3)]
                copied += 1
    assert copied and any("drafter" in row.sources for row in result)


def test_a_reviewer_has_its_own_tokens(models):
    plan = specjax.drafting.Cascade(((3, 0), (0, 2)), models=("drafter", "small"))
    decoder = specjax.Decoder(models, drafting=plan, **GREEDY)
    found = collections.Counter()
    for row in decoder(PROMPTS, sources=True):
        large, small = (agreeing(models.named[name], row) for name in ("drafter", "small"))
        place = 0
        while place < len(row.sources):
            start, block = place, []
            while len(block) < 3:  # inner rounds of at most 2 + 1 tokens
                here = start + len(block)
                block += [*one_drafter(small, 2, "small")(here), "drafter"]
            accepted = one_drafter(large, len(block))(start)
            place += len(accepted) + 1
            assert (
                list(row.sources[start : place - 1])
                == block[: len(accepted)][: len(row.sources) - start]
            )
        found.update(row.sources)
    assert set(found) == {"drafter", "small", "residual", "bonus"}


def test_cascades_have_the_name_of_the_model_that_wrote(pair):
    chow = rules.Chow(0.9)
    fallback = rules.FallbackRollback(fallback=chow, rollback=rules.BiLD(2.0))
    cases = [
        (specjax.decoding.TokenCascade(), chow),
        (specjax.decoding.BiLDCascade(), fallback),
        (specjax.decoding.OracleCascade(), rules.Diff(0.01)),
        (specjax.decoding.SequenceCascade(), rules.SequenceChowLog(60.0)),
    ]
    for method, rule in cases:
        decoder = specjax.Decoder(pair, method=method, rule=rule, **SHAPE)
        result = decoder(PROMPTS * 2, seed=1, sources=True)
        for row in result:
            wrote = row.sources.count("verifier")
            # An end-of-sequence token has no source.
            assert row.info.deferrals - row.ended <= wrote <= row.info.deferrals, method
            assert row.sources.count("drafter") == len(row.tokens) - wrote
            if isinstance(method, specjax.decoding.SequenceCascade):
                assert len(set(row.sources)) == 1
        assert {"drafter", "verifier"} == set().union(*(row.sources for row in result)), method
    alone = specjax.Decoder(pair.verifier, **SHAPE)(PROMPTS[:1], sources=True)[0]
    assert alone.sources == ("verifier",) * len(alone.tokens)


def test_rows_that_end_inside_a_block_or_by_nan(pair):
    whole = specjax.Decoder(pair, max_draft=G, **GREEDY)(PROMPTS, sources=True)
    row = next(row for row in whole if row.sources[:2] == ("drafter",) * 2)
    short = specjax.Decoder(pair, max_draft=G, **{**GREEDY, "max_new_tokens": 1})
    assert short(PROMPTS, sources=True)[row.index].sources == ("drafter",)
    params = pair.verifier.params.at[:, 5].set(jnp.nan)
    broken = specjax.Pair(pair.drafter, dataclasses.replace(pair.verifier, params=params))
    with pytest.warns(UserWarning, match="NaN"):
        row = specjax.Decoder(broken, max_draft=G, **GREEDY)(PROMPTS[:1], sources=True)[0]
    assert row.ended_by == "nan" and row.sources == ()
    assert repr(row.show()) == "0: \nsource of 0 tokens: none"


def test_a_mesh_a_slot_and_an_engine_change_nothing(pair):
    decoder = specjax.Decoder(pair, max_draft=G, **GREEDY)
    one = decoder(PROMPTS, sources=True, log_probs=True)
    mesh = make_mesh(data=2, model=1)
    split = (dataclasses.replace(x, mesh=mesh) for x in (pair.drafter, pair.verifier))
    spread = specjax.Decoder(specjax.Pair(*split), max_draft=G, **GREEDY)(PROMPTS, sources=True)
    engine = decoder.engine(prompt_length=32, sources=True)
    for prompt in PROMPTS:
        engine.add(specjax.Request(prompt))
    rows = tiny_pair.finished_rows(engine)
    for i, row in enumerate(one):
        assert row.sources == spread[i].sources == rows[i, 0].sources
    assert pickle.loads(pickle.dumps(one)).rows[0].sources == one[0].sources
    assert one[0].to_dict()["sources"] == list(one[0].sources)


def test_programs_without_sources_know_nothing_of_them(models):
    zeros, ones = np.ones((2, 32), np.int32), np.ones(2, np.int32)
    batch = PromptBatch(zeros, ones, np.arange(2), np.full(2, 16))
    for parts in (
        {"max_draft": G},
        {"drafting": specjax.drafting.Cascade(((2, 1), (0, 2)), models=("drafter", "small"))},
        {"method": specjax.decoding.TokenCascade(), "rule": rules.Chow(0.5)},
    ):
        decoder, programs = specjax.Decoder(models, **parts, **SHAPE), []
        for wanted in (False, True):
            state = decoder.method.init(decoder.params, batch, max_new=20, sources=wanted)
            given = decoder.method, decoder.params, state, np.int32(9), np.int32(2), None
            programs.append(methods.jitted_run().trace(*given).lower().as_text())
        # The codes are the only 8-bit integers.
        assert ["xi8>" in text for text in programs] == [False, True]
