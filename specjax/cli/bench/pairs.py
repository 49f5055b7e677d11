"""The code that benchmarks of pairs share: the pair, its prompts, the times of single passes."""

import argparse
import dataclasses
import operator
import time
from typing import Any

import jax
import numpy as np

import specjax
from specjax import Pair, Sampling, TextModel, decoding, drafting, rules, testing
from specjax.acceptance_head import Head
from specjax.data import read_examples
from specjax.models import T5, Llama
from specjax.text import costs
from specjax.text import prompts as prompts_lib
from specjax.text.capacity import check_state_fits
from specjax.types import DecodeState, LanguageModel, Method, Params, PromptBatch, Stopping
from specjax.verification import Block

GROWN_HELP = "grow the verifier to T5 base's size, or a Llama to 200 M parameters, same function"
REMEDY = "give a smaller --max-new or --rows, or shorter prompts"


def add_pair(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Adds the arguments for the pair and its prompts, which may be left out unless required."""
    parser.add_argument("--drafter", help="the drafter's directory; the built-in one if left out")
    parser.add_argument("--verifier", help="the verifier's directory; the built-in one if left out")
    parser.add_argument("--inputs", required=required, help="a text file, one prompt per line")


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
        if min(values, default=1) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if max(values, default=1) >= 2**31:
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
    parser.add_argument("--grown", action="store_true", help=GROWN_HELP)


# More steps than any output takes.
_FOREVER = 2**31 - 1


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
      head: the drafter's acceptance head, if it has one.
    """

    verifier: LanguageModel
    drafter: LanguageModel
    params: tuple[Params, Params]
    inputs: np.ndarray
    lengths: np.ndarray
    eos_ids: tuple[int, ...]
    max_new: int
    head: Head | None = None

    def speculative(
        self,
        max_draft: int,
        widths: tuple[int, ...] | None = None,
        policy: Stopping | None = None,
    ) -> decoding.Speculative:
        """Lossless block verification; a fixed draft length without a (bound) policy."""
        policy = drafting.FixedLength() if policy is None else policy
        # As `Decoder` does it.
        ends = () if policy.is_fixed else self.eos_ids
        catches_up = drafting.catches_up_on(jax.default_backend())
        drafter = drafting.NeuralDrafter(
            self.drafter, max_draft, policy, eos_ids=ends, catches_up=catches_up
        )
        return decoding.Speculative(
            self.verifier, drafter, Block(), widths=widths, eos_ids=self.eos_ids
        )

    def never_stops(self) -> tuple[Stopping, Params]:
        """A policy that does its work and never stops: the head's, or the drafter's confidence."""
        policy: Stopping = drafting.Confidence(0.0)
        if self.head is not None:
            policy = drafting.Survival(threshold=1.0)
        return policy.bind(self.head)

    def autoregressive(self) -> decoding.Autoregressive:
        """The verifier alone."""
        return decoding.Autoregressive(self.verifier, eos_ids=self.eos_ids)

    def batches(self, rows: int) -> list[slice]:
        """The prompts in full batches of `rows`; a rest is left out."""
        return [slice(i, i + rows) for i in range(0, len(self.inputs) - rows + 1, rows)]

    def longest(self, method: Method) -> int:
        """S, the cache positions of a batch."""
        return method.cache_length(self.inputs.shape[1], 0, self.max_new)

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
        self,
        method: Method,
        part: slice,
        temperature: float,
        limit: int | None = None,
        stopping: Params = (),
    ) -> DecodeState:
        """Takes one batch in."""
        prompts, longest = self.prompts(part, temperature, limit), self.longest(method)
        params = self.params_of(method, stopping)
        return method.init(params, prompts, max_new=self.max_new, max_length=longest)

    def run(
        self,
        method: Method,
        part: slice,
        temperature: float,
        limit: int | None = None,
        stopping: Params = (),
    ) -> tuple[float, DecodeState]:
        """Decodes one batch; returns the seconds of the loop (without prefill), and its end."""
        params = self.params_of(method, stopping)
        state = jax.block_until_ready(self.start(method, part, temperature, limit, stopping))
        begin = time.perf_counter()
        state = jax.block_until_ready(method.run(params, state, _FOREVER))
        return time.perf_counter() - begin, state

    def decode(
        self,
        method: Method,
        part: slice,
        temperature: float,
        limit: int | None = None,
        stopping: Params = (),
    ) -> tuple[float, Totals]:
        """Decodes one batch; returns the seconds of the loop (without prefill), and the totals.

        The totals are without passes; see `passes`.
        """
        seconds, state = self.run(method, part, temperature, limit, stopping)
        return seconds, Totals(emitted=int(state.lengths.sum()), rounds=int(state.steps.sum()))

    def passes(
        self,
        method: Method,
        part: slice,
        temperature: float,
        limit: int | None = None,
        stopping: Params = (),
    ) -> Totals:
        """Counts the passes of one batch; each serves all its rows."""
        state = self.start(method, part, temperature, limit, stopping)
        passes = costs.count_passes(method, self.params_of(method, stopping), state)[-1]
        return Totals(verifier=passes["verifier"], drafter=passes.get("drafter", 0))

    def params_of(self, method: Method, stopping: Params = ()) -> Params:
        """The parameters of one of the two methods, with those of its stopping policy."""
        verifier, drafter = self.params
        if method.max_draft == 0:
            return decoding.AutoregressiveParams(verifier)
        small = drafting.NeuralDrafterParams(drafter, stopping)
        return decoding.RoundParams(verifier, small, rules.Lossless())


