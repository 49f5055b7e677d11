"""Which drafts suit which text: a chat model on requests of several kinds, beside llama.cpp."""

import argparse
import functools
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tqdm

from benchmarks import command
from specjax.cli.bench import add_weights, forms_of
from specjax.cli.report import Report
from specjax.compilation import enable_compilation_cache
from specjax.data.examples import read_objects
from specjax.errors import UserError
from specjax.study.measure import take_turns, time_call
from specjax.text import Decoder, Pair, load_pair
from specjax.text.setting import VERIFIER_ALONE, Setting

HELP = "time drafters and copies in turns, by kind of request, at batch 1"

_BUCKETS = (256, 512, 1024, 2048)
_COMPLETE = "Complete this function. Answer with the whole function in a code block."
_EDITS = (
    "Add type hints and a docstring to this code, and answer with the whole code.",
    "Give the variables of this code longer, clearer names, and answer with the whole code.",
    "Let this code raise a ValueError for wrong arguments, and answer with the whole code.",
)


class Made(NamedTuple):
    """An answer: its tokens, their number with an end, and the verifier's passes (0: unknown)."""

    tokens: np.ndarray
    emitted: int
    passes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the models, the requests and the sizes."""
    parser.add_argument("--verifier", required=True, help="a chat model")
    parser.add_argument("--drafter", help="a smaller model (default: only copies)")
    add_weights(parser, "floats")
    parser.add_argument("--human-eval", help="HumanEval.jsonl.gz: requests to complete and to edit")
    parser.add_argument("--mbpp", help="mbpp.jsonl: requests to write and to explain")
    parser.add_argument("--spec-bench", help="question.jsonl: its kinds")
    parser.add_argument("--each", type=int, default=8, help="requests of each kind")
    parser.add_argument(
        "--drafting",
        nargs="+",
        help='how drafts are made: "drafter", or texts of parts (default: copies, and with a '
        "drafter also the drafter, and copies before it)",
    )
    parser.add_argument("--drafts", type=int, nargs="+", default=[3], help="draft lengths G")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--max-new", type=int, default=128, help="longest output, in tokens")
    parser.add_argument("--repeats", type=int, default=1, help="measurements of each side")
    parser.add_argument(
        "--llama",
        action="store_true",
        help="also llama.cpp on the verifier's GGUF file, plain and with its prompt lookup, "
        "greedily (pip install llama-cpp-python)",
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of llama.cpp")


def requests(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Draws the kinds and texts of requests, always the same of a file."""
    found: dict[str, list[str]] = {}
    if args.human_eval is not None:
        rows = _rows(args.human_eval, "prompt", "canonical_solution")
        found["complete"] = [f"{_COMPLETE}\n\n```python\n{x['prompt']}```" for x in rows]
        found["edit"] = [
            f"{_EDITS[i % 3]}\n\n```python\n{x['prompt']}{x['canonical_solution']}```"
            for i, x in enumerate(rows)
        ]
    if args.mbpp is not None:
        rows = _rows(args.mbpp, "task_id", "text", "code", "test_list")
        rows = [x for x in rows if 11 <= x["task_id"] <= 510]  # its test tasks
        tests = ["\n".join(x["test_list"]) for x in rows]
        found["write"] = [
            f"{x['text']}\nAnswer with the code alone, which must pass these tests:\n\n{test}"
            for x, test in zip(rows, tests, strict=True)
        ]
        found["explain"] = [f"Explain this code.\n\n```python\n{x['code']}\n```" for x in rows]
    if args.spec_bench is not None:
        for row in _rows(args.spec_bench, "category", "turns"):
            found.setdefault(row["category"], []).append(row["turns"][0])
    if not found:
        raise UserError("no requests: give --human-eval, --mbpp or --spec-bench")
    rng = random.Random(0)
    return [
        (kind, text)
        for kind, texts in found.items()
        for text in rng.sample(texts, min(args.each, len(texts)))
    ]


def _rows(path: str, *keys: str) -> list[dict[str, Any]]:
    rows = []
    for number, _, row in read_objects(path):
        if absent := [key for key in keys if key not in row]:
            raise UserError(f"{path}:{number}: the line has no {absent[0]}: give another file")
        rows.append(row)
    return rows


