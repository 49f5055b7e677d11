"""A run owns its directory before it touches anything, and touches only what it has made."""

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest

from specjax.runs import run_directory
from specjax.runs.run_directory import RunDirectory, difference, fingerprint_of
from specjax.writing import new_directory, write_checksums


def opened(path, *makes):
    return RunDirectory(path, config_name="config.json", makes=("out.txt", "tree", *makes))


def names(path):
    return sorted(entry.name for entry in path.iterdir())


def test_directories_are_made_with_their_parents_and_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    place = tmp_path / "a" / "b \u00fc"
    with opened("~/a/b \u00fc") as run:
        assert run.path == place
        assert names(place) == [".specjax.lock"]
    assert not (tmp_path / "a").exists()  # nothing was claimed


def test_a_path_that_is_not_a_directory_gives_an_error(tmp_path):
    (tmp_path / "file").touch()
    for path, message in (
        (tmp_path / "file", "file is a file: give a new directory"),
        (tmp_path / "file" / "in", r"file/in cannot be written \(Not a directory\)"),
    ):
        with pytest.raises(OSError, match=message), opened(path):
            pass
    (tmp_path / "link").symlink_to("nothing")
    with pytest.raises(OSError, match=r"link cannot be written \(File exists\)"):
        opened(tmp_path / "link").__enter__()
    with pytest.raises(ValueError, match="has a NUL character"):
        opened(f"{tmp_path}/nul\0")
    with pytest.raises(ValueError, match="output_dir is empty"):
        opened("")
    with pytest.raises(OSError, match=r"xxx cannot be written \(File name too long\)"):
        opened(tmp_path / ("x" * 300)).__enter__()
    with pytest.raises(ValueError, match="output_dir=5 must be a path"):
        opened(5)
    with pytest.raises(ValueError, match="output_dir=~nobody-here/run: .*: give the full path"):
        opened("~nobody-here/run")


def test_a_parent_that_another_start_removes_is_made_again(tmp_path, monkeypatch):
    made, place = [], tmp_path / "a" / "b"

    def removing(*, dir):
        made.append(dir)
        if len(made) < 3:
            dir.rmdir()
            dir.parent.rmdir()
        return own(dir=dir)

    own = run_directory.tempfile.TemporaryFile
    monkeypatch.setattr(run_directory.tempfile, "TemporaryFile", removing)
    with opened(place) as run:
        run.claim({"a": 1})
    assert made == 3 * [place] and names(place) == ["config.json"]


def test_the_first_claim_is_kept(tmp_path):
    with opened(tmp_path) as run:
        assert not run.kept
        run.claim({"a": (1, 2), "b": {"c": 1}})
        assert not run.kept
    with opened(tmp_path) as run:
        assert run.kept
        run.claim({"b": {"c": 1}, "a": [1, 2]})
        with pytest.raises(
            ValueError, match=r"\(b\.c: 1 there, 2 here\): choose another output_dir"
        ):
            run.claim({"a": (1, 2), "b": {"c": 2}})
        with pytest.raises(ValueError, match="d: None there, 0 here"):
            run.claim({"a": (1, 2), "b": {"c": 1}, "d": 0})
        run.claim({"a": 3}, replace=True)
    with opened(tmp_path) as run:
        run.claim({"a": 3})


def test_another_environment_is_refused_unless_it_is_allowed(tmp_path, capsys):
    here, there = ({"a": 1, "environment": {"xla_flags": flags}} for flags in ("", "--fast"))
    with opened(tmp_path) as run:
        run.claim(there)
    with opened(tmp_path) as run:
        with pytest.raises(
            ValueError,
            match=r"\(environment.xla_flags: '--fast' there, '' here\): .*allow_other_environ",
        ):
            run.claim(here)
        with pytest.raises(ValueError, match="continue the run$"):
            run.claim({**here, "a": 2}, allow_other_environment=True)
        run.claim(here, allow_other_environment=True)
        assert capsys.readouterr().err.count("environment.xla_flags: '--fast' there") == 1
        run.claim(here)


