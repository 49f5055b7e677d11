"""Models with matrices of 8-bit integers: loading, decoding, and what refuses them."""

import dataclasses
import warnings

import jax
import pytest

import specjax
from specjax import Decoder, Sampling
from specjax.drafting import Cascade, HeadEstimate, Lookup, Survival
from specjax.models.int8 import Int8Weight
from specjax.text.directories import built_in_pair
from specjax.training.head_recipe import _check_pair
from specjax.training.trainer import _fitting
from tests.variants import variants

PAIR = built_in_pair("multi30k_ende")
PROMPTS = ["A man is riding a bike.", "Two dogs play in the snow.", "A girl in a red dress sings."]
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def pair():
    return specjax.load_pair(weights="int8")


def matrices(model):
    kernels = jax.tree.leaves(model.params["decoder"]["layers_0"]["mlp"]["wo"])
    return {x.dtype.name for x in kernels if x.ndim == 2}


def test_both_models_or_either(pair):
    assert matrices(pair.drafter) == matrices(pair.verifier) == {"int8"}
    one = specjax.load_pair(weights={"verifier": "int8"})
    assert matrices(one.drafter) == {"float16"} or matrices(one.drafter) == {"float32"}
    assert matrices(one.verifier) == {"int8"}
    small, forms = {"small": PAIR / "drafter_small"}, {"small": "int8+embedding"}
    models = specjax.load_pair(verifier=PAIR / "verifier", others=small, weights=forms)
    assert matrices(models.named["small"]) == {"int8"} != matrices(models.verifier)
    table = models.named["small"].params["token_embedder"]["embedding"]
    assert isinstance(table, Int8Weight)


def test_fingerprints_differ_and_sizes_do_not(pair):
    floats = specjax.load_pair()
    found = {
        specjax.load_text_model(PAIR / "verifier", weights=form).fingerprint
        for form in (None, "int8", "int8+embedding")
    }
    assert len(found) == 3 and pair.verifier.fingerprint in found
    assert pair.verifier.size == floats.verifier.size


SMALL = ("drafter", str(PAIR / "drafter_small"))
WAYS = {
    "drafter": {},
    "head": {"stopping": Survival(HeadEstimate(), 0.3)},
    "lookup": {"drafting": Lookup()},
    "cascade": {"drafting": Cascade(((2, 1), (0, 2)), SMALL, weights={"drafter": "int8"})},
    "mesh": {},
}


@pytest.mark.parametrize("way", variants(WAYS, "head"))
def test_greedy_drafts_give_the_text_of_the_verifier_alone(pair, way):
    """With an int8 verifier, that verifier's own."""
    options = {"sampling": GREEDY, "max_new_tokens": 24, "batch_size": 4}
    alone, drafting = Decoder(pair.verifier, **options)(PROMPTS), pair
    if way == "mesh":
        drafting = specjax.load_pair(weights="int8", mesh=specjax.partitioning.make_mesh(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Decoder(drafting, **options, **WAYS[way])(PROMPTS).texts == alone.texts


def test_a_head_is_kept_although_the_fingerprint_differs(pair):
    assert pair.drafter.head is not None
    other = specjax.load_text_model(PAIR / "drafter_small", head=False)
    with pytest.raises(ValueError, match="was trained for weights|has width"):
        dataclasses.replace(other, head=pair.drafter.head)


def test_training_refuses_integers(pair, tmp_path):
    with pytest.raises(ValueError, match="quantised, which cannot be trained"):
        _fitting(pair.verifier.params, {})

    class Run:
        path = tmp_path

        def makes(self, name):
            return False

    with pytest.raises(ValueError, match="the drafter is quantised, so its head"):
        _check_pair(Run(), pair, False)
