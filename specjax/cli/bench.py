"""`specjax bench`: does drafting pay for this pair on this machine, and why not?

Further measurements are in the folder `benchmarks/` of a checkout: `python -m benchmarks.NAME`.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tqdm

from specjax.checks import one_number
from specjax.cli.report import Report
from specjax.data.examples import guess_format, read_examples
from specjax.decoding.blocks import powers_of_two
from specjax.drafting import Costs
from specjax.environment import products
from specjax.errors import UserError, tell
from specjax.models.quantised import FORMS
from specjax.study.measure import Times, take_turns, time_call
from specjax.study.speedups import (
    best,
    conclusion,
    possible,
    round_cost,
    speedup,
    speedups,
    spread,
    yields,
)
from specjax.text import Decoder, Pair, Result, load_pair
from specjax.text.draft_length import RoundCost
from specjax.text.engine import BUCKETS
from specjax.text.passes import costs_file, measure_costs
from specjax.text.requests import encode
from specjax.text.results import finite
from specjax.text.setting import VERIFIER_ALONE, Setting, choose_length
from specjax.writing import write_atomically

_Name = TypeVar("_Name", bound=Hashable)
_NOTES = (
    "speedup: of whole calls over the verifier alone, in turns, with its 95 % interval.",
    "c: the time of a drafter's pass, of which a draft takes G (of a block head, one), and r: that",
    "of the verifier's pass over G + 1 tokens, both over the verifier's pass over one token",
    "(verifier_ms; check_ms is r times it, and call_ms the rest of a call with its prompts).",
    "acceptance: the rate that yields these tokens per call; break_even: the rate at which",
    "drafting costs what it yields (-: no rate does). ideal: the speed-up if calls took only the",
    "time of their passes; a speedup above it means that other work disturbed the times of passes.",
)
# Python's parameters, as options.
NAMES = {"max_draft": "--drafts", "max_new_tokens": "--max-new", "batch_size": "--rows"}
# How long passes are measured for a file of costs, for each batch size.
_SECONDS = 5.0
# Calls of one token that are timed; the least counts.
_CALLS = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "--drafter", help="the drafter's or draft head's directory (default: built-in)"
    )
    parser.add_argument("--verifier", help="the verifier's directory (default: built-in)")
    add_weights(parser, "floats")
    parser.add_argument("--inputs", required=True, help="a text file, one prompt per line")
    parser.add_argument(
        "--chat", action="store_true", help="give each prompt to the model's chat template"
    )
    parser.add_argument("--prompts", type=int, default=64, help="number of prompts")
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="batch sizes B")
    parser.add_argument(
        "--temperatures",
        type=float,
        nargs="+",
        default=[0.0],
        help="temperatures to measure; 0 is greedy",
    )
    parser.add_argument("--max-new", type=int, default=64, help="longest output, in tokens")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each setting")
    parser.add_argument("--drafts", type=int, nargs="+", default=[3, 5], help="draft lengths G")
    parser.add_argument(
        "--costs",
        help="writes the times of passes and the acceptance into this JSON file, which chooses the "
        "length of drafts (specjax infer --gin.COSTS=FILE); give --rows up to your batch size, "
        "--drafts up to your longest draft and your --temperatures (of specjax infer: 1 16, 12 "
        "and 1)",
    )


def add_weights(parser: argparse._ActionsContainer, default: str) -> None:
    """Adds the dtype and the forms of both models' matrices, which `forms_of` reads."""
    forms = ["floats", *FORMS]
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        help="of both models (default: that of their files; of GGUF files float32)",
    )
    parser.add_argument(
        "--weights",
        default=default,
        choices=forms,
        help="the models' matrices: the floats that their files stand for, or fewer bits (int8: "
        "all but embeddings; int4: kernels, and embeddings in 8 bits; with +embedding: those too)",
    )
    parser.add_argument(
        "--drafter-weights",
        choices=forms,
        help="the drafter's, which change no distribution of a lossless rule: on CPUs with AVX-512 "
        "VNNI int4+embedding is the fastest (default: --weights)",
    )


