"""Recurrent verifiers and drafters in the loop: exact laws, with the least memory that serves."""

import functools
import itertools

import pytest

from specjax import decoding, drafting, testing, verification
from specjax.models.model import CausalLM
from specjax.models.qwen_hybrid import Qwen35Config
from tests import laws
from tests.models.tiny import random_params
from tests.tables import RULES, targets
from tests.variants import variants

N, EXACT = 4, 1e-5
TEMPERATURES = (1.0, 0.6, 0.0)
PROMPTS = ((0, 1), (2,), (1, 1, 0))
CONFIG = Qwen35Config(
    vocab_size=laws.V,
    embed_dim=8,
    num_heads=2,
    head_dim=4,
    mlp_dim=8,
    num_layers=2,
    num_kv_heads=1,
    layer_types=("linear_attention", "full_attention"),
    partial_rotary_factor=0.5,
    linear_num_key_heads=1,
    linear_key_head_dim=4,
    linear_num_value_heads=2,
    linear_value_head_dim=4,
)


def network(rollback, seed):
    model = CausalLM(CONFIG, rollback=rollback)
    return model, random_params(model, seed)


def pair(rollback=3):
    (large, p), (small, q) = network(rollback, 1), network(rollback, 2)
    return large, p, small, q


def plain(**options):
    large, p, small, q = pair()
    return large, p, drafting.Chain(small, 2, **options), drafting.chain.ChainParams(q)


def tabular_drafter():
    large, p, _, _ = pair()
    return large, p, drafting.Chain(laws.MODEL, 2), drafting.chain.ChainParams(laws.A)


def recurrent_drafter():
    _, _, small, q = pair()
    return laws.MODEL, laws.P, drafting.Chain(small, 2), drafting.chain.ChainParams(q)


def lookup_first():
    large, p, small, q = pair()
    lookup, neural = drafting.Lookup(max_copy=1, vocab_size=laws.V), drafting.Chain(small, 1)
    drafter = drafting.lookup.LookupFirst(lookup, neural, min_match=1)
    return large, p, drafter, ((), drafting.chain.ChainParams(q))


def vertical():
    large, p, small, q = pair(6)
    below = drafting.Chain(small, 1)
    drafter = drafting.cascades.VerticalCascade(below, network(6, 3)[0], 2)
    own = decoding.MethodParams(network(6, 3)[1], drafting.chain.ChainParams(q))
    return large, p, drafter, own


def horizontal():
    large, p, small, q = pair()
    first = drafting.Chain(small, 1, name="first")
    second = drafting.Chain(network(3, 3)[0], 1, name="second")
    own = (drafting.chain.ChainParams(q), drafting.chain.ChainParams(network(3, 3)[1]))
    return large, p, drafting.cascades.HorizontalCascade((first, second)), own


CASES = {
    "both": (plain, {}, {}),
    "catches up": (functools.partial(plain, catches_up=True), {}, {}),
    "limits": (plain, {"widths": (1, 3)}, {"between": laws.by_committed}),
    "verifier": (tabular_drafter, {}, {}),
    "drafter": (recurrent_drafter, {}, {}),
    "lookup first": (lookup_first, {}, {}),
    "vertical": (vertical, {}, {}),
    "horizontal": (horizontal, {}, {}),
}


@functools.cache
def distributions(model, which, prompt, temperature):
    """The law after each prefix, from passes over whole texts."""
    params = laws.P if which is None else random_params(model, which)
    logits = testing.prefix_distributions(model, params, prompt, N, lambda logits: logits)
    return laws.probabilities(logits, temperature)


@pytest.mark.parametrize("name", variants(CASES, "both", "lookup first"))
def test_the_law_of_texts(name):
    """Rows of several prompts and temperatures beside each other."""
    make, of_method, of_texts = CASES[name]
    verifier, p, drafter, own = make()
    method = decoding.Speculative(verifier, drafter, verification.Block(), **of_method)
    rules = ("Lossless", "OPT") if name in ("both", "catches up") else ("Lossless",)
    both = list(itertools.product(rules, zip(PROMPTS, TEMPERATURES, strict=True)))
    rule = laws.OneOf.by_row([rule for rule, _ in both]) if len(rules) > 1 else RULES["Lossless"]
    rows = [laws.Row(prompt, N, temperature=temperature) for _, (prompt, temperature) in both]
    found = laws.Texts(method, **of_texts)(decoding.MethodParams(p, own, rule), rows)
    seed = None if name == "drafter" else 1
    for (rule, (prompt, temperature)), law in zip(both, found, strict=True):
        of = functools.partial(distributions, verifier, seed, prompt)
        wanted = of(temperature)
        if rule != "Lossless":
            q = functools.partial(distributions, drafter.model, 2, prompt)
            wanted = targets(RULES[rule], (q(temperature), wanted, q(1.0), of(1.0)))
        law = laws.array_of(law, laws.V, N)
        apart = testing.total_variation(law, testing.target_law(wanted, N))
        assert apart < EXACT, (rule, prompt, temperature, apart)
