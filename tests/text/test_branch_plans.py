"""`Lookup(copies=...)`, `Branches(...)` and `Cascade(..., width=...)`: the verifier's texts."""

import pytest

import specjax
from specjax import verification
from specjax.drafting import Branches, Cascade, Lookup, Tree
from specjax.types import Sampling
from tests import tiny_pair
from tests.variants import variants

SHAPE = {"max_new_tokens": 12, "batch_size": 4, "buckets": (32,)}
PROMPTS = tiny_pair.sentences(6, seed=3)
K = [[1, 3], [0, 1]]
PLANS = {
    "copies": Lookup(copies=3, max_copy=3),
    "chain and copies": Branches(("drafter", Lookup(copies=2))),
    "tree and copies": Branches((Tree(depth=2, width=2), Lookup(max_copy=4))),
    "siblings": Cascade(K, last=Lookup(), width=8),
}
OWN = {"residual", "bonus", "verifier"}


@pytest.fixture(scope="module")
def alone(pair):
    return specjax.Decoder(pair.verifier, sampling=Sampling(0.0), **SHAPE)(PROMPTS)


@pytest.mark.parametrize("name", variants(PLANS, "chain and copies"))
def test_greedy_texts_are_the_verifiers_own(pair, alone, name):
    decoder = specjax.Decoder(pair, drafting=PLANS[name], sampling=Sampling(0.0), **SHAPE)
    assert decoder.method.verification == verification.Traversal()
    found = decoder(PROMPTS, sources=True)
    assert found.texts == alone.texts
    assert found.info.verifier_calls < alone.info.verifier_calls
    models = {"verifier"} if name == "copies" else {"verifier", "drafter"}
    assert set(found[0].info.calls) == models
    drafters = {"lookup"} if name == "copies" else {"lookup", "drafter"}
    used = {source for row in found for source in row.sources}
    assert used <= OWN | drafters and used & drafters
    drafted = sum(source not in OWN for row in found for source in row.sources)
    # Tokens after a row's end are accepted, too, but are not part of it.
    assert 0 < drafted <= found.info.accepted


@pytest.mark.exhaustive
def test_branches_accept_no_less_than_each_drafter(pair):
    """At temperature 0, on the same texts."""
    options = {"sampling": Sampling(0.0), **SHAPE}
    plans = (None, Lookup(max_copy=5), Branches(("drafter", Lookup(max_copy=5))))
    calls = [specjax.Decoder(pair, drafting=x, **options)(PROMPTS[:1]).info for x in plans]
    assert calls[2].verifier_calls <= min(x.verifier_calls for x in calls[:2])


@pytest.mark.exhaustive
def test_two_models_draft(pair):
    models = specjax.Pair(verifier=pair.verifier, drafter=pair.drafter, copy=pair.verifier)
    options = {"sampling": Sampling(0.0), "max_draft": 3, **SHAPE}
    decoder = specjax.Decoder(models, drafting=Branches(("drafter", "copy")), **options)
    found = decoder(PROMPTS, sources=True)
    # The second drafter is the verifier itself: each round accepts a whole branch.
    assert (
        found.texts
        == specjax.Decoder(pair.verifier, sampling=Sampling(0.0), **SHAPE)(PROMPTS).texts
    )
    assert {source for row in found for source in row.sources} >= {"copy", "drafter"}
    assert found[0].info.calls["copy"] > 0
