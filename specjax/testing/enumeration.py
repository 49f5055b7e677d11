"""The exact law of the tokens that rounds of drafting and verification emit.

All prefixes, drafts, draft lengths and outcomes are enumerated. The probabilities come from the
functions that the decoder itself calls (`Verification.acceptance`, `num_accepted_probs`,
`next_token_probs`, `next_carry`). Use it with small vocabularies and short blocks.

Axes: S states (a prefix with a carry), D drafts, G longest block, V vocabulary. A prefix of n
tokens has the number `offset(n) + value`, where value is the tokens as a number in base V.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.compilation import jit
from specjax.types import Array, LanguageModel, Params, Prompts, ScoredBlock
from specjax.verification import Verification, next_token_probs, num_accepted_probs

# (emitted context, tokens drafted since) -> probability of stopping after the last drafted token
Stop = Callable[[tuple[int, ...], tuple[int, ...]], float]
_CHUNK = 4096


def fixed_length(context: tuple[int, ...], drafted: tuple[int, ...]) -> float:
    """A `Stop` that never stops a draft before its maximal length."""
    return 0.0


def prefix_distributions(
    model: LanguageModel,
    params: Params,
    prompt: Sequence[int],
    num_tokens: int,
    to_probs: Callable[[Array], Array],
) -> np.ndarray:
    """The next-token distribution after every continuation of a prompt.

    Args:
      model: a model with a small vocabulary.
      params: its parameters.
      prompt: token ids, at least one.
      num_tokens: N, the longest continuation.
      to_probs: logits `[V]` to probabilities `[V]`, such as `sampling.distribution`.

    Returns:
      `[P, V]` float32 for the P continuations of 0 .. N tokens, in the module's order.
    """
    tails = [_tuples(model.vocab_size, length) for length in range(num_tokens + 1)]
    lengths = np.repeat(np.arange(num_tokens + 1), [len(each) for each in tails])
    # All in one batch, padded on the right: one program serves all lengths.
    inputs = np.zeros((lengths.size, len(prompt) + num_tokens), np.int32)
    inputs[:, : len(prompt)] = prompt
    inputs[:, len(prompt) :] = np.concatenate(
        [np.pad(each, ((0, 0), (0, num_tokens - each.shape[1]))) for each in tails]
    )
    logits = _last_logits(model, params, inputs, (len(prompt) + lengths).astype(np.int32))
    return np.asarray(jax.vmap(to_probs)(logits))


@functools.partial(jit, static_argnums=0)
def _last_logits(model: LanguageModel, params: Params, inputs: Array, lengths: Array) -> Array:
    """The logits `[B, V]` of the token after each row."""
    cache, tokens, positions = model.prefill(params, Prompts(inputs, lengths), inputs.shape[1])
    return model.extend(params, cache, tokens[:, None], positions).logits[:, 0]


def target_law(target: np.ndarray, num_tokens: int) -> np.ndarray:
    """The law of the first tokens if each is drawn from its target distribution.

    Args:
      target: `[P, V]`, pi after every prefix of up to `num_tokens - 1` tokens, or more.
      num_tokens: N.
    """
    vocab = target.shape[1]
    law = np.ones(1)
    for length in range(num_tokens):
        rows = target[_offset(vocab, length) :][: vocab**length].astype(np.float64)
        law = (law[:, None] * rows).reshape(-1)
    return law


def total_variation(a: np.ndarray, b: np.ndarray) -> float:
    """Half the sum of the absolute differences of two laws."""
    return 0.5 * float(np.abs(a - b).sum())


def emitted_law(
    verification: Verification,
    draft: np.ndarray,
    target: np.ndarray,
    num_tokens: int,
    max_draft: int,
    *,
    stop: Stop = fixed_length,
    drawn_from: np.ndarray | None = None,
    bonus: np.ndarray | None = None,
    accepted_probs: Callable[[Verification, Array], Array] = num_accepted_probs,
    keep_carry: bool = True,
    kept: Callable[[tuple[int, ...], tuple[int, ...]], int] | None = None,
) -> np.ndarray:
    """The exact law of the first N emitted tokens, over as many rounds as needed.

    Args:
      verification: the algorithm.
      draft: `[P, V]`, q after every prefix of up to N + G tokens, as verification gets it.
      target: `[P, V]`, pi after the same prefixes.
      num_tokens: N.
      max_draft: G.
      stop: the draft's stopping policy. It may read the context of the round and the tokens
        drafted so far; a probability strictly between 0 and 1 is a randomised stop. A verification
        with a carry needs `fixed_length`.
      drawn_from: `[P, V]`, the distributions that drafts are drawn from, if not `draft` (a negative
        control).
      bonus: `[P, V]`, the distributions of the bonus token, if not `target` (a negative control).
      accepted_probs: the law of the number of accepted tokens (other laws are negative controls).
      keep_carry: False forgets the carry between rounds (a negative control).
      kept: (context, drafted tokens) -> the number of tokens that verification gets; all by default
        (fewer, depending on the drafted tokens, is a negative control).
    """
    fixed = stop is fixed_length or not verification.has_carry
    assert fixed, "a verification with a carry needs drafts of a fixed length"
    vocab = draft.shape[1]
    needed = _offset(vocab, num_tokens + max_draft)
    assert min(len(draft), len(target)) >= needed, f"tables need {needed} prefixes"
    drafts = _tuples(vocab, max_draft)
    hashable: Any = verification
    outcome = _outcomes(hashable, accepted_probs)
    law = np.zeros(vocab**num_tokens)
    # (emitted tokens, starts of the rounds where the carry depends on them) -> [chance, carry]
    start = jax.tree.map(np.asarray, verification.init_carry(max_draft))
    states: dict[tuple[Any, ...], list[Any]] = {((), ()): [1.0, start]}
    while states:
        # Each round adds tokens, so all states of the shortest length are complete.
        length = min(len(emitted) for emitted, _ in states)
        now = {k: states.pop(k) for k in [k for k in states if len(k[0]) == length]}
        cases, weights = _cases(now, drafts, max_draft, stop, draft, drawn_from, kept)
        for start_row in range(0, len(cases), _CHUNK):
            part = cases[start_row : start_row + _CHUNK]
            tokens = np.stack([drafts[row] for _, row, _ in part]).astype(np.int32)
            ends = np.array([drawn for _, _, drawn in part], np.int32)
            prefixes = np.array(
                [
                    [_number((*state[0], *drafts[row][:i]), vocab) for i in range(max_draft + 1)]
                    for state, row, _ in part
                ]
            )
            carry = jax.tree.map(lambda *x: np.stack(x), *[now[state][1] for state, _, _ in part])
            # Nothing after the bonus row of a draft may be read: invalid values show if it is.
            inside = np.arange(max_draft + 1)[None, :, None] <= ends[:, None, None]
            q, pi = (np.where(inside, x[prefixes], np.float32(1.0)) for x in (draft, target))
            extra = np.full_like(pi, -1.0) if bonus is None else bonus[prefixes]
            accepted, following, carries = outcome(tokens, q, pi, extra, ends, carry)
            for i, (state, row, drawn) in enumerate(part):
                weight = now[state][0] * weights[start_row + i]
                for count in range(drawn + 1):
                    for token in range(vocab):
                        p = weight * float(accepted[i, count]) * float(following[i, count, token])
                        if p <= 0.0:
                            continue
                        emitted = (*state[0], *(int(x) for x in drafts[row][:count]), token)
                        if len(emitted) >= num_tokens:
                            law[_value(emitted[:num_tokens], vocab)] += p
                            continue
                        carry = jax.tree.map(lambda x: x[i, count, token], carries)  # noqa: B023
                        starts: tuple[int, ...] = ()
                        if verification.has_carry and keep_carry:
                            starts = (*state[1], length)
                        else:
                            carry = start
                        entry = states.setdefault((emitted, starts), [0.0, carry])
                        entry[0] += p
    return law


@functools.cache
def _outcomes(verification: Verification, accepted_probs: Callable) -> Callable:
    """Jitted: stacked cases -> laws of counts and next tokens, and all possible carries."""
    jitted = jit(jax.vmap(functools.partial(_outcome, verification, accepted_probs)))

    def padded(*args):
        rows = len(args[0])
        # Few sizes mean few compilations.
        size = next(s for s in (16, 256, _CHUNK) if s >= rows)
        out = jitted(*jax.tree.map(lambda x: np.resize(x, (size, *x.shape[1:])), args))
        return jax.tree.map(lambda x: np.asarray(x)[:rows], out)

    return padded


def _outcome(verification, accepted_probs, tokens, draft, target, bonus, length, carry):
    block = ScoredBlock(tokens, draft, target, length)
    acceptance = verification.acceptance(block, carry)
    counts = jnp.arange(tokens.size + 1)
    following = jax.vmap(lambda n: next_token_probs(acceptance, block, n))(counts)
    following = jnp.where((counts == length)[:, None] & (bonus >= 0.0), bonus, following)

    def carried(count, token):
        return verification.next_carry(acceptance, block, carry, count, token)

    vocab = jnp.arange(draft.shape[1])
    carries = jax.vmap(lambda n: jax.vmap(lambda v: carried(n, v))(vocab))(counts)
    return accepted_probs(verification, acceptance.thresholds), following, carries


def _cases(states, drafts, max_draft, stop, draft, drawn_from, kept):
    """All (state, draft, length) that can happen, and their probabilities given the state."""
    vocab = draft.shape[1]
    source = draft if drawn_from is None else drawn_from
    cases, weights = [], []
    for state in states:
        context = state[0]
        for row, tokens in enumerate(drafts):
            path, going = 1.0, 1.0
            for length in range(1, max_draft + 1):
                head = tuple(int(x) for x in tokens[: length - 1])
                path *= float(source[_number((*context, *head), vocab), tokens[length - 1]])
                ends = (
                    1.0 if length == max_draft else stop(context, (*head, int(tokens[length - 1])))
                )
                # Drafts that are equal up to their end are one case: the case padded with zeros.
                if path * going * ends > 0.0 and not tokens[length:].any():
                    block = tuple(int(x) for x in tokens[:length])
                    cases.append((state, row, length if kept is None else kept(context, block)))
                    weights.append(path * going * ends)
                going *= 1.0 - ends
    return cases, weights


def _tuples(vocab: int, length: int) -> np.ndarray:
    return np.indices((vocab,) * length).reshape(length, vocab**length).T.astype(np.int32)


def _value(tokens: Sequence[int], vocab: int) -> int:
    return functools.reduce(lambda value, token: value * vocab + int(token), tokens, 0)


def _offset(vocab: int, length: int) -> int:
    return sum(vocab**n for n in range(length))


def _number(tokens: Sequence[int], vocab: int) -> int:
    return _offset(vocab, len(tokens)) + _value(tokens, vocab)