DAMAGED = [
    b"", b"{", b"[]", b"{}", b"\xff", b'{"kept": true}',
    b'{"kept": true, "files": "a"}', b"[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("damaged", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_configuration_is_told_and_kept(tmp_path, damaged):
    path = tmp_path / "config.json"
    path.write_bytes(damaged)
    with (
        pytest.raises(ValueError, match=r"config\.json is damaged, or not the configuration"),
        opened(tmp_path),
    ):
        pass
    assert path.read_bytes() == damaged
    assert names(tmp_path) == ["config.json"]


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("name", ["../docs", "docs", "sub/../../docs", "ABSOLUTE"])
def test_names_that_the_run_does_not_make_are_refused_and_stay(tmp_path, name, kept):
    for docs in (tmp_path / "docs", tmp_path / "run" / "docs"):
        docs.mkdir(parents=True)
        (docs / "page").touch()
    listed = str(tmp_path / "docs") if name == "ABSOLUTE" else name
    stored = json.dumps({"a": 1, "files": [listed], "kept": kept})
    (tmp_path / "run" / "config.json").write_text(stored)
    with (
        pytest.raises(ValueError, match=r"config\.json is damaged, or not the configuration"),
        opened(tmp_path / "run"),
    ):
        pass
    assert (tmp_path / "docs" / "page").exists()
    assert (tmp_path / "run" / "docs" / "page").exists()


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("name", ["out.txt", "tree", "config.gin", "runs.jsonl"])
def test_what_no_run_has_made_is_refused_and_kept(tmp_path, name, is_listed):
    """A directory in the place of a file, or a file in that of a directory."""
    place = tmp_path / name
    with opened(tmp_path) as run:
        run.claim({})
        if is_listed:
            run.own(name)
    (place.mkdir if place.suffix else place.touch)()
    with pytest.raises(FileExistsError, match=f"{name} is not a file of this run"):
        opened(tmp_path).__enter__()
    assert place.is_dir() == bool(place.suffix)
    assert names(tmp_path) == sorted(["config.json", name])


@pytest.mark.parametrize("name", ["specjax.json", "model-1.safetensors", "checkpoint_100"])
def test_the_directory_of_a_model_is_refused(tmp_path, name):
    (tmp_path / name).write_text("{}")
    with pytest.raises(FileExistsError, match=rf"holds a model \({name}\): choose another"):
        opened(tmp_path).__enter__()
    assert name in names(tmp_path) and "config.json" not in names(tmp_path)


def test_inputs_and_logs_may_be_beside_a_run(tmp_path):
    for name in ("captions.txt", "log.txt", ".gitignore"):
        (tmp_path / name).write_text("mine")
    for _ in range(2):
        with opened(tmp_path) as run:
            run.claim({"a": 1})
    assert (tmp_path / "captions.txt").read_text() == "mine"


def test_a_file_that_a_run_writes_meanwhile_is_its_own(tmp_path, monkeypatch):
    """A comparison is read while it is written."""
    own = run_directory.read_config

    def read_then_write(path):
        found = own(path)
        run.write("out.txt", b"")
        return found

    with opened(tmp_path) as run:
        run.claim({"a": 1})
        with monkeypatch.context() as patched:
            patched.setattr(run_directory, "read_config", read_then_write)
            assert opened(tmp_path).peek()["a"] == 1
        assert opened(tmp_path).peek()["files"] == ["out.txt"]


@pytest.mark.parametrize("name", ["out.txt", "runs.jsonl", "config.json"])
@pytest.mark.parametrize("there", [True, False])
def test_a_link_in_the_place_of_a_file_is_refused_and_what_it_leads_to_kept(tmp_path, name, there):
    place, other = tmp_path / "out", tmp_path / "other"
    with opened(place) as run:
        run.claim({})
        run.record(command=[])
        run.write("out.txt", b"")
    (place / name).unlink()
    (place / name).symlink_to(other)
    if there:
        other.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match=f"{name} is not a file of this run"):
        opened(place).__enter__()
    assert other.read_bytes() == b"mine" if there else not other.exists()


def test_a_link_in_the_place_of_a_directory_is_refused_and_what_it_leads_to_kept(tmp_path):
    with opened(tmp_path / "out") as run:
        run.claim({})
        run.own("tree").mkdir()
    (tmp_path / "out/tree").rmdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_bytes(b"mine")
    (tmp_path / "out/tree").symlink_to(tmp_path / "mine")
    with pytest.raises(FileExistsError, match="tree is not a file of this run"):
        opened(tmp_path / "out").__enter__()
    assert (tmp_path / "mine/file").read_bytes() == b"mine"


