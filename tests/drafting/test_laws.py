"""The table of exact laws: the texts that the loop writes with each drafter and verification.

Rows of several prompts, limits, draft limits, temperatures and rules share each batch, in different
rounds, with an end of sequence.
"""

import dataclasses
import itertools
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding, drafting, platforms, rules, testing, verification
from specjax.drafting.trees import CHILDREN
from tests.decoding.helpers import AfterTokenOne
from tests.decoding.test_hidden import FromHidden
from tests.decoding.trees import Likeliest
from tests.drafting import binding
from tests.drafting.test_lookup import after_texts, shares
from tests.laws import (
    EOS,
    MODEL,
    A,
    B,
    OneOf,
    P,
    Row,
    Texts,
    V,
    after,
    by_committed,
    distance,
    law_of,
    target,
)
from tests.tables import RULES, VERIFICATIONS, targets
from tests.variants import variants

# It repeats itself, so that matches of all lengths occur.
PROMPT = (0, 1, 1, 0, 2, 1, 0, 1)
OF_A, OF_B = (drafting.chain.ChainParams(table) for table in (A, B))
COPY, COPIES = (drafting.Lookup(max_copy=n, vocab_size=V) for n in (1, 2))
COPYING = drafting.Lookup()  # the last of a cascade
CHAIN = drafting.Chain(MODEL, 1, name="b")
LENIENT = drafting.lenience(2.0)
BY_A = decoding.MethodParams(A, OF_B, LENIENT)
COPIED_A = decoding.MethodParams(A, (), LENIENT)
TABLES = {"a": A, "b": B, "c": jnp.asarray(testing.random_table(8, V, 2, scale=1.2, zeros=0.1))}
BIGRAM = jnp.asarray(np.array([1, -1, 0], np.int32))
# Contexts of two tokens, the last one first, say what the last one alone does not.
NGRAMS = drafting.Bigram(
    np.array([1, -1, 0], np.int32),
    "mark",
    {},
    np.array([[0, 1], [1, 0]], np.int32),
    np.array([0, 2], np.int32),
).table("it", "mark", V)
STOPS, THRESHOLD = drafting.Confidence(0.6).bind()
SHAPES = {
    "pair": drafting.trees.k_ary(1, 2),
    "bush": drafting.trees.Topology((0, 0, 1, 1)),
    "deep": drafting.trees.Topology((0, 0, 1, 3)),
    "late": drafting.trees.Topology((0, 0, 2, 2)),
    "beam": drafting.trees.Beam(2, 2, 1),
    "branchless": drafting.trees.k_ary(3, 1),
    "binary": drafting.trees.k_ary(2, 2),
    "paths": drafting.trees.Topology((0, 0, 1, 2)),
    "kept": drafting.trees.Beam(2, 2, 2, keep=4),
}


class Case(NamedTuple):
    """A drafter.

    Attributes:
      drafter: the drafter.
      params: its parameters.
      q: a row -> the distributions that its chain, or tree, has; None: rules must not read it.
      table: the drafter's, for its confidences.
      of_method: options of `Speculative`.
      of_texts: options of `Texts`.
    """

    drafter: Any
    params: Any
    q: Callable[[Row], np.ndarray] | None = None
    table: Any = A
    of_method: Any = MappingProxyType({})
    of_texts: Any = MappingProxyType({})


def chain(length, name="a", stopping=None):
    return drafting.Chain(MODEL, length, stopping or drafting.FixedLength(), name=name)


def tree(children, parents=(0, 0), name="a"):
    return drafting.Tree(parents=parents, children=children, model=MODEL, name=name)


def side_by_side(*drafters):
    return drafting.Branches(drafters)


def reviewed(count, enough=None, below=CHAIN):
    return drafting.cascades.VerticalCascade(below, MODEL, count, enough, name="a")


def wide(drafter, width=2):
    return drafting.trees.CaterpillarDrafter(drafter, width)


def matrix(lengths, names, last=None, own=(), rule=LENIENT, **settings):
    """A cascade by a matrix, and its parameters."""
    named = {name: (MODEL, TABLES[name]) for name in names}
    return Case(*binding.cascade(lengths, named, last, own, rules=rule, **settings))


def drafters_law(row):
    return after(A, row)


def reviewed_law(row):
    return targets(LENIENT, (after(B, row), after(A, row), None, None))


