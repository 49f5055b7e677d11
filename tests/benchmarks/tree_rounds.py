"""The exact law of a round with a tree, by summing over all drafts and their outcomes."""

import functools
import itertools

import numpy as np
import pytest


def laws_of(kind, count, q):
    """Yields the tokens of the children of a node, their laws and the probability of the tokens."""
    tops = np.argsort(-q, kind="stable")[:count]
    one = np.eye(len(q))
    vocab = len(q)
    if kind == "top":
        yield tuple(tops), [one[x] for x in tops], 1.0
    elif kind == "top+1":
        rest = np.where(np.isin(np.arange(vocab), tops[:-1]), 0.0, q)
        rest = rest / rest.sum()
        for first in np.flatnonzero(rest):
            yield (first, *tops[:-1]), [rest, *(one[x] for x in tops[:-1])], rest[first]
    else:
        for tokens in itertools.product(range(vocab), repeat=count):
            laws, chance, left = [], 1.0, q.copy()
            for token in tokens:
                law = left / left.sum() if left.sum() else one[token]
                laws.append(law)
                chance *= law[token]
                left = left if kind == "independent" else np.where(one[token] > 0, 0.0, left)
            if chance > 0:
                yield tokens, laws, chance


def rates_of(q, pi, kind, most):
    """How often each child of 1 .. K children is accepted, by recursive rejection: `[K, K]`."""
    rates = np.zeros((most, most))
    for count in range(1, most + 1):
        for tokens, laws, chance in laws_of(kind, count, q):
            mass, fails = pi.copy(), chance
            for rank, (token, law) in enumerate(zip(tokens, laws, strict=True)):
                share = min(1.0, mass[token] / law[token])
                rates[count - 1, rank] += fails * share
                fails *= 1.0 - share
                rest = np.maximum(mass - law, 0.0)
                mass = rest / max(rest.sum(), 1e-12)
    return rates


def outcomes(parents, kind, judge, q, pi, last, stop=None):
    """`[D + 1, V]`: the law of the number of accepted tokens and the next token.

    Args:
      parents: the tree.
      kind: how children are chosen.
      judge: the verification.
      q: `[V, V]`, the drafter's distribution after each token.
      pi: likewise the rule's target.
      last: the last committed token.
      stop: a draft ends with this token, or None.
    """
    size, vocab = len(parents) + 1, len(q)
    children = {n: [i + 1 for i, p in enumerate(parents) if p == n] for n in range(size)}
    depth = [0]
    for parent in parents:
        depth.append(depth[parent] + 1)
    law = np.zeros((max(depth) + 1, vocab))

    def drafted(node, tokens):
        return [child for child in children[node] if child in tokens]

    def judged(node, weight, tokens, laws):
        """Yields (node, its final mass) in post-order; the masses sum to the chance."""
        mass = weight * pi[tokens[node]]
        for child in drafted(node, tokens):
            y, draft = tokens[child], laws[child]
            chance = min(1.0, mass[y] / draft[y])
            yield from judged(child, chance, tokens, laws)
            rest = np.maximum(mass - draft, 0.0)
            below = rest.sum() + max(1.0 - mass.sum(), 0.0)
            mass = rest / below if below > 1e-12 else np.zeros(vocab)
        yield node, mass

    def descend(node, chance, tokens, laws):
        mass = pi[tokens[node]]
        for child in drafted(node, tokens):
            y, draft = tokens[child], laws[child]
            if judge == "Walk":
                share, mass = mass[y], np.where(np.arange(vocab) == y, 0.0, mass)
                descend(child, chance * share, tokens, laws)
                continue
            own = min(1.0, mass[y] / draft[y])
            descend(child, chance * own, tokens, laws)
            rest = np.maximum(mass - draft, 0.0)
            chance, mass = chance * (1.0 - own), rest / max(rest.sum(), 1e-12)
        law[depth[node]] += chance * mass

    def drawn(order, chance, tokens, laws):
        if order and order[0] and tokens.get(order[0], stop) == stop:
            drawn(order[1:], chance, tokens, laws)  # the draft has ended
        elif order:
            node, *others = order
            for own, of_own, share in laws_of(kind, len(children[node]), q[tokens[node]]):
                more = dict(zip(children[node], own, strict=True))
                below = dict(zip(children[node], of_own, strict=True))
                drawn(others, chance * share, tokens | more, laws | below)
        elif judge == "Traversal":
            going = chance
            for node, mass in judged(0, 1.0, tokens, laws):
                held = 1.0 if node == 0 else min(mass.sum(), 1.0)
                if going * held > 1e-12:
                    law[depth[node]] += going * held * mass / mass.sum()
                going *= 1.0 - held
        else:
            descend(0, chance, tokens, laws)

    inner = [n for n in range(size) if children[n]]
    drawn(inner, 1.0, {0: last}, {})
    assert law.sum() == pytest.approx(1.0)
    return law


def rounds_of(parents, kind, judge, q, pi, first, num_tokens, stop=None):
    """The expected rounds until N tokens are emitted; `first` is the prompt's last one."""
    laws = [outcomes(parents, kind, judge, q, pi, last, stop) for last in range(len(q))]

    @functools.cache
    def rounds(last, left):
        if left <= 0:
            return 0.0
        steps = np.ndenumerate(laws[last])
        return 1.0 + sum(x * rounds(token, left - count - 1) for (count, token), x in steps)

    return rounds(first, num_tokens)
