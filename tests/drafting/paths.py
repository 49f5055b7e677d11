"""The exact law of what rounds emit, whatever a drafter's blocks depend on; one row.

As `tests.drafting.rounds`, but what a token was drawn from is what the drafter itself says of it,
and the bonus pass is made where the round makes it. So drafters are seen whose blocks are copied,
or come now from one drafter and now from another.

Axes: C cases, G longest block, V vocabulary, N tokens.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.blocks import draft_probs
from specjax.sampling import Sampling
from specjax.types import DraftInputs, Prompts
from tests.drafting.rounds import cross, in_chunks, numbers, outcomes_of, put, take


def law(drafter, params, verification, drawn_from, p, prompt, num_tokens, *, temperature):
    """The law of the first N tokens.

    Args:
      drafter: any.
      params: its parameters.
      verification: without a carry.
      drawn_from: `[P, V]`, what its uniforms draw from after every continuation of the prompt; None
        if it takes no uniforms.
      p: `[P, V]`, the verifier's.
      prompt: tokens.
      num_tokens: N.
      temperature: of the row.

    Returns:
      `[V ** N]` float64, and the lengths of the drafts that were seen.
    """
    vocab, longest = drafter.vocab_size, drafter.max_draft
    propose, outcomes, commit = _jitted(drafter, params, verification, temperature)
    start = drafter.prefill(
        params, Prompts(jnp.asarray(prompt)[None], jnp.full(1, len(prompt), jnp.int32)), 16
    )
    states = jax.tree.map(lambda x: np.asarray(x)[None], start)
    emitted = np.zeros((1, num_tokens + longest), np.int64)
    lengths, chance = np.zeros(1, np.int64), np.ones(1)
    total, seen = np.zeros(vocab**num_tokens), set()
    draws = list(itertools.product(range(vocab), repeat=drafter.num_uniforms))
    draws = np.array(draws, int).reshape(len(draws), drafter.num_uniforms)
    options = np.array(list(itertools.product(range(longest + 1), range(vocab))))
    while len(chance):
        case, draw = cross(len(chance), len(draws))
        states, emitted = take((states, emitted), case)
        lengths, chance = lengths[case], chance[case]
        uniforms = np.zeros((len(case), drafter.num_uniforms), np.float32)
        for i in range(drafter.num_uniforms):
            before = put(emitted, lengths, draws[draw][:, :i])
            here = drawn_from[numbers(before, lengths + i, vocab)]
            low = np.cumsum(here, axis=-1) - here
            at = draws[draw][:, i, None]
            mass = np.take_along_axis(here, at, axis=-1)[:, 0]
            uniforms[:, i] = np.take_along_axis(low, at, axis=-1)[:, 0] + mass / 2
            chance = chance * mass
        real = chance > 1e-12
        states, emitted, uniforms = take((states, emitted, uniforms), real)
        lengths, chance = lengths[real], chance[real]
        last = np.take_along_axis(emitted, np.maximum(lengths - 1, 0)[:, None], axis=-1)[:, 0]
        last = np.where(lengths > 0, last, prompt[-1])
        tokens, q, drafted, states, whole = propose(states, last.astype(np.int32), uniforms)
        seen |= set(drafted.tolist())
        ends = lengths[:, None] + np.arange(longest + 1)
        target = p[numbers(put(emitted, lengths, tokens)[:, None], ends, vocab)]
        accepted, following = outcomes(tokens, q, target, drafted)
        case, pick = cross(len(chance), len(options))
        count, token = options[pick].T
        chance = chance[case] * accepted[case, count] * following[case, count, token]
        real = chance > 1e-12
        case, count, token, chance = (x[real] for x in (case, count, token, chance))
        tokens, drafted, lengths, emitted = take((tokens, drafted, lengths, emitted), case)
        index = np.arange(longest + 1)
        block = np.where(index == count[:, None], token[:, None], np.pad(tokens, ((0, 0), (0, 1))))
        took_bonus = (count == drafted) & (drafted > 0)
        states = jax.tree.map(
            lambda a, b: np.where(took_bonus.reshape((-1,) + (1,) * (a.ndim - 1)), a, b),  # noqa: B023
            take(whole, case),
            take(states, case),
        )
        states = commit(states, block.astype(np.int32), (count + 1).astype(np.int32))
        emitted = put(emitted, lengths, block)
        lengths = lengths + count + 1
        emitted = np.where(np.arange(emitted.shape[1]) < lengths[:, None], emitted, 0)
        done = lengths >= num_tokens
        value = numbers(emitted, np.full(lengths.shape, num_tokens), vocab)
        np.add.at(total, value[done] - sum(vocab**n for n in range(num_tokens)), chance[done])
        states = take(states, ~done)
        emitted, lengths, chance = emitted[~done], lengths[~done], chance[~done]
        states, emitted, lengths, chance = _merged(states, emitted, lengths, chance)
    return total, seen


def _merged(states, emitted, lengths, chance):
    """Cases that are equal become one."""
    if not len(chance):
        return states, emitted, lengths, chance
    parts = [*jax.tree.leaves(states), emitted, lengths]
    rows = [np.ascontiguousarray(x).reshape(len(chance), -1).view(np.uint8) for x in parts]
    _, first, which = np.unique(
        np.concatenate(rows, axis=1), axis=0, return_index=True, return_inverse=True
    )
    states, emitted, lengths = take((states, emitted, lengths), first)
    return states, emitted, lengths, np.bincount(which.reshape(-1), weights=chance)


def _jitted(drafter, params, verification, temperature):
    sampling = Sampling(jnp.full(1, temperature, jnp.float32))

    def one_case(state, last, uniforms):
        limits = jnp.full(1, drafter.max_draft, jnp.int32)
        active = drafter.draft_limits(params, state, limits) > 0
        inputs = DraftInputs(last[None], limits, uniforms[None], sampling, active)
        block, state = drafter.propose(params, state, inputs)
        _, whole = drafter.bonus(params, state, inputs, block)
        probs = draft_probs(block, drafter.vocab_size)
        return block.tokens[0], probs[0], block.num_drafted[0], state, whole

    def one_commit(state, tokens, count):
        return drafter.commit(state, tokens[None], count[None])

    def in_parts(function):
        jitted = jax.jit(jax.vmap(function))
        return lambda *args: in_chunks(jitted, *args)

    return in_parts(one_case), in_parts(outcomes_of(verification)), in_parts(one_commit)
