"""Decoding during training: one token at a time, greedily or by sampling.

Plain on purpose: it evaluates and distils while the networks are small. `specjax.decoding` has
the fast loops.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from specjax.models import T5
from specjax.types import Array, Params


@functools.partial(jax.jit, static_argnames=("model", "max_tokens", "eos_id", "greedy"))
def _generate(
    model: T5,
    params: Params,
    inputs: Array,
    lengths: Array,
    key: Array,
    *,
    max_tokens: int,
    eos_id: int,
    greedy: bool,
) -> Array:
    cache, tokens, positions = model.prefill(params, inputs, lengths, max_tokens)
    rows = inputs.shape[0]
    output = jnp.full((rows, max_tokens), eos_id, jnp.int32)
    carry = (jnp.zeros((), jnp.int32), tokens, jnp.zeros(rows, bool), cache, output)

    def cond_fun(carry: tuple) -> Array:
        return (carry[0] < max_tokens) & ~jnp.all(carry[2])

    def body_fun(carry: tuple) -> tuple:
        step, tokens, done, cache, output = carry
        logits, _, cache = model.extend(params, cache, tokens[:, None], positions + step)
        if greedy:
            drawn = jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)
        else:
            drawn = jax.random.categorical(jax.random.fold_in(key, step), logits[:, 0])
            drawn = drawn.astype(jnp.int32)
        tokens = jnp.where(done, eos_id, drawn)
        output = jax.lax.dynamic_update_slice(output, tokens[:, None], (jnp.int32(0), step))
        return step + 1, tokens, done | (tokens == eos_id), cache, output

    return jax.lax.while_loop(cond_fun, body_fun, carry)[-1]


def generate(
    model: T5,
    params: Params,
    inputs: Sequence[np.ndarray],
    *,
    bucket_lengths: Sequence[int],
    eos_id: int,
    pad_id: int = 0,
    rows: int = 64,
    max_tokens: int | None = None,
    key: Array | None = None,
    progress: str | None = None,
) -> list[np.ndarray]:
    """Generates an output for each input, greedily or, given a key, by sampling at T = 1.

    Args:
      model: the network.
      params: its parameters.
      inputs: token ids of each input, its end-of-sequence token included.
      bucket_lengths: inputs are padded to the first of these that holds them.
      eos_id: ends an output; it is not part of what is returned.
      pad_id: pads inputs.
      rows: of a batch.
      max_tokens: of an output; by default twice its input's bucket.
      key: a PRNG key; consumed. None decodes greedily.
      progress: title of a progress bar (on a terminal only), or None for no bar.

    Returns:
      The outputs, int32 arrays in the order of the inputs.

    Raises:
      ValueError: an input is longer than the last bucket.
    """
    order = sorted(range(len(inputs)), key=lambda i: len(inputs[i]))
    outputs: list[np.ndarray] = [np.zeros(0, np.int32)] * len(inputs)
    starts = tqdm.tqdm(
        range(0, len(order), rows), desc=progress, disable=None if progress else True
    )
    for number, start in enumerate(starts):
        members = order[start : start + rows]
        longest = len(inputs[members[-1]])
        length = next((n for n in bucket_lengths if n >= longest), None)
        if length is None:
            raise ValueError(
                f"input {members[-1]} has {longest} tokens, more than the last bucket "
                f"({bucket_lengths[-1]}); add a longer one"
            )
        # Filling rows hold one end-of-sequence token.
        padded = np.full((rows, length), pad_id, np.int32)
        padded[:, 0] = eos_id
        lengths = np.ones(rows, np.int32)
        for row, member in enumerate(members):
            padded[row, : len(inputs[member])] = inputs[member]
            lengths[row] = len(inputs[member])
        batch_key = jax.random.key(0) if key is None else jax.random.fold_in(key, number)
        generated = np.asarray(
            _generate(
                model,
                params,
                padded,
                lengths,
                batch_key,
                max_tokens=max_tokens or 2 * length,
                eos_id=eos_id,
                greedy=key is None,
            )
        )
        for row, member in enumerate(members):
            outputs[member] = _before_eos(generated[row], eos_id)
    return outputs


def _before_eos(tokens: np.ndarray, eos_id: int) -> np.ndarray:
    ends = np.flatnonzero(tokens == eos_id)
    return tokens[: ends[0]] if len(ends) else tokens
