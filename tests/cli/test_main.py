"""What all commands have in common: versions, errors in one line, the cache of programs."""

import os
import re
import subprocess
import sys

import jax
import pytest
from absl import logging

from specjax.cli import hosts, main
from specjax.errors import MissingLibraryError, UserError
from specjax.runs.processes import Process


class Command:
    """A command that raises what it is told to."""

    args = None
    error: Exception | None = None

    @staticmethod
    def add_arguments(parser):
        parser.add_argument("--size", type=int, default=3, help="how large")
        parser.add_argument("--name", help="how called")

    @classmethod
    def run(cls, args):
        cls.args = args
        if cls.error:
            raise cls.error
        return 0


@pytest.fixture(autouse=True)
def command(monkeypatch):
    monkeypatch.setattr(main, "COMMANDS", {"drive": "drives"})
    monkeypatch.setitem(sys.modules, "specjax.cli.drive", Command)
    monkeypatch.setattr(Command, "error", None)


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit, match="0"):
        main.main(["--version"])
    told = capsys.readouterr().out
    assert told.startswith("specjax ") and told.endswith(f", jax {jax.__version__}\n")


def test_help_says_in_one_line_what_each_command_is_for(monkeypatch, capsys):
    monkeypatch.undo()  # the real commands
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit, match="0"):
        main.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    for command, what in main.COMMANDS.items():
        found = [line for line in lines if line.startswith(f"    {command}  ")]
        assert len(found) == 1 and found[0].endswith(f"  {what}")


def test_help_shows_defaults_that_say_something(capsys):
    with pytest.raises(SystemExit, match="0"):
        main.main(["drive", "--help"])
    told = capsys.readouterr().out
    assert "how large (default: 3)" in told and "how called\n" in told


EVERY = [
    ["demo"],
    ["convert"],
    ["train"],
    ["train", "bigram"],
    ["train", "head"],
    ["compare"],
    ["infer"],
    ["bench"],
]


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_every_option_has_a_text_and_no_empty_default(monkeypatch, capsys, words):
    monkeypatch.undo()  # the real commands
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit, match="0"):
        main.main([*words, "--help"])
    options = capsys.readouterr().out.split("options:\n")[1].split("\n\n")[0]
    for option in re.split(r"\n(?=  -)", options):
        # Two spaces or a new line, then the text.
        assert re.search(r"\S(  |\n) *\w", option), option
    assert "default: None" not in options and "default: False" not in options


def test_a_command_knows_its_own_words():
    assert main.main(["drive", "--size", "4"]) == 0
    assert Command.args.command_line == ["specjax", "drive", "--size", "4"]


@pytest.mark.parametrize("kind", [UserError, OSError, MissingLibraryError])
def test_bad_input_is_one_line_and_a_traceback_on_request(monkeypatch, capsys, kind):
    monkeypatch.setattr(Command, "error", kind("a thing is wrong"))
    assert main.main(["drive"]) == 2
    assert capsys.readouterr().err == "specjax drive: a thing is wrong\n"
    monkeypatch.setenv("SPECJAX_TRACEBACK", "1")
    with pytest.raises(kind):
        main.main(["drive"])


@pytest.mark.parametrize(
    ("found", "remedy"),
    [
        ({"process": None}, "give --distributed, or run launch/tpu.sh"),
        ({}, "run specjax drive on a TPU of one host, or with JAX_PLATFORMS=cpu"),
        ({"process": Process(1, 4)}, None),
    ],
)
def test_a_tpu_of_hosts_that_were_not_joined_is_refused(monkeypatch, capsys, found, remedy):
    """On Cloud TPU VMs no variable tells of the other hosts; JAX knows them once it has started."""
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(Command, "args", None)

    def add_arguments(parser):
        if found:
            hosts.add_arguments(parser)

    monkeypatch.setattr(Command, "add_arguments", staticmethod(add_arguments))
    monkeypatch.setattr(hosts, "start", lambda args: found["process"])
    assert main.main(["drive"]) == (2 if remedy else 0)
    told = f"specjax drive: this TPU has 4 hosts: {remedy}\n" if remedy else ""
    assert capsys.readouterr().err == told
    assert (Command.args is None) == bool(remedy)  # nothing has begun


CHILD = """
import sys, jax
from specjax.cli import main
class Command:
    add_arguments = staticmethod(lambda parser: None)
    @staticmethod
    def run(args):
        jax.jit(lambda x: x + 1)(1.0), jax.jit(lambda x: x + 2)(1.0)
        return 0
main.COMMANDS = {"drive": "", "convert": ""}
sys.modules["specjax.cli.drive"] = sys.modules["specjax.cli.convert"] = Command
assert main.main(["convert"]) == 0 and jax.config.jax_compilation_cache_dir is None
assert main.main(["drive"]) == 0 and jax.config.jax_compilation_cache_dir is not None
"""


def test_commands_keep_programs_and_tell_of_compiling_once(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    environment |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path)}
    for told in ([f"later runs load the programs from {tmp_path}/specjax/programs"], []):
        child = [sys.executable, "-c", CHILD]
        out = subprocess.run(child, env=environment, capture_output=True, text=True, check=True)
        lines = [line for line in out.stderr.splitlines() if "later runs" in line]
        assert [line.split("; ")[1] for line in lines] == told, out.stderr


def test_what_orbax_also_raises_is_not_logged():
    main._tell_failed_writes_once()
    logger = logging.get_absl_logger()

    def is_told(text):
        return bool(logger.filter(logger.makeRecord("absl", 40, "f", 1, text, ("x",), None)))

    assert is_told("%s is lost")
    assert not is_told("[process=0] _SignalingThread.run() raised an exception: %s")
