"""Drafts copied from the answers that a decoder gave to the same prompts before."""

import numpy as np
import pytest

import specjax
from specjax.text import earlier
from specjax.text.earlier import EarlierAnswers
from tests import tiny_pair

PROMPTS = ["ab", "cde", "f", "ghij"]


def ids(*tokens):
    return np.array(tokens, np.int32)


def kept(store, prompt):
    return [answer.tolist() for answer in store.of(prompt)[0]]


def test_the_last_answers_to_a_prompt_are_kept():
    store, prompt = EarlierAnswers(2), ids(1, 2)
    assert store.of(prompt, 5) == ([], 5)
    for number in (3, 4, 4):
        store.keep(prompt, ids(number, 0))
    store.keep(ids(1), ids(9))
    assert kept(store, prompt) == [[4, 0], [4, 0]] and kept(store, ids(1)) == [[9]]
    seed = store.of(prompt, 5)[1]
    store.keep(prompt, ids(4, 0))
    assert len({5, seed, store.of(prompt, 5)[1], store.of(prompt, 6)[1]}) == 4


def test_the_prompt_that_was_used_least_recently_goes(monkeypatch):
    monkeypatch.setattr(earlier, "MOST_TOKENS", 10)
    store, prompts = EarlierAnswers(2), [ids(i) for i in range(3)]
    for prompt in prompts[:2]:
        store.keep(prompt, ids(7, 7, 7))  # four tokens with the prompt's
    store.keep(prompts[0], ids(8))
    store.keep(prompts[2], ids(9))  # eleven
    assert kept(store, prompts[1]) == []
    assert kept(store, prompts[0]) == [[8], [7, 7, 7]] and kept(store, prompts[2]) == [[9]]
    store.keep(prompts[0], ids(6, 6))  # in the place of three tokens
    assert kept(store, prompts[2]) == [[9]]
    store.keep(prompts[1], ids(*range(20)))  # the last prompt stays
    assert kept(store, prompts[1]) == [[*range(20)]] and kept(store, prompts[0]) == []


def decoder_of(temperature=1.0, drafting="Lookup(earlier=3)", **options):
    options = {"max_draft": 4, "max_new_tokens": 12, "batch_size": 4, "buckets": (8,), **options}
    sampling = specjax.Sampling(temperature=temperature)
    return specjax.Decoder(tiny_pair.tabular(1), drafting=drafting, sampling=sampling, **options)


def tokens_of(result):
    return [row.tokens_with_end.tolist() for row in result]


def test_a_later_call_takes_fewer_passes():
    decoder, alone = decoder_of(0.0), decoder_of(0.0, "Lookup()")
    first, second = decoder(PROMPTS), decoder(PROMPTS)
    assert tokens_of(first) == tokens_of(second) == tokens_of(alone(PROMPTS))
    assert second.info.verifier_calls < first.info.verifier_calls
    assert second.compile_seconds == 0.0
    # Whatever an answer is, it may be copied; another prompt has none.
    assert tokens_of(decoder(["ghij"], ids=[7])) == tokens_of(first)[3:]
    other = decoder(["xy"]).info.verifier_calls
    assert other == decoder_of(0.0)(["xy"]).info.verifier_calls


def test_a_row_follows_from_its_seed_its_id_and_the_answers_before_the_call():
    decoder = decoder_of(0.3)
    first, second = decoder(PROMPTS), decoder(PROMPTS, seed=1)
    again = decoder_of(0.3)
    assert tokens_of(again(PROMPTS)) == tokens_of(first)
    rows = {row.index: row for row in again.rows([PROMPTS[2], PROMPTS[0]], seed=1, ids=[2, 0])}
    assert [rows[1].tokens.tolist(), rows[0].tokens.tolist()] == [
        second[i].tokens.tolist() for i in (0, 2)
    ]
    # Without these answers the same seed draws other tokens.
    assert tokens_of(decoder_of(0.3)(PROMPTS, seed=1)) != tokens_of(second)


