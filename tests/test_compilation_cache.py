import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.compilation import count_compilations

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
