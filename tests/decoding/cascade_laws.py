"""The exact laws of sequential cascades, from two tables and nothing else.

A law: an emitted text, a tuple of tokens -> its chance.
"""

import collections
import itertools

import jax.numpy as jnp
import numpy as np

from tests.laws import EOS, A, P, V, after


class Models:
    """The models' distributions and confidences after a row's prompt and an emitted text."""

    def __init__(self, row):
        self.limit = row.limit
        texts = [x for n in range(row.limit) for x in itertools.product(range(V), repeat=n)]
        self.q, self.p, self.q_conf, self.p_conf = (
            dict(zip(texts, after(table, row, temperature).astype(np.float64), strict=True)).get
            for temperature in (row.temperature, 1.0)
            for table in (A, P)
        )

    def defers(self, rule, text):
        """The decision of a rule at one position; `specjax.rules` has its own tests."""
        laws = (of(text) for of in (self.q, self.p, self.q_conf, self.p_conf))
        return bool(rule.defers(*(jnp.asarray(law, jnp.float32) for law in laws)))


def over(emitted, limit):
    return len(emitted) == limit or emitted[-1:] == (EOS,)


def grow(limit, choose, state=()):
    """The law of texts whose next distribution, and the state after it, `choose` tells."""
    law, todo = collections.defaultdict(float), [((), 1.0, state)]
    while todo:
        emitted, chance, now = todo.pop()
        if over(emitted, limit):
            law[emitted] += chance
            continue
        dist, then = choose(emitted, now)
        todo += [((*emitted, v), chance * dist[v], then) for v in range(V) if dist[v]]
    return law


def alone(model, limit):
    return grow(limit, lambda emitted, now: (model(emitted), now))


def token_cascade(models, rule, longest):
    """`longest`: tokens of the drafter in a row."""

    def choose(emitted, run):
        if models.defers(rule, emitted) or run == longest:
            return models.p(emitted), 0
        return models.q(emitted), run + 1

    return grow(models.limit, choose, 0)


def oracle_cascade(models, rule):
    def choose(emitted, now):
        return (models.p if models.defers(rule, emitted) else models.q)(emitted), now

    return grow(models.limit, choose)


def bild(models, rule, longest, unread=True):
    """With `unread` a text that ends with a draft ends unread."""
    law, limit = collections.defaultdict(float), models.limit
    # Emitted tokens, then those drafted since.
    todo = [((), (), 1.0)]
    while todo:
        emitted, drafted, chance = todo.pop()
        text = (*emitted, *drafted)
        ended = over(text, limit)
        if ended and (unread or not drafted):
            law[text] += chance
            continue
        if not (ended or len(drafted) == longest or models.defers(rule.fallback, text)):
            more = enumerate(models.q(text))
            todo += [(emitted, (*drafted, v), chance * x) for v, x in more if x]
            continue
        places = [(*emitted, *drafted[:i]) for i in range(len(drafted))]
        stands = next((place for place in places if models.defers(rule.rollback, place)), text)
        if over(stands, limit):
            law[stands] += chance
            continue
        todo += [((*stands, v), (), chance * x) for v, x in enumerate(models.p(stands)) if x]
    return law


def sequence_cascade(models, defers):
    """`defers`: the drafter's confidences in a response's tokens -> bool."""
    law, deferred = collections.defaultdict(float), 0.0
    for text, chance in alone(models.q, models.limit).items():
        if defers(np.array([models.q_conf(text[:i])[token] for i, token in enumerate(text)])):
            deferred += chance
        else:
            law[text] += chance
    for text, chance in alone(models.p, models.limit).items():
        law[text] += deferred * chance
    return law
