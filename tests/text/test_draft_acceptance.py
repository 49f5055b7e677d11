"""The acceptance of drafts, with the names and definitions of vLLM's metrics."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

import specjax
from specjax import rules
from specjax.runs import predictions
from specjax.text.results import DraftAcceptance
from specjax.types import Sampling
from tests import tiny_pair

PROMPTS = tiny_pair.sentences(6, seed=3)
SHAPE = {"max_new_tokens": 12, "batch_size": 4, "buckets": (16, 32)}


def by_draft(drafts):
    """The rows' histograms and the rates, from the drafted and accepted tokens of each draft."""
    longest = max(drafted for drafted, _ in drafts)
    info = {name: [0] * (longest + 1) for name in ("drafted_lengths", "accepted_lengths")}
    for drafted, accepted in drafts:
        info["drafted_lengths"][drafted] += 1
        info["accepted_lengths"][accepted] += 1
    real = [(drafted, accepted) for drafted, accepted in drafts if drafted]
    rates = [sum(a >= i for _, a in real) / len(real) for i in range(1, longest + 1)]
    return info, rates, 1 + sum(a for _, a in real) / len(real)


def test_the_rates_are_those_of_single_drafts():
    # A draft of one token, and two rounds without a draft.
    drafts = [(3, 3), (3, 0), (1, 1), (0, 0), (3, 1), (0, 0), (2, 0)]
    info, rates, length = by_draft(drafts)
    found = DraftAcceptance.of([info, info])
    assert found.per_position_acceptance_rate == pytest.approx(rates)
    assert found.mean_acceptance_length == pytest.approx(length)
    assert found.draft_acceptance_rate == pytest.approx(5 / 12)
    assert (found.drafts, found.draft_tokens, found.accepted_tokens) == (10, 24, 10)
    assert found.accepted_lengths == (4, 4, 0, 2)
    assert dataclasses.asdict(found)["drafted_lengths"] == (2, 2, 6)
    lines = str(found).splitlines()
    assert lines == [
        "mean acceptance length 2.00, draft acceptance rate 0.417 (10 drafts)",
        "acceptance rate by position 0.600, 0.200, 0.200",
    ]
    assert repr(found) == f"DraftAcceptance({lines[0]}, {lines[1]})"


def test_a_result_has_them(pair):
    decoder = specjax.Decoder(pair, max_draft=3, **SHAPE)
    result = decoder(PROMPTS, seed=0)
    found, info = result.acceptance, result.info
    accepted = info.per_row.accepted.sum()  # those past the ends of rows too
    assert (found.accepted_tokens, found.draft_tokens) == (accepted, info.drafted)
    assert found.drafts == info.rounds and sum(found.accepted_lengths) == info.rounds
    assert found.draft_acceptance_rate == info.acceptance_rate
    # All drafts have one length, so both definitions agree.
    np.testing.assert_allclose(found.per_position_acceptance_rate, info.acceptance_by_position)
    assert found.accepted_lengths[3] > 0
    # Short drafts count as not accepted, but are left out of `acceptance_by_position`.
    mixed = decoder(PROMPTS, seed=0, draft_limit=[0, 1, 2, 3, 3, 1])
    ours, own = mixed.acceptance.per_position_acceptance_rate, mixed.info.acceptance_by_position
    assert ours[0] == own[0] and ours[1] < own[1]
    assert mixed.acceptance.drafts < mixed.info.rounds
    values = json.loads(json.dumps(mixed.acceptance.to_dict(), allow_nan=False))
    assert values["per_position_acceptance_rate"] == list(ours)


def test_without_drafts_rates_are_undefined(pair):
    decoder = specjax.Decoder(pair.verifier, sampling=Sampling(0.0), **SHAPE)
    for found in (decoder(PROMPTS[:2]).acceptance, DraftAcceptance.of([])):
        assert found.drafts == 0 and math.isnan(found.mean_acceptance_length)
        assert found.to_dict()["mean_acceptance_length"] is None
        assert str(found) == "no drafts"
        with pytest.raises(ValueError, match="no drafts to plot"):
            found.plot()


