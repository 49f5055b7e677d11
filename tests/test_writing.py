"""Files and directories are written whole or not at all."""

import contextlib
import errno
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from specjax import writing


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    writing.write_atomically(path, b"old")
    (tmp_path / ".file.json.unfinished").write_bytes(b"of a killed process, and longer")
    writing.write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"file\.json cannot be written \(No space left on device\)"):
        writing.write_atomically(path, b"newer")
    assert path.read_bytes() == b"new"
    assert [file.name for file in tmp_path.iterdir()] == ["file.json"]


def test_a_link_in_the_place_of_the_unfinished_file_is_not_followed(tmp_path):
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / ".file.json.unfinished").symlink_to(tmp_path / "mine")
    writing.write_atomically(tmp_path / "file.json", b"new")
    assert (tmp_path / "mine").read_bytes() == b"mine"
    assert (tmp_path / "file.json").read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.json", "mine"]


def test_only_this_file_changes_when_another_name_has_its_content(tmp_path):
    (tmp_path / "copy").write_bytes(b"a\n")
    os.link(tmp_path / "copy", tmp_path / "file")
    writing.append(tmp_path / "file", b"b\n")
    writing.append(tmp_path / "file", b"c\n")
    writing.append(tmp_path / "new", b"d\n")
    texts = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert texts == {"copy": b"a\n", "file": b"a\nb\nc\n", "new": b"d\n"}


def test_files_are_changed_in_place_nowhere_else():
    """A run's file may have a second name, in a hard-linked copy of the run."""
    in_place = re.compile(
        r"""["']r?\+?[ab]?a[bt]?\+?["'](?=[,)])|["']r[bt]?\+|truncate\(|O_APPEND"""
    )
    for path in Path(writing.__file__).parent.rglob("*.py"):
        for line in path.read_text().splitlines():
            if ("open" in line or "truncate(" in line) and in_place.search(line):
                assert path.name == "writing.py" or "check_truncate" in line, f"{path}: {line}"


