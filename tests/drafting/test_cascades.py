"""Whatever the levels below the verifier do, what is emitted follows the target exactly."""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import decoding, drafting, rules, sampling, testing, types, verification
from specjax.types import Sampling
from tests import tiny_pair
from tests.drafting import binding
from tests.laws import Law
from tests.pages import run_page
from tests.variants import variants

PROMPT = (0, 1)
TOKENS = 3
VERIFICATIONS = {
    "token": verification.Token(),
    "block": verification.Block(),
    "greedy": verification.GreedyBlock(),
}


@functools.cache
def model(vocab):
    return testing.TabularModel(vocab, 2)


@functools.cache
def table(which, vocab):
    return jnp.asarray(testing.random_table(which, vocab, 2, scale=1.5, zeros=0.1))


@functools.cache
def known(which, vocab, temperature):
    """A model's distributions and confidences after every prefix."""
    settings = (Sampling(temperature), Sampling())
    return tuple(
        testing.prefix_distributions(
            model(vocab),
            table(which, vocab),
            PROMPT,
            TOKENS,
            lambda x, setting=setting: sampling.distributions.distribution(x, setting),
        )
        for setting in settings
    )


def neural(which, vocab, count):
    return drafting.Chain(model(vocab), count, name=f"d{which}")


class Tree(NamedTuple):
    """A drafter by its levels: `below` is reviewed by model `which`; alone it drafts itself."""

    which: int
    below: "Tree | None" = None
    rule: str = "inner"


# Models 0 and 1 draft, 2 and 3 review; 4 is the verifier.
VERIFIER = 4
TWO, THREE = Tree(2, Tree(0)), Tree(3, Tree(2, Tree(0)))


def own_params(tree, vocab, given):
    if tree.below is None:
        return drafting.chain.ChainParams(table(tree.which, vocab))
    return decoding.MethodParams(
        table(tree.which, vocab), own_params(tree.below, vocab, given), given[tree.rule]
    )


def own_law(tree, vocab, temperature, given):
    """What the tree says that its tokens are drawn from, and its confidence, for every prefix."""
    p, p_conf = known(tree.which, vocab, temperature)
    if tree.below is None:
        return p, p_conf
    q, q_conf = own_law(tree.below, vocab, temperature, given)
    return applied(given[tree.rule], q, p, q_conf, p_conf), p_conf


@jax.jit
def _apply(rule, *distributions):
    return jax.vmap(rule)(*distributions)


def applied(rule, *distributions):
    return np.asarray(_apply(rule, *distributions))


def vertical(tree, vocab, counts, inner, **settings):
    """Vertical cascades with the longest blocks of `counts`, the lowest level's last."""
    if tree.below is None:
        return neural(tree.which, vocab, counts[0])
    below = vertical(tree.below, vocab, counts[1:], inner)
    own = {"max_draft": counts[0]} if isinstance(counts[0], int) else counts[0]
    return drafting.cascades.VerticalCascade(
        below, model(vocab), verification=VERIFICATIONS[inner], name=f"d{tree.which}", **own
    )


@functools.cache
def enumerated(drafter, verify):
    return Law(decoding.Speculative(model(drafter.vocab_size), drafter, VERIFICATIONS[verify]))


def distance(tree, drafter, verify, *, temperature=1.0, outer=None, **given):
    """Between what is emitted and the target under the outer rule."""
    vocab = drafter.vocab_size
    given = {"inner": rules.Lossless()} | given
    outer = rules.Lossless() if outer is None else outer
    params = decoding.MethodParams(table(VERIFIER, vocab), own_params(tree, vocab, given), outer)
    found = enumerated(drafter, verify)(params, PROMPT, TOKENS, temperature)
    q, q_conf = own_law(tree, vocab, temperature, given)
    target = applied(
        outer,
        q,
        *known(VERIFIER, vocab, temperature)[:1],
        q_conf,
        known(VERIFIER, vocab, temperature)[1],
    )
    return testing.total_variation(found, testing.target_law(target, TOKENS))


# A block is fixed, or ends with a round that leaves it at least so long.
LEAST = {"max_draft": 3, "min_draft": 2}
SHAPES = {
    "two": (TWO, 2, (2, 1)),
    "two, at least": (TWO, 2, (LEAST, 2)),
    "two, three tokens": (TWO, 3, (2, 1)),
    "three": (THREE, 2, (LEAST, {"max_draft": 2, "min_draft": 1}, 1)),
    "three, fixed": (THREE, 2, (2, 2, 1)),
}


@functools.cache
def shaped(name, inner):
    tree, vocab, counts = SHAPES[name]
    return tree, vertical(tree, vocab, counts, inner)


CASES = [
    case
    for case in itertools.product(SHAPES, ("token", "block"), ("token", "block"))
    # So many choices take minutes.
    if case[0] != "three, fixed" or case[1:] == ("block", "token")
]
SHORT = variants(CASES, ("three", "block", "block"), several=True)


