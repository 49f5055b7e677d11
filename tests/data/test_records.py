import gzip
import os

import pytest

from specjax.data.examples import read_lines


def test_reads_plain_and_gzipped_lines_alike(tmp_path):
    data = "\ufeffeins\r\nzwei\u2028noch zwei\n\nvier".encode()
    plain, packed = tmp_path / "a.txt", tmp_path / "a.txt.gz"
    plain.write_bytes(data)
    packed.write_bytes(gzip.compress(data))
    expected = [(1, "eins"), (2, "zwei\u2028noch zwei"), (3, ""), (4, "vier")]
    assert list(read_lines(plain)) == expected
    assert list(read_lines(packed)) == expected


def test_a_very_long_line_is_one_line(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("x" * 100_000 + "\nshort\n")
    assert [len(line) for _, line in read_lines(path)] == [100_000, 5]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("empty.gz", gzip.compress(b"", mtime=0), r"empty\.gz is empty"),
        ("bad.txt", b"gut\nschl\xffecht\n", r"bad\.txt:2: byte 0xff at column 5 is not UTF-8"),
        ("plain.gz", b"not packed\n", r"plain\.gz: the gzip data are damaged after line 0"),
        (
            "cut.gz",
            gzip.compress(b"a\n" * 99999, mtime=0)[:-20],
            r"cut\.gz: the gzip data are damaged after",
        ),
    ],
)
def test_unreadable_files_are_named(tmp_path, name, data, message):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        list(read_lines(path))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_damaged_gzip_data_give_an_error(tmp_path):
    packed = bytearray(gzip.compress(bytes(range(256)) * 400, mtime=0))
    packed[40:60] = b"\xff" * 20
    path = tmp_path / "broken.gz"
    path.write_bytes(packed)
    with pytest.raises(ValueError, match=r"gzip data are damaged|is not UTF-8"):
        list(read_lines(path))


def test_a_gzipped_file_is_unpacked_once(tmp_path, monkeypatch):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(os.urandom(2**17).hex().encode(), mtime=0))
    opened, own = [], gzip.open
    monkeypatch.setattr(gzip, "open", lambda name: opened.append(name) or own(name))
    assert len(list(read_lines(path))) == len(opened) == 1


def test_a_missing_file_and_a_directory_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.txt: no such file"):
        list(read_lines(tmp_path / "absent.txt"))
    with pytest.raises(IsADirectoryError):
        list(read_lines(tmp_path))
