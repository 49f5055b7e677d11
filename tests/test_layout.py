"""No function over 60 lines, no class over 200, no file over 400; no private modules."""

import ast
import pathlib

import specjax

ROOT = pathlib.Path(specjax.__file__).parent
LIMITS = {ast.FunctionDef: 60, ast.ClassDef: 200}


def too_long(path):
    """What in a file is too long: (name, lines, limit). Docstrings and arguments do not count."""
    text = path.read_text()
    if len(text.splitlines()) > 400:
        yield path.name, len(text.splitlines()), 400
    for node in ast.walk(ast.parse(text)):
        limit = next((most for kind, most in LIMITS.items() if isinstance(node, kind)), None)
        if limit is not None and (size := _size(node)) > limit:
            yield f"{path.name}:{node.name}", size, limit


def _size(node):
    """Lines of code: those of a statement, without any docstring in it."""
    lines = node.end_lineno - node.body[0].lineno + 1
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner):
            docstring = inner.body[0]
            lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def test_nothing_is_too_long():
    found = [item for path in sorted(ROOT.rglob("*.py")) for item in too_long(path)]
    assert not found


def test_files_are_named_by_their_content():
    assert not [path for path in ROOT.rglob("_*.py") if path.name not in _DUNDER]


_DUNDER = ("__init__.py", "__main__.py")


def test_a_long_function_is_seen(tmp_path):
    path = tmp_path / "long.py"
    path.write_text("def f():\n" + "    x = 1\n" * 61)
    assert list(too_long(path)) == [("long.py:f", 61, 60)]
