import errno
import itertools
import os
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache as jax_cache
from jax._src.lru_cache import LRUCache

import specjax
from specjax.compilation import BACKEND_COMPILE
from specjax.runs import compilation_cache
from specjax.runs.compilation_cache import CheckedCache, count_compilations

CHILD = """
import jax, specjax
from specjax.runs.compilation_cache import count_compilations
assert jax.config.jax_compilation_cache_dir is None, "an import must change nothing"
print(specjax.enable_compilation_cache())
with count_compilations("compiling") as counts:
    for size in (3, 4):
        jax.block_until_ready(jax.jit(lambda x: x @ x + 1)(jax.numpy.ones((size, size))))
print(counts.compiled, counts.read)
"""


def test_programs_are_kept_and_only_compiling_is_announced_once(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    environment |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path)}
    counts = []
    for _ in range(2):
        out = subprocess.run(
            [sys.executable, "-c", CHILD],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        directory, numbers = out.stdout.splitlines()
        assert directory == str(tmp_path / "specjax" / "programs")
        counts.append((*map(int, numbers.split()), out.stderr.count("compiling")))
    (compiled, read, told), again = counts
    assert compiled >= 2 and (read, told) == (0, 1)
    assert again == (0, compiled, 0)


def test_decoding_works_without_a_writable_cache(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    names = ("jax_enable_compilation_cache", "jax_compilation_cache_dir")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", None)  # set by the environment
    try:
        assert specjax.enable_compilation_cache() is None
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_compilations_are_counted_while_the_context_lasts(capsys):
    @jax.jit
    def cubed(x):
        return x**3

    ones = {n: jnp.ones(n, jnp.float32) for n in (5, 6, 7)}
    jax.block_until_ready(ones)
    with count_compilations("told") as outer, count_compilations() as inner:
        for n in (5, 6, 5):
            np.testing.assert_array_equal(cubed(ones[n]), 1)
        assert inner.compiled == outer.compiled == 2 and inner.read == 0
    cubed(ones[7])
    assert inner.compiled == outer.compiled == 2
    assert capsys.readouterr().err == "told\n"


DAMAGES = (
    lambda data: data[: len(data) // 2],
    lambda data: b"",
    lambda data: bytes(range(256)) * 8,
    lambda data: data[:-60] + bytes([data[-60] ^ 1]) + data[-59:],
    lambda data: data[:-40],  # no checksum, as other programs write them
)


def test_damaged_programs_are_compiled_again_and_replaced(tmp_path):
    code = CHILD.replace("(3, 4)", "(3, 4, 5, 6)")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    environment |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path)}

    def run():
        command = [sys.executable, "-W", "error", "-c", code]
        out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        compiled, read = map(int, out.stdout.splitlines()[1].split())
        return compiled, read, out.stderr.replace("compiling\n", "")

    assert run()[1:] == (0, "")
    entries = sorted((tmp_path / "specjax/programs").glob("*-cache"))
    damaged = {}
    for entry, damage in zip(entries, itertools.cycle([*DAMAGES, None])):
        if damage is not None:
            damaged[entry] = damage(entry.read_bytes())
            entry.write_bytes(damaged[entry])
    compiled, read, told = run()
    assert compiled >= len(DAMAGES) and read >= 1
    assert told == (
        f"specjax: {tmp_path}/specjax/programs has damaged programs, or programs without checksum: "
        "compiling them again\n"
    )
    assert all(entry.read_bytes() != data for entry, data in damaged.items())
    assert run() == (0, compiled + read, "")


def test_jax_alone_reads_programs_that_have_a_checksum(tmp_path):
    """What lies behind the entry does not disturb it."""
    path = tmp_path / "key-cache"
    cache = CheckedCache(LRUCache(str(tmp_path), max_size=-1))
    entry = jax_cache.compress_executable(b"program" * 99)
    cache.put("key", entry)
    assert path.read_bytes() != entry == cache.get("key")
    assert jax_cache.decompress_executable(path.read_bytes()) == b"program" * 99
    assert cache.get("another") is None


def test_an_entry_appears_whole_and_is_written_once(tmp_path):
    """Another process that looks meanwhile finds no entry, or all of it."""
    seen = []

    class Watched(LRUCache):
        def put(self, key, value):
            super().put(key, value)
            seen.append((tmp_path / "key-cache").exists())

    cache = CheckedCache(Watched(str(tmp_path), max_size=-1))
    for value in (b"first", b"second"):
        cache.put("key", value)
    assert seen == [False] and cache.get("key") == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["key-cache"]


def test_a_full_disk_is_told_once_and_leaves_no_torn_entry(tmp_path, capsys):
    class Full:
        _path = tmp_path

        def put(self, key, value):
            (tmp_path / f"{key}-cache").write_bytes(value[:9])
            raise OSError(errno.ENOSPC, "No space left on device")

    cache = CheckedCache(Full())
    cache.put("one", b"program" * 99)
    cache.put("two", b"program" * 99)
    assert capsys.readouterr().err == (
        f"specjax: compiled programs are not saved: {tmp_path}: No space left on device\n"
    )
    assert not list(tmp_path.iterdir())


def test_a_long_compilation_is_told_while_it_lasts(monkeypatch, capsys):
    """By one thread for all programs, also after one that is refused."""
    monkeypatch.setattr(compilation_cache, "_EVERY", 0.1)
    before = threading.active_count()
    with count_compilations("compiling") as counts:
        for _ in range(2):
            counts.on_event(compilation_cache._REQUEST)
            assert threading.active_count() == before + 1
            time.sleep(0.35)
            counts.on_duration(BACKEND_COMPILE, 0.35)
            told = capsys.readouterr().err
            assert told.count("specjax: compiling a program: 0 s\n") in (2, 3)
            counts.on_event(compilation_cache._REQUEST)  # a short one is not told
            time.sleep(0.06)
            counts.on_duration(BACKEND_COMPILE, 0.06)
            with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
                jax.jit(lambda: 0, compiler_options={"nothing": 1}).lower().compile()
            capsys.readouterr()
            time.sleep(0.25)
            assert capsys.readouterr().err == ""
    time.sleep(0.15)
    assert threading.active_count() == before
