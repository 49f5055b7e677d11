"""A call that leaves finished rows out gives the others the bits that they have beside them."""

import jax
import numpy as np
import pytest

import specjax
from specjax import rules, verification
from specjax.decoding import method as methods
from specjax.text import decoder as decoder_lib
from specjax.text.engine import TURNS, TURNS_AGAIN, Slots
from tests import tiny_pair
from tests.decoding.helpers import AfterTokenOne
from tests.variants import variants

COUNT = 30
PROMPTS = tiny_pair.sentences(COUNT, seed=3)
SHAPE = {"max_new_tokens": 12, "batch_size": 8, "buckets": (16, 24)}
OPTIONS = {"seed": 5, "log_probs": True, "max_new_tokens": [3, 12, 6, 9, 12] * 6}
METHODS = {
    "block": {"rule": rules.OPT(0.2), "max_draft": 2},
    "greedy block": {"verification": verification.GreedyBlock(), "max_draft": 2},
    "alone": {},
}
SUBSETS = [
    set(),
    set(range(COUNT)) - {0},
    set(range(COUNT)) - {17, 29},
    *(set(np.random.default_rng(i).permutation(COUNT)[: 5 * i + 3].tolist()) for i in range(5)),
]


@pytest.fixture(scope="module", params=variants(METHODS, "block", "alone"))
def decoder(pair, request):
    models = pair.verifier if request.param == "alone" else pair
    return specjax.Decoder(models, **METHODS[request.param], **SHAPE)


@pytest.fixture
def seen(monkeypatch):
    """What happens: the groups that enter the slots, the steps, and the prefills."""
    record = {"groups": [], "steps": 0, "prefills": 0}
    occupy, run, init = Slots.occupy, methods.Method.run, methods.Method.init

    def occupied(self, places, *since):
        asked = [entry.index for entry in self.waiting]
        record["groups"].append((list(places), asked[: len(places)]))
        return occupy(self, places, *since)

    def counted(self, params, state, *stops):
        before = np.array(state.steps)
        state = run(self, params, state, *stops)
        record["steps"] += int((np.array(state.steps) - before).max())
        return state

    def filled(self, *args, **options):
        record["prefills"] += 1
        return init(self, *args, **options)

    monkeypatch.setattr(Slots, "occupy", occupied)
    monkeypatch.setattr(methods.Method, "run", counted)
    monkeypatch.setattr(methods.Method, "init", filled)
    return record


def bits(row):
    """All that a row says of itself, as bytes."""
    parts = (row.tokens, row.info, row.log_probs, row.log_probs_target)
    return row.ended_by, [np.asarray(x).tobytes() for x in jax.tree.leaves(parts)]


def decode(decoder, seen, done, **options):
    seen.update(groups=[], steps=0, prefills=0)
    rows = {row.index: row for row in decoder.rows(PROMPTS, done=done, **{**OPTIONS, **options})}
    return rows, dict(seen)


def test_what_is_missing_comes_out_with_the_same_bits_and_without_the_rest(decoder, seen):
    whole, everything = decode(decoder, seen, {})
    assert len(whole) == COUNT and len(everything["groups"]) > 8
    rounds = {place: int(row.info.rounds) for place, row in whole.items()}
    for done in SUBSETS:
        rest, happened = decode(decoder, seen, {place: rounds[place] for place in done})
        assert rest.keys() == whole.keys() - done
        assert all(bits(rest[place]) == bits(whole[place]) for place in rest)
        assert happened["groups"] == everything["groups"]
        assert happened["steps"] <= sum(rounds[place] for place in rest)
        if len(rest) < 3:
            # A state for all slots, and one prefill for each row.
            assert happened["prefills"] <= len(rest) + 1
            assert happened["steps"] < everything["steps"] / 2
    # Rows that are not known are decoded again.
    rest, happened = decode(decoder, seen, rounds.keys() - {17})
    assert list(rest) == [17] and happened["steps"] == everything["steps"]
    # The groups do depend on the rounds.
    wrong = {place: 1 for place in rounds if place != 17}
    assert decode(decoder, seen, wrong)[1]["groups"] != everything["groups"]


@pytest.mark.parametrize("reason", ["draft limits", "drafts of any length"])
def test_rows_that_depend_on_others_are_decoded_beside_them(pair, seen, monkeypatch, reason):
    stopping = AfterTokenOne() if reason == "drafts of any length" else None
    decoder = specjax.Decoder(pair, **METHODS["block"], stopping=stopping, **SHAPE)
    options = {"draft_limit": [2, 1] * 15} if reason == "draft limits" else {}
    turns = []
    groups_of = decoder_lib.groups_of
    monkeypatch.setattr(
        decoder_lib, "groups_of", lambda *args: turns.append(args[-1]) or groups_of(*args)
    )
    whole, everything = decode(decoder, seen, {}, **options)
    rounds = {place: int(row.info.rounds) for place, row in whole.items() if place != 3}
    rest, happened = decode(decoder, seen, rounds, **options)
    assert list(rest) == [3] and bits(rest[3]) == bits(whole[3])
    assert happened == everything
    assert turns == [TURNS_AGAIN] * 2 and TURNS_AGAIN < TURNS


def test_a_known_row_can_be_dropped(pair):
    decoder = specjax.Decoder(pair.verifier, **SHAPE)
    engine = decoder.engine(prompt_length=16, rows=2, refill=1)
    prompt = np.ones(3, np.int32)
    ids = [
        engine.put(specjax.Request(prompt, 5, id=i), prompt, [], [steps])
        for i, steps in enumerate((7, 8, 9, None))
    ]
    assert engine.step() == [] and engine.unfinished == 3  # one has left, and one has come in
    assert engine.abort(ids[1]) and engine.abort(ids[2]) and not engine.abort(ids[0])
    finished = []
    while engine.unfinished:
        finished += engine.step()
    assert [row.index for row in finished] == [ids[3]]
