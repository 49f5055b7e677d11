"""`specjax audit MODULE:FUNCTION`: what distribution does a verifier emit?

The audit runs in a process of its own, which is ended when the time is spent: so a function that
hangs, or crashes Python, is a verdict too.
"""

import argparse
import functools
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn

from specjax.checks import one_line
from specjax.errors import UserError

_GRACE = 15.0  # how long a process may go on after its time, for the last call and the report
_IMPORT = 120.0  # how long a library may take to import
_OPTIONS = (
    "mode", "cases", "arrays", "dtype", "drafts", "tolerance", "samples", "time_limit", "seed",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    # Imported here so that other commands stay quick.
    from specjax.testing import auditing

    parser.add_argument(
        "target",
        metavar="MODULE:FUNCTION",
        help="the verifier: package.module:function, or path/to/file.py:function",
    )
    parser.add_argument(
        "--mode",
        choices=auditing.MODES,
        help="injected: the function gets its uniforms; black-box: samples (default: injected if "
        "it takes uniforms and uniform_next)",
    )
    parser.add_argument("--rule", help="the rule that it declares, such as 'Lossy(0.3)'")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="only these, or parts of names")
    parser.add_argument("--arrays", choices=auditing.ARRAYS, help="(default: what it accepts)")
    parser.add_argument("--dtype", choices=auditing.DTYPES, help="(default: what it accepts)")
    parser.add_argument(
        "--drafts",
        choices=auditing.DRAFTS,
        default="drawn",
        help="drawn from q; argmax: q's most probable tokens, although the function gets q; "
        "certain: likewise, and draft_probs is None",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="TV",
        help="the largest total variation that is exact (default: 1e-9, in float32 1e-6)",
    )
    parser.add_argument(
        "--samples", type=int, metavar="N", default=50_000, help="of a black box, per case"
    )
    late = f"importing may take {_IMPORT:g} s besides (default: 300)"
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", default=300.0, help=late)
    parser.add_argument("--seed", type=int, default=0, help="of the audit's own random numbers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report there")
    statuses = "; ".join(f"{v.status} {v.text}" for v in auditing.Verdict)
    parser.epilog = f"Exit status: {statuses}; 2 bad input."


def run(args: argparse.Namespace) -> int:
    """Audits; prints the score sheet and the verdict, whose exit status it returns."""
    from specjax.checks import check_count, one_number, whole_number
    from specjax.writing import write_atomically

    check_count("--samples", args.samples, "give the number of draws per case")
    one_number("--time-limit", args.time_limit, low=0.0, open_low=True, dtype=float)
    whole_number("--seed", args.seed, low=0)
    if args.json is not None and (args.json.is_dir() or not os.access(args.json.parent, os.W_OK)):
        raise UserError(f"--json={args.json} cannot be written: give a file in your directory")
    if args.rule is not None:
        _make_rule(args.rule)  # a wrong rule is refused before the library is imported
    options = {name: getattr(args, name) for name in _OPTIONS}
    job = {"target": args.target, "rule": args.rule, "options": options}
    report = _audit(job, args.time_limit)
    report.show()
    if args.json is not None:
        text = json.dumps(report.to_dict(), indent=1, allow_nan=False)
        write_atomically(args.json, text.encode() + b"\n")
    return int(report.verdict.status)


def _audit(job: dict[str, Any], limit: float) -> Any:
    """Runs the audit in another process; the report, also if that process does not answer."""
    from specjax.testing.auditing import AuditReport, Verdict

    receiving, sending = Pipe(duplex=False)
    command = [sys.executable, "-m", __spec__.name, str(sending.fileno())]
    rows: list[Any] = []
    started = time.monotonic()
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[sending.fileno()]) as process:
        sending.close()
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(job).encode())
            process.stdin.close()
            ends = started + _IMPORT + limit
            while receiving.poll(max(0.0, ends - time.monotonic())):
                kind, value = receiving.recv()
                if kind == "report":
                    return value
                if kind == "refusal":
                    raise UserError(value)
                if kind == "failure":
                    raise AssertionError(f"the audit failed: {value}")
                if kind == "imported":
                    ends = time.monotonic() + limit + _GRACE
                else:
                    rows.append(value)
            reason = f"it had no answer after {time.monotonic() - started:.0f} s"
        except (EOFError, BrokenPipeError):
            process.wait()
            code = process.returncode
            how = f"status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
            reason = f"the process ended with {how}"
        finally:
            process.kill()
            receiving.close()
    if rows:
        reason += f", after the case {rows[-1].case!r}"
    seconds = time.monotonic() - started
    name = job["target"].rpartition(":")[2]
    how = job["options"]["mode"] or "not called"
    return AuditReport(Verdict.INVALID, reason, tuple(rows), name, how, 0.0, seconds=seconds)


def _make_rule(text: str) -> Any:
    from specjax.text.parts import make_part

    return make_part("rule", text)


def load(target: str) -> Callable[..., Any]:
    """Imports the function that `MODULE:FUNCTION` names."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise UserError(f"{target!r} is not MODULE:FUNCTION: write my_package.verify:verify")
    path = Path(place)
    if path.exists() and path.suffix != ".py":
        raise UserError(f"{place} must be a module or a file whose name ends in .py")
    try:
        if place.endswith(".py"):
            sys.path.insert(0, str(path.resolve().parent))
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = module
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, os.getcwd())
            module = importlib.import_module(place)
        function = functools.reduce(getattr, name.split("."), module)
    except AttributeError as error:
        raise UserError(
            f"{place} has no {name} ({one_line(error)}): give one of its functions"
        ) from None
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {one_line(error)[:200]}"
        raise UserError(
            f"{place} cannot be imported ({why}): correct it, or give path/to/file.py:{name}"
        ) from None
    if not callable(function):
        raise UserError(f"{target} is {type(function).__name__}, not a function: give a function")
    return function


def _work(descriptor: int) -> NoReturn:
    """The other process: reads a job from standard input, sends rows and the report."""
    sending = Connection(descriptor)
    job = json.load(sys.stdin)
    os.dup2(2, 1)  # what the function prints is no part of the report
    try:
        from specjax.testing.auditing import audit

        rule = None if job["rule"] is None else _make_rule(job["rule"])
        function = load(job["target"])
        sending.send(("imported", None))
        report = audit(
            function, rule=rule, on_row=lambda row: sending.send(("row", row)), **job["options"]
        )
        sending.send(("report", report))
    except (UserError, OSError) as error:
        sending.send(("refusal", one_line(error)))
    except Exception:
        sending.send(("failure", traceback.format_exc()))
    sys.stderr.flush()
    os._exit(0)  # a thread of the function may go on


if __name__ == "__main__":
    _work(int(sys.argv[1]))
