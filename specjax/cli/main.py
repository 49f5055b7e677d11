"""The `specjax` command: `specjax COMMAND ...`.

A command is a module with `add_arguments(parser)` and `run(args) -> int`, imported only for its
own command. `args.command_line` has the words of the whole command line.
"""

import argparse
import contextlib
import difflib
import errno
import importlib
import logging
import os
import select
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

import jax
from absl import logging as absl_logging

from specjax.checks import ELSEWHERE, in_names, one_line
from specjax.cli import BAD_INPUT, BROKEN_PIPE, INTERRUPTED, UNEXPECTED, hosts
from specjax.cli.help_format import SHIPPED, HelpFormatter, definitions, hint
from specjax.compilation import count_compilations, enable_compilation_cache
from specjax.environment import check_devices, specjax_version
from specjax.errors import REFUSALS, UserError
from specjax.runs.processes import LostProcessError

# name -> description; `demo chat` is the module `specjax.cli.demo_chat`.
COMMANDS = {
    "demo": "try specjax: compare settings on sample texts with a built-in pair",
    "demo chat": "a real chat model answers alone and with drafts (extra: chat)",
    "demo code": "your pair of models writes functions alone and with drafts; their tests run",
    "infer": "decode a text, TSV or JSONL file with a pair of models (resumable)",
    "serve": "serve a pair over HTTP with OpenAI's routes (extra: serve)",
    "evaluate": "score predictions with confidence intervals; compare methods",
    "compare": "compare rules, strengths and drafts on your texts; choose the best setting "
    "(resumable)",
    "train": "train, fine-tune or distil a model, such as a drafter for your verifier (resumable)",
    "train drafter": "train a draft head for your verifier, such as EAGLE-3 or DFlash (resumable)",
    "train head": "train a drafter's acceptance head, which decides when a draft ends (resumable)",
    "train bigram": "count the successors of each token in texts, to draft without a model",
    "inspect": "show what a model is, and whether two models are a pair and fit a device",
    "convert": "convert a checkpoint between the formats of Hugging Face, T5X and specjax (Orbax)",
    "bench": "does drafting pay for a pair on this machine, and why not: speed-up and costs of "
    "passes",
    "audit": "audit a verifier of any library: what distribution does it emit?",
}
# Commands that compile little.
_WITHOUT_CACHE = ("convert", "inspect", "evaluate", "train bigram", "audit")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command with these arguments, by default those of the process.

    Returns:
      The exit status: 0 done, 2 bad input, 1 an unexpected error, 3 a comparison in which settings
      failed, 130 interrupted; one line on stderr describes an error. If SPECJAX_TRACEBACK is set,
      errors have Python's traceback.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    command, rest = _command(argv)
    args = argparse.Namespace()
    _tell_failed_writes_once()
    try:
        _parse(command, rest, args)
        args.command_line = ["specjax", *argv]
        with _printing_logs():
            return _run(args)
    except Exception as error:
        together = jax.distributed.is_initialized()
        if os.environ.get("SPECJAX_TRACEBACK"):
            if not together:
                raise
            traceback.print_exception(error)
        status = tell(command, error, getattr(args, "names", {}))
        if together:
            hosts.end(status)
        return status
    except KeyboardInterrupt:
        print(f"specjax {command}: interrupted", file=sys.stderr)
        return INTERRUPTED


def tell(command: str, error: Exception, names: Mapping[str, str] = MappingProxyType({})) -> int:
    """Prints one line about an error that ended a command; returns the exit status.

    Of a fault of specjax the traceback is written to a temporary file, which the line names.
    `names` are those of the command's options for Python's parameters.
    """
    program = f"specjax {command}".strip()
    if isinstance(error, BrokenPipeError) and _reader_has_gone():
        _give_up_stdout()
        return BROKEN_PIPE
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        # An error without a file name is about standard output.
        text = f"standard output cannot be written ({error.strerror}): redirect it elsewhere"
        print(f"{program}: {text}", file=sys.stderr)
        _give_up_stdout()
        return BAD_INPUT
    if isinstance(error, (*REFUSALS, LostProcessError)):
        print(f"{program}: {in_names(one_line(error), names)}", file=sys.stderr)
        # Another process failed: a restart may succeed.
        return UNEXPECTED if isinstance(error, LostProcessError) else BAD_INPUT
    text = f"{type(error).__name__}: {one_line(error)[:200]}"
    print(f"{program}: unexpected {text}; {_log(error)}", file=sys.stderr)
    return UNEXPECTED


def _give_up_stdout() -> None:
    # Otherwise Python reports the error again when it closes the stream.
    with contextlib.suppress(OSError):  # not a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reader_has_gone() -> bool:
    try:
        stdout = sys.stdout.fileno()
    except OSError:  # not a file, as in a test
        return False
    poll = select.poll()
    poll.register(stdout, 0)  # only errors
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _log(error: Exception) -> str:
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="specjax-", suffix=".log", delete=False, encoding="utf-8", errors="replace"
        ) as file:
            traceback.print_exception(error, file=file)
    except OSError as failure:
        return f"the traceback could not be saved ({failure.strerror}): set SPECJAX_TRACEBACK=1"
    return f"the traceback is in {file.name}"


