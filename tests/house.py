"""Prints the packages with their lines, to see what grows: `python -m tests.house`."""

import ast
import collections
import pathlib

import specjax

ROOT = pathlib.Path(specjax.__file__).parent
COLUMNS = ("files", "lines", "docstrings", "code")


def counts(path):
    """One file's counts, by column."""
    text = path.read_text()
    lines = text.splitlines()
    inside = set()
    for node in ast.walk(ast.parse(text)):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node):
            inside |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    blank = sum(not line.strip() for i, line in enumerate(lines, 1) if i not in inside)
    return collections.Counter(
        files=1,
        lines=len(lines),
        docstrings=len(inside),
        code=len(lines) - blank - len(inside),
    )


def packages(root=ROOT):
    """Package -> its first line of documentation and its counts; "." is what is in no package."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        name = parts[0] if len(parts) > 1 else "."
        start = root / ("" if name == "." else name) / "__init__.py"
        line = (ast.get_docstring(ast.parse(start.read_text())) or "").split("\n")[0]
        about, before = found.get(name, (line, collections.Counter()))
        found[name] = about, before + counts(path)
    return found


def main():
    print(f"{'':16}" + "".join(f"{name:>11}" for name in COLUMNS))
    rows = sorted(packages().items(), key=lambda item: -item[1][1]["lines"])
    for name, (about, of) in rows:
        print(f"{name:16}" + "".join(f"{of[column]:11,}" for column in COLUMNS) + f"  {about}")
    total = sum((of for _, of in packages().values()), collections.Counter())
    print(f"{'total':16}" + "".join(f"{total[column]:11,}" for column in COLUMNS))


if __name__ == "__main__":
    main()