def likeliest(parents, early=False):
    """A tree that one rule reads at temperature 1, whatever the verifier's is."""
    first = testing.random_table(2, V, 1, scale=1.5)
    table = jnp.asarray(np.tile(first, (V + 1, 1)))
    drafter = Likeliest(V, parents, early)
    return Case(drafter, jnp.asarray(first), lambda row: after(table, row, 1.0), table)


# What every rule is enumerated with; of three tokens, so that carry-overs nest.
PLAIN = {
    "fixed": Case(chain(3), OF_A, drafters_law),
    "stops": Case(chain(3, stopping=AfterTokenOne()), OF_A, drafters_law),
    "catches up": Case(drafting.Chain(MODEL, 2, catches_up=True), OF_A, drafters_law),
    "limits": Case(
        chain(3),
        OF_A,
        drafters_law,
        of_method={"widths": (1, 2, 4)},
        of_texts={"between": by_committed},
    ),
}
LOOKUPS = {
    "copy": Case(COPIES, ()),
    "bigram": Case(dataclasses.replace(COPIES, min_ngram=3), BIGRAM),
    "order 3": Case(dataclasses.replace(COPIES, min_ngram=3), jax.tree.map(jnp.asarray, NGRAMS)),
    "overlap": Case(
        drafting.Lookup(
            max_copy=3, vocab_size=V, min_ngram=3, max_ngram=3, latest=True, overlap=True
        ),
        (),
    ),
    "copies or chain": Case(drafting.lookup.LookupFirst(COPIES, CHAIN, min_match=2), ((), OF_B)),
    "as long as matches say": Case(
        drafting.lookup.LookupFirst(
            dataclasses.replace(COPIES, copy_factor=0.5), CHAIN, min_match=2
        ),
        ((), OF_B),
    ),
}
PREDICTED = {"predictions": (((1, 0, 1, 1),), (), ((0, 1, 2),))}
# Texts that go on in several ways, after longer and shorter matches.
EARLIER = {"predictions": (((1, 0, 1, 1), (0, 1, 0)), (), ((0, 1, 2), (0, 1, 1)))}
# It draws one of the places, at most two or four.
TWO, FOUR = (dataclasses.replace(copy, earlier=n) for copy, n in ((COPY, 1), (COPIES, 2)))
PREDICTIONS = {
    "predicted": Case(COPIES, (), of_texts=PREDICTED),
    "predicted or chain": LOOKUPS["copies or chain"]._replace(of_texts=PREDICTED),
    "predicted, reviewed": Case(reviewed(2, below=COPIES), COPIED_A, of_texts=PREDICTED),
    "earlier": Case(FOUR, (), of_texts=EARLIER),
    "earlier or chain": Case(
        drafting.lookup.LookupFirst(FOUR, CHAIN, min_match=2), ((), OF_B), of_texts=EARLIER
    ),
    "earlier, as long as matches say": Case(
        dataclasses.replace(FOUR, copy_factor=0.5), (), of_texts=EARLIER
    ),
    "earlier, reviewed": Case(reviewed(2, below=TWO), COPIED_A, of_texts=EARLIER),
    "earlier, in turn": Case(
        drafting.cascades.HorizontalCascade((CHAIN, TWO)), (OF_B, ()), of_texts=EARLIER
    ),
}
CHAINS = {
    **PLAIN,
    **PREDICTIONS,
    **LOOKUPS,
    "from hidden states": Case(
        FromHidden(), jnp.asarray(np.random.default_rng(2).normal(size=(V, V)), jnp.float32)
    ),
    "stopped": Case(
        chain(3, stopping=STOPS), drafting.chain.ChainParams(A, THRESHOLD), drafters_law
    ),
    "in turn": Case(drafting.cascades.HorizontalCascade((CHAIN, COPIES)), (OF_B, ())),
    "reviewed": Case(reviewed(2, 1), BY_A, reviewed_law),
    "reviewed copies": Case(reviewed(2, below=COPIES), COPIED_A),
    "twice one table": Case(
        drafting.cascades.HorizontalCascade((chain(1), CHAIN)), (OF_A, OF_A), drafters_law
    ),
    "copies first, reviewed": Case(
        reviewed(2, below=drafting.lookup.LookupFirst(COPIES, chain(2, "b"), min_match=2)),
        decoding.MethodParams(A, ((), OF_B), LENIENT),
    ),
    "a matrix": matrix([[1, 1], [0, 1]], "a", COPYING, rule=rules.Lossless()),
    "models in turn": matrix([[1, 1], [0, 0]], "ab"),
    "models reviewed and in turn": matrix([[1, 1], [0, 1]], "ab"),
    "the same, cumulative": matrix([[1, 1], [0, 1]], "ab", cumulative=True),
    "three models": matrix([[1, 0, 1], [0, 1, 1], [0, 0, 0]], "abc"),
    "copies reviewed and in turn": matrix([[1, 1], [0, 2]], "a", COPYING),
    "the same, by Token": matrix([[1, 1], [0, 2]], "a", COPYING, verification=verification.Token()),
    "copies by a table": matrix([[2, 0], [0, 1]], "a", COPYING, BIGRAM),
    "a model and copies in turn": matrix([[1, 2], [0, 0]], "a", drafting.Lookup(latest=True)),
}
BRANCHES = {
    "wide chain": Case(wide(chain(2)), OF_A, drafters_law),
    "wide cascade": Case(wide(reviewed(2)), BY_A, reviewed_law),
    "wide cascade and copies": Case(
        wide(drafting.cascades.HorizontalCascade((reviewed(2, 1, COPY), COPY)), 3), (COPIED_A, ())
    ),
    "copies": Case(drafting.lookup.LookupTree(COPIES, 2), ()),
    "chain and chain": Case(side_by_side(chain(2), CHAIN), (OF_A, OF_B)),
    "chain and copies": Case(
        side_by_side(CHAIN, drafting.lookup.LookupTree(COPY, 2), COPIES), (OF_B, (), ())
    ),
    "earlier copies": Case(
        drafting.lookup.LookupTree(dataclasses.replace(COPIES, earlier=2), 2),
        (),
        of_texts=EARLIER,
    ),
    "chain and earlier": Case(side_by_side(CHAIN, TWO), (OF_B, ()), of_texts=EARLIER),
    "chain and predictions": Case(side_by_side(CHAIN, COPIES), (OF_B, ()), of_texts=PREDICTED),
    "copies or chain, and copies": Case(
        side_by_side(drafting.lookup.LookupFirst(COPIES, CHAIN, min_match=2), COPY),
        (((), OF_B), ()),
    ),
    "in turn, and a chain": Case(
        side_by_side(drafting.cascades.HorizontalCascade((CHAIN, COPY)), chain(1, "drafter")),
        ((OF_B, ()), OF_A),
    ),
    "reviewed, and copies": Case(side_by_side(reviewed(2, 1), COPY), (BY_A, ())),
    "wide chain and copies": Case(side_by_side(wide(CHAIN), COPIES), (OF_B, ())),
}
# By how children are drawn, after the comma.
TREES = {
    f"{name}, {children}": case
    for children in CHILDREN
    for name, case in {
        **{
            name: Case(binding.tree(MODEL, shape, children), OF_A, drafters_law)
            for name, shape in SHAPES.items()
            # Those with too many combinations of draws, or with drawn tokens that are left out.
            if (name != "binary" or children.startswith("top"))
            and (name != "kept" or children == "top")
        },
        "tree and copies": Case(side_by_side(tree(children), COPIES), (OF_A, ())),
        "copies and tree": Case(side_by_side(COPIES, tree(children)), ((), OF_A)),
        "tree and chain": Case(side_by_side(tree(children), CHAIN), (OF_A, OF_B)),
        "tree and tree": Case(side_by_side(tree(children), tree(children, name="b")), (OF_A, OF_B)),
        "branches of branches": Case(
            side_by_side(CHAIN, side_by_side(COPY, tree(children))), (OF_B, ((), OF_A))
        ),
        "a deeper tree": Case(side_by_side(tree(children, (0, 0, 1, 1)), COPY), (OF_A, ())),
    }.items()
}
TREES |= {
    "likeliest": likeliest((0, 0, 1, 1, 4)),
    "likeliest, early": likeliest((0, 0, 1, 1, 4), early=True),
}
CASES = CHAINS | BRANCHES | TREES
JUDGES = {
    "Walk": verification.Walk(),
    "Traversal": verification.Traversal(),
    "TopDown": verification.TopDown(),
    "Token": verification.Token(),
    "Block": verification.Block(),
}
OF_TREES, OF_CHAINS = ("Walk", "Traversal", "TopDown"), ("Token", "Block", "Traversal")
NAMES = [
    *itertools.product({**BRANCHES, **TREES}, OF_TREES),
    *itertools.product(CHAINS, OF_CHAINS),
]
QUICK = [
    ("from hidden states", "Block"),
    ("likeliest, early", "Walk"),
    ("bush, top+1", "Traversal"),
    ("bush, without", "TopDown"),
    ("pair, independent", "Traversal"),
    ("kept, top", "Traversal"),
    ("beam, without", "Traversal"),
    ("late, top", "Walk"),
    ("tree and copies, top+1", "Traversal"),
    ("tree and copies, without", "TopDown"),
    ("tree and copies, independent", "Traversal"),
    ("branches of branches, top+1", "Traversal"),
    ("chain and chain", "Traversal"),
    ("chain and copies", "Traversal"),
    ("wide chain", "Traversal"),
    ("wide cascade and copies", "Traversal"),
    ("copy", "Block"),
    ("bigram", "Token"),
    ("order 3", "Block"),
    ("overlap", "Block"),
    ("copies or chain", "Block"),
    ("predicted or chain", "Token"),
    ("earlier", "Block"),
    ("earlier or chain", "Block"),
    ("chain and earlier", "Traversal"),
    ("twice one table", "Block"),
    ("chain and predictions", "Traversal"),
    ("reviewed copies", "Token"),
    ("a matrix", "Block"),
    ("models reviewed and in turn", "Block"),
]
# Of the rules in `RULES`, where they may read the drafter.
SOME = ("Lossless", "OPT", "Diff", "TokenV3")


