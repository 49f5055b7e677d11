"""Verification: which prefix of a drafted block is accepted, and which token follows it."""

from specjax.types import Verification
from specjax.verification.chains import (
    Block,
    GreedyBlock,
    GreedyBlockCarry,
    Token,
    accept,
    block_acceptance_probs,
    draw_next,
    expected_accepted,
    next_token_probs,
    num_accepted_probs,
    token_acceptance_probs,
    verify,
)
from specjax.verification.traversal import TopDown, Traversal, Walk

ALL_VERIFICATIONS = (Token, Block, GreedyBlock, Walk, TopDown, Traversal)

__all__ = [
    "Block",
    "GreedyBlock",
    "Token",
    "TopDown",
    "Traversal",
    "Walk",
    "expected_accepted",
    "num_accepted_probs",
    "verify",
]
