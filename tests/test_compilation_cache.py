import io
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import compilation
from specjax.compilation import count_compilations
from specjax.decoding.method import _words_of_run, _words_of_start

CHILD = """
import jax, specjax
from specjax.compilation import count_compilations
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
    salt = time.time_ns() % 1000  # no kept program is like it

    @jax.jit
    def cubed(x):
        return x**3 + salt

    ones = {n: jnp.ones(n, jnp.float32) for n in (5, 6, 7)}
    jax.block_until_ready(ones)
    with count_compilations("told") as outer, count_compilations() as inner:
        for n in (5, 6, 5):
            np.testing.assert_array_equal(cubed(ones[n]), 1 + salt)
        assert inner.compiled == outer.compiled == 2 and inner.read == 0
    cubed(ones[7])
    assert inner.compiled == outer.compiled == 2
    assert capsys.readouterr().err == "told\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("announcement", ["told", ""])
@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (None, "the slow function"),
        (lambda x: f"the sum of {len(x)} numbers", "the sum of 3 numbers"),
    ],
)
def test_a_long_compilation_says_what_it_is(monkeypatch, announcement, stream, words, what):
    """The function is as long in XLA as a line about it needs."""
    event, shown = compilation._BACKEND_COMPILE, stream()
    line = f"specjax: compiling {what}: 0 s"

    def _the_slow_function(x):
        jax.monitoring.record_scalar(event, 0.0, fun_name="jit(_the_slow_function)")
        while announcement and line not in shown.getvalue():
            time.sleep(0.01)
        jax.monitoring.record_event_duration_secs(event, 0.0)
        return x + 1

    monkeypatch.setattr(compilation, "_LONG", 0.01)
    monkeypatch.setattr(sys, "stderr", shown)
    ones = jnp.ones(3, jnp.float32)
    with count_compilations(announcement):
        compilation.jit(_the_slow_function, words=words)(ones)
    assert (line in shown.getvalue()) == bool(announcement)
    # On a terminal the line is replaced, elsewhere it is written once in a while.
    assert (f"{line}\n" in shown.getvalue()) == (announcement != "" and stream is io.StringIO)


def test_programs_say_what_they_do():
    one, many = SimpleNamespace(max_draft=0), SimpleNamespace(max_draft=5)
    state = {rows: SimpleNamespace(tokens=np.zeros((rows, 64))) for rows in (1, 8)}
    prompts = {rows: SimpleNamespace(inputs=np.zeros((rows, 32))) for rows in (1, 8)}
    assert (
        _words_of_run(one, (), state[1]) == "the step of a token for 1 row of up to 64 new tokens"
    )
    said = _words_of_run(many, (), state[8], 1, 1)
    assert said == "the round of 6 tokens for 8 rows of up to 64 new tokens"
    said = [_words_of_start(one, 64, 99, (), 1, (), prompts[rows]) for rows in (1, 8)]
    assert said[0] == "the prefill of 1 prompt of up to 32 tokens"
    assert said[1] == "the prefill of 8 prompts of up to 32 tokens"
