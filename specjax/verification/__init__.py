"""Verification: which prefix of a drafted block stands, and which token follows it."""

from specjax.verification._base import (
    Verification,
    accept,
    draw_next,
    expected_accepted,
    next_token_probs,
    num_accepted_probs,
    verify,
)
from specjax.verification._block import Block, block_acceptance_probs
from specjax.verification._greedy_block import GreedyBlock, GreedyBlockCarry
from specjax.verification._token import Token, token_acceptance_probs

ALL_VERIFICATIONS = (Token, Block, GreedyBlock)

__all__ = [
    "ALL_VERIFICATIONS",
    "Block",
    "GreedyBlock",
    "GreedyBlockCarry",
    "Token",
    "Verification",
    "accept",
    "block_acceptance_probs",
    "draw_next",
    "expected_accepted",
    "next_token_probs",
    "num_accepted_probs",
    "token_acceptance_probs",
    "verify",
]
