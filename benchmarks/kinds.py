"""Which drafts suit which text: a chat model on requests of several kinds, beside others."""

import argparse
import functools
import itertools
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tqdm

from benchmarks import command, peers
from specjax.cli.bench import add_weights, forms_of
from specjax.cli.report import Report
from specjax.compilation import enable_compilation_cache
from specjax.data.examples import read_objects
from specjax.errors import UserError
from specjax.study.measure import take_turns, time_call
from specjax.text import Decoder, Pair, TextModel, load_pair
from specjax.text.setting import VERIFIER_ALONE, Setting

HELP = "time drafters and copies in turns, by kind of request"

_Batch = tuple[np.ndarray, ...]
_COMPLETE = "Complete this function. Answer with the whole function in a code block."
_EDITS = (
    "Add type hints and a docstring to this code, and answer with the whole code.",
    "Give the variables of this code longer, clearer names, and answer with the whole code.",
    "Let this code raise a ValueError for wrong arguments, and answer with the whole code.",
)


class Made(NamedTuple):
    """A batch's answers: tokens, their number with ends, the rows' passes (0: unknown)."""

    tokens: list[np.ndarray]
    emitted: int
    passes: int

    @classmethod
    def cut(cls, rows: Sequence[Sequence[int]], ends: Sequence[int]) -> "Made":
        """Of tokens that may go on after an end."""
        texts = [np.array([*itertools.takewhile(lambda x: x not in ends, row)]) for row in rows]
        ended = sum(len(text) < len(row) for text, row in zip(texts, rows, strict=True))
        return cls(texts, sum(map(len, texts)) + ended, 0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the models, the requests and the sizes."""
    parser.add_argument("--verifier", required=True, help="a chat model")
    parser.add_argument("--drafter", help="a smaller model (default: only copies)")
    add_weights(parser, "floats")
    parser.add_argument("--human-eval", help="HumanEval.jsonl.gz: requests to complete and to edit")
    parser.add_argument("--mbpp", help="mbpp.jsonl: requests to write and to explain")
    parser.add_argument("--spec-bench", help="question.jsonl: its kinds")
    parser.add_argument("--each", type=int, default=8, help="batches of each kind")
    parser.add_argument("--rows", type=int, default=1, help="requests of a batch")
    parser.add_argument(
        "--drafting",
        nargs="+",
        help='how drafts are made: "drafter", or texts of parts (default: copies, and with a '
        "drafter also the drafter and copies before it)",
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
    parser.add_argument(
        "--transformers",
        action="store_true",
        help="also transformers in the same --dtype, on CUDA where PyTorch has it; at batch 1 also "
        "with its prompt lookup and with the drafter as its assistant, by its own defaults",
    )


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
        for text in rng.sample(texts, min(args.each * args.rows, len(texts)))
    ]


def _rows(path: str, *keys: str) -> list[dict[str, Any]]:
    rows = []
    for number, _, row in read_objects(path):
        if absent := [key for key in keys if key not in row]:
            raise UserError(f"{path}:{number}: the line has no {absent[0]}: give another file")
        rows.append(row)
    return rows


def run(args: argparse.Namespace) -> Report:
    """Times all sides on each batch in turns, and compares each with the verifier alone."""
    command.check_positive(args, "each", "rows", "drafts", "max_new", "repeats")
    if args.llama and args.rows > 1:
        raise UserError("llama.cpp decodes one text at a time: leave out --llama or --rows")
    copies = "Lookup(min_ngram=2)"
    both = ["drafter", copies, "Lookup(min_match=3, max_copy=7)"]
    settings = {"alone": Setting(method=VERIFIER_ALONE, temperature=args.temperature)}
    for drafting in args.drafting or ((copies,) if args.drafter is None else both):
        for draft in args.drafts:
            part = None if drafting == "drafter" else drafting
            name, longest = f"{drafting}, G={draft}", draft
            if drafting.startswith("Cascade("):  # it has lengths of its own
                name, longest = drafting, None
            setting = Setting(drafting=part, max_draft=longest, temperature=args.temperature)
            settings[name] = setting
    asked = requests(args)
    named = {"verifier": args.verifier, "drafter": args.drafter}
    paths: Any = {name: path for name, path in named.items() if path is not None}
    pair = load_pair(**paths, weights=forms_of(args), dtype=args.dtype)
    encode = pair.verifier.tokenizer.encode_chat
    of_kinds: dict[str, list[np.ndarray]] = {}
    for kind, text in asked:
        chat = np.array(encode([{"role": "user", "content": text}]), np.int32)
        of_kinds.setdefault(kind, []).append(chat)
    if few := [kind for kind, found in of_kinds.items() if len(found) < args.rows]:
        raise UserError(f"{few[0]} has {len(of_kinds[few[0]])} requests: give a smaller --rows")
    # An incomplete batch is left out.
    chats = [
        x for found in of_kinds.values() for x in zip(*[iter(found)] * args.rows, strict=False)
    ]
    batch_kinds = [kind for kind, x in of_kinds.items() for _ in range(len(x) // args.rows)]
    print("compiling ...", flush=True)
    sides = {name: _ours(pair, one, chats, args) for name, one in settings.items()}
    if args.llama:
        sides |= _llama(args, chats, pair.verifier.tokenizer.eos_ids)
    if args.transformers:
        sides |= _transformers(args, pair, chats)
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
        bar.set_postfix_str(f"{name}: {one.emitted / spent:.1f} tokens/s")
    rows = [
        _figures(
            kind, name, [i for i, x in enumerate(batch_kinds) if kind in (x, "all")], seconds, made
        )
        for kind in [*of_kinds, "all"]
        for name in sides
    ]
    columns = ("kind", "side", "speedup", "low", "high", "tokens_per_s", "tokens_per_pass", "same")
    notes = [
        "speedup: of whole calls over the verifier alone, prompts included: the ratio of tokens "
        "per second; low and high: the quartiles of the batches' own ratios. same: texts equal "
        "to the verifier's."
    ]
    return Report(rows, columns, notes)


def _timed(call: Callable[[int], Made], i: int) -> tuple[float, Made]:
    return time_call(lambda: call(i))


def _ours(
    pair: Pair, setting: Setting, chats: Sequence[_Batch], args: argparse.Namespace
) -> Callable[[int], Made]:
    options: Any = {"max_new_tokens": args.max_new, "batch_size": args.rows}
    decoder = Decoder(pair.named, setting, **options)
    # A limit of one token compiles all programs.
    places = {np.searchsorted(decoder.buckets, max(map(len, x))): i for i, x in enumerate(chats)}
    for i in places.values():
        decoder([*chats[i]], max_new_tokens=1, progress=False)

    def call(i: int) -> Made:
        ids = range(i * args.rows, (i + 1) * args.rows)
        result = decoder([*chats[i]], ids=ids, progress=False)
        return Made(result.tokens, result.info.emitted, result.info.verifier_calls)

    return call


def _llama(
    args: argparse.Namespace, chats: Sequence[_Batch], ends: Sequence[int]
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
            for token in model.generate(chats[i][0].tolist(), temp=0.0, repeat_penalty=1.0):
                tokens.append(token)
                if token in ends or len(tokens) == args.max_new:
                    break
            return Made.cut([tokens], ends)

        return call

    return {
        f"llama.cpp, {threads} thread{'s' * (threads > 1)}{', lookup' * lookup}": side(
            threads, lookup
        )
        for threads in args.threads
        for lookup in (False, True)
    }


def _transformers(
    args: argparse.Namespace, pair: Pair, chats: Sequence[_Batch]
) -> dict[str, Callable[[int], Made]]:
    torch, transformers = peers.load_transformers()
    device, ends = (
        "cuda" if torch.cuda.is_available() else "cpu",
        list(pair.verifier.tokenizer.eos_ids),
    )

    def load(model: TextModel) -> Any:
        made = peers.load_model(torch, transformers, model, ends, args.dtype or "float32")
        return made.to(device)

    verifier = load(pair.verifier)
    drawing: dict[str, Any] = {"do_sample": False}
    if args.temperature > 0:
        drawing = {"do_sample": True, "temperature": args.temperature, "top_k": 0}

    def side(**drafts: Any) -> Callable[[int], Made]:
        def call(i: int) -> Made:
            longest = max(map(len, chats[i]))
            # A decoder-only model continues the right end.
            short = [(longest - len(chat), chat.tolist()) for chat in chats[i]]
            ids = torch.tensor([[ends[0]] * pad + chat for pad, chat in short], device=device)
            mask = torch.tensor([[0] * pad + [1] * len(x) for pad, x in short], device=device)
            torch.manual_seed(i)
            with torch.inference_mode():
                out = verifier.generate(
                    ids, attention_mask=mask, max_new_tokens=args.max_new, **drawing, **drafts
                )
            return Made.cut(out[:, longest:].tolist(), ends)

        call(0)
        return call

    found = {"transformers": side()}
    if args.rows == 1:
        found["transformers, lookup"] = side(prompt_lookup_num_tokens=10)
        if "drafter" in pair.named and not pair.drafter.is_head:
            found["transformers, assistant"] = side(assistant_model=load(pair.drafter))
    return found


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
    texts = [zip(made[name][i].tokens, made["alone"][i].tokens, strict=True) for i in places]
    same = [np.array_equal(one, other) for batch in texts for one, other in batch]
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
