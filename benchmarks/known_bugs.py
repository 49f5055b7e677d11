"""Token and block verification in NumPy, right and with each known mistake.

The right ones are in float64 what `specjax.verification` computes in float32. The others are the
bugs that serving systems had, and near misses: the audit must tell each of them from a right one.

Axes: B rows, G padded block, N = G + 1 positions, V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from specjax.testing.auditing.hard_cases import one_hot


class BlockParts(NamedTuple):
    """What a reference verifier reads.

    `inside` is drafted, not padding, and `joint` the scale of p in residuals: 1, or P_i of the
    block.
    """

    x: Int[np.ndarray, "B G"]
    q: Float[np.ndarray, "B G V"]
    p: Float[np.ndarray, "B N V"]
    u: Float[np.ndarray, "B G"]
    inside: Bool[np.ndarray, "B G"]
    lengths: Int[np.ndarray, " B"]
    joint: Float[np.ndarray, "B N"]

    def at(self, array: np.ndarray, n: np.ndarray) -> np.ndarray:
        """Row n of each block."""
        return array[np.arange(len(n)), np.clip(n, 0, array.shape[1] - 1)]


def ratio(b: BlockParts) -> np.ndarray:
    """p(x) / q(x)."""
    return _over(_of(b.p, b.x), _of(b.q, b.x))


def count_prefix(passed: np.ndarray, b: BlockParts) -> np.ndarray:
    """The number of leading passes."""
    return np.cumprod(passed & b.inside, axis=1).sum(axis=1)


def count_last(passed: np.ndarray, b: BlockParts) -> np.ndarray:
    """The position of the last pass."""
    return ((passed & b.inside) * np.arange(1, passed.shape[1] + 1)).max(axis=1, initial=0)


def difference(b: BlockParts, n: np.ndarray) -> np.ndarray:
    """(P p - q)_+ after n accepted tokens."""
    q = b.at(b.q, n) if b.q.shape[1] else 0.0
    return np.maximum(b.at(b.joint, n)[:, None] * b.at(b.p, n) - q, 0.0)


def whole(b: BlockParts, n: np.ndarray) -> np.ndarray:
    """The target p after n accepted tokens."""
    return b.at(b.p, n)


def draw_first(weights: np.ndarray, u: np.ndarray) -> np.ndarray:
    """The first token whose cumulative weight is above u times the total."""
    cumulative = np.cumsum(weights, axis=1)
    return (cumulative <= u[:, None] * cumulative[:, -1:]).sum(axis=1)


def block_chances(b: BlockParts, joint: np.ndarray) -> np.ndarray:
    """Block verification's h_i of each prefix; at the whole block P_L."""
    longest = b.x.shape[1]
    remain = np.stack(
        [
            np.maximum(joint[:, i, None] * b.p[:, i] - (b.q[:, i] if i < longest else 0.0), 0.0)
            for i in range(1, longest + 1)
        ],
        axis=1,
    ).sum(axis=2)
    below = remain + 1.0 - joint[:, 1:]
    h = np.where(below > 0.0, remain / np.where(below > 0.0, below, 1.0), 1.0)
    last = np.arange(1, longest + 1) == b.lengths[:, None]
    return np.where(last, joint[:, 1:], h)


