import errno
import os

import pytest

from specjax.runs import output_directory


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    output_directory.write_atomically(path, b"old")
    (tmp_path / ".file.json.unfinished").write_bytes(b"of a killed process, and longer")
    output_directory.write_atomically(path, b"new")
    assert path.read_bytes() == b"new"

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"file\.json cannot be written \(No space left on device\)"):
        output_directory.write_atomically(path, b"newer")
    assert path.read_bytes() == b"new"
    assert [file.name for file in tmp_path.iterdir()] == ["file.json"]


def test_new_files_have_the_permissions_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        output_directory.write_atomically(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_directories_are_made_with_their_parents_and_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert output_directory.make_writable("~/a/b \u00fc") == tmp_path / "a" / "b \u00fc"
    assert list((tmp_path / "a" / "b \u00fc").iterdir()) == []


def test_a_path_that_is_not_a_directory_gives_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"file is a file: choose a directory"):
        output_directory.make_writable(tmp_path / "file")
    with pytest.raises(OSError, match=r"file/in cannot be written \(Not a directory\)"):
        output_directory.make_writable(tmp_path / "file" / "in")
    with pytest.raises(ValueError, match="output_dir is empty"):
        output_directory.make_writable("")
    with pytest.raises(TypeError, match="output_dir=5 must be a path"):
        output_directory.make_writable(5)


def test_the_first_claim_is_kept(tmp_path):
    path = tmp_path / "config.json"
    output_directory.claim(path, {"a": (1, 2), "b": {"c": 1}})
    output_directory.claim(path, {"b": {"c": 1}, "a": [1, 2]})
    with pytest.raises(ValueError, match=r"\(b\.c: 1 there, 2 here\): choose another output_dir"):
        output_directory.claim(path, {"a": (1, 2), "b": {"c": 2}})
    with pytest.raises(ValueError, match="d: None there, 0 here"):
        output_directory.claim(path, {"a": (1, 2), "b": {"c": 1}, "d": 0})
    for damaged in (b"", b"{", b"[]", b"{}", b"\xff"):
        path.write_bytes(damaged)
        with pytest.raises(
            ValueError, match=r"config\.json is damaged, or not the configuration of a run"
        ):
            output_directory.claim(path, {"a": 1})
        assert path.read_bytes() == damaged


def test_only_one_process_works_in_a_directory(tmp_path):
    with (
        output_directory.locked(tmp_path),
        pytest.raises(OSError, match="another process is at work in it"),
        output_directory.locked(tmp_path),
    ):
        pass
    with output_directory.locked(tmp_path):
        pass
