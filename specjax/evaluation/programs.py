"""pass@1 of generated programs: MBPP and HumanEval."""

import concurrent.futures
import functools
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from specjax.data.records import read_objects
from specjax.errors import UserError
from specjax.evaluation.metrics import MeanMetric
from specjax.evaluation.sandbox import Sandbox

_FENCED = re.compile(r"^```[\w+-]*[ \t]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)


class Problem(NamedTuple):
    """A programming problem with its tests.

    Attributes:
      prompt: the beginning of the program, which the output continues; "" if there is none.
      entry_point: the tested function, if the prompt begins it, otherwise "".
      tests: code to run after the program, which raises an error if the program is wrong.
    """

    prompt: str
    entry_point: str
    tests: str


def read_problems(path: str | os.PathLike[str]) -> list[Problem]:
    """Reads the problems of HumanEval or MBPP.

    Args:
      path: a JSONL file, plain or `.gz`, whose objects have the keys of HumanEval (`prompt`,
        `entry_point`, `test`) or of MBPP (`test_list`, and `test_setup_code` or `test_imports`).

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: the file is empty or not JSONL, or a line has other keys.
    """
    name = os.path.expanduser(os.fspath(path))
    return [_problem(f"{name}:{number}", row) for number, _, row in read_objects(name)]


def check_problems(
    problems: Sequence[Problem], inputs: Sequence[str | None], path: Any, source: Any
) -> None:
    """Raises UserError unless each input has the name of the function that its problem tests."""
    for i, (problem, text) in enumerate(zip(problems, inputs, strict=True)):
        if text is not None and problem.entry_point not in text:
            raise UserError(
                f"problem {i} of {path} tests {problem.entry_point!r}, which is not in row {i} of "
                f"{source}: give the problems of these inputs, in the same order"
            )


def _problem(where: str, row: dict[str, Any]) -> Problem:
    if all(isinstance(row.get(key), str) for key in ("prompt", "entry_point", "test")):
        tests = f"{row['test']}\ncheck({row['entry_point']})\n"
        return Problem(row["prompt"], row["entry_point"], tests)
    lists = [row.get("test_imports", []), row.get("test_list")]
    if all(isinstance(x, list) and all(isinstance(line, str) for line in x) for x in lists):
        setup = row.get("test_setup_code") or ""
        return Problem("", "", "\n".join([str(setup), *lists[0], *(row["test_list"])]) + "\n")
    raise UserError(
        f"{where}: the line must have the keys of HumanEval (prompt, entry_point, test) or of "
        "MBPP (test_list)"
    )


def program(problem: Problem, output: str) -> str:
    """The program of an output, with the problem's tests.

    The output is the continuation of the prompt, or a whole function, perhaps in a Markdown block
    (the first block counts).
    """
    fenced = _FENCED.search(output)
    code = fenced[1] if fenced else output
    whole = re.search(rf"^def\s+{re.escape(problem.entry_point)}\b", code, re.MULTILINE)
    prompt = problem.prompt
    if prompt and whole:
        # Keeps the prompt's imports and definitions; the output defines the function again.
        prompt = f"{prompt.rstrip()}\n    pass\n\n"
    return f"{prompt}{code}\n\n{problem.tests}"


# The rounds of a search score the same outputs again, and lossless settings often write the same.
@functools.lru_cache(maxsize=1 << 14)
def _passes(sandbox: Sandbox, source: str) -> bool:
    return sandbox.run(source).passed


class PassAt1(MeanMetric):
    """The share of outputs that pass their problem's tests.

    The references of an output are the fields of its `Problem`. Equal programs are run only once in
    a process.

    Args:
      sandbox: runs the programs.
      workers: the number of programs at a time; by default the number of processors.

    Source: Chen et al. 2021 (HumanEval), Austin et al. 2021 (MBPP); one output per problem.
    """

    def __init__(self, sandbox: Sandbox, *, workers: int | None = None):
        self._sandbox, self._workers = sandbox, workers or os.cpu_count() or 1

    def values(self, outputs: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
        pairs = zip(outputs, references, strict=True)
        sources = [program(Problem(*problem), output) for output, problem in pairs]
        with concurrent.futures.ThreadPoolExecutor(self._workers) as pool:
            return list(map(float, pool.map(functools.partial(_passes, self._sandbox), sources)))

    def refusal(self, references: Sequence[str]) -> str | None:
        if len(references) == len(Problem._fields):
            return None
        return f"pass@1 needs {', '.join(Problem._fields)}, got {len(references)} texts"
