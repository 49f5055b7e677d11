"""A row of a real pair is the same alone, in a batch, padded, and over a mesh.

Networks sum in another order in another shape, so rows may differ where a decision is within
rounding; each that does must be traced to a margin below 1e-5.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import partitioning, rules
from specjax.types import Sampling
from tests import margins, tiny_pair

MARGIN = 1e-5
CAPTIONS = [
    "A man rides a bicycle.",
    "Two dogs play in the snow.",
    "A woman in a red coat is waiting for the bus.",
    "Children are running across a green field.",
    "An old man is reading a newspaper on a bench in the park.",
    "A girl jumps.",
    "Three men in orange vests are working on the railway tracks.",
    "A brown horse stands behind a wooden fence.",
]


@pytest.mark.exhaustive
def test_rows_do_not_depend_on_their_surroundings():
    pair = specjax.load_pair()
    # Half of the rows greedy, half drawn: their decisions have other margins.
    options = {"rule": rules.OPT(0.1), "max_draft": 4, "max_new_tokens": 24, "batch_size": 8}
    temperatures = np.array([0.0, 1.0] * 4, np.float32)
    decoder = specjax.Decoder(pair, buckets=(24,), **options)
    together = decoder(CAPTIONS, seed=1, sampling=Sampling(temperatures)).texts
    order = [3, 0, 7, 6, 1, 5, 2, 4]
    elsewhere = decoder(
        [CAPTIONS[i] for i in order], seed=1, sampling=Sampling(temperatures[order]), ids=order
    ).texts
    alone = specjax.Decoder(pair, buckets=(32,), **options)  # and padded further
    mesh = partitioning.make_mesh(data=4, model=2)
    spread = specjax.Decoder(specjax.load_pair(mesh=mesh), buckets=(24,), **options)
    others = {
        "elsewhere": [elsewhere[order.index(i)] for i in range(8)],
        "alone and padded": [
            alone([text], seed=1, sampling=Sampling(temperatures[i]), ids=[i]).texts[0]
            for i, text in enumerate(CAPTIONS)
        ],
        "eight devices": spread(CAPTIONS, seed=1, sampling=Sampling(temperatures)).texts,
    }
    differing = {i for texts in others.values() for i in range(8) if texts[i] != together[i]}
    for i in differing:
        settings = {**options, "sampling": Sampling(float(temperatures[i]))}
        assert margins.within(pair, CAPTIONS[i], MARGIN, seed=1, row=i, **settings), (
            f"row {i} differs, and not for a margin below {MARGIN}"
        )
    assert len(differing) <= 1, "rounding parts one row in thousands"


@pytest.mark.parametrize(("gap", "near"), [(1e-6, True), (1e-2, False)])
def test_a_near_decision_is_told_from_a_clear_one(gap, near):
    one = tiny_pair.tabular(1)
    table = np.asarray(one.params).copy()
    # After any token two tokens are nearly equally good.
    table[:, 10] = table.max() + 1.0
    table[:, 20] = table[:, 10] - gap
    models = [specjax.TextModel(one.model, jnp.asarray(table), one.tokenizer) for _ in range(2)]
    options = {"max_draft": 2, "max_new_tokens": 4, "sampling": Sampling(0.0)}
    found = margins.within(specjax.Pair(*models), "a", MARGIN, seed=0, row=0, **options)
    assert found == near