def rows_of(most):
    """Rows under every draft limit, and of other prompts, limits and temperatures."""
    limits = [Row(PROMPT, length, draft) for length in (1, 3) for draft in range(most + 1)]
    others = Row((0, 1), 4, None, 0.6), Row((1,), 3, 0), Row((2, 1, 0), 4, min(3, most), 0.0)
    return [*limits, *others, Row((0, 0), 2, 1, 0.6)]


def few_rows(most):
    """Of these, for drafts with thousands of combinations of choices."""
    return [
        Row(PROMPT, 3),
        Row(PROMPT, 2, most - 1, 0.6),
        Row((2, 1, 0), 3, min(3, most), 0.0),
        Row((1,), 2, 1),
    ]


def enumerated(name, rows, names):
    """The distances of the rows' texts from the laws of their rules, and what was enumerated."""
    case, judge = CASES[name[0]], (JUDGES | VERIFICATIONS)[name[1]]
    method = decoding.Speculative(MODEL, case.drafter, judge, eos_ids=(EOS,), **case.of_method)
    texts = Texts(method, **case.of_texts)
    rows = rows(case.drafter.max_draft, texts.size) if callable(rows) else rows
    if case.q is None:
        names = ("Lossless",)
    both = [(row, names[i % len(names)]) for i, row in enumerate(rows)]
    rule = RULES[names[0]] if len(names) == 1 else OneOf.by_row([name for _, name in both])
    found = texts(decoding.MethodParams(P, case.params, rule), rows)
    wanted = []
    for row, of_rule in both:
        q = None if case.q is None else case.q(row)
        wanted.append(law_of(target(RULES[of_rule], row, q, drafter=case.table), row))
    return list(map(distance, found, wanted)), texts, found


