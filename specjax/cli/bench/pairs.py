"""The code that benchmarks of pairs share: the pair, its prompts, the times of single passes."""

import argparse
import dataclasses
import functools
import itertools
import operator
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax import Pair, Sampling, decoding, drafting, rules, testing
from specjax.data import read_examples
from specjax.memory import told_if_full
from specjax.models import T5
from specjax.runs import costs
from specjax.text import prompts as prompts_lib
from specjax.text.capacity import check_state_fits, in_words
from specjax.types import Array, DecodeState, LanguageModel, Method, Params, PromptBatch
from specjax.verification import Block

REMEDY = "give a smaller --max-new or --rows, or shorter prompts"


def add_pair(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair and its prompts."""
    parser.add_argument("--drafter", help="the drafter's directory; the built-in one if left out")
    parser.add_argument("--verifier", help="the verifier's directory; the built-in one if left out")
    parser.add_argument("--inputs", required=True, help="a text file, one prompt per line")


def add_temperatures(parser: argparse.ArgumentParser) -> None:
    """Adds the temperatures."""
    parser.add_argument(
        "--temperatures",
        type=float,
        nargs="+",
        default=[0.0, 1.0],
        help="temperatures to measure; 0 is greedy",
    )


def read_texts(args: argparse.Namespace) -> list[str]:
    """The first `--prompts` texts of `--inputs`."""
    return [example.inputs for example in read_examples(args.inputs)][: args.prompts]


def encode_texts(args: argparse.Namespace, texts: list[str], tokenizer: Any) -> list[np.ndarray]:
    """The tokens of the texts, `[n]` int32 each.

    Raises:
      ValueError: a text is empty or longer than the Decoder's last bucket; the message names it.
    """
    prompts = []
    for i, text in enumerate(texts):
        prompts.append(prompts_lib.encode(tokenizer, text, f"{args.inputs}, prompt {i + 1}"))
        if len(prompts[-1]) > prompts_lib.BUCKETS[-1]:
            raise ValueError(
                f"{args.inputs}, prompt {i + 1} has {len(prompts[-1])} tokens, more than "
                f"{prompts_lib.BUCKETS[-1]}: leave it out"
            )
    return prompts


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Raises ValueError unless these arguments, or all of a list, are at least 1, and int32."""
    for name in names:
        value = getattr(args, name)
        values = value if isinstance(value, list) else [value]
        if min(values) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if max(values) >= 2**31:
            raise ValueError(f"--{name.replace('_', '-')} must be below {2**31}, got {value}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair, its prompts and the sizes."""
    add_workload(parser)
    parser.add_argument("--drafts", type=int, nargs="+", default=[3, 5], help="draft lengths G")


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Adds all these arguments but the draft lengths."""
    add_pair(parser)
    parser.add_argument("--prompts", type=int, default=64, help="number of prompts")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16], help="batch sizes B")
    add_temperatures(parser)
    parser.add_argument("--max-new", type=int, default=64, help="longest output, in tokens")
    parser.add_argument("--repeats", type=int, default=3, help="times that each is measured")
    parser.add_argument(
        "--grown", action="store_true", help="grow the verifier to T5 base's size, same function"
    )


# No logit is this large, but XLA cannot know that.
_NEVER = 1e30
# More steps than any output takes.
_FOREVER = 2**31 - 1
# The time that the passes of one turn take together.
_PASSES_SECONDS = 0.02


@dataclasses.dataclass(frozen=True)
class Totals:
    """Emitted tokens, rounds summed over rows, and passes of each model (one serves a batch)."""

    emitted: int = 0
    rounds: int = 0
    verifier: int = 0
    drafter: int = 0

    def __add__(self, other: "Totals") -> "Totals":
        sums = map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other))
        return Totals(*sums)


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    """A pair and its prompts, ready to decode.

    Attributes:
      verifier: the large model.
      drafter: the small model.
      params: the parameters of the verifier and of the drafter.
      inputs: `[n, P]` int32.
      lengths: `[n]` int32.
      eos_ids: the tokens that end a row.
      max_new: N, the longest output.
    """

    verifier: LanguageModel
    drafter: LanguageModel
    params: tuple[Params, Params]
    inputs: np.ndarray
    lengths: np.ndarray
    eos_ids: tuple[int, ...]
    max_new: int

    def speculative(
        self, max_draft: int, widths: tuple[int, ...] | None = None
    ) -> decoding.Speculative:
        """Lossless block verification with a fixed draft length."""
        drafter = drafting.NeuralDrafter(self.drafter, max_draft)
        return decoding.Speculative(
            self.verifier, drafter, Block(), widths=widths, eos_ids=self.eos_ids
        )

    def autoregressive(self) -> decoding.Autoregressive:
        """The verifier alone."""
        return decoding.Autoregressive(self.verifier, eos_ids=self.eos_ids)

    def batches(self, rows: int) -> list[slice]:
        """The prompts in full batches of `rows`; a rest is left out."""
        return [slice(i, i + rows) for i in range(0, len(self.inputs) - rows + 1, rows)]

    def longest(self, method: Method) -> int:
        """S, the cache positions of a batch."""
        return self.inputs.shape[1] + self.max_new + method.max_draft + 1

    def prompts(self, part: slice, temperature: float, limit: int | None = None) -> PromptBatch:
        """One batch, whose drafts have `limit` tokens at most."""
        rows = part.stop - part.start
        return PromptBatch(
            inputs=self.inputs[part],
            input_lengths=self.lengths[part],
            ids=np.arange(part.start, part.stop, dtype=np.int32),
            limits=np.full((rows,), self.max_new, np.int32),
            sampling=Sampling(temperature),
            draft_limits=None if limit is None else np.full((rows,), limit, np.int32),
        )

    def check_fits(self, rows: int, max_draft: int) -> None:
        """Raises ValueError if a batch of so many rows cannot fit into the memory."""
        method = self.speculative(max_draft)
        check_state_fits(
            method,
            self.params_of(method),
            self.prompts(slice(0, rows), 0.0),
            max_new=self.max_new,
            max_length=self.longest(method),
            remedy=REMEDY,
        )

    def start(
        self, method: Method, part: slice, temperature: float, limit: int | None = None
    ) -> DecodeState:
        """Takes one batch in."""
        prompts, longest = self.prompts(part, temperature, limit), self.longest(method)
        params = self.params_of(method)
        return method.init(params, prompts, max_new=self.max_new, max_length=longest)

    def decode(
        self, method: Method, part: slice, temperature: float, limit: int | None = None
    ) -> tuple[float, Totals]:
        """Decodes one batch; returns the seconds of the loop (without prefill), and the totals.

        The totals are without passes; see `passes`.
        """
        params, state = self.params_of(method), self.start(method, part, temperature, limit)
        jax.block_until_ready(state)
        begin = time.perf_counter()
        state = jax.block_until_ready(method.run(params, state, _FOREVER))
        seconds = time.perf_counter() - begin
        return seconds, Totals(emitted=int(state.lengths.sum()), rounds=int(state.steps.sum()))

    def passes(
        self, method: Method, part: slice, temperature: float, limit: int | None = None
    ) -> Totals:
        """Counts the passes of one batch; each serves all its rows."""
        state = self.start(method, part, temperature, limit)
        passes = costs.count_passes(method, self.params_of(method), state)[-1]
        return Totals(verifier=passes["verifier"], drafter=passes.get("drafter", 0))

    def params_of(self, method: Method) -> Params:
        """The parameters of one of the two methods."""
        verifier, drafter = self.params
        if method.max_draft == 0:
            return decoding.AutoregressiveParams(verifier)
        small = drafting.NeuralDrafterParams(drafter)
        return decoding.RoundParams(verifier, small, rules.Lossless())


@dataclasses.dataclass(frozen=True)
class Measured:
    """The times of loops and of single passes on the same prompts, in seconds.

    Attributes:
      alone: the loop of the verifier alone.
      loop: the speculative loop.
      draft: one pass of the drafter over one token.
      draft_two: one pass of the drafter over two tokens.
      one: one pass of the verifier over one token.
      block: one pass of the verifier over G + 1 tokens.
      lone_totals: the totals of the verifier alone.
      totals: the totals of the speculative loop.
    """

    alone: float
    loop: float
    draft: float
    draft_two: float
    one: float
    block: float
    lone_totals: Totals
    totals: Totals

    @property
    def overhead(self) -> float:
        """The time of the loop divided by the time of its passes."""
        parts = self.totals.drafter * self.draft + self.totals.verifier * self.block
        return self.loop / parts


def measure(setup: Setup, rows: int, max_draft: int, temperature: float, repeats: int) -> Measured:
    """Decodes all prompts with both loops, and measures single passes in between.

    Loops and passes take turns at every batch, and the times of each are summed. So noise that is
    longer than a batch affects all of them equally.
    """
    methods: dict[str, Method] = {
        "alone": setup.autoregressive(),
        "loop": setup.speculative(max_draft),
    }
    passes = {
        "draft": _passes(setup.drafter, setup.params[1], setup, rows, 1),
        "draft_two": _passes(setup.drafter, setup.params[1], setup, rows, 2),
        "one": _passes(setup.verifier, setup.params[0], setup, rows, 1),
        "block": _passes(setup.verifier, setup.params[0], setup, rows, max_draft + 1),
    }
    seconds = dict.fromkeys((*methods, *passes), 0.0)
    batches = setup.batches(rows)
    totals = {}
    for method in methods.values():
        setup.decode(method, batches[0], temperature)  # compiles
    for name, method in methods.items():
        passes_of = [setup.passes(method, part, temperature) for part in batches]
        totals[name] = sum(passes_of * repeats, Totals())
    for part in batches * repeats:
        for name, method in methods.items():
            spent, counted = setup.decode(method, part, temperature)
            seconds[name] += spent
            totals[name] += counted
        for name, call in passes.items():
            seconds[name] += call() / len(batches) / repeats
    return Measured(**seconds, lone_totals=totals["alone"], totals=totals["loop"])


def load(args: argparse.Namespace) -> tuple[Setup, Pair]:
    """Loads the pair and the prompts that the arguments name."""
    check_positive(args, "rows", "prompts", "max_new", "repeats")
    texts = read_texts(args)
    if len(texts) < max(args.rows):
        raise ValueError(
            f"{args.inputs} has {len(texts)} prompts, but a batch needs {max(args.rows)}: add "
            "lines or give a smaller --rows"
        )
    pair = specjax.load_pair(drafter=args.drafter, verifier=args.verifier)
    verifier = pair.verifier
    tokens = encode_texts(args, texts, verifier.tokenizer)
    if args.grown:
        if not isinstance(verifier.model, T5):
            raise ValueError(
                f"{verifier.name} is not a T5, but --grown needs a T5: leave out --grown"
            )
        model, params = testing.grow_t5(verifier.model, verifier.params)
        verifier = dataclasses.replace(verifier, model=model, params=params)
        pair = Pair(pair.drafter, verifier)
    width = -(-max(map(len, tokens)) // 8) * 8
    inputs = np.zeros((len(tokens), width), np.int32)
    for row, ids in zip(inputs, tokens, strict=True):
        row[: len(ids)] = ids
    setup = Setup(
        verifier.model,
        pair.drafter.model,
        (verifier.prepared, pair.drafter.prepared),
        inputs,
        np.array([len(ids) for ids in tokens], np.int32),
        verifier.tokenizer.eos_ids,
        args.max_new,
    )
    return setup, pair


def measure_all(args: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Measured]]:
    """Measures the pair for every batch size, draft length and temperature of the arguments."""
    check_positive(args, "drafts")
    setup = load(args)[0]
    setup.check_fits(max(args.rows), max(args.drafts))
    for rows, max_draft, temperature in itertools.product(
        args.rows, args.drafts, args.temperatures
    ):
        print(f"B={rows} G={max_draft} T={temperature:g} ...", flush=True)
        sizes = {"rows": rows, "max_draft": max_draft, "temperature": temperature}
        asked = in_words(setup.speculative(max_draft), rows, setup.inputs.shape[1], setup.max_new)
        with told_if_full(asked, REMEDY):
            measured = measure(setup, rows, max_draft, temperature, args.repeats)
        yield sizes, measured


def _passes(
    model: LanguageModel, params: Params, setup: Setup, rows: int, width: int
) -> Callable[[], float]:
    """A function that runs passes of `width` tokens in mid-output and returns seconds per pass."""
    length = setup.inputs.shape[1] + setup.max_new + width
    inputs, lengths = jnp.asarray(setup.inputs[:rows]), jnp.asarray(setup.lengths[:rows])
    filled = jax.jit(model.prefill, static_argnums=3)(params, inputs, lengths, length)
    positions = filled.positions + setup.max_new // 2

    options = decoding.step_options(jax.default_backend())

    @functools.partial(jax.jit, donate_argnums=(1, 2), compiler_options=options)
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