def test_answers_of_the_same_call_are_not_copied():
    once, many = decoder_of(0.0), decoder_of(0.0, batch_size=1)
    single, several = once(PROMPTS[:1]), many(PROMPTS[:1] * 3)
    assert [row.info.calls for row in several] == [single[0].info.calls] * 3
    assert many(PROMPTS[:1]).info.verifier_calls < single.info.verifier_calls


def test_an_engine_copies_what_had_finished_when_a_request_was_added():
    engine = decoder_of(0.0).engine(prompt_length=8, rows=1)
    for _ in range(2):  # the second waits
        engine.add(specjax.Request("ab"))
    rows = [row for _ in range(2) for row in engine.step()]
    engine.add(specjax.Request("ab"))
    rows += engine.step()
    assert len({tuple(row.tokens) for row in rows}) == 1
    before, waited, after = (row.info.verifier_calls for row in rows)
    assert before == waited > after


def test_answers_are_kept_for_another_decoder():
    old, new = decoder_of(0.0), decoder_of(0.0)
    old(PROMPTS)
    new.earlier = old.earlier
    assert new(PROMPTS).info.verifier_calls == old(PROMPTS).info.verifier_calls
    assert len(new.earlier.of(new.encode("ab"))[0]) == 3  # of both
    assert decoder_of(drafting="Lookup()").earlier is None


def test_a_given_text_is_copied_beside_earlier_answers():
    decoder = decoder_of(0.0)
    first = decoder(PROMPTS)
    given = decoder_of(0.0)(PROMPTS, predictions=first.rows)
    both = decoder(PROMPTS, predictions=[None, *first.rows[1:]])
    assert tokens_of(given) == tokens_of(both) == tokens_of(first)
    assert both.info.verifier_calls <= given.info.verifier_calls < first.info.verifier_calls


@pytest.mark.parametrize(
    "drafting",
    [
        "Lookup(earlier=2, copies=2)",
        "Lookup(min_match=2, earlier=2)",
        "Branches(('drafter', Lookup(earlier=2)))",
        "Cascade(((2, 1), (0, 1)), last=Lookup(earlier=2))",
    ],
)
def test_other_drafters_copy_earlier_answers_too(drafting):
    verifier = tiny_pair.tabular(1)
    pair = specjax.Pair(tiny_pair.near(verifier, 2, 0.5), verifier)
    greedy = specjax.Sampling(temperature=0.0)
    sizes = {"max_new_tokens": 12, "buckets": (8,)}
    decoder = specjax.Decoder(pair, drafting=drafting, sampling=greedy, **sizes)
    first, second = decoder(PROMPTS, num_samples=2), decoder(PROMPTS, num_samples=2)
    assert tokens_of(first) == tokens_of(second)
    assert second.info.verifier_calls <= first.info.verifier_calls
    assert len(decoder.earlier.of(decoder.encode("ab"))[0]) == 2


@pytest.mark.parametrize("control", [False, True], ids=["", "control"])
def test_a_second_call_with_the_same_seed_follows_the_same_law(control, monkeypatch):
    """The first tokens, by place among the three most probable; the control keeps the seed."""
    if control:
        of = EarlierAnswers.of
        monkeypatch.setattr(EarlierAnswers, "of", lambda *args: (of(*args)[0], args[-1]))
    three = specjax.Sampling(temperature=1.0, top_k=3)
    decoder = specjax.Decoder(
        tiny_pair.tabular(1),
        drafting="Lookup(earlier=1)",
        sampling=three,
        max_draft=1,
        max_new_tokens=2,
        batch_size=32,
        buckets=(8,),
    )
    prompts = [a + b for a in "abcdefgh" for b in "abcd"]
    first = []
    for seed in range(60):
        decoder.earlier = EarlierAnswers(1)
        calls = [decoder(prompts, seed=seed) for _ in range(2)]
        first.append([[row.tokens_with_end[0] for row in call] for call in calls])
    places = [
        np.searchsorted(np.unique(tokens), tokens)
        for tokens in np.moveaxis(np.array(first), 2, 0)  # of a prompt: seeds, calls
    ]
    shares = np.mean(np.stack(places)[..., None] == np.arange(3), axis=(0, 1))
    difference = np.abs(shares[0] - shares[1]).max()  # 0.01 by chance
    assert difference > 0.06 if control else difference < 0.035