def forms_of(args: argparse.Namespace) -> Any:
    """Returns `load_pair`'s value for `--weights` and `--drafter-weights`."""
    if args.drafter_weights is not None and args.drafter is None and args.verifier is not None:
        raise UserError("--drafter-weights needs a --drafter: give one, or leave it out")
    names = {"verifier": args.weights, "drafter": args.drafter_weights}
    forms = {name: None if form == "floats" else form for name, form in names.items()}
    return forms["verifier"] if args.drafter_weights is None else forms


class Side(NamedTuple):
    """The verifier alone, or with drafts: its times and its results, of each chunk of prompts."""

    times: Times
    results: list[Result]


def run(args: argparse.Namespace) -> int:
    """Times whole calls and passes of every batch size, and prints tables and a verdict.

    All sides take turns at every batch, in which rows that end early wait for the last row.
    """
    check_positive(args, "drafts")
    if sorted(set(args.rows)) != args.rows:
        raise UserError(f"--rows must increase, got {args.rows}")
    for temperature in args.temperatures:  # before minutes of measurement
        one_number("--temperatures", temperature, low=0.0, open_high=True, dtype=float)
    if args.costs is not None:
        check_output("--costs", Path(args.costs))
    pair, tokens = load(args, chat=args.chat, weights=forms_of(args), dtype=args.dtype)
    rows, verdicts = [], []
    passes: dict[tuple[int, int], dict[str, float]] = {}
    acceptance: dict[float, list[float]] = {}
    for batch in args.rows:
        chunks = [tokens[i : i + batch] for i in range(0, len(tokens) - batch + 1, batch)]
        decoders = _decoders(pair, tokens, args, batch, args.temperatures[0])
        times: dict[int, Costs] = {}
        print(f"B={batch}: measuring calls of one token ...", flush=True)
        emit_one = functools.partial(decoders[0], list(chunks[0]), max_new_tokens=1, progress=False)
        call = min(time_call(emit_one)[0] for _ in range(_CALLS))
        for length in args.drafts:
            print(f"B={batch} G={length}: measuring passes ...", flush=True)
            times[length] = measure_costs(
                pair,
                (batch,),
                (length + 1,),
                prompt_length=decoders[0].buckets[0],
                with_alone=True,
                block_apart=True,
            )
            passes[batch, length] = _of_passes(times[length], call)
            method: Any = decoders[length].method
            cost = round_cost(times[length], method.drafter, math.nan)
            told = f"c = {cost.c:.2f} (a draft's pass over the verifier's), r = {cost.r:.2f}"
            print(f"B={batch} G={length}: {told} (of {length + 1} tokens)", flush=True)
        for temperature in args.temperatures:
            print(f"B={batch} T={temperature:g}: measuring calls ...", flush=True)
            decoders = _decoders(pair, tokens, args, batch, temperature)
            sides = measure(decoders, chunks, args.repeats)
            costs = {}
            for length in args.drafts:
                method = decoders[length].method
                tokens_of_pass = yields(sides[length].times, sides[0].times)
                costs[length] = round_cost(times[length], method.drafter, tokens_of_pass)
            for length, cost in costs.items():
                sizes = {"rows": batch, "max_draft": length, "temperature": temperature}
                rows.append({**sizes, **figures(sides[0], sides[length], cost)})
                rate = min(max(cost.acceptance, 0.0), 1.0)
                acceptance.setdefault(temperature, []).append(rate)
            where = f"at batch {batch}, temperature {temperature:g}"
            verdicts.append(_verdict(sides, costs, where))
    table_of_passes = Report([*passes.values()], list(next(iter(passes.values())))).table()
    forms = {"weights": args.weights, "drafter_weights": args.drafter_weights or args.weights}
    notes = ["", table_of_passes, "", *_NOTES, *products(), "", *verdicts]
    report = Report(rows, list(rows[0]), notes, forms)
    for row in rows:  # for the line of JSON
        row["passes"] = passes[row["rows"], row["max_draft"]]
    report.show("bench")
    if args.costs is not None:
        tell("measuring the costs of passes of every width ...")
        widths = powers_of_two(max(args.drafts) + 1)
        length = max(map(len, tokens))
        options: dict[str, Any] = {"prompt_length": length, "seconds": _SECONDS}
        every = measure_costs(pair, args.rows, widths, with_alone=True, **options)
        tried = sorted(acceptance)
        rates = tuple(float(np.mean(acceptance[temperature])) for temperature in tried)
        every = dataclasses.replace(every, temperatures=tuple(tried), acceptance=rates)
        names = {"drafter": pair.drafter.name, "verifier": pair.verifier.name}
        content = costs_file(every, models=names, **forms)
        write_atomically(Path(args.costs), content)
        tell(f"wrote {args.costs}")
        for batch, temperature in itertools.product(args.rows, tried):
            why = choose_length(every, pair, batch, temperature).why
            tell(f"at batch {batch}, temperature {temperature:g}: {why}")
    return 0


