"""What a round costs, yields and needs; the length of drafts that follows, with its reason."""

import dataclasses

import numpy as np
import pytest

from specjax.drafting import Costs
from specjax.text.draft_length import (
    RoundCost,
    acceptance_for,
    draft_length,
    expected_rounds,
    round_costs,
)
from specjax.theory import optimal_draft

# Passes over six tokens cost 2.1, a drafter's 0.2: a round of 2.8 tokens takes 3.1 passes.
SLOW = RoundCost(5, 5, 0.2, 2.1, 2.8)


@pytest.mark.parametrize(
    ("cost", "remedy"),
    [
        # 2.8 tokens in 5 x 0.2 + 2.1 passes; at r = 1 in 2 passes.
        (SLOW, "r = 2.1 (a verifier's pass over 6 tokens) takes 3.1 passes"),
        (SLOW, "a larger verifier or a GPU or TPU has it, the passes would allow 1.4x"),
        (
            RoundCost(5, 5, 0.5, 1.2, 2.8),
            "much cheaper drafter (c near 0) the passes would allow",
        ),
        (RoundCost(5, 5, 0.3, 1.5, 1.1), "A drafter that agrees more often would help"),
        (
            RoundCost(5, 5, 0.05, 1.1, 2.8),
            "The passes allow 2.1x; calls and prompts, or other",
        ),
        (
            RoundCost(5, 1, 0.5, 1.2, 2.8),
            "5 tokens at c = 0.5 (the drafter's only pass) and ch",
        ),
        (RoundCost(2, 2, 0.5, 2.5, 2.0), "no acceptance breaks even"),
    ],
)
def test_the_reason_names_what_would_help(cost, remedy):
    assert remedy in cost.why()
    assert cost.ideal == pytest.approx(cost.tokens / (cost.draft_passes * cost.c + cost.r))


def test_the_acceptance_of_a_number_of_tokens():
    for acceptance in (0.0, 0.3, 0.77, 1.0):
        tokens = sum(acceptance**i for i in range(6))
        assert acceptance_for(tokens, 5) == pytest.approx(acceptance, abs=1e-9)
        assert RoundCost(5, 5, 0.2, 1.0, tokens).acceptance == pytest.approx(acceptance, abs=1e-9)
    assert acceptance_for(0.9, 2) == -np.inf == -RoundCost(2, 2, 0.5, 2.5, 2.0).break_even


# Seconds of a drafter's pass, and of a verifier's pass over 1 .. 8 tokens.
FREE_CHECKS = (1.0,) * 8
WIDE_CHECKS = tuple(1.0 + 0.3 * width for width in range(8))


def rounds(acceptance, draft, checks=FREE_CHECKS, catches_up=True):
    costs = Costs((1,), tuple(range(1, 9)), (draft,), (checks,))
    tokens = expected_rounds(acceptance, 7)
    return round_costs(costs, 1, tokens, catches_up=catches_up)


@pytest.mark.parametrize(
    ("given", "length"),
    [
        (rounds(0.9, 0.0), 7),  # free drafts: the longest
        (rounds(1.0, 0.9), 7),
        (rounds(0.7, 0.1), 4),
        (rounds(0.7, 0.1, WIDE_CHECKS), 2),
        (rounds(0.3, 0.2), 1),
        (rounds(0.0, 0.0), 0),  # nothing is gained, though nothing is lost
        (rounds(0.5, 0.5), 0),  # G = 1 breaks even, and the others lose
        (rounds(0.3, 0.4), 0),
        (rounds(0.7, 0.1, (1.0, *(2.0,) * 7)), 6),  # a wide pass costs much, a wider one no more
        # The one pass of a block head is a part of rounds with drafts.
        (rounds(0.7, 0.0, (1.0, *(1.4,) * 7)), 7),
        (rounds(0.3, 0.0, (1.0, *(1.5,) * 7)), 0),
        # Of a whole draft the last token is read apart: short drafts, which are often whole, pay
        # more for it.
        (rounds(0.7, 0.3), 2),
        (rounds(0.7, 0.3, catches_up=False), 3),
        ([RoundCost(3, 3, 0.1, 1.0, 2.6), RoundCost(2, 2, 0.1, 1.0, 2.4)], 2),  # a tie
        ([RoundCost(5, 1, 0.5, 1.2, 2.8), RoundCost(3, 1, 0.5, 1.1, 2.4)], 5),
    ],
)
def test_the_length_of_known_costs(given, length):
    found = draft_length(given)
    assert found.max_draft == length and found.why.startswith(f"G = {length}: ")
    assert found == draft_length(given[::-1])
    # No other length is faster, and of equals none is shorter.
    best = {0: 1.0} | {cost.max_draft: cost.ideal for cost in given}
    assert length == min(n for n, speed in best.items() if speed >= max(best.values()) - 1e-12)


