"""`specjax audit MODULE:FUNCTION`: what distribution does a verifier emit?

The audit runs in a process of its own, which an alarm ends when the time is spent: so a function
that hangs, or crashes Python, is a verdict too.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from specjax.checks import PathLike, one_line
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
        choices=auditing.auditor.MODES,
        help="injected: the function gets its uniforms; black-box: samples (default: injected if "
        "it takes uniforms and uniform_next)",
    )
    parser.add_argument("--rule", help="the rule that it declares, such as 'Lossy(0.3)'")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="only these, or parts of names")
    parser.add_argument(
        "--arrays", choices=auditing.calling.ARRAYS, help="(default: what it accepts)"
    )
    parser.add_argument(
        "--dtype", choices=auditing.calling.DTYPES, help="(default: what it accepts)"
    )
    parser.add_argument(
        "--drafts",
        choices=auditing.auditor.DRAFTS,
        default="drawn",
        help="drawn from q; argmax: q's most probable tokens, although the function gets q; "
        "certain: likewise, and draft_probs is None",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="TV",
        default=1e-6,
        help="the largest total variation that is exact",
    )
    parser.add_argument(
        "--samples", type=int, metavar="N", default=50_000, help="of a black box, per case"
    )
    late = f"importing may take {_IMPORT:g} s besides (default: 300)"
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", default=300.0, help=late)
    parser.add_argument("--seed", type=int, default=0, help="of the audit's own random numbers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report there")
    statuses = "; ".join(f"{v.status} {v.text}" for v in auditing.report.Verdict)
    parser.epilog = f"Exit status: {statuses}; 2 bad input."


def run(args: argparse.Namespace) -> int:
    """Audits; prints the score sheet and the verdict, whose exit status it returns."""
    from specjax.checks import check_count, one_number, whole_number
    from specjax.testing.auditing import AuditReport
    from specjax.testing.auditing.report import Verdict
    from specjax.text.parts import make_part

    check_count("--samples", args.samples, "give the number of draws per case")
    one_number("--time-limit", args.time_limit, low=0.0, open_low=True, dtype=float)
    whole_number("--seed", args.seed, low=0)
    if args.json is not None and (args.json.is_dir() or not os.access(args.json.parent, os.W_OK)):
        raise UserError(f"--json={args.json} cannot be written: give a file in your directory")
    if args.rule is not None:
        make_part("rule", args.rule)  # a wrong rule is refused before the library is imported
    job = {name: getattr(args, name) for name in ("target", "rule", *_OPTIONS)}
    job |= {"json": args.json and str(args.json), "grace": _GRACE}
    started = time.monotonic()
    status = subprocess.run([sys.executable, "-m", __spec__.name, json.dumps(job)]).returncode
    if status >= 0:
        return status
    ended = signal.Signals(-status)
    seconds = time.monotonic() - started
    reason = f"the process ended with signal {ended.name}"
    if ended is signal.SIGALRM:
        reason = f"it had no answer after {seconds:.0f} s"
    name, how = args.target.rpartition(":")[2], args.mode or "not called"
    _tell(AuditReport(Verdict.INVALID, reason, (), name, how, seconds=seconds), args.json)
    return Verdict.INVALID.status


def _tell(report: Any, file: PathLike | None) -> None:
    from specjax.writing import write_atomically

    report.show()
    if file is not None:
        text = json.dumps(report.to_dict(), indent=1, allow_nan=False)
        write_atomically(Path(file), text.encode() + b"\n")


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


def _work(job: dict[str, Any]) -> NoReturn:
    """The other process: audits, and ends with the verdict's status."""
    stdout = os.dup(1)
    os.dup2(2, 1)  # what the function prints is no part of the report
    try:
        from specjax.testing.auditing import audit
        from specjax.text.parts import make_part

        rule = None if job["rule"] is None else make_part("rule", job["rule"])
        signal.setitimer(signal.ITIMER_REAL, _IMPORT)
        function = load(job["target"])
        signal.setitimer(signal.ITIMER_REAL, job["time_limit"] + job["grace"])
        report = audit(function, rule=rule, **{name: job[name] for name in _OPTIONS})
        sys.stdout.flush()
        os.dup2(stdout, 1)
        _tell(report, job["json"])
        status = report.verdict.status
    except (UserError, OSError) as error:
        print(f"specjax audit: {one_line(error)}", file=sys.stderr)
        status = 2
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a thread of the function may go on


if __name__ == "__main__":
    _work(json.loads(sys.argv[1]))
