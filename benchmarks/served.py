"""Loads `specjax serve` with streams, and compares it with the engine alone."""

import argparse
import concurrent.futures
import contextlib
import http.client
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import command
from specjax.cli import bench
from specjax.cli.report import Report
from specjax.compilation import enable_compilation_cache
from specjax.errors import UserError
from specjax.text import Decoder, Request
from specjax.types import Sampling

HELP = "an endpoint under load: tokens per second, time to first token, time between tokens"
_PORT = re.compile(r"http://127\.0\.0\.1:(\d+)/v1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair, its prompts and the load."""
    command.add_workload(parser)
    bench.add_weights(parser, "floats")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=120.0, help="of each load")
    parser.add_argument(
        "--prefixes",
        type=int,
        nargs="+",
        default=[8],
        help="finished rows whose caches stay: 0 8 compares, for prompts that begin alike",
    )


class Stream(NamedTuple):
    """A request's text, when its parts came, and the number of its tokens."""

    text: str
    start: float
    times: list[float]
    tokens: int


def run(args: argparse.Namespace) -> Report:
    """Keeps so many greedy requests in flight, first in an engine here, then over HTTP.

    `ratio` is the tokens per second over HTTP over those of the engine. Times are in milliseconds:
    `first` to the first text, `gap` between the texts of a stream. `lost` requests had no answer,
    `mixed` ones another text than a Decoder's. `rss` is the server's memory in MiB.
    """
    command.check_positive(args, "streams", "seconds")
    pair, tokens = command.load(args, bench.forms_of(args), args.dtype)
    rows = max(args.rows)
    decoder = Decoder(
        pair,
        sampling=Sampling(temperature=0.0),
        max_new_tokens=args.max_new,
        batch_size=rows,
        buckets=(max(64, *map(len, tokens)),),
    )
    expected = decoder(tokens).texts
    found = []
    for kept in args.prefixes:
        with served(args, rows, max(map(len, tokens)), kept) as (process, port):
            for streams in args.streams:
                alone = _engine(decoder, tokens, streams, args.seconds, kept)
                before = _resident(process.pid)
                over_http = _load(port, tokens, args.max_new, streams, args.seconds)
                firsts = [1e3 * (x.times[0] - x.start) for x in over_http if x.times]
                gaps = [1e3 * (b - a) for x in over_http for a, b in itertools.pairwise(x.times)]
                texts = [x.text == expected[i % len(tokens)] for i, x in enumerate(over_http)]
                rate = sum(x.tokens for x in over_http) / args.seconds
                found.append(
                    {
                        "prefixes": kept,
                        "streams": streams,
                        "engine": alone,
                        "served": rate,
                        "ratio": rate / alone,
                        "first_p50": np.percentile(firsts, 50),
                        "first_p99": np.percentile(firsts, 99),
                        "gap_p50": np.percentile(gaps, 50),
                        "gap_p99": np.percentile(gaps, 99),
                        "requests": len(over_http),
                        "lost": sum(not x.times for x in over_http),
                        "mixed": sum(not same for same in texts),
                        "rss_before": before,
                        "rss_after": _resident(process.pid),
                    }
                )
    return Report(found, list(found[0]))


@contextlib.contextmanager
def served(
    args: argparse.Namespace, rows: int, longest: int, kept: int
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server of the pair in a process of its own, and its port."""
    words = [sys.executable, "-m", "specjax", "serve", "--port", "0", "--batch-size", str(rows)]
    words += ["--max-new-tokens", str(args.max_new), "--prompt-length", str(max(longest, 64))]
    words += ["--prefixes", str(kept)]
    for name in ("verifier", "drafter", "weights", "drafter_weights", "dtype"):
        if getattr(args, name) is not None:
            words += [f"--{name.replace('_', '-')}", getattr(args, name)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = _PORT.search(process.stdout.readline())
            if found is None:
                raise UserError("specjax serve did not start: see what it says above")
            yield process, int(found[1])
        finally:
            process.terminate()


def _engine(
    decoder: Decoder, tokens: Sequence[np.ndarray], streams: int, seconds: float, kept: int
) -> float:
    """The tokens per second of an engine with so many requests in flight."""
    engine = decoder.engine(prompt_length=decoder.buckets[-1], refill=1, kept_prefixes=kept)
    prompts = itertools.cycle(tokens)

    def decode(seconds: float) -> int:
        end, emitted = time.perf_counter() + seconds, 0
        while time.perf_counter() < end:
            while engine.unfinished < streams:
                engine.add(Request(next(prompts)))
            rows = [added.row for added in engine.stream_step() if added.row is not None]
            emitted += sum(int(row.info.emitted) for row in rows)
        return emitted

    decode(min(5.0, seconds))  # compiles
    return decode(seconds) / seconds


def _load(
    port: int, tokens: Sequence[np.ndarray], longest: int, streams: int, seconds: float
) -> list[Stream]:
    """The streams of so many clients at a time, in the order of the prompts."""
    numbers, end = itertools.count(), time.perf_counter() + seconds
    found: dict[int, Stream] = {}

    def ask_on() -> None:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
            while time.perf_counter() < end:
                number = next(numbers)
                prompt = tokens[number % len(tokens)].tolist()
                found[number] = _ask(connection, prompt, longest, end)

    with concurrent.futures.ThreadPoolExecutor(streams) as pool:
        for future in [pool.submit(ask_on) for _ in range(streams)]:
            future.result()
    return [found[number] for number in sorted(found)]


def _ask(
    connection: http.client.HTTPConnection, prompt: list[int], longest: int, end: float
) -> Stream:
    """A request's stream; tokens after `end` do not count."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": longest, "temperature": 0.0}
    body |= {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    start, times, text, tokens = time.perf_counter(), [], "", 0
    connection.request("POST", "/v1/completions", json.dumps(body))
    with connection.getresponse() as response:
        for line in response:
            if line.startswith(b"data: {"):
                chunk, now = json.loads(line[6:]), time.perf_counter()
                times.append(now)
                text += chunk["choices"][0]["text"]
                if now < end:
                    tokens = chunk["usage"]["completion_tokens"]
    return Stream(text, start, times, tokens)


def _resident(process: int) -> float:
    """The memory of a process, in MiB; NaN where the system does not tell."""
    status = Path(f"/proc/{process}/status")
    found = re.search(r"VmRSS:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return float("nan") if found is None else int(found[1]) / 1024


main = command.program(__file__, HELP, add_arguments, run)

if __name__ == "__main__":
    enable_compilation_cache()
    sys.exit(main())