def run(args: argparse.Namespace) -> Report:
    """Times all sides on each request in turns, and compares each with the verifier alone."""
    command.check_positive(args, "each", "drafts", "max_new", "repeats")
    copies = "Lookup(min_ngram=2)"
    both = ("drafter", copies, "Lookup(min_match=2, max_copy=7)")
    settings = {"alone": Setting(method=VERIFIER_ALONE, temperature=args.temperature)}
    for drafting in args.drafting or ((copies,) if args.drafter is None else both):
        for draft in args.drafts:
            part = None if drafting == "drafter" else drafting
            setting = Setting(drafting=part, max_draft=draft, temperature=args.temperature)
            settings[f"{drafting}, G={draft}"] = setting
    asked = requests(args)
    named = {"verifier": args.verifier, "drafter": args.drafter}
    paths: Any = {name: path for name, path in named.items() if path is not None}
    pair = load_pair(**paths, weights=forms_of(args))
    chats = [
        np.array(pair.verifier.tokenizer.encode_chat([{"role": "user", "content": text}]), np.int32)
        for _, text in asked
    ]
    print("compiling ...", flush=True)
    sides = {name: _ours(pair, one, chats, args) for name, one in settings.items()}
    if args.llama:
        sides |= _llama(args, chats, pair.verifier.tokenizer.eos_ids)
    seconds = {name: np.zeros((args.repeats, len(chats))) for name in sides}
    made: dict[str, dict[int, Made]] = {name: {} for name in sides}
    turns = take_turns(
        {name: functools.partial(_timed, call) for name, call in sides.items()},
        range(len(chats)),
        args.repeats,
    )
    print("measuring ...", flush=True)
    total = len(sides) * args.repeats * len(chats)
    bar = tqdm.tqdm(turns, total=total)
    for name, repeat, i, (spent, one) in bar:
        seconds[name][repeat, i], made[name][i] = spent, one
        bar.set_postfix_str(f"{name}: {len(one.tokens) / spent:.1f} tokens/s")
    kinds = list(dict.fromkeys(kind for kind, _ in asked))
    rows = [
        _figures(
            kind, name, [i for i, x in enumerate(asked) if kind in (x[0], "all")], seconds, made
        )
        for kind in [*kinds, "all"]
        for name in sides
    ]
    columns = ("kind", "side", "speedup", "low", "high", "tokens_per_s", "tokens_per_pass", "same")
    notes = [
        "speedup: of whole calls over the verifier alone, prompts included: the ratio of tokens "
        "per second; low and high: the quartiles of the requests' own ratios. same: texts equal "
        "to the verifier's."
    ]
    return Report(rows, columns, notes)


def _timed(call: Callable[[int], Made], i: int) -> tuple[float, Made]:
    return time_call(lambda: call(i))


def _ours(
    pair: Pair, setting: Setting, chats: Sequence[np.ndarray], args: argparse.Namespace
) -> Callable[[int], Made]:
    options: Any = {"max_new_tokens": args.max_new, "batch_size": 1, "buckets": _BUCKETS}
    decoder = Decoder(pair.named, setting, **options)
    # A limit of one token compiles all programs.
    places = {np.searchsorted(_BUCKETS, len(chat)): i for i, chat in enumerate(chats)}
    for i in places.values():
        decoder([chats[i]], max_new_tokens=1, progress=False)

    def call(i: int) -> Made:
        (row,) = decoder([chats[i]], ids=[i], progress=False)
        return Made(row.tokens, int(row.info.emitted), int(row.info.verifier_calls))

    return call


def _llama(
    args: argparse.Namespace, chats: Sequence[np.ndarray], ends: Sequence[int]
) -> dict[str, Callable[[int], Made]]:
    try:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
    except ImportError:
        raise UserError(
            "llama-cpp-python is not installed: pip install llama-cpp-python, or leave out --llama"
        ) from None

    def side(threads: int, lookup: bool) -> Callable[[int], Made]:
        model = llama_cpp.Llama(
            str(args.verifier),
            n_ctx=2048 + args.max_new,
            n_threads=threads,
            n_threads_batch=threads,
            draft_model=LlamaPromptLookupDecoding() if lookup else None,
            logits_all=lookup,
            verbose=False,
        )

        def call(i: int) -> Made:
            tokens: list[int] = []
            for token in model.generate(chats[i].tolist(), temp=0.0, repeat_penalty=1.0):
                if token in ends:
                    break
                tokens.append(token)
                if len(tokens) == args.max_new:
                    break
            return Made(np.array(tokens, np.int32), len(tokens) + (len(tokens) < args.max_new), 0)

        return call

    return {
        f"llama.cpp, {threads} thread{'s' * (threads > 1)}{', lookup' * lookup}": side(
            threads, lookup
        )
        for threads in args.threads
        for lookup in (False, True)
    }


def _figures(
    kind: str,
    name: str,
    places: Sequence[int],
    seconds: Mapping[str, np.ndarray],
    made: Mapping[str, Mapping[int, Made]],
) -> dict[str, Any]:
    usual = {side: np.median(seconds[side][:, places], axis=0) for side in (name, "alone")}
    counts = {side: np.array([made[side][i].emitted for i in places]) for side in usual}
    speeds = {side: counts[side] / usual[side] for side in usual}
    passes = sum(made[name][i].passes for i in places)
    whole = {side: counts[side].sum() / usual[side].sum() for side in usual}
    low, high = np.percentile(speeds[name] / speeds["alone"], (25, 75)).tolist()
    same = [np.array_equal(made[name][i].tokens, made["alone"][i].tokens) for i in places]
    return {
        "kind": kind,
        "side": name,
        "speedup": float(whole[name] / whole["alone"]),
        "low": low,
        "high": high,
        "tokens_per_s": float(whole[name]),
        "tokens_per_pass": float(counts[name].sum() / passes) if passes else None,
        "same": f"{sum(same)}/{len(same)}",
    }


main = command.program(__file__, HELP, add_arguments, run)

if __name__ == "__main__":
    enable_compilation_cache()
    sys.exit(main())