def test_the_plot_has_both():
    info, rates, _ = by_draft([(2, 2), (2, 1), (2, 0), (2, 0)])
    positions, lengths = DraftAcceptance.of([info]).plot().axes
    assert [bar.get_height() for bar in positions.patches] == pytest.approx(rates)
    assert [bar.get_height() for bar in lengths.patches] == pytest.approx([0.5, 0.25, 0.25])
    # Legible without colours.
    assert all(len(set(bar.get_facecolor()[:3])) == 1 for bar in lengths.patches)
    # A notebook shows it, without pyplot.
    assert lengths.figure._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize("longest", [10, 24])
def test_no_number_of_the_plot_stands_over_another(longest):
    figure = DraftAcceptance((1,) * longest, (1,) * (longest + 1)).plot()
    figure.canvas.draw()
    for axis in figure.axes:
        for texts in (axis.texts, axis.get_xticklabels()):
            boxes = sorted(text.get_window_extent().extents.tolist() for text in texts)
            # All stand at one height, or their bars have other heights.
            for (_, low, right, top), (left, other, _, _) in itertools.pairwise(boxes):
                assert right < left or not low <= other < top
        assert len(axis.get_xticks()) > 3


BILD = rules.FallbackRollback(rules.Chow(1.0), rules.BiLD(20.0))
METHODS = {
    "chain": {"max_draft": 3},
    "tree": {"drafting": specjax.drafting.Tree(depth=3, width=2)},
    "bild": {"method": specjax.decoding.BiLDCascade(3), "rule": BILD},
    "token cascade": {"method": specjax.decoding.TokenCascade(3), "rule": rules.Chow(1.0)},
    "alone": {},
}


@pytest.mark.parametrize("name", METHODS)
def test_no_more_tokens_are_accepted_than_emitted(name):
    verifier = tiny_pair.tabular(1)
    pair = specjax.Pair(drafter=verifier, verifier=verifier)  # all drafts are accepted
    models = verifier if name == "alone" else pair
    decoder = specjax.Decoder(models, **METHODS[name], **SHAPE)
    for max_new in (1, 2, 3, 12):
        result = decoder(["a", "b", "c"], seed=1, max_new_tokens=max_new)
        info = result.info
        assert info.accepted <= info.emitted and info.accepted == info.summary()["accepted"]
        records = [{"info": row.info.to_dict(), "ended_by": row.ended_by} for row in result]
        totals = predictions.totals(records)
        assert totals["accepted"] == info.accepted
        for counts in (info.summary(), totals):
            judged = counts["accepted"] + counts["accepted_past_end"]
            assert judged == result.acceptance.accepted_tokens
            rate = judged / counts["drafted"] if counts["drafted"] else None
            assert counts["acceptance_rate"] == rate
        if name in ("chain", "tree"):
            assert info.acceptance_rate == 1.0
            # Each round but a last one that is cut ends with a token of the verifier.
            whole = sum(int(row.info.emitted) % 4 == 0 for row in result)
            assert info.accepted == info.emitted - (info.rounds - len(result)) - whole


def test_a_tree_has_a_bar_per_node():
    pair = specjax.Pair(drafter=tiny_pair.tabular(2), verifier=tiny_pair.tabular(1))
    tree = specjax.drafting.Tree(depth=2, width=2)
    result = specjax.Decoder(pair, drafting=tree, **SHAPE)(PROMPTS, seed=0)
    found, size = result.acceptance, len(result.acceptance.drafted_nodes)
    assert size > 2  # more nodes than depths
    drafted, accepted = np.array(found.drafted_nodes), np.array(found.accepted_nodes)
    assert (accepted <= drafted).all() and drafted[0] == found.drafts
    assert accepted.sum() == found.accepted_tokens > 0
    np.testing.assert_allclose(found.per_node_acceptance_rate, accepted / drafted)
    heights = [bar.get_height() for bar in result.plot().axes[0].patches]
    np.testing.assert_allclose(heights, found.per_node_acceptance_rate)
    assert result.plot().axes[0].get_xlabel() == "node of the tree, as drafted"
    # The same from the rows of a file.
    records = json.loads(json.dumps([{"info": row.info.to_dict()} for row in result]))
    assert predictions.acceptance_of(records) == found
    chain = specjax.Decoder(pair, max_draft=2, **SHAPE)(PROMPTS[:1], seed=0)
    assert chain.acceptance.drafted_nodes == () and "nodes" not in chain[0].info.to_dict()
    assert chain.plot().axes[0].get_xlabel() == "position in the draft"
