"""Both built-in pairs: the greedy output is the verifier's own, whatever drafts."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import specjax
from specjax import rules, verification
from specjax.data.examples import read_examples
from specjax.drafting import Branches, Cascade, Lookup, Tree
from specjax.text.directories import built_in_pair
from specjax.types import Sampling

SHAPES = {
    "multi30k_ende": {"max_new_tokens": 48, "batch_size": 25, "buckets": (64,)},
    "gsm8k": {"max_new_tokens": 96, "batch_size": 25, "buckets": (256,)},
}
LENIENT = Cascade(lengths=((4, 0), (0, 3)), models=("drafter", "small"), lenience=3.0)
PLANS = {
    "binary tree": (Tree(depth=3, width=2), None),
    "most probable": (Tree(depth=2, width=4, children="top"), verification.Walk()),
    "beam": (Tree(depth=4, width=2, beam=2), None),
    "kept": (Tree(depth=4, width=3, beam=3, keep=12, children="top"), verification.Walk()),
    "own tree": (Tree(parents=(0, 0, 0, 1, 1, 2, 4), children="without"), None),
    "independent": (Tree(depth=3, width=2, children="independent"), None),
    "copies": (Lookup(copies=3), None),
    "siblings": (Cascade([[1, 3], [0, 1]], last=Lookup(), width=8), None),
    "branches": (Branches((Tree(depth=3, width=2), "drafter", Lookup(copies=2))), None),
    "copies below the drafter": (
        Cascade(lengths=((3, 2), (0, 3)), last=Lookup(bigram="built-in")),
        None,
    ),
    "two models, lenient": (LENIENT, None),
    "two models and copies, rules": (
        Cascade(
            lengths=((2, 1, 1), (0, 2, 1), (0, 0, 4)),
            models=("drafter", "small"),
            rules=(rules.TokenV3(0.7), rules.TokenV3(0.5)),  # a copy has no confidence
            last=Lookup(bigram="built-in"),
        ),
        None,
    ),
}


def models(name):
    """The pair, and a drafter below its own: the small one, or the own one with noise."""
    pair = specjax.load_pair(name)
    directory = built_in_pair(name) / "drafter_small"
    if directory.is_dir():
        small = specjax.load_text_model(directory)
    else:
        keys = iter(jax.random.split(jax.random.key(0), 500))
        worse = jax.tree.map(
            lambda x: x + 0.1 * jnp.std(x) * jax.random.normal(next(keys), x.shape, x.dtype),
            pair.drafter.params,
        )
        small = dataclasses.replace(pair.drafter, params=worse, head=None, name="noisy")
    return specjax.Pair(verifier=pair.verifier, drafter=pair.drafter, small=small)


def prompts(name):
    """A hundred: the samples, and their beginnings."""
    (source,) = built_in_pair(name).glob("samples.*")
    field = "en" if source.suffix == ".tsv" else "question"
    samples = [example.inputs for example in read_examples(source, inputs_field=field)]
    cut = [
        " ".join(words[: size * len(words) // 4])
        for size in (2, 3, 1)
        for words in map(str.split, samples)
    ]
    return [*samples, *cut][:100]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SHAPES)
def test_no_draft_changes_a_greedy_output(name):
    given, shape, asked = models(name), {**SHAPES[name], "sampling": Sampling(0.0)}, prompts(name)

    def decode(models, **options):
        return specjax.Decoder(models, **options, **shape)(asked, progress=False)

    want = decode(given.verifier)
    for kind, (plan, judge) in PLANS.items():
        found = decode(given, drafting=plan, verification=judge)
        wrong = [i for i, text in enumerate(found.texts) if text != want.texts[i]]
        assert not wrong, (kind, wrong)
        # Not because nothing was drafted.
        assert found.info.verifier_calls < want.info.verifier_calls, kind
    # The control: under a rule at the top, texts do change.
    assert decode(given, drafting=LENIENT, rule=rules.OPT(0.9)).texts != want.texts