def load(args: argparse.Namespace) -> tuple[Setup, Pair]:
    """Loads the pair and the prompts that the arguments name."""
    check_positive(args, "rows", "prompts", "max_new", "repeats")
    texts = _enough_texts(args)
    pair = specjax.load_pair(drafter=args.drafter, verifier=args.verifier)
    verifier = pair.verifier
    inputs, lengths = _prompts(args, texts, verifier.tokenizer)
    if args.grown:
        pair = Pair(pair.drafter, grown(verifier))
        verifier = pair.verifier
    setup = Setup(
        verifier.model,
        pair.drafter.model,
        (verifier.prepared, pair.drafter.prepared),
        inputs,
        lengths,
        verifier.tokenizer.eos_ids,
        args.max_new,
        pair.drafter.head,
    )
    return setup, pair


def grown(verifier: TextModel) -> TextModel:
    """The same function by a larger network, which takes more time.

    Raises:
      ValueError: the network cannot grow.
    """
    if not isinstance(verifier.model, T5 | Llama):
        raise ValueError(
            f"{verifier.name} is neither a T5 nor a Llama, which --grown needs: leave out --grown"
        )
    model, params = testing.grow(verifier.model, verifier.params)
    return dataclasses.replace(verifier, model=model, params=params)


def with_inputs(setup: Setup, args: argparse.Namespace, tokenizer: Any) -> Setup:
    """The same pair with the prompts of `--inputs`."""
    inputs, lengths = _prompts(args, _enough_texts(args), tokenizer)
    return dataclasses.replace(setup, inputs=inputs, lengths=lengths)


def _enough_texts(args: argparse.Namespace) -> list[str]:
    texts = read_texts(args)
    if len(texts) < max(args.rows):
        raise ValueError(
            f"{args.inputs} has {len(texts)} prompts, but a batch needs {max(args.rows)}: add "
            "lines or give a smaller --rows"
        )
    return texts


def _prompts(
    args: argparse.Namespace, texts: list[str], tokenizer: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens `[n, P]` int32, and the length of each row."""
    tokens = encode_texts(args, texts, tokenizer)
    inputs = np.zeros((len(tokens), -(-max(map(len, tokens)) // 8) * 8), np.int32)
    for row, ids in zip(inputs, tokens, strict=True):
        row[: len(ids)] = ids
    return inputs, np.array([len(ids) for ids in tokens], np.int32)