@pytest.mark.parametrize("name", variants(NAMES, *QUICK), ids=str)
def test_the_law_of_texts(name):
    def rows(most, size):
        # Each row has another rule, or all of them.
        if name in QUICK:
            return few_rows(most) if size > 1000 else rows_of(most)
        return [row for row in rows_of(most) for _ in SOME]

    off, texts, _ = enumerated(name, rows, SOME)
    assert max(off) < 1e-6, off
    assert len(texts.drafted) > 1


def law_of_copies(drafter, rule, row, predictions):
    """The law of texts by rounds of Token: q and so pi depend on where a draft began."""
    before, found = after_texts(row.prompt, predictions), {}

    def write(text, begun, chance):
        if len(text) == row.limit or EOS in text:
            found[tuple(text)] = found.get(tuple(text), 0.0) + chance
            return
        context, drafted = [*before, *text[:begun]], text[begun:]
        known = shares(drafter, context, drafted)
        drafts = known and len(drafted) < min(drafter.max_draft, row.draft_limit or V)
        if not known:
            known = {(context + drafted)[-1]: 1.0}
        q = np.array([known.get(token, 0.0) for token in range(V)], np.float32)
        at = np.array([V, V, *row.prompt, *text])[-2:] @ [V + 1, 1]
        p = np.asarray(jax.nn.softmax(P[at]))
        pi = np.asarray(RULES[rule](q, p, None, p), np.float64)
        for token in np.flatnonzero(pi):
            stays = min(q[token], pi[token]) if drafts else 0.0
            write([*text, int(token)], begun, chance * stays)
            write([*text, int(token)], len(text) + 1, chance * (pi[token] - stays))

    write([], 0, 1.0)
    return found


