"""Verification: which prefix of a drafted block is accepted, and which token follows it."""

from specjax.types import Verification
from specjax.verification.chains import (
    Block,
    Token,
    block_acceptance_probs,
    token_acceptance_probs,
)
from specjax.verification.greedy_block import GreedyBlock, GreedyBlockCarry
from specjax.verification.traversal import TopDown, Traversal, Walk
from specjax.verification.verify import (
    accept,
    draw_next,
    expected_accepted,
    next_token_probs,
    num_accepted_probs,
    verify,
)

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