def test_new_files_have_the_permissions_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        writing.write_atomically(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def after_a_full_disk(chained):
    """An error of a library, after the system's."""
    try:
        full()
    except OSError as error:
        raise ValueError("of its own") from (error if chained else None)


def fails(error):
    raise error


FULL = r"out cannot be written \(No space left on device\): free"
WRAPPED = "UNAVAILABLE: 3 of 7 failed [No space left on device]"


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(
    ("body", "error", "told"),
    [
        (lambda: fails(RuntimeError(WRAPPED)), OSError, FULL),
        (lambda: fails(ValueError(WRAPPED)), OSError, FULL),
        (lambda: after_a_full_disk(chained=True), OSError, FULL),
        (lambda: after_a_full_disk(chained=False), ValueError, "^of its own$"),
        (lambda: fails(ValueError("wrong")), ValueError, "^wrong$"),
        (lambda: Path("/absent").read_bytes(), FileNotFoundError, "/absent"),
    ],
)
def test_only_what_a_full_disk_says_is_called_a_failed_write(tmp_path, replace, body, error, told):
    place = writing.new_directory(tmp_path / "out", replace=replace)
    with pytest.raises(error, match=told), place:
        body()
    assert not list(tmp_path.iterdir())


def test_late_writes_of_other_threads_leave_nothing(tmp_path):
    ended = threading.Event()

    def write_on(directory):
        while not ended.is_set():
            with contextlib.suppress(FileExistsError):  # mkdir looks twice
                directory.mkdir(exist_ok=True)
            for i in range(100):
                with contextlib.suppress(FileNotFoundError):
                    (directory / f"{i}").touch()

    with pytest.raises(ValueError, match="^full$"), writing.new_directory(tmp_path / "out") as made:
        threading.Thread(target=write_on, args=(made,)).start()
        threading.Timer(0.4, ended.set).start()
        raise ValueError("full")
    assert ended.is_set()
    assert not list(tmp_path.iterdir())


KILLED = """
from specjax.writing import temporary_directory
with temporary_directory() as place:
    (place / "inner").mkdir()
    print(place)
    input()
"""


def test_temporary_directories_of_killed_processes_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", KILLED]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}, **pipes) as child:
        left = Path(child.stdout.readline().strip())
        others = [tmp_path / name for name in ("specjax-mine", "specjax-named", "specjax-log")]
        for other in others[:2]:  # of other programs
            other.mkdir()
            (other / "mine").touch()
        (others[1] / writing._HELD).mkdir()
        others[2].touch()
        (tmp_path / "specjax-link").symlink_to(left)
        writing._remove_left.cache_clear()  # as in another process
        with writing.temporary_directory() as mine:
            assert left.is_dir() and not mine.is_relative_to(left) and not list(mine.iterdir())
        child.kill()
    writing._remove_left.cache_clear()
    with writing.temporary_directory() as mine:
        assert not left.exists()
        with writing.temporary_directory():
            assert mine.exists()  # its process lives
    left_over = {path.name for path in tmp_path.iterdir()}
    assert left_over == {"specjax-link", *(other.name for other in others)}


def test_a_directory_is_replaced_only_by_a_whole_one_and_then_kept(tmp_path, capsys):
    place = tmp_path / "out"
    place.mkdir()
    (place / "old").touch()
    with pytest.raises(FileExistsError, match="out is not empty"), writing.new_directory(place):
        pass
    with pytest.raises(KeyError), writing.new_directory(place, replace=True) as partial:
        (partial / "new").touch()
        raise KeyError
    assert [path.name for path in place.iterdir()] == ["old"]
    for kept in ("out.earlier-1", "out.earlier-2"):
        with writing.new_directory(place, replace=True) as partial:
            (partial / "new").write_text(kept)
        assert [path.name for path in place.iterdir()] == ["new"]
        assert f"warning: {place} is new; what was there is now {tmp_path / kept}" in (
            capsys.readouterr().err
        )
    assert [path.name for path in (tmp_path / "out.earlier-1").iterdir()] == ["old"]
    assert (tmp_path / "out.earlier-2" / "new").read_text() == "out.earlier-1"
    assert len(list(tmp_path.iterdir())) == 3


def test_a_directory_that_has_the_same_files_stays_with_its_others(tmp_path, capsys):
    place = tmp_path / "out"
    for _ in range(2):
        with writing.new_directory(place, replace=True) as partial:
            (partial / "inner").mkdir()
            (partial / "inner" / "file").write_text("one")
        (place / "inner" / "mine").write_text("mine")
    assert capsys.readouterr().err == ""
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (place / "inner" / "mine").read_text() == "mine"


@pytest.mark.parametrize("owner", ["ours", "theirs"])
def test_only_what_checksums_prove_is_removed(tmp_path, owner):
    place, outside = tmp_path / "out", tmp_path / "outside"
    (place / "inner").mkdir(parents=True)
    outside.write_text("one")
    for name in ("file", "changed", "inner/file"):
        (place / name).write_text("one")
    (place / "link").symlink_to(outside)
    writing.write_checksums(place, owner={"run": owner})
    # Names that lead out of the directory count for nothing.
    sums = place / writing.CHECKSUMS_NAME
    values = json.loads(sums.read_text())
    values["files"]["../outside"] = values["files"]["file"]
    sums.write_text(json.dumps(values))
    (place / "changed").write_text("two")
    (place / "inner" / "mine").write_text("mine")
    everything = {path.relative_to(place).as_posix() for path in place.rglob("*")}
    writing.remove_proven(place, owner={"run": "ours"})
    left = {path.relative_to(place).as_posix() for path in place.rglob("*")}
    gone = {"file", "inner/file", sums.name} if owner == "ours" else set()
    assert left == everything - gone and outside.read_text() == "one"


def test_a_removal_that_was_killed_goes_on(tmp_path):
    place = tmp_path / "out"
    place.mkdir()
    for name in "abc":
        (place / name).write_text(name)
    writing.write_checksums(place, owner={"run": "ours"})
    (place / "b").unlink()
    writing.remove_proven(place, owner={"run": "ours"})
    assert not place.exists()


def test_what_a_killed_process_left_is_removed_and_a_living_one_is_respected(tmp_path):
    dead = tmp_path / ".out.specjax-partial"
    dead.mkdir()
    (dead / "half").touch()
    (tmp_path / ".out.specjax-lock").touch()
    with writing.new_directory(tmp_path / "out") as partial:
        assert not list(partial.iterdir())
        with (
            pytest.raises(OSError, match="another process is writing .*out: wait"),
            writing.new_directory(tmp_path / "out"),
        ):
            pass
        (partial / "whole").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["whole"]


def test_what_a_link_leads_to_is_replaced(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("one", "two"):
        with writing.new_directory(tmp_path / "link", replace=True) as place:
            (place / name).touch()
        assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == [name]
        assert (tmp_path / "link").is_symlink()
    there = sorted(path.name for path in tmp_path.iterdir())
    assert there == ["elsewhere", "elsewhere.earlier-1", "link"]
