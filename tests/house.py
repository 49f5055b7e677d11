"""Prints the packages with their lines, to see what grows: `python -m tests.house`."""

import ast
import pathlib

import specjax

ROOT = pathlib.Path(specjax.__file__).parent


def packages(root=ROOT):
    """Package -> its first line of documentation, files and lines; "." is what is in no package."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        name = parts[0] if len(parts) > 1 else "."
        start = root / ("" if name == "." else name) / "__init__.py"
        about = (ast.get_docstring(ast.parse(start.read_text())) or "").split("\n")[0]
        _, files, lines = found.get(name, ("", 0, 0))
        found[name] = about, files + 1, lines + len(path.read_text().splitlines())
    return found


def main():
    rows = sorted(packages().items(), key=lambda item: -item[1][2])
    for name, (about, files, lines) in rows:
        print(f"{name:16}{files:6,}{lines:9,}  {about}")
    files, lines = (sum(of[i] for _, of in rows) for i in (1, 2))
    print(f"{'total':16}{files:6,}{lines:9,}")


if __name__ == "__main__":
    main()
