"""Each package says in a line what it is for, and the table of the house counts every line."""

from tests.house import ROOT, packages


def test_each_package_has_a_line():
    assert [name for name, (about, _) in packages().items() if not about] == []


def test_every_line_is_counted():
    lines = sum(len(path.read_text().splitlines()) for path in ROOT.rglob("*.py"))
    assert sum(of["lines"] for _, of in packages().values()) == lines
