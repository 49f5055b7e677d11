"""The exact number of rounds that emit N tokens, by summing over all drafts and their outcomes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import ScoredBlock
from specjax.verification import next_token_probs, num_accepted_probs


def expected_rounds(q, pi, first, num_tokens, longest, verification, stop=None):
    """Rounds until N tokens are emitted, of models that read the last token alone.

    Args:
      q: `[V, V]`, the drafter's distribution after each token.
      pi: likewise the rule's target.
      first: the last token of the prompt.
      num_tokens: N.
      longest: G.
      verification: the algorithm.
      stop: a draft ends with this token, or None.
    """
    vocab = len(q)
    drafts = np.asarray(list(itertools.product(range(vocab), repeat=longest)))
    hits = (drafts == stop) if stop is not None else np.zeros(drafts.shape, bool)
    lengths = np.where(hits.any(1), hits.argmax(1) + 1, longest)

    @functools.partial(jax.jit)
    @functools.partial(jax.vmap, in_axes=(0, 0, None))
    def outcome(tokens, length, last):
        before = jnp.concatenate([last[None], tokens])
        block = ScoredBlock(tokens, q32[before], pi32[before], length)
        found = verification.acceptance(block)
        counts = jnp.arange(longest + 1)
        law = num_accepted_probs(verification, found.thresholds)
        after = jax.vmap(lambda n: next_token_probs(found, block, n))(counts)
        return law[:, None] * after

    q32, pi32 = jnp.asarray(q, jnp.float32), jnp.asarray(pi, jnp.float32)
    known = {}
    for last in range(vocab):
        path = np.ones(len(drafts))
        for i in range(longest):
            before = drafts[:, i - 1] if i else np.full(len(drafts), last)
            path *= np.where(i < lengths, q[before, drafts[:, i]], 1.0 / vocab)
        joint = outcome(jnp.asarray(drafts), jnp.asarray(lengths), jnp.int32(last))
        known[last] = np.einsum("d,dcv->cv", path, np.asarray(joint, np.float64))

    @functools.cache
    def rounds(last, left):
        if left <= 0:
            return 0.0
        found = 1.0
        for count in range(longest + 1):
            for token in range(vocab):
                found += known[last][count, token] * rounds(token, left - count - 1)
        return found

    assert all(abs(law.sum() - 1.0) < 1e-4 for law in known.values())
    return rounds(first, num_tokens)


def all_texts(law, first, num_tokens):
    """All texts `[n, N]` that follow `law [V, V]`, and their probabilities `[n]`."""
    texts = np.asarray(list(itertools.product(range(len(law)), repeat=num_tokens)))
    before = np.concatenate([np.full((len(texts), 1), first), texts[:, :-1]], axis=1)
    return texts, before, law[before, texts].prod(axis=1)
