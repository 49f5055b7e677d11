"""The exact law of what rounds emit with a drafter's own code and the verification's laws.

All drafts of all rows, all counts of accepted tokens and all next tokens are enumerated. Draft
lengths and memories come from the drafter itself: its uniforms are chosen so that it draws a given
draft. So a policy that learns, or looks at other rows, is seen as it runs.

Axes: C cases, B rows, G longest block, V vocabulary, N tokens.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import DraftInputs, Prompts, Sampling
from tests.laws import numbers, outcomes_of

CHUNK = 512


def law(drafter, params, verification, q, p, prompts, num_tokens, *, temperature, cut=None):
    """The joint law of the first N tokens of all rows.

    Args:
      drafter: a `Chain` of a `TabularModel`.
      params: its parameters.
      verification: without a carry.
      q: `[B, P, V]`, its distributions after every continuation of each row's prompt.
      p: `[B, P, V]`, the verifier's.
      prompts: `[B, K]` tokens, all of one length.
      num_tokens: N.
      temperature: of all rows.
      cut: (block, q) -> `[B]` int32, how many drafted tokens verification gets, in the place of
        what the drafter says (a negative control).

    Returns:
      `[V ** N] * B` float64, and whether the drawn tokens decided the lengths of the first drafts.
    """
    rows, vocab, longest = len(prompts), drafter.vocab_size, drafter.max_draft
    propose, outcomes, commit = _jitted(drafter, verification, temperature, cut)
    place = np.arange(rows)
    start = drafter.prefill(
        params, Prompts(jnp.asarray(prompts), jnp.full(rows, prompts.shape[1], jnp.int32)), 24
    )
    states = jax.tree.map(lambda x: np.asarray(x)[None], start)
    emitted = np.zeros((1, rows, num_tokens + longest), np.int64)
    lengths, chance = np.zeros((1, rows), np.int64), np.ones(1)
    total = np.zeros((vocab**num_tokens,) * rows)
    drafts = np.array(list(itertools.product(range(vocab), repeat=longest)))
    joint = np.array(list(itertools.product(range(len(drafts)), repeat=rows)))
    varied = None
    while len(chance):
        case, block = cross(len(chance), len(joint))
        states, emitted = take((states, emitted), case)
        lengths, chance = lengths[case], chance[case]
        tokens = drafts[joint[block]]
        active = lengths < num_tokens
        # Of a row that has ended only one draft is a case.
        chance = chance * np.all(active | (joint[block] == 0), axis=1)
        uniforms = np.zeros(tokens.shape, np.float32)
        for i in range(longest):
            path = put(emitted, lengths, tokens[..., :i])
            law_here = q[place, numbers(path, np.minimum(lengths, num_tokens) + i, vocab)]
            low = np.cumsum(law_here, axis=-1) - law_here
            at = tokens[..., i, None]
            mass = np.take_along_axis(law_here, at, axis=-1)[..., 0]
            uniforms[..., i] = np.take_along_axis(low, at, axis=-1)[..., 0] + mass / 2
            chance = chance * np.prod(np.where(active, mass, 1.0), axis=1)
        real = chance > 0
        states, emitted, uniforms = take((states, emitted, uniforms), real)
        lengths, chance, tokens, active = (x[real] for x in (lengths, chance, tokens, active))
        last = np.where(
            lengths > 0,
            np.take_along_axis(emitted, np.maximum(lengths - 1, 0)[..., None], axis=-1)[..., 0],
            prompts[:, -1],
        )
        drawn, drafted, states = propose(params, states, last, uniforms, active)
        if varied is None:
            varied = len(np.unique(drafted, axis=0)) > 1
        inside = np.arange(longest) < drafted[..., None]
        assert (np.where(inside, drawn, 0) == np.where(inside, tokens, 0)).all()
        # The tables after each part of the block.
        path = put(emitted, lengths, tokens)
        ends = np.minimum(lengths, num_tokens)[..., None] + np.arange(longest + 1)
        which = numbers(path[..., None, :], ends, vocab)
        accepted, following = outcomes(
            tokens, q[place[:, None], which], p[place[:, None], which], drafted
        )
        options = [(count, token) for count in range(longest + 1) for token in range(vocab)]
        picks = np.array(list(itertools.product(range(len(options)), repeat=rows)))
        case, pick = cross(len(chance), len(picks))
        chosen = np.array(options)[picks[pick]]
        count, token = chosen[..., 0], chosen[..., 1]
        each = accepted[case[:, None], place, count] * following[case[:, None], place, count, token]
        each = np.where(active[case], each, (picks[pick] == 0).astype(float))
        chance = chance[case] * np.prod(each, axis=1)
        real = chance > 1e-12
        case, count, token, chance = (x[real] for x in (case, count, token, chance))
        tokens, lengths, emitted = tokens[case], lengths[case], emitted[case]
        counts = np.where(lengths < num_tokens, count + 1, 0)
        following_token = np.where(np.arange(longest + 1) == count[..., None], token[..., None], 0)
        block = np.where(
            np.arange(longest + 1) < count[..., None],
            np.pad(tokens, ((0, 0), (0, 0), (0, 1))),
            following_token,
        )
        states = commit(take(states, case), block, counts)
        emitted = np.where((counts > 0)[..., None], put(emitted, lengths, block), emitted)
        lengths = lengths + counts
        done = np.all(lengths >= num_tokens, axis=1)
        value = numbers(emitted, np.full(lengths.shape, num_tokens), vocab)
        value -= sum(vocab**n for n in range(num_tokens))
        np.add.at(total, tuple(value[done].T), chance[done])
        states = take(states, ~done)
        emitted, lengths, chance = emitted[~done], lengths[~done], chance[~done]
    return total, varied


def take(tree, which):
    return jax.tree.map(lambda x: x[which], tree)


def cross(first, second):
    return np.repeat(np.arange(first), second), np.tile(np.arange(second), first)


def put(emitted, lengths, tokens):
    """Appends `tokens [C, B, n]` to the emitted ones."""
    out = emitted.copy()
    for i in range(tokens.shape[-1]):
        at = np.minimum(lengths + i, emitted.shape[-1] - 1)[..., None]
        np.put_along_axis(out, at, tokens[..., i, None], axis=-1)
    return out


def _jitted(drafter, verification, temperature, cut):
    sampling = Sampling(jnp.float32(temperature))

    @jax.jit
    @jax.vmap
    def one_case(params, state, last, uniforms, active):
        rows = last.shape[0]
        by_row = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows,)), sampling)
        limits = jnp.where(active, drafter.max_draft, 0)
        wanted = drafter.draft_limits(params, state, limits) > 0
        inputs = DraftInputs(last, limits, uniforms, by_row, wanted, True)
        block, state = drafter.propose(params, state, inputs)
        count = jnp.minimum(block.num_drafted, limits)
        return block.tokens, count if cut is None else jnp.minimum(cut(block), count), state

    outcome = jax.jit(jax.vmap(jax.vmap(outcomes_of(verification))))
    commit = jax.jit(jax.vmap(drafter.commit))

    def propose(params, states, last, uniforms, active):
        repeated = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(last), *jnp.shape(x))), params)
        return in_chunks(one_case, repeated, states, last.astype(np.int32), uniforms, active)

    def outcomes(tokens, q, p, drafted):
        return in_chunks(outcome, tokens.astype(np.int32), q, p, drafted)

    def committed(states, tokens, counts):
        return in_chunks(commit, states, tokens.astype(np.int32), counts.astype(np.int32))

    return propose, outcomes, committed


def in_chunks(jitted, *args):
    """Calls in one size, so that one program is compiled."""
    parts = []
    rows = len(args[-1])
    for start in range(0, rows, CHUNK):
        which = np.arange(start, min(start + CHUNK, rows))
        part = take(jax.tree.map(np.asarray, args), np.resize(which, CHUNK))
        parts.append(take(jax.tree.map(np.asarray, jitted(*part)), np.arange(len(which))))
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)