COPIED = [("predicted", "Token"), ("predicted", "Block"), ("earlier", "Token")]


@pytest.mark.parametrize("name", variants(COPIED, *COPIED[1:]), ids=str)
def test_the_law_of_copies_under_a_rule_that_reads_them(name):
    """A certain draft is accepted by Block as by Token; one that was drawn is not."""
    case, rows = CASES[name[0]], [Row(PROMPT, 3), Row((1, 0), 3), Row((2, 1, 0), 3, 1)]
    method = decoding.Speculative(MODEL, case.drafter, JUDGES[name[1]], eos_ids=(EOS,))
    laws = Texts(method, **case.of_texts)(decoding.MethodParams(P, (), RULES["TokenV3"]), rows)
    both = [*zip(rows, case.of_texts["predictions"], strict=True)]
    wanted = [law_of_copies(case.drafter, "TokenV3", *one) for one in both]
    assert max(map(distance, laws, wanted)) < 1e-6
    # Controls: the verifier's law, and that of copies from nothing.
    assert distance(laws[0], law_of_copies(case.drafter, "Lossless", *both[0])) > 0.01
    assert distance(laws[0], law_of_copies(case.drafter, "TokenV3", rows[0], ())) > 0.01


class Misjudged(drafting.Lookup):
    """Says that all tokens were equally probable."""

    def _drawn(self, state, inputs):
        tokens, q, count = super()._drawn(state, inputs)
        return tokens, jnp.full_like(q, 1 / V), count


def test_control_another_q_of_copies_is_seen():
    case = CASES["earlier"]
    drafter = Misjudged(max_copy=2, vocab_size=V, earlier=2)
    method = decoding.Speculative(MODEL, drafter, JUDGES["Token"], eos_ids=(EOS,))
    row = Row(PROMPT, 2)
    found = Texts(method, **case.of_texts)(decoding.MethodParams(P, (), RULES["Lossless"]), [row])
    assert distance(found[0], law_of(target(RULES["Lossless"], row), row)) > 1e-3


@pytest.mark.parametrize("name", ["predicted", "earlier"])
def test_rules_that_read_a_confidence_refuse_copies(name):
    """A single copy is certain of itself: OPT would keep any text that was copied."""
    method = decoding.Speculative(MODEL, CASES[name].drafter, JUDGES["Token"], eos_ids=(EOS,))
    with pytest.raises(ValueError, match="OPT reads the drafter's confidence, but Lookup has none"):
        method.check_rule(RULES["OPT"])


# Where these read it, all rules share a program; a rule by itself is another one.
SHARED = ("Lossless", "OPT", "Diff", "TokenV2", "TokenV3", "Lossy")
ROWS = [Row((0,), 4), Row((1, 0), 3, temperature=0.7), Row((0, 1, 1), 2, temperature=1.3)]
RULED = [
    *(("fixed", name, names) for name in VERIFICATIONS for names in (SHARED, ("Lossless",))),
    ("stops", "Token", SHARED),
    ("stops", "Block", ("Lossless",)),
    ("catches up", "Block", SHARED),
    ("limits", "Token", SHARED),
]
ALL_RULED = [
    *RULED,
    *(("fixed", name, tuple(RULES)) for name in VERIFICATIONS),
    *itertools.product(("stops", "catches up", "limits"), ("Token", "Block"), (tuple(RULES),)),
]


def under_rules(loop, judge, names):
    return enumerated((loop, judge), [row for row in ROWS for _ in names], names)


@pytest.mark.parametrize("case", variants(ALL_RULED, *RULED), ids=str)
def test_the_law_under_every_rule(case):
    off, texts, found = under_rules(*case)
    assert max(off) < 1e-6, off
    # Where drafts may end early, they do.
    assert (len(texts.drafted) > 1) == (case[0] in ("stops", "limits"))
    # The control: another rule's law is told apart.
    other = "TokenV2" if case[2][0] == "Lossless" else "Lossless"
    assert distance(found[0], law_of(target(RULES[other], ROWS[0]), ROWS[0])) > 0.01


@pytest.mark.parametrize(("name", "names"), [("Block", SHARED), ("Token", ("Lossless",))])
def test_the_law_of_what_is_computed_on_tpus(name, names):
    with platforms.as_on_tpus():
        assert max(under_rules("catches up", name, names)[0]) < 1e-6
