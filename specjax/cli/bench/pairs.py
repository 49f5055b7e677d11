"""What the benchmarks of whole pairs share: the pair, its prompts, the time of single passes."""

import argparse
import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import Sampling, decoding, drafting, rules
from specjax.base import Array, LanguageModel, Params
from specjax.decoding import DecodeState
from specjax.verification import Block


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the pair, its prompts and the sizes."""
    parser.add_argument("--drafter", help="directory; the built-in pair by default")
    parser.add_argument("--verifier", help="directory; the built-in pair by default")
    parser.add_argument("--inputs", required=True, help="a text file, one prompt per line")
    parser.add_argument("--prompts", type=int, default=64, help="how many of its lines")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16], help="batch sizes B")
    parser.add_argument("--drafts", type=int, nargs="+", default=[3, 5], help="draft lengths G")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-new", type=int, default=64, help="longest output, in tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--grown", action="store_true", help="grow the verifier to T5 base's size, same function"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    """A pair and its prompts, ready to decode.

    Attributes:
      verifier: the large model.
      drafter: the small one.
      params: the verifier's and the drafter's.
      inputs: `[n, P]` int32.
      lengths: `[n]` int32.
      eos_ids: what ends a row.
      max_new: N.
    """

    verifier: LanguageModel
    drafter: LanguageModel
    params: tuple[Params, Params]
    inputs: np.ndarray
    lengths: np.ndarray
    eos_ids: tuple[int, ...]
    max_new: int

    def speculative(self, max_draft: int) -> decoding.Speculative:
        """Lossless block verification with a fixed draft length."""
        drafter = drafting.NeuralDrafter(self.drafter, max_draft)
        return decoding.Speculative(self.verifier, drafter, Block(), self.eos_ids)

    def autoregressive(self) -> decoding.Autoregressive:
        """The verifier alone."""
        return decoding.Autoregressive(self.verifier, self.eos_ids)

    def decode(self, loop: Any, rows: int, temperature: float) -> tuple[float, dict[str, int]]:
        """Decodes all prompts in batches of `rows`.

        Returns:
          Seconds in the loop (prefill left out), and totals: emitted tokens, rounds by row, passes
          of verifier and drafter (each serves a whole batch).
        """
        alone = isinstance(loop, decoding.Autoregressive)
        params = self.params[0] if alone else (self.params[0], (self.params[1], ()))
        longest = 0 if alone else loop.drafter.max_draft
        seconds, totals = 0.0, {"emitted": 0, "rounds": 0, "verifier": 0, "drafter": 0}
        for start in range(0, len(self.inputs) - rows + 1, rows):
            part = slice(start, start + rows)
            state = loop.init(
                params,
                jnp.asarray(self.inputs[part]),
                jnp.asarray(self.lengths[part]),
                seed=0,
                ids=jnp.arange(start, start + rows, dtype=jnp.int32),
                limits=jnp.full((rows,), self.max_new, jnp.int32),
                sampling=Sampling(temperature),
                max_new=self.max_new,
                max_length=self.inputs.shape[1] + self.max_new + longest + 1,
            )
            jax.block_until_ready(state)
            begin = time.perf_counter()
            state = _finish(loop, params, state)
            seconds += time.perf_counter() - begin
            info = jax.tree.map(np.asarray, state.info)
            totals["emitted"] += int(info.emitted.sum())
            totals["rounds"] += int(info.rounds.sum())
            totals["verifier"] += int(info.verifier_calls.max())
            totals["drafter"] += int(info.drafter_calls.max())
        return seconds, totals


def _finish(loop: Any, params: Params, state: DecodeState) -> DecodeState:
    forever = jnp.iinfo(jnp.int32).max
    if isinstance(loop, decoding.Autoregressive):
        return jax.block_until_ready(loop.run(params, state, forever))
    return jax.block_until_ready(loop.run(params, rules.Lossless(), state, forever))


def load(args: argparse.Namespace) -> Setup:
    """The pair and prompts that the arguments name."""
    import specjax
    from specjax import testing
    from specjax.data import read_examples

    for name in ("rows", "drafts", "prompts", "max_new", "repeats"):
        value = getattr(args, name)
        if min(value if isinstance(value, list) else [value]) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    pair = specjax.load_pair(drafter=args.drafter, verifier=args.verifier)
    verifier: Any = pair.verifier.model
    params = pair.verifier.params
    if args.grown:
        verifier, params = testing.grow_t5(verifier, params)
    texts = [example.inputs for example in read_examples(args.inputs)][: args.prompts]
    if len(texts) < max(args.rows):
        raise ValueError(
            f"{args.inputs} has {len(texts)} prompts, but a batch takes {max(args.rows)}: give "
            "more lines or smaller --rows"
        )
    tokens = [pair.verifier.tokenizer.encode(text) for text in texts]
    width = -(-max(map(len, tokens)) // 8) * 8
    inputs = np.zeros((len(tokens), width), np.int32)
    for row, ids in zip(inputs, tokens, strict=True):
        row[: len(ids)] = ids
    return Setup(
        verifier,
        pair.drafter.model,
        (_prepared(verifier, params), _prepared(pair.drafter.model, pair.drafter.params)),
        inputs,
        np.array([len(ids) for ids in tokens], np.int32),
        pair.verifier.tokenizer.eos_ids,
        args.max_new,
    )


def _prepared(model: Any, params: Params) -> Params:
    return model.prepare(params) if hasattr(model, "prepare") else params


def pass_seconds(
    model: LanguageModel, params: Params, setup: Setup, rows: int, width: int, *, repeats: int
) -> float:
    """Median seconds of one `extend` of `width` tokens inside a jitted loop, mid-output."""
    steps = 20
    length = setup.inputs.shape[1] + setup.max_new + width
    inputs, lengths = jnp.asarray(setup.inputs[:rows]), jnp.asarray(setup.lengths[:rows])
    filled = jax.jit(model.prefill, static_argnums=3)(params, inputs, lengths, length)
    tokens = jnp.ones((rows, width), jnp.int32)
    positions = filled.positions + setup.max_new // 2

    @functools.partial(jax.jit, donate_argnums=1)
    def passes(params: Params, cache: Any, tokens: Array, positions: Array) -> Any:
        def step(_: Any, carry: Any) -> Any:
            cache, tokens = carry
            logits, _, cache = model.extend(params, cache, tokens, positions)
            # The next tokens depend on this pass, so that none can be left out or overlap.
            return cache, jnp.argmax(logits, axis=-1).astype(jnp.int32)

        return jax.lax.fori_loop(0, steps, step, (cache, tokens))

    cache, tokens = passes(params, filled.cache, tokens, positions)
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        cache, tokens = jax.block_until_ready(passes(params, cache, tokens, positions))
        seconds.append((time.perf_counter() - begin) / steps)
    return float(np.median(seconds))