@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_a_lock_that_no_run_made_is_refused_and_kept(tmp_path, kind):
    place, other = tmp_path / "out", tmp_path / "other"
    place.mkdir()
    other.write_bytes(b"mine")
    lock = place / ".specjax.lock"
    {
        "file": lambda: lock.write_bytes(b"mine"),
        "link": lambda: lock.symlink_to(other),
        "directory": lock.mkdir,
    }[kind]()
    with pytest.raises(OSError, match=r"\.lock .*: move it, or choose another directory"):
        opened(place).__enter__()
    assert other.read_bytes() == b"mine"
    assert lock.is_dir() if kind == "directory" else lock.read_bytes() == b"mine"


def test_what_a_run_has_made_may_be_replaced(tmp_path):
    for text in (b"one", b"two"):
        with opened(tmp_path) as run:
            run.claim({})
            run.write("out.txt", text)
            with new_directory(run.own("tree"), replace=True) as place:
                (place / text.decode()).touch()
        assert (tmp_path / "out.txt").read_bytes() == text
        assert names(tmp_path / "tree") == [text.decode()]
    assert names(tmp_path / "tree.earlier-1") == ["one"]


def test_a_claim_that_goes_leaves_what_the_run_cannot_prove(tmp_path):
    with pytest.raises(KeyError), opened(tmp_path) as run:
        run.claim({"a": 1})
        run.own("tree").mkdir()
        (tmp_path / "tree" / "own").write_text("own")
        write_checksums(tmp_path / "tree", owner=run.owner)
        (tmp_path / "tree" / "mine").write_text("mine")
        raise KeyError
    assert names(tmp_path) == ["tree"] and names(tmp_path / "tree") == ["mine"]
    with pytest.raises(OSError, match="tree is not a file of this run"):
        opened(tmp_path).__enter__()


