"""What wrong drafters and wrong verifications would emit: each has another law.

The distances are total variations over three tokens. The references of trees are means over six
other random pairs of three tokens, which were enumerated apart from this code.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding, drafting, testing, verification
from specjax.decoding import speculative as rounds
from specjax.drafting import trees
from specjax.types import ChildLaw
from specjax.verification import traversal
from tests import laws
from tests.drafting import binding
from tests.drafting.test_laws import (
    BY_A,
    CHAIN,
    OF_A,
    OF_B,
    SHAPES,
    chain,
    reviewed,
    side_by_side,
)
from tests.laws import MODEL, P, Row, V
from tests.tables import RULES
from tests.variants import variants

PAIRS = 6
BUSH, TRAVERSAL = SHAPES["bush"], verification.Traversal()


@dataclasses.dataclass(frozen=True)
class Changed(drafting.Tree):
    """Changes its blocks: `change` takes and returns a `DraftBlock`."""

    change: Any = lambda block: block

    def propose(self, *args, **options):
        block, state = super().propose(*args, **options)
        return self.change(block), state

    def __post_init__(self):
        """Nothing is refused."""


def chances(block):
    """The drafter's probability of each token, `[B, G]`."""
    rows = jnp.take_along_axis(block.probs, block.parents[..., None], axis=1)
    return jnp.take_along_axis(rows, block.tokens[..., None], axis=2)[..., 0]


def left_out(block, wrong):
    """Without the nodes `wrong [B, G]`: a node that follows itself is the child of no other."""
    own = jnp.arange(1, wrong.shape[1] + 1, dtype=jnp.int32)[None]
    return block._replace(parents=jnp.where(wrong, own, block.parents))


def mislabelled(block):
    """Says of every token that it was drawn from the whole distribution."""
    return block._replace(laws=jnp.full_like(block.laws, ChildLaw.DRAWN))


def improbable(block):
    return left_out(block, chances(block) < 0.25)


@dataclasses.dataclass(frozen=True)
class WrongParent(verification.Walk):
    """Judges the children by the distribution after another node."""

    def walk(self, uniforms, block):
        wrong = jnp.roll(block.target_probs, 1, axis=0)
        return super().walk(uniforms, block._replace(target_probs=wrong))


def without_paths(patch):
    """What failed children take does not change the chance of their parent."""
    judge = traversal._judge

    def wrong(*given, **options):
        found = judge(*given, **options)
        return found._replace(totals=found.chances)

    patch.setattr(traversal, "_judge", wrong)


def from_the_target(patch):
    """After failed children the next token is drawn from the whole target."""
    path_to = traversal._path_to

    def wrong(last, parents, judged, targets):
        return path_to(last, parents, judged, targets)._replace(weights=targets[last])

    patch.setattr(traversal, "_path_to", wrong)


def without_residuals(patch):
    """Each sibling is judged by the whole target."""
    judge = traversal._judge

    def wrong(tree, *, joint):
        found = judge(tree, joint=joint)
        at = tree.parents, tree.tokens
        own = tree.target_probs[at]
        law = jnp.where(tree.laws == ChildLaw.TOP, 1.0, tree.draft_probs[at])
        chance = jnp.minimum(own / jnp.where(law > 0, law, 1.0), 1.0)
        return found._replace(chances=found.chances.at[1:].set(chance))

    patch.setattr(traversal, "_judge", wrong)


def bonus_of_the_verifier(patch):
    """The token after a leaf is drawn from p, whatever the rule."""
    patch.setattr(rounds, "next_target", lambda rule, credit, q, p, *_: (p, credit))


class Control(NamedTuple):
    """A wrong drafter or verification.

    Attributes:
      children: of the drafter.
      reference: the mean distance of other pairs.
      tree: the shape.
      judge: the verification.
      change: of blocks.
      patch: takes a monkeypatch.
      rule: the name of the rule.
    """

    children: str
    reference: float
    tree: Any = BUSH
    judge: Any = TRAVERSAL
    change: Any = lambda block: block
    patch: Any = lambda monkeypatch: None
    rule: str = "Lossless"


CONTROLS = {
    "without replacement, verified with q": Control("without", 0.036, change=mislabelled),
    "top, verified with q": Control("top", 0.265, change=mislabelled),
    "top+1, verified with q": Control("top+1", 0.531, change=mislabelled),
    "reranked": Control("without", 0.072, SHAPES["kept"]),
    "improbable draws left out": Control("without", 0.127, change=improbable),
    "siblings judged by the whole target": Control(
        "without", 0.186, judge=verification.TopDown(), patch=without_residuals
    ),
    "next token from the target": Control("without", 0.099, patch=from_the_target),
    "the chance of a parent stays": Control("without", 0.168, patch=without_paths),
    "a wrong parent": Control("top", 0.15, judge=WrongParent()),
    "the verifier's own bonus": Control(
        "without", 0.184, patch=bonus_of_the_verifier, rule="TokenV3"
    ),
}


QUICK = [
    "without replacement, verified with q",
    "top+1, verified with q",
    "a wrong parent",
    "the verifier's own bonus",
]


@pytest.mark.parametrize("name", variants(CONTROLS, *QUICK))
def test_a_wrong_tree_has_another_law(name, monkeypatch):
    control, row, far = CONTROLS[name], Row(limit=3), []
    control.patch(monkeypatch)
    drafter = binding.tree(
        MODEL, control.tree, control.children, kind=Changed, change=control.change
    )
    texts, rule = (
        laws.Texts(decoding.Speculative(MODEL, drafter, control.judge)),
        RULES[control.rule],
    )
    for seed in range(PAIRS):
        p, q = (jnp.asarray(testing.random_table(10 * seed + i, V, 2, scale=1.5)) for i in (3, 4))
        given = decoding.MethodParams(p, drafting.chain.ChainParams(q), rule)
        pi = laws.target(rule, row, verifier=p, drafter=q)
        far.append(laws.distance(texts(given, [row])[0], laws.law_of(pi, row, ends=())))
    assert np.mean(far) > control.reference / 3


