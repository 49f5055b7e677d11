import errno
import json
import os
from pathlib import Path

import pytest

from specjax.runs.record import record_run


def test_each_process_adds_a_line_and_the_last_configuration_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    record_run("out", command=["specjax", "infer", "--gin.A=b c"], config="A = 'b c'\n")
    record_run("out", command=["specjax"], config="A = 'é'\n", paths={"source": "/in.txt"})
    assert (tmp_path / "out/config.gin").read_text(encoding="utf-8") == "A = 'é'\n"
    first, second = map(json.loads, (tmp_path / "out/runs.jsonl").read_text().splitlines())
    assert first["command"] == "specjax infer '--gin.A=b c'"
    assert first["working_directory"] == str(tmp_path)
    assert first["paths"] == {"output_dir": str(tmp_path / "out")}
    assert second["paths"] == {"source": "/in.txt", "output_dir": str(tmp_path / "out")}
    for line in (first, second):
        assert line["versions"]["jax"] and line["device"].startswith("cpu") and line["python"]


def test_a_full_disk_gives_an_error(tmp_path, monkeypatch):
    def full(self, mode="r", *args, **options):
        if "a" in mode:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(self, mode, *args, **options)

    opened = Path.open
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match=r"runs\.jsonl cannot be written \(No space left on device\)"):
        record_run(tmp_path, command=[], config="")