def test_a_first_start_that_fails_leaves_the_directory_as_it_was(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(KeyError), opened(tmp_path) as run:
        run.claim({"a": 1})
        run.record(command=["specjax"], config="")
        run.write("out.txt", b"")
        run.own("tree").mkdir()
        raise KeyError
    assert names(tmp_path) == ["mine"]
    with pytest.raises(KeyError), opened(tmp_path) as run:
        run.claim({"a": 2})
        run.write("out.txt", b"of worth")
        run.keep()
        raise KeyError
    with pytest.raises(KeyError), opened(tmp_path) as run:
        run.claim({"a": 2})
        raise KeyError
    assert names(tmp_path) == ["config.json", "mine", "out.txt"]


def test_a_claim_that_a_killed_start_left_binds_nobody_unless_it_kept_something(tmp_path):
    def killed(configuration, keeps):
        run = opened(tmp_path).__enter__()
        run.claim(configuration)
        run.write("out.txt", b"made")
        if keeps:
            run.keep()
        run._stack.close()  # the lock ends with the process

    killed({"a": 1}, keeps=False)
    killed({"a": 2}, keeps=True)
    with pytest.raises(ValueError, match="a: 2 there, 3 here"):
        killed({"a": 3}, keeps=False)
    assert (tmp_path / "out.txt").read_bytes() == b"made"
    with pytest.raises(KeyError), opened(tmp_path) as run:
        run.claim({"a": 2})
        raise KeyError
    assert (tmp_path / "out.txt").read_bytes() == b"made"


def test_a_disk_that_is_full_at_the_claim_is_told(tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(f"{path} cannot be written (No space left on device)")

    monkeypatch.setattr(run_directory, "write_atomically", full)
    with pytest.raises(OSError, match="config.json cannot be written"), opened(tmp_path) as run:
        run.claim({})
    assert names(tmp_path) == []


def test_a_configuration_that_cannot_be_read_is_not_called_damaged(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(OSError, match=r"config\.json is not a regular file"):
        opened(tmp_path).__enter__()


def test_only_one_process_works_in_a_directory(tmp_path):
    with opened(tmp_path):
        with pytest.raises(OSError, match="is used by another process"):
            opened(tmp_path).__enter__()
        assert names(tmp_path) == [".specjax.lock"]
    with opened(tmp_path):
        pass
    assert names(tmp_path) == []


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with opened(tmp_path) as run:
        run.claim({})
    error = capsys.readouterr().err
    assert "has no locks (No locks available): do not start a second process" in error
    assert error.count("\n") == 1


def test_each_process_adds_a_line_and_the_last_configuration_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    with opened("out") as run:
        run.claim({})
        run.record(command=["specjax", "infer", "--gin.A=b c"], config="A = 'b c'\n")
        run.record(command=["specjax"], config="A = 'é'\n", paths={"source": "/in.txt"})
    assert (out / "config.gin").read_text(encoding="utf-8") == "A = 'é'\n"
    first, second = map(json.loads, (out / "runs.jsonl").read_text().splitlines())
    assert first["command"] == "specjax infer '--gin.A=b c'"
    assert first["working_directory"] == str(tmp_path)
    assert first["paths"] == {"output_dir": str(out)}
    assert second["paths"] == {"source": "/in.txt", "output_dir": str(out)}
    for line in (first, second):
        assert line["versions"]["jax"] and line["device"].startswith("cpu") and line["python"]


def test_a_full_disk_gives_an_error(tmp_path, monkeypatch):
    def full(self, mode="r", *args, **options):
        if "a" in mode:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return unpatched(self, mode, *args, **options)

    unpatched = Path.open
    monkeypatch.setattr(Path, "open", full)
    with (
        pytest.raises(OSError, match=r"runs\.jsonl cannot be written \(No space left on device\)"),
        opened(tmp_path) as run,
    ):
        run.claim({})
        run.record(command=[], config="")


CONFIG = "T5Config(vocab_size=2048, embed_dim={}, num_heads=4, head_dim=32, " + "x=0.1, " * 40 + ")"


@pytest.mark.parametrize(
    ("theirs", "ours", "told"),
    [
        (
            {"models": {"verifier": "a1"}, "model_names": {"verifier": "large"}, "tokens": "x"},
            {"models": {"verifier": "b2"}, "model_names": {"verifier": "base"}, "tokens": "y"},
            "VERIFIER: large there, base here, tokens: 'x' there, 'y' here",
        ),
        (  # the same weights at another place
            {"models": {"verifier": "a1"}, "model_names": {"verifier": "large"}, "seed": 0},
            {"models": {"verifier": "a1"}, "model_names": {"verifier": "../large"}, "seed": 1},
            "seed: 0 there, 1 here",
        ),
        (  # other weights at the same place
            {"models": {"verifier": "a1"}, "model_names": {"verifier": "large"}},
            {"models": {"verifier": "b2"}, "model_names": {"verifier": "large"}},
            "models.verifier: 'a1' there, 'b2' here",
        ),
        (  # of a training, which has hashes of the teacher's parameters
            {"constants": "a1", "model_names": {"teacher": "large"}, "task": {"teacher": CONFIG}},
            {"constants": "b2", "model_names": {"teacher": "base"}, "task": {"teacher": None}},
            "TEACHER: large there, base here, constants: 'a1' there, 'b2' here, task.teacher: "
            f"'{CONFIG[:99]}... there, None here",
        ),
        (  # a training whose model has another path and whose data have other tokens
            {"data": {"tokens": "a"}, "model_names": {"teacher": "large"}},
            {"data": {"tokens": "b"}, "model_names": {"teacher": "../large"}},
            "TEACHER: large there, ../large here, data.tokens: 'a' there, 'b' here",
        ),
        (
            {"model": CONFIG.format(128)},
            {"model": CONFIG.format(64)},
            "model: ...onfig(vocab_size=2048, embed_dim=128, num_heads=4, head_dim=32, x=0.1, "
            "x=0.1, x=0.1, x=0.1, x=0.1, x... there, ...onfig(vocab_size=2048, embed_dim=64, "
            "num_heads=4, head_dim=32, x=0.1, x=0.1, x=0.1, x=0.1, x=0.1, x=... here",
        ),
        ({"model_names": {"verifier": "a"}}, {"model_names": {"verifier": "b"}}, ""),
    ],
)
def test_a_changed_model_is_told_by_its_name(theirs, ours, told):
    assert difference(theirs, ours) == told
    assert fingerprint_of({"model_names": {}}) == fingerprint_of({})
