"""A run of `specjax infer` that all files share: they read it, or copy it to change it."""

import pytest

from specjax.cli.main import main
from tests import tiny_pair
from tests.cli.infer_command import TEXTS, arguments, write


@pytest.fixture(autouse=True)
def models_line(monkeypatch):
    """Leaves out the line about the models, so that tests count the lines of errors."""
    monkeypatch.setattr("specjax.cli.main._Printed.emit", lambda *_: None)


@pytest.fixture(scope="session")
def paths():
    return tiny_pair.shared_pair()


@pytest.fixture(scope="session")
def done(paths, tmp_path_factory):
    """A finished run: its input and its output directory."""
    directory = tmp_path_factory.mktemp("run")
    source = write(directory, TEXTS)
    assert main(arguments(paths, source, directory / "out")) == 0
    return source, directory / "out"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Texts to be copied, for `tiny_train.gin`; a file of tests may have its own."""
    directory = tmp_path_factory.mktemp("data")
    texts = tiny_pair.sentences(132, longest=5)
    for name, some in (("train", texts[:120]), ("validation", texts[120:])):
        (directory / f"{name}.tsv").write_text("".join(f"{text}\t{text}\n" for text in some))
    return directory
