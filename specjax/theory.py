"""Expected lengths and walltime factors of drafting, from acceptance rates.

All formulas except `tokens_of_models` and `expected_calls` suppose that each drafted token is
accepted independently of the others, at one rate for each pair of drafter and reviewer; in a tree,
at one rate for each rank among siblings. An EWIF (expected walltime improvement factor) is the
expected number of tokens per pass of the verifier, over the time of these tokens in passes of the
verifier: the speed-up over the verifier alone. Costs are times of a pass, in passes of the
verifier.

Functions take Python floats, and work on the host.

Sources: Leviathan et al. (arXiv 2211.17192); Cascade Speculative Drafting (arXiv 2312.11462); Block
Verification (arXiv 2403.10444); Sequoia (arXiv 2402.12374).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from specjax.checks import check_count, one_number
from specjax.errors import UserError

__all__ = [
    "BestTree",
    "best_tree",
    "expected_calls",
    "expected_tokens",
    "expected_tree_tokens",
    "horizontal_ewif",
    "optimal_draft",
    "speculative_ewif",
    "standardised_improvement",
    "tokens_of_models",
    "vertical_ewif",
    "vertical_expected_tokens",
]


def expected_tokens(acceptance: float, draft: int) -> float:
    """The expected number of tokens of a round: (1 - a^{k+1}) / (1 - a).

    Args:
      acceptance: a in [0, 1], the rate at which a drafted token is accepted.
      draft: k >= 0, the number of drafted tokens.

    Source: arXiv 2211.17192, equation 1.
    """
    return _series([_rate("acceptance", acceptance)] * _count("draft", draft))


def expected_calls(acceptance: ArrayLike) -> float:
    """The expected number of rounds, each a call of the verifier, that write a text of n tokens.

    c_a = 1 + Σ_{j=0..k} (Π_{i<j} α_{a,i}) (1 - α_{a,j}) c_{a+j+1}, where α_{a,k} = 0, and c is 0
    from the text's end on; the result is c_0.

    Args:
      acceptance: α, `[n, k]`: the rate at which draft i (from 0) of a round that begins after a
        tokens is accepted, if the drafts before it are.
    """
    alpha = np.asarray(acceptance, np.float64)
    count, draft = alpha.shape
    accepted = np.cumprod(np.pad(alpha, ((0, 0), (1, 0)), constant_values=1.0), axis=1)
    stops = accepted * (1.0 - np.pad(alpha, ((0, 0), (0, 1))))
    calls = np.zeros(count + draft + 1)
    for a in reversed(range(count)):
        calls[a] = 1.0 + stops[a] @ calls[a + 1 : a + draft + 2]
    return float(calls[0])


def speculative_ewif(acceptance: float, draft: int, cost: float) -> float:
    """The EWIF of one drafter: (1 - a^{k+1}) / ((1 - a) (c k + 1)).

    Args:
      acceptance: a in [0, 1].
      draft: k >= 0.
      cost: c >= 0, of a pass of the drafter.

    Source: arXiv 2211.17192, theorem 3.8; arXiv 2312.11462, corollary 4.2.
    """
    cost = _cost("cost", cost)
    return expected_tokens(acceptance, draft) / (cost * draft + 1.0)


def optimal_draft(acceptance: float, cost: float, longest: int = 64) -> int:
    """The draft length of the highest EWIF; 0 if no length is faster than the verifier alone.

    Args:
      acceptance: a in [0, 1].
      cost: c >= 0, of a pass of the drafter.
      longest: the longest possible draft, >= 0; the result if a = 1 and c < 1.

    Returns:
      The shortest of the best lengths.

    Source: arXiv 2211.17192, section 3.5.
    """
    lengths = range(_count("longest", longest) + 1)
    return max(lengths, key=lambda k: (speculative_ewif(acceptance, k, cost), -k))


def tokens_of_models(
    drafter: Callable[[tuple[int, ...]], ArrayLike],
    target: Callable[[tuple[int, ...]], ArrayLike],
    draft: int,
) -> tuple[float, float]:
    """The expected tokens of a round under two given models, exactly: it reads all drafts.

    By token verification 1 + sum over drafted prefixes x of prod_i min(q_i, pi_i); by block
    verification 1 + sum over x of q(x) P(x), where P_i = min(1, P_{i-1} pi_i / q_i). The second is
    never smaller.

    Args:
      drafter: the tokens drafted so far -> `[V]` q, the drafter's probabilities of the next token.
      target: likewise pi, the distribution of the output.
      draft: G >= 0; V^G drafts are read.

    Returns:
      The tokens with token verification, and with block verification.

    Source: arXiv 2211.17192, theorem 2.1; arXiv 2403.10444, section 4.
    """
    draft = _count("draft", draft)

    def below(prefix: tuple[int, ...], token: float, weight: float, stands: float) -> np.ndarray:
        # token: prod min(q, pi); weight: q(x); stands: P.
        tokens = np.array([token, weight * stands])
        if len(prefix) == draft or not weight:
            return tokens
        q, p = (_law(n, f(prefix)) for n, f in (("drafter", drafter), ("target", target)))
        if q.shape != p.shape:
            raise UserError(f"drafter and target must share V, got {q.size} and {p.size}")
        for x in np.flatnonzero(q):
            least = min(1.0, stands * p[x] / q[x])
            tokens += below((*prefix, int(x)), token * min(q[x], p[x]), weight * q[x], least)
        return tokens

    by_token, by_block = below((), 1.0, 1.0, 1.0)
    return float(by_token), float(by_block)


def vertical_expected_tokens(acceptance: float, inner: float, draft: int, rounds: int) -> float:
    """The expected tokens of a round with n inner rounds: (1 - a phi_{a',k}(a)^n) / (1 - a).

    Args:
      acceptance: a in [0, 1], the rate at which the verifier accepts the middle model's tokens.
      inner: a' in [0, 1], the rate at which the middle model accepts those of the level below.
      draft: k >= 0, tokens drafted in an inner round.
      rounds: n >= 0, inner rounds.

    Source: arXiv 2312.11462, theorem 4.3.
    """
    a, b = _rate("acceptance", acceptance), _rate("inner", inner)
    k, n = _count("draft", draft), _count("rounds", rounds)
    if a == 1.0:
        return 1.0 + n * expected_tokens(b, k)
    # phi_{b, k}(a), the mean of a^N, where an inner round emits N tokens: theorem 4.1.
    phi = 1.0 + (a - 1.0) * _series([b * a] * k)
    return (1.0 - a * phi**n) / (1.0 - a)


def vertical_ewif(
    acceptance: float, inner: float, draft: int, rounds: int, costs: tuple[float, float]
) -> float:
    """The EWIF of a vertical cascade: its expected tokens over 1 + n c_1 + n k c_2.

    Args:
      acceptance: see `vertical_expected_tokens`.
      inner: see there.
      draft: k.
      rounds: n.
      costs: c_1 of the middle model, c_2 of the level below, each >= 0.

    Source: arXiv 2312.11462, theorem 4.3.
    """
    tokens = vertical_expected_tokens(acceptance, inner, draft, rounds)
    middle, below = (_cost(f"costs[{i}]", cost) for i, cost in enumerate(costs))
    return tokens / (1.0 + rounds * middle + rounds * draft * below)


def horizontal_ewif(acceptances: Sequence[float], costs: Sequence[float]) -> float:
    """The EWIF of a horizontal cascade: sum_{i=0..k} prod_{j<=i} a_j, over 1 + sum c_i.

    Args:
      acceptances: a_1 .. a_k, for each position of the block the rate of its drafter.
      costs: c_1 .. c_k, for each position the cost of its drafter.

    Source: arXiv 2312.11462, theorem 4.5.
    """
    if len(acceptances) != len(costs):
        raise UserError(
            f"acceptances and costs must have a number for each position, got "
            f"{len(acceptances)} and {len(costs)}"
        )
    rates = [_rate(f"acceptances[{i}]", rate) for i, rate in enumerate(acceptances)]
    return _series(rates) / (1.0 + sum(_cost(f"costs[{i}]", c) for i, c in enumerate(costs)))


def standardised_improvement(
    tokens: float, calls: Mapping[str, float], costs: Mapping[str, float], verifier: str
) -> float:
    """SWI: the speed-up over the verifier alone if each pass of a model takes a fixed time.

    Args:
      tokens: the number of emitted tokens.
      calls: passes by the model's name.
      costs: the time of a pass of each; with parameter counts instead it is the paper's SWI (MS),
        with measured or published times its SWI (PW).
      verifier: the verifier's name.

    Source: arXiv 2312.11462, section 5.1.
    """
    for name in (verifier, *calls):
        if name not in costs:
            raise UserError(f"costs must have an entry {name!r}, got {', '.join(costs)}")
    spent = sum(_cost(f"calls[{n!r}]", calls[n]) * _cost(f"costs[{n!r}]", costs[n]) for n in calls)
    if not spent > 0.0:
        raise UserError(f"calls and costs must add up to more than 0, got {spent:g}")
    return _cost("tokens", tokens) * costs[verifier] / spent


def expected_tree_tokens(parents: Sequence[int], rates: ArrayLike) -> float:
    """The expected number of tokens of a round with a tree: over nodes, the sum of path products.

    It is exact with `TopDown` verification, if the rates depend on nothing but ranks; of a tree
    whose tokens are not drawn, with every exact verification. `Traversal` emits at least as many.

    Args:
      parents: the parent of each node from 1 on; see `drafting.Tree`.
      rates: `[K, K]`; at [b - 1, i] the probability that the child of rank i, from 0, of a node
        with b children is accepted, if the node is.

    Source: arXiv 2402.12374, section 4.
    """
    rates = _rates(rates)
    counts = np.bincount(np.asarray(parents, int), minlength=1)
    if counts.max() > len(rates):
        raise UserError(
            f"parents has a node with {counts.max()} children, but rates has rows for at most "
            f"{len(rates)}: give more rates, or a narrower tree"
        )
    reached, seen = [1.0], np.zeros(len(counts), int)
    for parent in parents:
        reached.append(reached[parent] * rates[counts[parent] - 1, seen[parent]])
        seen[parent] += 1
    return float(sum(reached))


class BestTree(NamedTuple):
    """A tree that `best_tree` has chosen.

    Attributes:
      parents: for `drafting.Tree`; empty if drafting does not pay.
      tokens: its expected tokens; see `expected_tree_tokens`.
      time: the time of a round.
    """

    parents: tuple[int, ...]
    tokens: float
    time: float


def best_tree(
    rates: ArrayLike,
    verifier: Callable[[int], float],
    drafter: Callable[[int], float],
    *,
    sizes: Sequence[int] = range(65),
    depth: int = 8,
) -> BestTree:
    """The tree with the most expected tokens per time.

    For each number of nodes and each depth it finds the tree with the most tokens, by dynamic
    programming over subtrees; of these it takes the best. This is the best of all trees if a pass
    of the drafter costs the same for every width.

    Args:
      rates: see `expected_tree_tokens`; K is the most children of a node.
      verifier: the number of tokens -> the time of a pass; it reads the nodes and one more token.
      drafter: the number of tokens -> the time of a pass; each pass reads the nodes of a level that
        have children, the first the last committed token.
      sizes: the numbers of nodes to consider, the root left out.
      depth: the most levels.

    Returns:
      The tree. Of equal ones it is the smallest.

    Source: arXiv 2402.12374, section 4, generalised to rates that depend on the number of siblings.
    """
    rates, depth = _rates(rates), _count("depth", depth)
    wanted = sorted({_count("sizes", size) for size in sizes})
    if not wanted:
        raise UserError("sizes is empty: give at least one number of nodes")
    subtrees = _Subtrees(rates, wanted[-1] + 1, depth)
    best = None
    for size in wanted:
        for levels in range(depth + 1):
            tokens = float(subtrees.tokens[levels][size + 1])
            if not math.isfinite(tokens):
                continue
            parents, widths = subtrees.tree(size + 1, levels)
            drafts = sum(_cost("drafter", drafter(width)) for width in widths)
            spent = _cost("verifier", verifier(size + 1)) + drafts
            if best is None or tokens * best.time > best.tokens * spent * (1.0 + 1e-12):
                best = BestTree(parents, tokens, spent)
    if best is None:
        raise UserError(
            f"no tree of {depth} levels and nodes of at most {len(rates)} children has a size in "
            f"{wanted}: give another depth"
        )
    return best


class _Subtrees:
    """The most expected tokens of subtrees with n nodes, their root included, and d levels below.

    Attributes:
      tokens: for each d an array `[n + 1]` of float64, -inf if there is no such tree.
    """

    def __init__(self, rates: np.ndarray, most: int, depth: int):
        none = np.full(most + 1, -np.inf)
        leaf = none.copy()
        leaf[1] = 1.0
        self.tokens = [leaf]
        # (d, n) -> the sizes of the children's subtrees.
        self._sizes: dict[tuple[int, int], tuple[int, ...]] = {(0, 1): ()}
        for d in range(1, depth + 1):
            below, best = self.tokens[-1], leaf.copy()
            self._sizes[d, 1] = ()
            for count in range(1, len(rates) + 1):
                # The best sum over the first children that have m nodes together.
                sums, chosen = np.where(np.arange(most + 1) == 0, 0.0, -np.inf), []
                for rate in rates[count - 1, :count]:
                    # [m, s]: s of m nodes are below this child.
                    each = none + np.zeros((most + 1, 1))
                    for s in range(1, most + 1):
                        if np.isfinite(below[s]):
                            each[s:, s] = sums[: most + 1 - s] + rate * below[s]
                    sums, own = each.max(axis=1), each.argmax(axis=1)
                    chosen.append(own)
                for n in np.flatnonzero(np.isfinite(sums[:-1]) & (1.0 + sums[:-1] > best[1:])):
                    best[n + 1] = 1.0 + sums[n]
                    self._sizes[d, int(n) + 1] = _split(chosen, int(n))
            self.tokens.append(best)

    def tree(self, nodes: int, levels: int) -> tuple[tuple[int, ...], list[int]]:
        """The parents of the best tree, and for each level the number of nodes with children."""
        parents: list[int] = []
        widths, level, first = [], [nodes], 0
        for d in range(levels, -1, -1):
            if not level:
                break
            below = [self._sizes[d, size] for size in level]
            widths += [inner] if (inner := sum(map(bool, below))) else []
            parents += [first + i for i, sizes in enumerate(below) for _ in sizes]
            first += len(level)
            level = [size for sizes in below for size in sizes]
        return tuple(parents), widths


def _split(chosen: Sequence[np.ndarray], left: int) -> tuple[int, ...]:
    """The sizes of the children's subtrees, the first child's first."""
    sizes: list[int] = []
    for own in reversed(chosen):
        sizes.append(int(own[left]))
        left -= sizes[-1]
    return tuple(reversed(sizes))


def _rates(values: ArrayLike) -> np.ndarray:
    rates = np.asarray(values, np.float64)
    square = rates.ndim == 2 and rates.shape[0] == rates.shape[1] and rates.size
    if not square or not ((rates >= 0.0) & (rates <= 1.0)).all():
        raise UserError(
            f"rates must be a square table of probabilities [K, K], got an array {rates.shape} "
            f"with values in [{rates.min(initial=0.0):g}, {rates.max(initial=0.0):g}]"
        )
    return rates


def _series(rates: Sequence[float]) -> float:
    """1 + r_1 + r_1 r_2 + ..."""
    total = product = 1.0
    for rate in rates:
        product *= rate
        total += product
    return total


def _law(name: str, probs: ArrayLike) -> np.ndarray:
    law = np.asarray(probs, np.float64)
    if law.ndim != 1 or not (law >= 0).all() or abs(law.sum() - 1.0) > 1e-4:
        raise UserError(f"{name} must give probabilities [V] that add up to 1, got {law}")
    return law


def _rate(name: str, value: float) -> float:
    one_number(name, value, low=0.0, high=1.0)
    return float(value)


def _cost(name: str, value: float) -> float:
    one_number(name, value, low=0.0, high=math.inf, open_high=True)
    return float(value)


def _count(name: str, value: int) -> int:
    check_count(name, value, "give a whole number", low=0)
    return int(value)