@pytest.mark.parametrize("draft", [0.01, 0.09, 0.3, 0.7])
@pytest.mark.parametrize("acceptance", [0.05, 0.41, 0.78, 0.97])
def test_where_wider_passes_cost_the_same_it_is_the_known_optimum(acceptance, draft):
    found = draft_length(rounds(acceptance, draft)).max_draft
    assert found == optimal_draft(acceptance, draft, longest=7)
    # Were wider passes' cost ignored, a longer draft would be chosen.
    assert draft_length(rounds(acceptance, draft, WIDE_CHECKS)).max_draft <= found


def test_the_reason_has_the_numbers_and_the_next_best():
    assert draft_length(rounds(0.71, 0.1)).why == (
        "G = 4: at an acceptance of 0.71 it yields 2.83 tokens a round for 1.4 passes of the "
        "verifier, 2.02x its speed alone; G = 5 would give 2x."
    )
    assert draft_length(rounds(0.3, 0.4)).why == (
        "G = 0: no draft pays; the best is G = 1: at an acceptance of 0.30 it yields 1.3 tokens a "
        "round for 1.4 passes of the verifier, 0.929x its speed alone."
    )
    (only,) = [cost for cost in rounds(0.71, 0.1) if cost.max_draft == 1]
    assert draft_length([only]).why.endswith("1.55x its speed alone.")


def test_costs_between_rows_and_widths_are_interpolated():
    costs = Costs((1, 5), (1, 2, 4), (0.1, 0.3), ((1.0, 2.0, 4.0), (2.0, 4.0, 8.0)))
    (found,) = round_costs(costs, 3, {2: 2.0}, catches_up=True)
    assert found == pytest.approx((2, 2, 0.2 / 1.5, 4.5 / 1.5, 2.0))
    # Rounds are compared to a step of the verifier alone, without the work of a round.
    costs = dataclasses.replace(costs, alone=(0.5, 1.5))
    (found,) = round_costs(costs, 3, {2: 2.0}, catches_up=True)
    assert found == pytest.approx((2, 2, 0.2 / 1.0, 4.5 / 1.0, 2.0))


def test_a_gain_over_rounds_without_drafts_is_none_over_the_verifier_alone():
    costs = Costs((1,), (1, 2), (0.1,), ((1.0, 1.1),))
    for alone, length in (((), 1), ((1.0,), 1), ((0.7,), 0)):
        given = dataclasses.replace(costs, alone=alone)
        rounds = round_costs(given, 1, {1: 1.5}, catches_up=True)
        assert draft_length(rounds).max_draft == length


@pytest.mark.parametrize(("rows", "more"), [(1, 0.25), (2, 0.4375), (40, 1.0)])
def test_all_rows_wait_for_the_pass_after_any_whole_draft(rows, more):
    costs = Costs((1, 64), (1, 4), (0.1, 0.1), ((1.0, 1.0),) * 2)
    tokens = {2: 1.0 + 0.5 + 0.25}  # a draft is whole with the chance 0.25
    (found,) = round_costs(costs, rows, tokens, catches_up=False)
    assert found.draft_passes == pytest.approx(2 + more, abs=1e-4)
