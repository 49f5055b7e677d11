"""The time of rows that read the same tokens: samples of a prompt, or prompts with examples."""

import argparse
import sys
from collections.abc import Sequence

import jax
import numpy as np

from benchmarks import command
from benchmarks.interleaved import time_interleaved
from specjax.cli.bench import check_positive
from specjax.cli.report import Report
from specjax.data.examples import read_examples
from specjax.data.few_shot import FewShot
from specjax.decoding.method import ByToken, jitted_init
from specjax.text import Decoder, load_pair
from specjax.text.directories import built_in_pair
from specjax.text.requests import common_of
from specjax.types import PromptBatch, Sampling

HELP = "time of n samples of a prompt (one prefill, n prompts, n calls), or of shared examples"
# Long enough for eight examples of the gsm8k pair.
_BUCKETS = (256, 512, 1024, 1536, 2048)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the pair and the sizes."""
    parser.add_argument("--pair", default="gsm8k", help="a built-in pair")
    parser.add_argument("--samples", type=int, default=8, help="outputs of each prompt, n")
    parser.add_argument("--prompts", type=int, default=2, help="prompts of a call")
    parser.add_argument("--repeated", type=int, default=1, help="times a prompt's text is repeated")
    parser.add_argument(
        "--shots", type=int, default=0, help="solved examples before each prompt, read once or not"
    )
    parser.add_argument("--max-draft", type=int, default=5, help="draft length G")
    parser.add_argument("--max-new", type=int, default=32, help="tokens of each output")
    parser.add_argument("--repeats", type=int, default=7, help="timings of each")


def run(args: argparse.Namespace) -> Report:
    """Decodes the same rows in three ways."""
    check_positive(args, "samples", "prompts", "repeated", "max_draft", "max_new", "repeats")
    if args.shots:
        return _few_shot(args)
    pair = load_pair(args.pair)
    (source,) = built_in_pair(args.pair).glob("samples.*")
    field = "en" if source.suffix == ".tsv" else "question"
    texts = [example.inputs for example in read_examples(source, inputs_field=field)]
    prompts = [" ".join([text] * args.repeated) for text in texts[: args.prompts]]
    count, n = len(prompts), args.samples
    sizes = {"max_draft": args.max_draft, "max_new_tokens": args.max_new}
    decoder = Decoder(pair, **sizes, batch_size=count * n)
    ids = [[i * n + j for i in range(count)] for j in range(n)]
    calls = {
        "one prefill": lambda: decoder(prompts, num_samples=n),
        "n prompts": lambda: decoder([text for text in prompts for _ in range(n)]),
        "n calls": lambda: [decoder(prompts, ids=of_call) for of_call in ids],
    }
    seconds = time_interleaved(calls, repeats=args.repeats)
    length = next(
        size for size in decoder.buckets if size >= max(map(len, map(decoder.encode, prompts)))
    )
    mib = {
        "one prefill": _init_mib(decoder, count, length, n),
        "n prompts": _init_mib(decoder, count * n, length, 1),
        "n calls": _init_mib(decoder, count, length, 1),
    }
    table = [
        {
            "way": way,
            "prompt_length": length,
            "ms": 1e3 * seconds[way],
            "ratio": seconds[way] / seconds["one prefill"],
            "state_mib": mib[way][0],
            "prefill_mib": mib[way][1],
        }
        for way in calls
    ]
    notes = ["state_mib: the state of the rows. prefill_mib: what else the prefill allocates."]
    return Report(table, tuple(table[0]), notes)


def _few_shot(args: argparse.Namespace) -> Report:
    """Decodes prompts with the same examples, which are read once or with each prompt."""
    check_positive(args, "shots")
    if args.pair != "gsm8k":
        raise ValueError(f"--shots needs --pair gsm8k, got {args.pair}")
    source = built_in_pair(args.pair) / "samples.jsonl"
    task = FewShot(
        prompt="Question: {question}\nAnswer:",
        completion=" {answer}",
        examples=source,
        shots=args.shots,
    )
    # The first are examples.
    texts = [example.inputs for example in task.read(source)][args.shots :][: args.prompts]
    if len(texts) < args.prompts:
        raise ValueError(
            f"{source} has {len(texts)} inputs after {args.shots} examples: give --prompts "
            f"{len(texts)}, or fewer --shots"
        )
    decoder = Decoder(
        load_pair(args.pair),
        max_draft=args.max_draft,
        max_new_tokens=args.max_new,
        batch_size=args.prompts,
        buckets=_BUCKETS,
        sampling=Sampling(0.0),
    )
    tokens = [decoder.encode(text) for text in texts]
    prefix = decoder.prefix(common_of(tokens))
    rests = [prompt[len(prefix) :] for prompt in tokens]
    calls = {
        "whole prompts": lambda: decoder(tokens),
        "share_prefix": lambda: decoder(tokens, share_prefix=True),
        "prefix kept": lambda: decoder(rests, prefix=prefix),
    }
    results = {way: call() for way, call in calls.items()}
    seconds = time_interleaved(calls, repeats=args.repeats)
    read = {way: results[way].prefilled for way in calls}
    read["share_prefix"] += len(prefix)
    table = [
        {
            "way": way,
            "prompt_tokens": sum(map(len, tokens)),
            "tokens_read": read[way],
            "ms": 1e3 * seconds[way],
            "ratio": seconds[way] / seconds["prefix kept"],
            "same_texts": results[way].texts == results["whole prompts"].texts,
        }
        for way in calls
    ]
    notes = [f"{args.prompts} prompts begin with the same {len(prefix)} tokens."]
    return Report(table, tuple(table[0]), notes)


def _init_mib(decoder: Decoder, rows: int, length: int, copies: int) -> tuple[float, float]:
    prompts = PromptBatch(
        inputs=np.ones((rows, length), np.int32),
        input_lengths=np.full(rows, length),
        ids=np.arange(rows, dtype=np.uint32),
        limits=np.ones(rows, np.int32),
        seeds=np.zeros(rows, np.uint32),
        sampling=jax.tree.map(lambda x: np.full(rows, x), decoder.sampling),
    )
    most = decoder.max_new_tokens
    static = (most, decoder.method.cache_length(length, 0, most), ByToken(), copies)
    lowered = jitted_init(None).lower(decoder.method, *static, decoder.params, prompts)
    used = lowered.compile().memory_analysis()
    return used.output_size_in_bytes / 2**20, used.temp_size_in_bytes / 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    return command.main(__file__, HELP, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