def load(
    args: argparse.Namespace, *, chat: bool = False, weights: Any = None, dtype: Any = None
) -> tuple[Pair, list[np.ndarray]]:
    """Loads the pair and the tokens of the prompts."""
    check_positive(args, "rows", "prompts", "max_new", "repeats")
    texts = enough_texts(args)
    pair = load_pair(drafter=args.drafter, verifier=args.verifier, weights=weights, dtype=dtype)
    if "drafter" not in pair.named:
        raise UserError(
            "drafter must be given, too, because bench measures what its passes cost; specjax "
            f'infer --gin.VERIFIER={args.verifier} --gin.DRAFTING="Lookup()" drafts without one'
        )
    return pair, encode_texts(args, texts, pair.verifier.tokenizer, chat=chat)


def enough_texts(args: argparse.Namespace) -> list[str]:
    """Returns the texts of `read_texts`, which must fill a batch."""
    texts = read_texts(args)
    if len(texts) < max(args.rows):
        raise UserError(
            f"{args.inputs} has {len(texts)} prompts, but a batch needs {max(args.rows)}: add "
            "lines or give a smaller --rows"
        )
    return texts


def read_texts(args: argparse.Namespace) -> list[str]:
    """Returns the first `--prompts` texts of `--inputs`."""
    if guess_format(args.inputs) == "tsv":
        raise UserError(
            f"--inputs={args.inputs} has columns, but must have one prompt per line: write the "
            "prompts' column into a .txt file"
        )
    return [example.inputs for example in read_examples(args.inputs)][: args.prompts]


