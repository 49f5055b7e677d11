"""The exact laws of sequential cascades, in fractions, from two tables and nothing else.

Probabilities are thirds, so that uniforms of three values reach every outcome as often as it is
likely. Contexts are the last two tokens. `q` and `p` map a context to probabilities.
"""

import collections
import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

V, EOS = 3, 2
THIRDS = (Fraction(1, 3), Fraction(2, 3), Fraction(0))
# No context is certain, so that a bound on the largest probability can exclude all of them.
KINDS = sorted({k for row in ((1, 1, 1), (2, 1, 0)) for k in itertools.permutations(row)})
Law = dict[tuple[int, ...], Fraction]
Dist = tuple[Fraction, ...]


def random_thirds(seed: int) -> np.ndarray:
    """Logits for `TabularModel(3, 2)` whose probabilities are thirds."""
    rng = np.random.default_rng(seed)
    counts = np.array(KINDS)[rng.integers(len(KINDS), size=(V + 1) ** 2)]
    with np.errstate(divide="ignore"):
        return np.log(counts / 3.0).astype(np.float32)


def reader(table: np.ndarray, prompt: list[int]) -> Callable[[tuple[int, ...]], Dist]:
    """Emitted tokens -> the model's distribution after the prompt and these."""
    counts = np.rint(3.0 * np.exp(table.astype(np.float64))).astype(int)

    def after(emitted: tuple[int, ...]) -> Dist:
        context = [V, V, *prompt, *emitted][-2:]
        return tuple(Fraction(int(n), 3) for n in counts[context[0] * (V + 1) + context[1]])

    return after


def floats(dist: Dist) -> np.ndarray:
    return np.array([float(x) for x in dist], np.float32)


def over(emitted: tuple[int, ...], limit: int) -> bool:
    return len(emitted) == limit or emitted[-1:] == (EOS,)


def grow(limit: int, choose: Callable[..., tuple[Dist, Any]], state: Any = ()) -> Law:
    """The law of texts whose next distribution, and the state after it, `choose` tells."""
    law: Law = collections.defaultdict(Fraction)
    todo = [((), Fraction(1), state)]
    while todo:
        emitted, chance, now = todo.pop()
        if over(emitted, limit):
            law[emitted] += chance
            continue
        dist, then = choose(emitted, now)
        todo += [((*emitted, v), chance * dist[v], then) for v in range(V) if dist[v]]
    return law


def alone(model: Any, limit: int) -> Law:
    return grow(limit, lambda emitted, now: (model(emitted), now))


def token_cascade(q: Any, p: Any, limit: int, falls: Any, longest: int) -> Law:
    """`falls`: distribution -> bool; `longest`: tokens of the drafter in a row."""

    def choose(emitted, run):
        if falls(q(emitted)) or run == longest:
            return p(emitted), 0
        return q(emitted), run + 1

    return grow(limit, choose, 0)


def oracle_cascade(q: Any, p: Any, limit: int, defers: Any) -> Law:
    def choose(emitted, now):
        return (p if defers(q(emitted), p(emitted)) else q)(emitted), now

    return grow(limit, choose)


def bild(
    q: Any, p: Any, limit: int, falls: Any, rolls: Any, longest: int, unread: bool = True
) -> Law:
    """`rolls`: (q, p) -> bool. With `unread` a text that ends with a draft ends unread."""
    law: Law = collections.defaultdict(Fraction)
    # Emitted tokens, then those drafted since.
    todo = [((), (), Fraction(1))]
    while todo:
        emitted, drafted, chance = todo.pop()
        text = (*emitted, *drafted)
        ended = over(text, limit)
        if ended and (unread or not drafted):
            law[text] += chance
            continue
        waits = ended or len(drafted) == longest or falls(q(text))
        if not waits:
            todo += [(emitted, (*drafted, v), chance * x) for v, x in enumerate(q(text)) if x]
            continue
        places = [(*emitted, *drafted[:i]) for i in range(len(drafted))]
        stands = next((place for place in places if rolls(q(place), p(place))), text)
        if over(stands, limit):
            law[stands] += chance
            continue
        todo += [((*stands, v), (), chance * x) for v, x in enumerate(p(stands)) if x]
    return law


def sequence_cascade(q: Any, p: Any, limit: int, defers: Any) -> Law:
    """`defers`: the probabilities of a response's tokens -> bool."""
    law: Law = collections.defaultdict(Fraction)
    deferred = Fraction(0)
    for text, chance in alone(q, limit).items():
        probs = [q(text[:i])[token] for i, token in enumerate(text)]
        if defers(probs):
            deferred += chance
        else:
            law[text] += chance
    for text, chance in alone(p, limit).items():
        law[text] += deferred * chance
    return {text: chance for text, chance in law.items() if chance}


def distance(a: Law, b: Law) -> float:
    """Total variation."""
    return float(sum(abs(a.get(k, Fraction(0)) - b.get(k, Fraction(0))) for k in {*a, *b}) / 2)
