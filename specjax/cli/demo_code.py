"""`specjax demo code`: your pair writes functions, whose tests then run."""

import argparse
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specjax.checks import check_count
from specjax.cli.bench import add_weights, check_positive, forms_of, measure
from specjax.cli.demo_chat import copies, show_answer, summary
from specjax.environment import products
from specjax.errors import tell
from specjax.evaluation.sandbox import PassAt1, Problem, Sandbox, missing
from specjax.text import Decoder, load_pair
from specjax.types import Sampling


class Exercise(NamedTuple):
    """A request for code, and the tests of the code."""

    request: str
    tests: str


_LEDGER = """```python
class Ledger:
    def __init__(self):
        self.entries = []

    def deposit(self, account, amount):
        self.entries.append((account, amount))

    def withdraw(self, account, amount):
        self.entries.append((account, -amount))

    def balance(self, account):
        total = 0
        for name, amount in self.entries:
            if name == account:
                total += amount
        return total

    def accounts(self):
        return sorted({name for name, _ in self.entries})
```"""
EXERCISES = (
    Exercise(
        "Write a Python function run_lengths(text) that returns a list of pairs (character, "
        "count), one for each run of equal characters. Answer with the code alone.",
        "assert run_lengths('aaab') == [('a', 3), ('b', 1)]\n"
        "assert run_lengths('') == []\n"
        "assert run_lengths('abba') == [('a', 1), ('b', 2), ('a', 1)]\n",
    ),
    Exercise(
        "Write a Python function merge(intervals) that merges overlapping intervals, given as "
        "pairs (begin, end) in any order, and returns a sorted list of tuples. Answer with the "
        "code alone.",
        "assert merge([(5, 8), (1, 3), (2, 4)]) == [(1, 4), (5, 8)]\n"
        "assert merge([]) == []\n"
        "assert merge([(1, 9), (2, 3)]) == [(1, 9)]\n",
    ),
    Exercise(
        "Write a Python function to_roman(number) that writes a whole number from 1 to 3999 in "
        "Roman numerals. Answer with the code alone.",
        "assert to_roman(4) == 'IV'\n"
        "assert to_roman(1994) == 'MCMXCIV'\n"
        "assert to_roman(3888) == 'MMMDCCCLXXXVIII'\n",
    ),
    Exercise(
        "Change this class: withdraw must raise a ValueError if the account would have less than "
        f"nothing. Answer with the whole code, otherwise unchanged.\n\n{_LEDGER}",
        "book = Ledger()\n"
        "book.deposit('a', 5)\n"
        "book.withdraw('a', 2)\n"
        "assert book.balance('a') == 3 and book.accounts() == ['a']\n"
        "try:\n    book.withdraw('a', 4)\nexcept ValueError:\n    pass\n"
        "else:\n    raise AssertionError\n"
        "assert book.balance('a') == 3\n",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "--verifier",
        required=True,
        help="a chat model that writes code, such as the GGUF file (Q4_K_M) of "
        "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
    )
    parser.add_argument(
        "--drafter",
        help="a smaller model with the same tokens, such as that of "
        "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF (default: drafts are copied from the text so far)",
    )
    add_weights(parser, "int8")
    parser.add_argument(
        "--max-draft",
        type=int,
        default=3,
        help="tokens drafted at a time; 7 if copied before a drafter",
    )
    parser.add_argument("--max-new-tokens", type=int, default=256, help="the longest answer")
    parser.add_argument("--repeats", type=int, default=1, help="how often each answer is timed")


def run(args: argparse.Namespace) -> int:
    """Shows the drafted answers, times them alone and with drafts in turns, and runs the tests."""
    check_count("--max-draft", args.max_draft, "give the number of drafted tokens")
    check_positive(args, "repeats", "max_new_tokens")
    paths = {"verifier": args.verifier, "drafter": args.drafter}
    models = load_pair(
        **{name: path for name, path in paths.items() if path is not None},
        weights=forms_of(args),
        dtype=args.dtype,
    )
    options: dict[str, Any] = {
        "sampling": Sampling(temperature=0.0),
        "max_new_tokens": args.max_new_tokens,
        "batch_size": 1,
        "buckets": (256, 1024),  # few programs to compile
    }
    drafts = Decoder(models, drafting=copies(models), max_draft=args.max_draft, **options)
    prompts = [drafts.encode([{"role": "user", "content": each.request}]) for each in EXERCISES]
    for exercise, prompt in zip(EXERCISES, prompts, strict=True):
        print(f"\n> {exercise.request}\n", flush=True)
        show_answer(drafts, prompt)
    tell("timing the answers, alone and with drafts, in turns ...")
    decoders = {"alone": Decoder(models.verifier, **options), "with drafts": drafts}
    timed = {name: functools.partial(one, sources=True) for name, one in decoders.items()}
    sides = measure(timed, [[prompt] for prompt in prompts], args.repeats)
    texts = {name: [result.texts[0] for result in side.results] for name, side in sides.items()}
    lines = summary(sides["alone"], sides["with drafts"], 0.0)
    for line in ["", *products(), *lines[:-1], test_counts(texts), lines[-1]]:
        print(line)
    return 0


def test_counts(texts: Mapping[str, Sequence[str]]) -> str:
    """How many answers of each side pass their tests."""
    reason = missing()
    if reason is not None:
        return f"The tests did not run ({reason}): see docs/evaluation.md, Programs."
    problems = [Problem("", "", each.tests) for each in EXERCISES]
    metric = PassAt1(Sandbox())
    counts = [
        f"{sum(metric.values(side, problems)):.0f} of {len(side)} {name}"
        for name, side in texts.items()
    ]
    return f"Answers that pass their tests: {', '.join(counts)}."
