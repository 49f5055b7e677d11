"""Runs notebooks top to bottom, one after another in one process: they share compiled programs.

`python -m tests.notebook_runner NAME.ipynb ...` prints a line of JSON for each. Lines with a magic
are left out; notebooks have none but the installation in Colab.
"""

import ast
import json
import sys
from pathlib import Path


def plain(source):
    """A cell's source with `pass` in the place of each magic."""
    lines = source.split("\n")
    spaces = [len(line) - len(line.lstrip()) for line in lines]
    magic = [line.lstrip().startswith(("%", "!")) for line in lines]
    return "\n".join(
        " " * n + "pass" if skip else line
        for line, n, skip in zip(lines, spaces, magic, strict=True)
    )


def run_cell(source, where, names):
    """Runs a cell; what its last line gives is shown, as a notebook does."""
    tree = ast.parse(plain(source), where)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, where, "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), where, "eval"), names)
        if value is not None:
            print(repr(value))


def run(path):
    """Runs a notebook; returns how many cells of code and figures it has."""
    import matplotlib.pyplot as plt

    counts = {"cells": 0, "figures": 0}

    def show():
        counts["figures"] += len(plt.get_fignums())
        for number in plt.get_fignums():
            plt.figure(number).canvas.draw()
        plt.close("all")

    plt.show = show
    names = {"__name__": "__main__"}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            counts["cells"] += 1
            run_cell("".join(cell["source"]), f"{path.name}, cell {counts['cells']}", names)
    return counts


if __name__ == "__main__":
    import matplotlib

    matplotlib.use("Agg")
    for argument in sys.argv[1:]:
        print(json.dumps({"name": Path(argument).name, **run(Path(argument))}), flush=True)