def _tell_failed_writes_once() -> None:
    """Silences Orbax's logs and warnings about failed writes, which `main` reports in one line."""
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    # absl creates its logger on first use.
    absl_logging.get_absl_logger().addFilter(_raises_nothing)


def _raises_nothing(record: logging.LogRecord) -> bool:
    return "_SignalingThread.run() raised" not in record.getMessage()


class _Printed(logging.Handler):
    """Prints what specjax logs, such as the models that it loads."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"specjax: {record.getMessage()}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _printing_logs() -> Iterator[None]:
    logger, printed = logging.getLogger("specjax"), _Printed()
    level, propagates = logger.level, logger.propagate
    logger.addHandler(printed)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(printed)
        logger.setLevel(level)
        logger.propagate = propagates


def _run(args: argparse.Namespace) -> int:
    if hasattr(args, "process_count"):
        args.process = hosts.start(args)
    check_devices()
    hosts.check_joined(args)
    announcement = ""
    if args.command not in _WITHOUT_CACHE:
        # Only here does the command change JAX's global settings.
        directory = enable_compilation_cache()
        kept = f"; later runs load the programs from {directory}" if directory else ""
        announcement = f"specjax: compiling, which takes a while{kept}"
    with count_compilations(announcement):
        status = args.run(args)
        sys.stdout.flush()  # raises here if the output cannot be written
        return status


def _command(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The command, of one or two words, and its arguments."""
    for length in (2, 1):
        if (command := " ".join(argv[:length])) in COMMANDS:
            return command, list(argv[length:])
    return (argv[0], list(argv[1:])) if argv else ("", [])


def _parse(name: str, rest: Sequence[str], args: argparse.Namespace) -> None:
    if not name:
        raise UserError(f"give a command: {', '.join(COMMANDS)}; see specjax --help")
    if name not in COMMANDS and not name.startswith("-"):
        remedy = hint(name, COMMANDS, f"choose from {', '.join(COMMANDS)}")
        raise UserError(f"unknown command; {remedy}")
    parser = _Parser(prog="specjax", description="Speculative decoding and model cascades in JAX")
    version = f"specjax {specjax_version() or '(not installed)'}, jax {jax.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND ARGUMENT")
    for command, what in COMMANDS.items():
        sub = commands.add_parser(
            command, help=what, description=what, formatter_class=HelpFormatter
        )
        if name == command:
            module = importlib.import_module(f"specjax.cli.{name.replace(' ', '_')}")
            module.add_arguments(sub)
            names = {x.dest: x.option_strings[0] for x in sub._actions if x.option_strings}
            sub.set_defaults(run=module.run, names=names | getattr(module, "NAMES", {}))
    # argparse cannot declare --gin.NAME=value, because NAME is arbitrary.
    short = "--gin."
    rest = ["--helpfull" if word == "--help=all" else word for word in rest]
    words = [f"--gin_bindings={a.removeprefix(short)}" if a.startswith(short) else a for a in rest]
    _, unknown = parser.parse_known_args([name, *words], args)
    if unknown and not unknown[0].startswith("-"):
        raise UserError(f"{unknown[0]}: unexpected argument; {_meant(name, unknown[0], args)}")
    if unknown:
        options = commands.choices[name]._actions
        raise UserError(
            f"{unknown[0]}: unknown option; {_option_meant(name, unknown, options, args)}"
        )


class _Parser(argparse.ArgumentParser):
    """Raises ValueError where argparse prints the usage and exits."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def _option_meant(
    name: str, unknown: Sequence[str], options: Sequence[argparse.Action], args: argparse.Namespace
) -> str:
    """A hint about an unknown option."""
    option, equals, value = unknown[0].partition("=")
    default = getattr(args, "default_gin_file", None)
    wanted = option.lstrip("-").replace("-", "_").lower()
    for name_there in (wanted, ELSEWHERE.get(wanted, "").partition("=")[0]):
        if default and name_there.upper() in definitions(SHIPPED / default):
            return f"did you mean --gin.{name_there.upper()}{equals}{value}?"
        if name_there in args.names:
            return f"did you mean {args.names[name_there]}{equals}{value}?"
    value = value or " ".join(word for word in unknown[1:2] if not word.startswith("-"))
    takes_it = [x.option_strings[0] for x in options if value and value in (x.choices or ())]
    near = takes_it or difflib.get_close_matches(
        option, [text for action in options for text in action.option_strings], n=1
    )
    if not near:
        return f"see specjax {name} --help"
    return f"did you mean {near[0]}{'=' if value else ''}{value}?"


def _meant(name: str, word: str, args: argparse.Namespace) -> str:
    """A hint about a word without dashes."""
    seconds = [command.split()[1] for command in COMMANDS if command.startswith(f"{name} ")]
    if near := difflib.get_close_matches(word, seconds, n=1):
        return f"did you mean specjax {name} {near[0]}?"
    default = getattr(args, "default_gin_file", None)
    if default is None:
        return f"see specjax {name} --help"
    if word.endswith(".gin"):
        return f"write --gin_file={word}"
    unset = [binding for binding in args.gin_binding if "=" not in binding]
    names = definitions(SHIPPED / default)
    first = next((x for x in (*unset, "INPUT", "PREDICTIONS") if x in names), "NAME")
    value = "value" if first == "NAME" else word
    return f"write --gin.{first}={value}, or see specjax {name} --help"
