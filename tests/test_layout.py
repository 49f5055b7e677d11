"""No function over 60 lines, no name twice, no private modules."""

import ast
import collections
import pathlib

import specjax

ROOT = pathlib.Path(specjax.__file__).parent
LONGEST = 60


def too_long(path):
    """The functions of a file that are too long: (name, lines). Docstrings do not count."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and (size := _size(node)) > LONGEST:
            yield f"{path.name}:{node.name}", size


def _size(node):
    """Lines of code: those of the body, without any docstring in it."""
    lines = node.end_lineno - node.body[0].lineno + 1
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner):
            docstring = inner.body[0]
            lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def twice(root):
    """Names of several classes, and of several modules, that lie below a directory."""
    modules, classes = collections.Counter(), collections.Counter()
    for path in root.rglob("*.py"):
        if path.stem not in _DUNDER:
            modules[path.stem] += 1
        body = ast.parse(path.read_text()).body
        classes.update(node.name for node in body if isinstance(node, ast.ClassDef))
    return tuple({name for name, n in c.items() if n > 1} for c in (classes, modules))


def test_nothing_is_too_long():
    found = [item for path in sorted(ROOT.rglob("*.py")) for item in too_long(path)]
    assert not found


def test_a_name_stands_for_one_thing():
    assert twice(ROOT) == (set(), set())


def test_files_are_named_by_their_content():
    assert not [path for path in ROOT.rglob("_*.py") if path.stem not in _DUNDER]


_DUNDER = ("__init__", "__main__")


def test_a_long_function_is_seen(tmp_path):
    path = tmp_path / "long.py"
    path.write_text("def f():\n" + "    x = 1\n" * 61)
    assert list(too_long(path)) == [("long.py:f", 61)]


def test_a_name_that_is_taken_is_seen(tmp_path):
    for directory in ("a", "b"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "part.py").write_text("class Part:\n    pass\n")
    assert twice(tmp_path) == ({"Part"}, {"part"})
