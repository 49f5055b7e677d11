"""The times of loops and of single passes, which take turns at every batch."""

import argparse
import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from specjax.cli.bench.pairs import REMEDY, Setup, Totals, check_positive, load, read_texts
from specjax.cli.bench.starts import call_start
from specjax.compilation import jit, step_options
from specjax.memory import told_if_full
from specjax.text.capacity import in_words
from specjax.types import Array, LanguageModel, Method, Params

# No logit is this large, but XLA cannot know that.
_NEVER = 1e30
# The time that the passes of one turn take together.
_PASSES_SECONDS = 0.02


@dataclasses.dataclass(frozen=True)
class Measured:
    """The times of loops and of single passes on the same prompts, in seconds.

    Attributes:
      alone: the loop of the verifier alone.
      loop: the speculative loop.
      policy: the same with a stopping policy that never stops.
      draft: one pass of the drafter over one token.
      draft_two: one pass of the drafter over two tokens.
      one: one pass of the verifier over one token.
      block: one pass of the verifier over G + 1 tokens.
      lone_totals: the totals of the verifier alone.
      totals: the totals of the speculative loop.
      policy_totals: those of the loop with a policy.
      start: a call of a `Decoder` beside its prefills and rounds (the median of the batches); NaN
        if it was not asked for.
    """

    alone: float
    loop: float
    policy: float
    draft: float
    draft_two: float
    one: float
    block: float
    lone_totals: Totals
    totals: Totals
    policy_totals: Totals
    start: float = math.nan

    @property
    def overhead(self) -> float:
        """The time of the loop divided by the time of its passes."""
        return self.loop / self._passes(self.totals)

    @property
    def policy_overhead(self) -> float:
        """The same with a policy."""
        return self.policy / self._passes(self.policy_totals)

    def _passes(self, totals: Totals) -> float:
        return totals.drafter * self.draft + totals.verifier * self.block


def measure(
    setup: Setup,
    rows: int,
    max_draft: int,
    temperature: float,
    repeats: int,
    start: Callable[[slice], float] | None = None,
) -> Measured:
    """Decodes all prompts with both loops, and measures single passes in between.

    Loops and passes take turns at every batch, and the times of each are summed. So noise that is
    longer than a batch affects all of them equally. `start` says what the start of a batch took.
    """
    policy, own = setup.never_stops()
    methods: dict[str, tuple[Method, Params]] = {
        "alone": (setup.autoregressive(), ()),
        "loop": (setup.speculative(max_draft), ()),
        # Of one width, as without a policy.
        "policy": (setup.speculative(max_draft, (max_draft + 1,), policy), own),
    }
    passes = {
        "draft": _passes(setup.drafter, setup.params[1], setup, rows, 1),
        "draft_two": _passes(setup.drafter, setup.params[1], setup, rows, 2),
        "one": _passes(setup.verifier, setup.params[0], setup, rows, 1),
        "block": _passes(setup.verifier, setup.params[0], setup, rows, max_draft + 1),
    }
    seconds = dict.fromkeys((*methods, *passes), 0.0)
    batches = setup.batches(rows)
    totals, starts = {}, []
    for method, own in methods.values():
        setup.decode(method, batches[0], temperature, stopping=own)  # compiles
    for name, (method, own) in methods.items():
        passes_of = [setup.passes(method, part, temperature, stopping=own) for part in batches]
        totals[name] = sum(passes_of * repeats, Totals())
    for part in batches * repeats:
        for name, (method, own) in methods.items():
            spent, counted = setup.decode(method, part, temperature, stopping=own)
            seconds[name] += spent
            totals[name] += counted
        for name, call in passes.items():
            seconds[name] += call() / len(batches) / repeats
        if start is not None:
            starts.append(start(part))
    return Measured(
        **seconds,
        lone_totals=totals["alone"],
        totals=totals["loop"],
        policy_totals=totals["policy"],
        start=statistics.median(starts) if starts else math.nan,
    )


def measure_all(
    args: argparse.Namespace, *, starts: bool = False
) -> Iterator[tuple[dict[str, Any], Measured]]:
    """Measures the pair for every batch size, draft length and temperature of the arguments."""
    check_positive(args, "drafts")
    setup, pair = load(args)
    texts = read_texts(args)
    setup.check_fits(max(args.rows), max(args.drafts))
    for rows, max_draft, temperature in itertools.product(
        args.rows, args.drafts, args.temperatures
    ):
        print(f"B={rows} G={max_draft} T={temperature:g} ...", flush=True)
        sizes = {"rows": rows, "max_draft": max_draft, "temperature": temperature}
        asked = in_words(setup.speculative(max_draft), rows, setup.inputs.shape[1], setup.max_new)
        with told_if_full(asked, REMEDY):
            own = (setup, rows, max_draft, temperature)
            start = call_start(pair, texts, *own) if starts else None
            measured = measure(*own, args.repeats, start)
        yield sizes, measured


def _passes(
    model: LanguageModel, params: Params, setup: Setup, rows: int, width: int
) -> Callable[[], float]:
    """A function that runs passes of `width` tokens in mid-output and returns seconds per pass."""
    prompt = int(model.prompt_positions(setup.inputs.shape[1], 0))
    length = prompt + setup.max_new + width
    inputs, lengths = jnp.asarray(setup.inputs[:rows]), jnp.asarray(setup.lengths[:rows])
    filled = jit(model.prefill, static_argnums=3)(params, inputs, lengths, length)
    positions = filled.positions + setup.max_new // 2

    @functools.partial(jit, options=step_options, donate_argnums=(1, 2))
    def passes(params: Params, cache: Any, tokens: Array, positions: Array, steps: Array) -> Any:
        def step(_: Any, carry: Any) -> Any:
            cache, tokens = carry
            logits, _, cache = model.extend(params, cache, tokens, positions)
            # The next tokens depend on this pass, so that no pass can be left out or overlap.
            return cache, tokens + (jnp.max(logits, axis=-1) > _NEVER).astype(jnp.int32)

        return jax.lax.fori_loop(0, steps, step, (cache, tokens))

    state = (filled.cache, jnp.ones((rows, width), jnp.int32))

    def call(steps: int) -> float:
        nonlocal state
        begin = time.perf_counter()
        state = jax.block_until_ready(passes(params, *state, positions, jnp.int32(steps)))
        return (time.perf_counter() - begin) / steps

    call(1)  # compiles
    # So many that the cost of the call and of its first, cold pass does not matter.
    steps = max(8, int(_PASSES_SECONDS / min(call(8) for _ in range(3))))
    return functools.partial(call, steps)
