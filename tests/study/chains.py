"""All texts that follow a law, and their probabilities."""

import itertools

import numpy as np


def all_texts(law, first, num_tokens):
    """All texts `[n, N]` that follow `law [V, V]`, and their probabilities `[n]`."""
    texts = np.asarray(list(itertools.product(range(len(law)), repeat=num_tokens)))
    before = np.concatenate([np.full((len(texts), 1), first), texts[:, :-1]], axis=1)
    return texts, before, law[before, texts].prod(axis=1)