def encode_texts(
    args: argparse.Namespace, texts: list[str], tokenizer: Any, *, chat: bool = False
) -> list[np.ndarray]:
    """Returns the tokens of the texts; an error names a text that is empty or too long."""
    prompts = []
    for i, text in enumerate(texts):
        name = f"{args.inputs}, prompt {i + 1}"
        said: Any = [{"role": "user", "content": text}] if chat and text.strip() else text
        prompts.append(encode(said, name, tokenizer.vocab_size, tokenizer))
        if len(prompts[-1]) > BUCKETS[-1]:
            raise UserError(
                f"{name} has {len(prompts[-1])} tokens, more than {BUCKETS[-1]}: leave it out"
            )
    return prompts


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Raises UserError unless these numbers, or lists of numbers, are in 1 .. 2**31 - 1."""
    for name in names:
        value = getattr(args, name)
        values = value if isinstance(value, list) else [value]
        if min(values, default=1) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if max(values, default=1) >= 2**31:
            raise UserError(f"--{name.replace('_', '-')} must be below {2**31}, got {value}")


def check_output(option: str, path: Path) -> None:
    """Checks, before minutes of measurement, that a file of costs can be written or replaced."""
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: {path.parent} is not a directory: make it first")
    if path.exists():
        try:
            values = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            values = None
        # Of any format: those of earlier versions are to be measured again.
        if not isinstance(values, dict) or not {"format", "widths"} <= values.keys():
            raise UserError(
                f"{option} {path} is not a file of costs: choose another name, or move it"
            )


def _decoders(
    pair: Pair,
    tokens: Sequence[np.ndarray],
    args: argparse.Namespace,
    batch: int,
    temperature: float,
) -> dict[int, Decoder]:
    """Draft length -> the decoder; 0: the verifier alone."""
    settings = {0: Setting(method=VERIFIER_ALONE, temperature=temperature)}
    settings |= {n: Setting(max_draft=n, temperature=temperature) for n in args.drafts}
    # With one bucket all batches run the same program.
    options: dict[str, Any] = {"buckets": (max(map(len, tokens)),), "max_new_tokens": args.max_new}
    return {
        length: Decoder(pair.named, setting, batch_size=batch, **options)
        for length, setting in settings.items()
    }


def measure(
    decoders: Mapping[_Name, Callable[..., Result]],
    chunks: Sequence[Sequence[np.ndarray]],
    repeats: int,
) -> dict[_Name, Side]:
    """Returns the times and the results of each decoder; the decoders take turns."""

    def decode(decoder: Callable[..., Result], place: int) -> tuple[float, Result]:
        prompts: list[Any] = list(chunks[place])
        ids = range(place * len(prompts), (place + 1) * len(prompts))
        return time_call(lambda: decoder(prompts, ids=ids, progress=False))

    calls = {name: functools.partial(decode, one) for name, one in decoders.items()}
    for call in calls.values():
        call(0)  # compiles
    seconds = {name: np.zeros((1, repeats, len(chunks))) for name in decoders}
    results: dict[_Name, dict[int, Result]] = {name: {} for name in decoders}
    turns = take_turns(calls, range(len(chunks)), repeats)
    total = len(decoders) * repeats * len(chunks)
    bar: Any = {"total": total, "desc": "measuring", "unit": "call", "leave": False}
    for name, repeat, place, (spent, result) in tqdm.tqdm(turns, **bar, disable=None, delay=2.0):
        seconds[name][0, repeat, place] = spent
        results[name][place] = result
    return {name: _side(seconds[name], list(of.values())) for name, of in results.items()}


def _side(seconds: np.ndarray, results: list[Result]) -> Side:
    return Side(Times.of(seconds, [results]), results)


def figures(alone: Side, drafts: Side, cost: RoundCost) -> dict[str, float | None]:
    """Returns a line of the table."""
    gain = speedup(drafts.times, alone.times)
    infos = [result.info.per_row for result in drafts.results]
    calls = sum(int(info.verifier_calls.sum()) for info in infos)
    return {
        "speedup": gain.value,
        "speedup_low": finite(gain.low),
        "speedup_high": finite(gain.high),
        "tokens_per_call": sum(int(info.emitted.sum()) for info in infos) / calls,
        "c": cost.c,
        "r": cost.r,
        "acceptance": finite(cost.acceptance),
        "break_even": finite(cost.break_even),
        "ideal": cost.ideal,
        "alone_tokens_per_s": float(alone.times.tokens.sum() / alone.times.usual.sum()),
    }


def _verdict(sides: dict[int, Side], costs: dict[int, RoundCost], where: str) -> str:
    """What was fastest, or why drafting does not pay; then what a round costs."""
    alone = sides[0].times
    gains = speedups({n: (side.times, alone) for n, side in sides.items() if n})
    most = {n: cost.tokens for n, cost in costs.items()}
    length = best(possible(gains, most) or gains)
    assert length is not None
    return conclusion(
        {f"drafts of {n}": gain for n, gain in gains.items()},
        where=where,
        most={f"drafts of {n}": tokens for n, tokens in most.items()},
        cost=costs[length],
        spread=max(spread([side.times]) for side in sides.values()),
    )


def _of_passes(costs: Costs, call: float) -> dict[str, float]:
    """`call`: the seconds of a call of the verifier alone that emits one token."""
    return {
        "rows": costs.rows[0],
        "max_draft": costs.widths[-1] - 1,
        "draft_ms": 1e3 * costs.draft[0],
        "verifier_ms": 1e3 * costs.alone[0],
        "check_ms": 1e3 * costs.verifier[0][-1],
        "call_ms": 1e3 * max(call - costs.alone[0], 0.0),
    }
