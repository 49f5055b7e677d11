"""Expected lengths and walltime factors of drafting, from acceptance rates.

All formulas except `tokens_of_models` suppose that each drafted token is accepted independently of
the others, at one rate for each pair of drafter and reviewer. An EWIF (expected walltime
improvement factor) is the expected number of tokens per pass of the verifier, over the time of
these tokens in passes of the verifier: the speed-up over the verifier alone. Costs are times of a
pass, in passes of the verifier.

Functions take Python floats, and work on the host.

Sources: Leviathan et al. (arXiv 2211.17192); Cascade Speculative Drafting (arXiv 2312.11462); Block
Verification (arXiv 2403.10444).
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from specjax.checks import check_count, one_number

__all__ = [
    "expected_tokens",
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


def tokens_generating_function(acceptance: float, draft: int, x: float) -> float:
    """E[x^N] for the number N of tokens that a round emits: phi_{a,k}(x).

    phi_{a,k}(x) = 1 + (x - 1) (1 - (a x)^{k+1}) / (1 - a x).

    Args:
      acceptance: a in [0, 1].
      draft: k >= 0.
      x: in [0, 1].

    Source: arXiv 2312.11462, theorem 4.1.
    """
    a, k = _rate("acceptance", acceptance), _count("draft", draft)
    x = _rate("x", x)
    return 1.0 + (x - 1.0) * _series([a * x] * k)


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

    Raises:
      ValueError: if a distribution is invalid, or their lengths differ.

    Source: arXiv 2211.17192, theorem 2.1; arXiv 2403.10444, section 4.
    """
    draft = _count("draft", draft)

    def below(prefix: tuple[int, ...], token: float, weight: float, stands: float) -> np.ndarray:
        # token: prod min(q, pi); weight: q(x); stands: P.
        found = np.array([token, weight * stands])
        if len(prefix) == draft or not weight:
            return found
        q, p = (_law(n, f(prefix)) for n, f in (("drafter", drafter), ("target", target)))
        if q.shape != p.shape:
            raise ValueError(f"drafter and target must share V, got {q.size} and {p.size}")
        for x in np.flatnonzero(q):
            least = min(1.0, stands * p[x] / q[x])
            found += below((*prefix, int(x)), token * min(q[x], p[x]), weight * q[x], least)
        return found

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
    a, n = _rate("acceptance", acceptance), _count("rounds", rounds)
    if a == 1.0:
        return 1.0 + n * expected_tokens(inner, draft)
    return (1.0 - a * tokens_generating_function(inner, draft, a) ** n) / (1.0 - a)


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

    Raises:
      ValueError: if they differ in length.

    Source: arXiv 2312.11462, theorem 4.5.
    """
    if len(acceptances) != len(costs):
        raise ValueError(
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

    Raises:
      ValueError: if a model has no cost, or the total time is 0.

    Source: arXiv 2312.11462, section 5.1.
    """
    for name in (verifier, *calls):
        if name not in costs:
            raise ValueError(f"costs must have an entry {name!r}, got {', '.join(costs)}")
    spent = sum(_cost(f"calls[{n!r}]", calls[n]) * _cost(f"costs[{n!r}]", costs[n]) for n in calls)
    if not spent > 0.0:
        raise ValueError(f"calls and costs must add up to more than 0, got {spent:g}")
    return _cost("tokens", tokens) * costs[verifier] / spent


def _series(rates: Sequence[float]) -> float:
    """1 + r_1 + r_1 r_2 + ..."""
    total = product = 1.0
    for rate in rates:
        product *= rate
        total += product
    return total


def _law(name: str, probs: ArrayLike) -> np.ndarray:
    found = np.asarray(probs, np.float64)
    if found.ndim != 1 or not (found >= 0).all() or abs(found.sum() - 1.0) > 1e-4:
        raise ValueError(f"{name} must give probabilities [V] that add up to 1, got {found}")
    return found


def _rate(name: str, value: float) -> float:
    one_number(name, value, low=0.0, high=1.0)
    return float(value)


def _cost(name: str, value: float) -> float:
    one_number(name, value, low=0.0, high=math.inf, open_high=True)
    return float(value)


def _count(name: str, value: int) -> int:
    check_count(name, value, "give a whole number", low=0)
    return int(value)