@pytest.mark.parametrize(("shape", "inner", "verify"), SHORT)
def test_any_lenience_at_any_depth_is_exact(shape, inner, verify):
    tree, drafter = shaped(shape, inner)
    for lenience, temperature in itertools.product((1.0, 3.0), (1.0, 0.0)):
        # Not `drafting.lenience`, so that one program serves both.
        rule = rules.Lossy(1.0 - 1.0 / lenience)
        found = distance(tree, drafter, verify, temperature=temperature, inner=rule)
        assert found < 1e-5, (lenience, temperature)


INNER = {
    "OPT": rules.OPT(0.3),
    "Chow": rules.Chow(0.3),
    "TokenV3": rules.TokenV3(0.6),
    "Mentored": rules.Mentored(0.1),
}
OUTER = {"Diff": rules.Diff(0.1), "TokenV2": rules.TokenV2(0.3), "Lossless": rules.Lossless()}
RULED = variants(
    itertools.product(INNER, OUTER, ("two", "three")), ("OPT", "TokenV2", "two"), several=True
)


@pytest.mark.parametrize(("inner", "outer", "shape"), RULED)
def test_rules_at_every_level(inner, outer, shape):
    """The outer rule mixes the inner target with p, and reads the middle model's confidence."""
    tree, drafter = shaped(shape, "block")
    for temperature in (1.0, 0.0):
        found = distance(
            tree, drafter, "block", temperature=temperature, inner=INNER[inner], outer=OUTER[outer]
        )
        assert found < 1e-5, temperature


OWN = Tree(3, Tree(2, Tree(0), "lower"), "inner")


@pytest.mark.exhaustive
def test_each_level_has_a_rule_and_a_strength_of_its_own():
    """pi = T(T'(T''(q, p''), p'), p)."""
    drafter = shaped("three", "block")[1]
    lower, inner = rules.OPT(0.4), rules.TokenV3(0.5)
    for given in (
        {"lower": lower, "inner": inner},
        {"lower": inner, "inner": lower},
        {"lower": lower, "inner": rules.OPT(0.1)},
    ):
        assert distance(OWN, drafter, "block", outer=rules.TokenV2(0.3), **given) < 1e-5
    one, other = (
        own_law(OWN, 2, 1.0, dict(zip(("lower", "inner"), pair, strict=True)))[0]
        for pair in ((lower, inner), (inner, lower))
    )
    assert np.abs(one - other).max() > 0.05, "the levels' rules could be exchanged unseen"


class ClaimsTheModel(decoding.Round):
    """The wrong one: it says that its tokens were drawn from the middle model's p."""

    def __call__(self, *args, with_confidence=False, **options):
        outcome = super().__call__(*args, with_confidence=True, **options)
        # At temperature 1 the confidences are p.
        return outcome._replace(probs=outcome.confidences)


class Wrong(drafting.cascades.VerticalCascade):
    @property
    def _round(self):
        right = super()._round
        return ClaimsTheModel(**{f.name: getattr(right, f.name) for f in dataclasses.fields(right)})


def test_control_the_middle_model_is_not_the_law_of_what_it_reviews():
    tree, right = shaped("two", "token")
    drafter = Wrong(**{f.name: getattr(right, f.name) for f in dataclasses.fields(right)})
    for lenience, wrong in ((1.0, False), (3.0, True)):
        found = distance(tree, drafter, "block", inner=rules.Lossy(1.0 - 1.0 / lenience))
        assert (found > 1e-3) == wrong, (lenience, found)


@pytest.mark.exhaustive
def test_greedy_block_reviews_blocks_of_a_fixed_length():
    tree, drafter = shaped("two", "block")
    assert drafter.traits.fixed_length and drafter.traits.prefix_only
    assert distance(tree, drafter, "greedy", inner=rules.Lossy(0.6)) < 1e-5


class NoConfidence(drafting.Chain):
    has_confidence = False


def test_rules_that_read_a_confidence_need_one_of_every_position():
    counted = NoConfidence(model(2), 1, name="d1")
    both = drafting.cascades.HorizontalCascade((neural(0, 2, 1), counted))
    assert not both.has_confidence
    with pytest.raises(ValueError, match="Chow reads the drafter's confidence, but Horizontal"):
        decoding.Round(model(2), both, verification.Token()).check_rule(rules.Chow(0.1))
    # What a model has reviewed has the model's; the rule inside has none to read.
    above = drafting.cascades.VerticalCascade(counted, model(2), 2)
    assert above.has_confidence
    one_round = decoding.Round(model(2), above, verification.Token())
    one_round.check_rule(rules.Chow(0.1))
    low = drafting.chain.ChainParams(table(0, 2))
    own = decoding.MethodParams(table(2, 2), low, rules.Chow(0.1))
    given = decoding.MethodParams(table(VERIFIER, 2), own, rules.Lossless())
    state = jax.eval_shape(
        lambda: one_round.prefill(
            given, types.Prompts(jnp.ones((1, 2), jnp.int32), jnp.array([2])), 9
        )
    )
    with pytest.raises(ValueError, match="Chow reads the drafter's confidence, but NoConfidence"):
        jax.eval_shape(
            one_round,
            given,
            Sampling(jnp.ones(1)),
            state,
            jnp.zeros((1, one_round.num_uniforms)),
            jnp.ones(1, bool),
            jnp.ones(1, jnp.int32),
        )


