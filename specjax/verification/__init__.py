"""Verification: which prefix of a drafted block is accepted, and which token follows it."""

from specjax.types import Verification
from specjax.verification.block import Block, block_acceptance_probs
from specjax.verification.fly import FLy
from specjax.verification.greedy_block import GreedyBlock, GreedyBlockCarry
from specjax.verification.multi_draft import KSeq, MultiPathBlock
from specjax.verification.token import Token, token_acceptance_probs
from specjax.verification.traversal import TopDown, Traversal, Walk
from specjax.verification.verify import (
    accept,
    draw_next,
    expected_accepted,
    next_token_probs,
    num_accepted_probs,
    verify,
)

# Those that are exact.
ALL_VERIFICATIONS = (
    *(Token, Block, GreedyBlock),
    *(Walk, TopDown, Traversal, KSeq, MultiPathBlock),
)

__all__ = [
    "Block",
    "FLy",
    "GreedyBlock",
    "KSeq",
    "MultiPathBlock",
    "Token",
    "TopDown",
    "Traversal",
    "Walk",
    "expected_accepted",
    "num_accepted_probs",
    "verify",
]