@dataclasses.dataclass(frozen=True)
class ReferenceVerifier:
    """A verifier in NumPy; the defaults are Token's, and a mistake replaces one of them.

    Attributes:
      block: whether the whole block is judged (Block) or each token.
      rows: changes q before anything else.
      ratio: p(x) / q(x) as the verifier computes it.
      chances: the chance of each test from the parts and P, for Block.
      passes: whether each test passes, from u, the chances and the parts.
      count: the number of accepted tokens from the passes.
      residual: the weights of the next token after a rejection.
      joint: whether residuals have P_i before p, for Block.
      bonus: the weights of the next token after the whole block.
      noise: the uniform of the next token, from (uniform_next, u, n).
      draw: a token from weights and a uniform.
      mend: whether a residual without mass is replaced by p.
      reads_padding: whether padding is judged too.
    """

    block: bool = False
    rows: Callable[[np.ndarray], np.ndarray] = lambda q: q
    ratio: Callable[[BlockParts], np.ndarray] = ratio
    chances: Callable[[BlockParts, np.ndarray], np.ndarray] = block_chances
    passes: Callable[..., np.ndarray] = lambda u, chance, b, joint: u < chance
    count: Callable[[np.ndarray, BlockParts], np.ndarray] | None = None
    residual: Callable[[BlockParts, np.ndarray], np.ndarray] = difference
    joint: bool = True
    bonus: Callable[[BlockParts, np.ndarray], np.ndarray] = whole
    noise: Callable[..., np.ndarray] = lambda v, u, n: v
    draw: Callable[[np.ndarray, np.ndarray], np.ndarray] = draw_first
    mend: bool = True
    reads_padding: bool = False

    def __call__(
        self,
        tokens: np.ndarray,
        draft_probs: np.ndarray | None,
        target_probs: np.ndarray,
        uniforms: np.ndarray,
        uniform_next: np.ndarray,
        lengths: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        if draft_probs is None:
            draft_probs = one_hot(tokens, target_probs.shape[-1])
        longest = tokens.shape[1]
        if self.reads_padding:
            lengths = np.full_like(lengths, longest)
        inside = np.arange(longest) < lengths[:, None]
        ones = np.ones((len(tokens), longest + 1))
        q = self.rows(draft_probs)
        b = BlockParts(tokens, q, target_probs, uniforms, inside, lengths, ones)
        ratios = self.ratio(b)
        joint = ones.copy()
        for i in range(longest):
            joint[:, i + 1] = np.minimum(_times(joint[:, i], ratios[:, i]), 1.0)
        if self.block:
            chances = self.chances(b, joint)
            if self.joint:
                b = b._replace(joint=joint)
        else:
            chances = np.minimum(ratios, 1.0)
        passed = self.passes(uniforms, chances, b, joint)
        count = self.count or (count_last if self.block else count_prefix)
        n = count(passed, b)
        weights = np.where((n < lengths)[:, None], self.residual(b, n), self.bonus(b, n))
        if self.mend:
            weights = np.where(weights.sum(axis=1, keepdims=True) > 0.0, weights, whole(b, n))
        return n, self.draw(weights, self.noise(uniform_next, uniforms, n))


def _of(probs: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return np.take_along_axis(probs[:, : tokens.shape[1]], tokens[..., None], axis=2)[..., 0]


def _over(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.where(q > 0.0, p / np.where(q > 0.0, q, 1.0), np.where(p > 0.0, np.inf, 0.0))


def _times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product, with 0 * inf = 0."""
    return a * np.where(a == 0.0, 0.0, b)


def _uncapped(b: BlockParts, joint: np.ndarray) -> np.ndarray:
    """Block's chances, but the last is the uncapped product of all ratios."""
    with np.errstate(invalid="ignore"):
        product = np.cumprod(ratio(b), axis=1)
    product = np.where(np.isnan(product), 0.0, product)
    last = np.arange(1, b.x.shape[1] + 1) == b.lengths[:, None]
    return np.where(last, np.minimum(product, 1.0), block_chances(b, joint))


def _stale(b: BlockParts, joint: np.ndarray) -> np.ndarray:
    """h_i from P_{i-1}."""
    last = np.arange(1, b.x.shape[1] + 1) == b.lengths[:, None]
    before = np.concatenate([np.ones_like(joint[:, :1]), joint[:, :-1]], axis=1)
    return np.where(last, joint[:, 1:], block_chances(b, before))


def _late(b: BlockParts, n: np.ndarray) -> np.ndarray:
    """The residual with the next position's q."""
    return np.maximum(b.at(b.p, n) - b.at(b.q, n + 1), 0.0)


def _most(b: BlockParts, n: np.ndarray) -> np.ndarray:
    return one_hot(np.argmax(difference(b, n), axis=1), b.p.shape[2])


def _used(v: np.ndarray, u: np.ndarray, n: np.ndarray) -> np.ndarray:
    """The uniform of the failed test."""
    return np.where(n < u.shape[1], u[np.arange(len(n)), np.minimum(n, u.shape[1] - 1)], v)


def _after_last(b: BlockParts, n: np.ndarray) -> np.ndarray:
    """The bonus from the residual with the last q."""
    return np.maximum(b.at(b.p, n) - np.where((n > 0)[:, None], b.at(b.q, n - 1), 0.0), 0.0)


def _with_epsilon(weights: np.ndarray, u: np.ndarray) -> np.ndarray:
    return draw_first(weights / weights.sum(axis=1, keepdims=True) + 1e-3, u)


def _row_0(b: BlockParts, n: np.ndarray) -> np.ndarray:
    return np.repeat(difference(b, n)[:1], len(n), axis=0)


RIGHT = MappingProxyType({"Token": ReferenceVerifier(), "Block": ReferenceVerifier(block=True)})
_Wrong = ReferenceVerifier
WRONG = MappingProxyType(
    {
        "all passes are counted, not those before the first failure": _Wrong(
            count=lambda passed, b: (passed & b.inside).sum(axis=1)
        ),
        "the bonus token is drawn from the last drafted position's p": _Wrong(
            bonus=lambda b, n: b.at(b.p, n - 1)
        ),
        "the residual's q is one position late": _Wrong(residual=_late),
        "q of row 0 is used for all rows": _Wrong(rows=lambda q: np.repeat(q[:1], len(q), axis=0)),
        "a token is accepted if p > q, without a random number": _Wrong(
            passes=lambda u, chance, b, joint: ratio(b) > 1.0
        ),
        "p is shifted by one position": _Wrong(
            ratio=lambda b: _over(_of(b.p[:, 1:], b.x), _of(b.q, b.x))
        ),
        "the residual is |p - q|": _Wrong(
            residual=lambda b, n: np.abs(b.at(b.p, n) - b.at(b.q, n))
        ),
        "all rows advance by the batch's minimum": _Wrong(
            count=lambda passed, b: np.full(len(passed), count_prefix(passed, b).min(initial=9))
        ),
        "block: h_i reads P before position i": _Wrong(block=True, chances=_stale),
        "the residual's argmax is taken, not drawn": _Wrong(residual=_most),
        "block: stops at the first failure": _Wrong(block=True, count=count_prefix),
        "the bonus token is drawn from a residual": _Wrong(bonus=_after_last),
        "the residual is p": _Wrong(residual=whole),
        "block: P_i is compared with a product of uniforms (vllm-ascend before 7808)": _Wrong(
            block=True,
            passes=lambda u, chance, b, joint: joint[:, 1:] >= np.cumprod(u, axis=1),
        ),
        "block: the last test is not capped (HSD as published)": _Wrong(
            block=True, chances=_uncapped
        ),
        "row 0's residual is used for all rows": _Wrong(residual=_row_0),
        "the uniform of the failed test draws the next token": _Wrong(noise=_used),
        "one uniform serves all positions": _Wrong(
            passes=lambda u, chance, b, joint: u[:, :1] < chance
        ),
        "block: one uniform serves all positions": _Wrong(
            block=True, passes=lambda u, chance, b, joint: u[:, :1] < chance
        ),
        "1e-2 is added to the residual": _Wrong(residual=lambda b, n: difference(b, n) + 1e-2),
        "block: the residual is (p - q)+ without P": _Wrong(block=True, joint=False),
        "1e-3 is added before the logarithm": _Wrong(draw=_with_epsilon),
        "<= in a test accepts impossible tokens at u = 0": _Wrong(
            passes=lambda u, chance, b, joint: u <= chance
        ),
        "padding is read as drafted tokens": _Wrong(reads_padding=True),
    }
)
# Equivalent to Token: a residual without mass is reached with probability zero.
EQUIVALENT = MappingProxyType({"a residual without mass is not replaced": _Wrong(mend=False)})
# Their outcome for a row depends on the other rows.
COUPLED = (
    "q of row 0 is used for all rows",
    "all rows advance by the batch's minimum",
    "row 0's residual is used for all rows",
)
