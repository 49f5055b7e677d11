"""The time of a round with each processor, over that without."""

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import command
from benchmarks.interleaved import time_interleaved
from specjax import processors
from specjax.cli.bench import check_positive
from specjax.cli.report import Report
from specjax.data.examples import read_examples
from specjax.sampling import Sampling
from specjax.text import Decoder, load_pair
from specjax.text.directories import built_in_pair

HELP = "time of a round with each processor, over that without"

_NONE = "none"
# Its outputs have about as many tokens as they may: an output that ends early has few rounds, and
# then its prefill counts for more.
_LONG_TEXT = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 80}, "number": {"type": "integer"}},
    "required": ["text", "number"],
}
_CASES: dict[str, tuple[Any, ...] | None] = {
    _NONE: None,
    "LogitBias": (processors.LogitBias({5: 1.0, 9: -1.0}),),
    "RepetitionPenalty": (processors.RepetitionPenalty(1.2),),
    "FrequencyPenalty": (processors.FrequencyPenalty(0.3),),
    "PresencePenalty": (processors.PresencePenalty(0.3),),
    "NoRepeatNgram": (processors.NoRepeatNgram(3),),
    "MinNewTokens": (processors.MinNewTokens(8),),
    "ForcedTokens": (processors.ForcedTokens({0: 9}),),
    "SuppressTokens": (processors.SuppressTokens((5, 9)),),
    "LinearTemperature": (processors.LinearTemperature(1.2, 0.8, 16),),
    "MinP": (processors.MinP(0.05),),
    "TypicalP": (processors.TypicalP(0.9),),
    "EpsilonCutoff": (processors.EpsilonCutoff(0.001),),
    "EtaCutoff": (processors.EtaCutoff(0.001),),
    "Regex": (processors.Regex(r"(?s).*"),),
    "JsonSchema": (processors.JsonSchema(_LONG_TEXT),),
    "penalty and cut-off": (processors.RepetitionPenalty(1.2), processors.MinP(0.05)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the pair and the sizes."""
    parser.add_argument("--pair", default="multi30k_ende", help="a built-in pair")
    parser.add_argument("--cases", nargs="+", default=[*_CASES], help="processors", metavar="CASE")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16], help="batch sizes B")
    parser.add_argument("--max-draft", type=int, default=5, help="draft length G")
    parser.add_argument("--max-new", type=int, default=32, help="tokens of each output")
    parser.add_argument("--repeats", type=int, default=7, help="timings of each")


def run(args: argparse.Namespace) -> Report:
    """Decodes the pair's samples; rounds differ in number, so the time of one is compared."""
    check_positive(args, "rows", "max_draft", "max_new", "repeats")
    unknown = [name for name in args.cases if name not in _CASES]
    if unknown:
        raise ValueError(f"--cases must be of {', '.join(_CASES)}, got {unknown[0]}")
    cases = {name: _CASES[name] for name in dict.fromkeys((_NONE, *args.cases))}
    pair = load_pair(args.pair)
    (source,) = built_in_pair(args.pair).glob("samples.*")
    field = "en" if source.suffix == ".tsv" else "question"
    samples = [example.inputs for example in read_examples(source, inputs_field=field)]
    table = []
    for rows in args.rows:
        prompts = [samples[i % len(samples)] for i in range(rows)]
        decoders = {
            name: Decoder(
                pair,
                max_draft=args.max_draft,
                processors=case,
                sampling=Sampling(1.0),
                max_new_tokens=args.max_new,
                batch_size=rows,
            )
            for name, case in cases.items()
        }
        rounds = {name: _steps(decoder, prompts) for name, decoder in decoders.items()}
        calls = {name: functools.partial(x, prompts) for name, x in decoders.items()}
        seconds = time_interleaved(calls, repeats=args.repeats)
        each = {name: seconds[name] / rounds[name] for name in cases}
        table += [
            {
                "rows": rows,
                "processors": name,
                "round_us": 1e6 * each[name],
                "ratio": each[name] / each[_NONE],
            }
            for name in cases
        ]
    return Report(table, ("rows", "processors", "round_us", "ratio"))


def _steps(decoder: Decoder, prompts: list[str]) -> int:
    """The steps of the whole batch: those of the row with the most."""
    return int(decoder(prompts).info.per_row.rounds.max())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    return command.main(__file__, HELP, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
