"""The time that a call of a `Decoder` takes beside its prefills and its rounds."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax import Decoder, Pair
from specjax.cli.bench.pairs import Setup
from specjax.compilation import jit
from specjax.types import Array, Params

# Prefills in a row, so that the host's work for one is done during another.
_IN_A_ROW = 4


def call_start(
    pair: Pair, texts: Sequence[str], setup: Setup, rows: int, max_draft: int, temperature: float
) -> Callable[[slice], float]:
    """A function of a batch that decodes it and says what the call took besides, in seconds.

    That is a call of a `Decoder` less two prefills, and less a loop that does the same rounds; the
    loop less the time of one that finds all rows finished, which is its dispatch alone.

    Args:
      pair: the pair of `setup`.
      texts: its prompts.
      setup: their tokens, and the sizes.
      rows: B.
      max_draft: G.
      temperature: of all rows.

    Returns:
      The function; its programs are compiled.
    """
    decoder = Decoder(
        pair,
        max_draft=max_draft,
        temperature=temperature,
        max_new_tokens=setup.max_new,
        batch_size=rows,
        buckets=(setup.inputs.shape[1],),
    )
    method = setup.speculative(max_draft)
    prefills = _prefills(setup, rows, setup.longest(method))

    def measured(part: slice) -> float:
        begin = time.perf_counter()
        # The loop's ids, so that it does the same rounds.
        decoder(texts[part], ids=range(part.start, part.stop))
        call = time.perf_counter() - begin
        loop, state = setup.run(method, part, temperature)
        begin = time.perf_counter()
        jax.block_until_ready(method.run(setup.params_of(method), state, 1))
        dispatch = time.perf_counter() - begin
        return call - prefills() - (loop - dispatch)

    measured(slice(0, rows))
    return measured


def _prefills(setup: Setup, rows: int, length: int) -> Callable[[], float]:
    """A function that takes prompts in with both models, and returns the seconds of that."""

    @jit
    def prefill(params: tuple[Params, Params], inputs: Array, lengths: Array) -> Any:
        models = (setup.verifier, setup.drafter)
        both = [m.prefill(p, inputs, lengths, length) for m, p in zip(models, params, strict=True)]
        # The next ones depend on these, so that they do not overlap.
        firsts = [jax.tree.leaves(one)[0].ravel()[0].astype(jnp.float32) for one in both]
        return lengths + jnp.isnan(jnp.stack(firsts)).any().astype(jnp.int32), both

    def call() -> float:
        inputs, lengths = jnp.asarray(setup.inputs[:rows]), jnp.asarray(setup.lengths[:rows])
        begin = time.perf_counter()
        for _ in range(_IN_A_ROW):
            lengths, last = prefill(setup.params, inputs, lengths)
        jax.block_until_ready(last)
        return (time.perf_counter() - begin) / _IN_A_ROW

    call()
    return call
