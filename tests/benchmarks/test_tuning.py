"""The benchmark of `specjax tune` refuses bad input; what it measures is in docs/tuning.md."""

import pytest

from benchmarks.tuning import main

GIVEN = ["--inputs", "texts.txt", "--references", "references.txt", "--store", "store"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "texts.txt: no such file"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--texts", "8"], "--texts must be at least 16, got 8"),
        (["--demands", "fast"], "demand must be such as"),
    ],
)
def test_bad_input_is_one_line(capsys, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    assert main([*GIVEN, *args]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())