class Peeking(drafting.Chain):
    """Drops a drafted token because of its value."""

    def propose(self, params, state, inputs, **options):
        block, state = super().propose(params, state, inputs, **options)
        kept = jnp.where(block.tokens[:, 0] == 1, 0, block.num_drafted)
        return block._replace(num_drafted=kept), state


class Mislabelled(drafting.trees.CaterpillarDrafter):
    """Says that the siblings were drawn from q."""

    def propose(self, *args, **options):
        block, state = super().propose(*args, **options)
        return block._replace(laws=jnp.full_like(block.laws, ChildLaw.DRAWN)), state


class OneLaw(drafting.Branches):
    """Says that all children of the root were drawn by the first drafter."""

    def propose(self, *args, **options):
        block, state = super().propose(*args, **options)
        rows = jnp.where(block.parents == 0, 0, block.drawn_from)
        return block._replace(drawn_from=rows), state


class Merged(drafting.Branches):
    """Leaves out the second of two equal tokens that were drawn."""

    def propose(self, *args, **options):
        block, state = super().propose(*args, **options)
        equal = block.tokens[:, 0] == block.tokens[:, 1]
        count = block.num_drafted - equal.astype(jnp.int32)
        return block._replace(num_drafted=count), state


class SharesOne(drafting.cascades.HorizontalCascade):
    """The wrong one: all positions say the distribution of the first drafter."""

    def propose(self, params, state, inputs, **options):
        block, new = super().propose(params, state, inputs, **options)
        first = self.drafters[0]
        # What the first drafter would have drawn from after the first token.
        told = first.commit(new.drafters[0], block.tokens, jnp.minimum(block.num_drafted, 1))
        rows = inputs.tokens.size
        empty = decoding.blocks.empty_block(rows, first.max_draft, first.vocab_size, False)
        after = inputs._replace(tokens=block.tokens[:, 0])
        extra = first.bonus(params[0], told, after, empty)[0]
        return block._replace(probs=block.probs.at[:, 1].set(extra.probs)), new


# Name -> a wrong drafter, its parameters, a verification, and the least distance.
OTHERS = {
    "a token dropped for its value": (Peeking(MODEL, 3), OF_A, verification.Token(), 0.01),
    "siblings verified with q": (Mislabelled(chain(2), 2), OF_A, TRAVERSAL, 0.02),
    "siblings of a cascade": (Mislabelled(reviewed(2), 2), BY_A, TRAVERSAL, 0.02),
    "the first drafter's q for all": (
        OneLaw((chain(1), CHAIN)),
        (OF_A, OF_B),
        TRAVERSAL,
        0.01,
    ),
    "positions that share one distribution": (
        SharesOne((chain(1), CHAIN)),
        (OF_A, OF_B),
        verification.Token(),
        0.001,
    ),
    "equal draws joined": (Merged((chain(1), CHAIN)), (OF_A, OF_A), TRAVERSAL, 0.001),
}
SHORT = [name for name in OTHERS if name != "siblings of a cascade"]


@pytest.mark.parametrize("name", variants(OTHERS, *SHORT))
def test_a_wrong_drafter_has_another_law(name):
    drafter, own, judge, least = OTHERS[name]
    texts = laws.Texts(decoding.Speculative(MODEL, drafter, judge))
    row = Row((0, 1, 1, 0, 2, 1, 0, 1), 3)
    (found,) = texts(decoding.MethodParams(P, own, RULES["Lossless"]), [row])
    wanted = laws.law_of(laws.target(RULES["Lossless"], row), row, ends=())
    assert laws.distance(found, wanted) > least


FIRST, SECOND = (
    np.log([x], dtype=np.float32) for x in ([0.4, 0.3, 0.2, 0.1], [0.5, 0.3, 0.15, 0.05])
)


@pytest.mark.parametrize("judge", variants(["Traversal", "TopDown"], "Traversal"))
@pytest.mark.parametrize("kept", [True, False])
def test_a_child_is_judged_by_its_law_without_the_siblings_that_a_limit_cuts(
    judge, kept, monkeypatch
):
    """The control leaves them out: the drawn token then seems to come from the whole of q."""
    if not kept:
        monkeypatch.setattr(trees, "_with_cut_siblings", lambda tree, parts: tree)
    model = testing.TabularModel(4, 0)
    pair = drafting.Tree(1, 2, model=model)
    drafter = side_by_side(pair, drafting.Lookup(max_copy=2, vocab_size=4))
    judges = {"Traversal": TRAVERSAL, "TopDown": verification.TopDown()}
    texts = laws.Texts(decoding.Speculative(model, drafter, judges[judge]))
    own = drafting.chain.ChainParams(jnp.asarray(SECOND)), ()
    given = decoding.MethodParams(jnp.asarray(FIRST), own, RULES["Lossless"])
    (found,) = texts(given, [Row(limit=1, draft_limit=1)])
    emitted = [found.get((token,), 0.0) for token in range(4)]
    want = [0.4, 0.3, 0.2, 0.1] if kept else [0.0, 0.6, 0.3, 0.1]
    np.testing.assert_allclose(emitted, want, atol=1e-6)