class KeepsAll(drafting.Chain):
    """As a drafter of one's own is moved back: its whole state is kept."""

    mark = types.Drafter.mark
    rewind = types.Drafter.rewind


@pytest.mark.exhaustive
def test_a_drafter_that_knows_nothing_of_marks_is_moved_back():
    low = KeepsAll(model(2), 2, name="d0")
    drafter = drafting.cascades.VerticalCascade(low, model(2), max_draft=3, min_draft=2, name="d2")
    assert distance(TWO, drafter, "block", inner=rules.Lossy(0.6)) < 1e-5


def test_every_array_of_a_state_has_its_axes():
    named = {f"d{i}": (model(2), table(i, 2)) for i in range(3)}
    drafter, params = binding.cascade([[1, 0, 1], [0, 1, 1], [0, 0, 0]], named)
    prompts = types.Prompts(
        jax.ShapeDtypeStruct((3, 4), jnp.int32), jax.ShapeDtypeStruct((3,), jnp.int32)
    )
    state = jax.eval_shape(functools.partial(drafter.prefill, max_length=9), params, prompts)
    for leaf, names in zip(
        jax.tree.leaves(state),
        jax.tree.leaves(
            jax.tree.map(lambda _, names: [names], state, drafter.state_axes(state)),
            is_leaf=lambda x: isinstance(x, list),
        ),
        strict=True,
    ):
        assert len(names[0]) == leaf.ndim and names[0][0] == "batch"


def vertical_of(**change):
    given = {"drafter": neural(0, 2, 1), "reviewer": model(2), "max_draft": 3} | change
    return drafting.cascades.VerticalCascade(**given)


def in_turn(*which, vocab=(2, 2)):
    drafters = tuple(neural(i, size, 1 + i) for i, size in zip(which, vocab, strict=True))
    return drafting.cascades.HorizontalCascade(drafters)


def matrix(lengths):
    return drafting.Cascade(lengths, ("d0", "d1"))


BAD = [
    (lambda: vertical_of(name="d0"), "models of a round must have different names, got d0, d0"),
    (
        lambda: vertical_of(reviewer=model(3)),
        "the drafter's vocabulary has 2 tokens, the verifier's 3",
    ),
    (
        lambda: vertical_of(verification=verification.GreedyBlock()),
        "GreedyBlock is not exact in an inner round of a cascade: use Block or Token",
    ),
    (lambda: vertical_of(drafter=model(2)), "drafter must be like drafting.Chain"),
    (lambda: vertical_of(reviewer=neural(1, 2, 1)), "verifier must be like .*it has no"),
    (lambda: in_turn(0, 1, vocab=(2, 3)), r"have the same vocabulary, got sizes \[2, 3\]"),
    (
        lambda: decoding.Round(model(2), in_turn(0, 1), verification.GreedyBlock()),
        "GreedyBlock is not exact with a drafter whose dist",
    ),
    (
        lambda: matrix([[1, 1]]),
        r"K must have a row and a column for each of the 2 drafters \(d0, d1\), got shape",
    ),
    (
        lambda: matrix([[1, 2], [3, 1]]),
        "K must be upper triangular, got 3 in row 2, column 1: row r has the",
    ),
    (lambda: matrix([[1, -2], [0, 1]]), "K must hold whole numbers of at least 0, got"),
    (lambda: matrix([[1.5, 2], [0, 1]]), "K must hold whole numbers of at least 0, got"),
    (
        lambda: matrix([[0, 0], [0, 1]]),
        "K must have tokens in its first row, which the verifier reviews",
    ),
    *(
        (functools.partial(drafting.lenience, value), "lenience must")
        for value in (0.5, 0.0, -1.0, np.inf, np.nan)
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_cascades_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_page_runs(monkeypatch):
    """Every block of docs/cascade_drafting.md, with a pair that compiles quickly."""
    pair = specjax.Pair(drafter=tiny_pair.tabular(2), verifier=tiny_pair.tabular(1))
    monkeypatch.setattr(specjax, "load_pair", lambda: pair)
    names = run_page("docs/cascade_drafting.md")
    info = names["result"][0].info
    assert set(info.calls) == {"verifier", "drafter"} and info.calls["drafter"] > 0
    # Three tokens and what an inner round of 3 adds, then 2.
    assert names["decoder"].method.drafter.max_draft == 3 + 3 + 2
