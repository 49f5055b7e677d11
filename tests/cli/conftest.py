"""A run of `specjax infer` that the tests of the command share, one per file."""

import pytest

from specjax.cli.main import main
from tests import tiny_pair
from tests.cli.infer_command import TEXTS, arguments, write


@pytest.fixture(autouse=True)
def models_line(monkeypatch):
    """Leaves out the line about the models, so that tests count the lines of errors."""
    monkeypatch.setattr("specjax.cli.main._Printed.emit", lambda *_: None)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return tiny_pair.write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def done(paths, tmp_path_factory):
    """A finished run: its input and its output directory."""
    directory = tmp_path_factory.mktemp("run")
    source = write(directory, TEXTS)
    assert main(arguments(paths, source, directory / "out")) == 0
    return source, directory / "out"
