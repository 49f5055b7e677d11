"""Damage to a file: what a disk, an editor or another program may do to it."""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

# In the place of any value of a JSON file.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 0.5, -0.5, 10**5, float("nan"), float("inf"), "", "x", "1",
    "\0", "a\nb", "\ud800", "../x", [], [1], [[]], [None], {}, {"a": 1}, {"": []}, ["x", {}],
)  # fmt: skip
# Where nothing is allocated by the value.
HUGE = (2**31, 2**63, 10**30, 10**400, -(10**400), 1e308)
# In the place of a whole file.
TEXTS = (
    b"", b"\n", b"null", b"[]", b"{}", b'"x"', b"5", b"{", b"\0", b"\xff\xfe{}", b"\xef\xbb\xbf{}",
    b"[" * 100_000, b'{"a":' * 100_000, b'{"a": ' + b"1" * 5000 + b"}", b'{"a": 1, "a": 2}',
    b"NaN", b"\r\n\r\n", b"\xed\xa0\x80",
)  # fmt: skip
KINDS = ("file", "directory", "dangling", "circle", "removed", "linked")


@dataclasses.dataclass(frozen=True)
class Change:
    """One change of one file.

    Attributes:
      file: its path in the directory that is changed.
      how: a method of this class, without its underscore.
      at: a place, in thousandths of the file's bytes, lines or values.
      value: what is put there.
    """

    file: str
    how: str
    at: int = 0
    value: Any = None

    def apply(self, directory: Path, outside: Path) -> None:
        """Makes the change.

        Args:
          directory: holds the file.
          outside: a directory for what a link leads to.
        """
        path = directory / self.file
        if self.how in ("add", "become") or (path.is_file() and not path.is_symlink()):
            getattr(self, f"_{self.how}")(path, outside)

    def _flip(self, path: Path, _: Path) -> None:
        data = bytearray(path.read_bytes())
        if data:
            data[self.at * len(data) // 1000] ^= 1 << (self.value % 8)
            path.write_bytes(data)

    def _cut(self, path: Path, _: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[: self.at * len(data) // 1000])

    def _insert(self, path: Path, _: Path) -> None:
        data = path.read_bytes()
        place = self.at * len(data) // 1000
        path.write_bytes(data[:place] + self.value + data[place:])

    def _whole(self, path: Path, _: Path) -> None:
        path.write_bytes(self.value)

    def _lines(self, path: Path, _: Path) -> None:
        """Drops, repeats or swaps lines."""
        lines = path.read_bytes().splitlines(keepends=True)
        if not lines:
            return
        i = self.at * len(lines) // 1000
        j = (i + 1) % len(lines)
        if self.value == "swap":
            lines[i], lines[j] = lines[j], lines[i]
        else:
            lines[i : i + 1] = {"drop": [], "repeat": [lines[i]] * 2}[self.value]
        path.write_bytes(b"".join(lines))

    def _json(self, path: Path, _: Path) -> None:
        """Puts a value into a JSON file, or into a line of a JSONL file."""
        lines = path.read_bytes().splitlines() if path.suffix == ".jsonl" else [path.read_bytes()]
        i = self.at * len(lines) // 1000
        try:
            tree = json.loads(lines[i])
        except (ValueError, RecursionError, IndexError):
            return  # another change has been here
        places = list(_places(tree))
        if places:
            container, key = places[self.at * 7 % len(places)]
            container[key] = fitting(key, self.value)
            lines[i] = json.dumps(tree).encode()
            path.write_bytes(b"\n".join(lines) + b"\n")

    def _delete(self, path: Path, _: Path) -> None:
        """Removes a key or an item of a JSON file."""
        try:
            tree = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            return
        if places := list(_places(tree)):
            container, key = places[self.at * len(places) // 1000]
            del container[key]
            path.write_bytes(json.dumps(tree).encode())

    def _add(self, path: Path, _: Path) -> None:
        if not os.path.lexists(path):
            path.write_bytes(self.value)

    def _become(self, path: Path, outside: Path) -> None:
        """Puts something else in the file's place, which may be free."""
        kept = path.read_bytes() if path.is_file() else b"not the run's\n"
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        if self.value == "file":
            path.write_bytes(kept)
        elif self.value == "directory":
            path.mkdir()
            (path / "inside.txt").write_bytes(kept)
        elif self.value == "dangling":
            path.symlink_to(outside / "nothing")
        elif self.value == "circle":
            path.symlink_to(path.name)
        elif self.value == "linked":
            (outside / path.name).write_bytes(kept)
            path.symlink_to(outside / path.name)


def fitting(key: Any, value: Any) -> Any:
    """A value that allocates no more than a small model does."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return 7 if number and value > 64 and "layers" in str(key) else value


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every value of a JSON tree, as its container and its key there."""
    if not isinstance(tree, dict | list):
        return
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, key
        yield from _places(value)


def changes(files: list[str], kinds: Sequence[str] = KINDS) -> st.SearchStrategy[Change]:
    """Changes of any of these files, of a kind that each may undergo."""
    name, at = st.sampled_from(files), st.integers(0, 999)
    named = [file for file in files if file.endswith((".json", ".jsonl"))]
    options = [
        st.builds(Change, name, st.just("flip"), at, st.integers(0, 7)),
        st.builds(Change, name, st.just("cut"), at),
        st.builds(Change, name, st.just("insert"), at, st.sampled_from(TEXTS)),
        st.builds(Change, name, st.just("whole"), st.just(0), st.sampled_from(TEXTS)),
        st.builds(Change, name, st.just("lines"), at, st.sampled_from(["drop", "repeat", "swap"])),
        st.builds(Change, name, st.just("become"), st.just(0), st.sampled_from(kinds)),
    ]
    if named:
        of_json = st.sampled_from(named)
        options += [
            st.builds(Change, of_json, st.just("json"), at, st.sampled_from(VALUES + HUGE))
        ] * 3
        options.append(st.builds(Change, of_json, st.just("delete"), at))
    return st.one_of(options)
