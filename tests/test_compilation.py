"""What is compiled for a CPU is right, without the fusions whose code in YNNPACK has faults; what
is compiled is counted, told and kept."""

import ast
import io
import os
import pathlib
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

import specjax
from specjax import compilation, models
from specjax.compilation import count_compilations
from specjax.decoding.method import _words_of_run, _words_of_start
from specjax.training import AdamW
from specjax.training.losses import Total
from specjax.training.step import init_state, make_eval_step, make_train_step
from tests.models.tiny import CONFIGS

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="XLA's compiler for CPUs")
ROWS = 32_769


def squares(matrix, rows):
    """Sums of the squares of products (jax issue 39103)."""
    return jax.vmap(lambda row: jnp.sum((matrix @ row) ** 2))(rows)


def given():
    rows = np.zeros((ROWS, 3), np.float32)
    rows[:, 0] = np.arange(ROWS)
    return np.eye(3, dtype=np.float32), rows


def wrong(found):
    """The rows that are not the squares of their numbers, which float32 gives exactly rounded."""
    return np.flatnonzero(np.asarray(found) != np.arange(ROWS, dtype=np.float32) ** 2).tolist()


@on_cpu
@pytest.mark.parametrize("options", [compilation.cpu_options, compilation.step_options])
def test_sums_of_products_are_right(options):
    assert wrong(compilation.jit(squares, options=options)(*given())) == []


class Squares:
    """A task of training whose loss, and whose evaluation, are such sums."""

    def loss(self, params, constants, batch, key):
        return Total(jnp.sum(self.evaluate(params, constants, batch)), jnp.int32(1))

    def evaluate(self, params, constants, batch):
        return squares(params["kernel"], batch)


@on_cpu
def test_sums_are_right_where_tasks_are_evaluated():
    matrix, rows = given()
    assert wrong(make_eval_step(Squares())({"kernel": matrix}, None, rows)) == []


@on_cpu
def test_training_steps_have_none_of_these_fusions():
    matrix, rows = given()
    optimizer = AdamW(learning_rate=0.01, warmup_steps=1)
    step = make_train_step(Squares(), optimizer, seed=0, ema_decay=0.0)
    state = init_state({"kernel": matrix}, optimizer, 0.0)
    text = step.lower(state, None, rows).compile().as_text()
    assert fused(text) == []


def fused(text):
    """The bodies of YNNPACK's fusions that hold more than a product."""
    names = {line.split("calls=%")[1].split(",")[0] for line in text.splitlines() if _YNN in line}
    bodies = [text.split(f"\n%{name} (")[1].split("\n}")[0] for name in names]
    return [body for body in bodies if " multiply(" in body or " reduce(" in body]


_YNN = '"__ynn_fusion"'


@on_cpu
def test_without_the_options_they_are_not():
    if jaxlib.__version__ != "0.10.2":
        pytest.skip(f"the fault is known of jaxlib 0.10.2, this is {jaxlib.__version__}")
    program = jax.jit(squares)
    assert wrong(program(*given())) == [ROWS - 1]
    assert fused(program.lower(*given()).compile().as_text())


def test_options_are_those_that_xla_knows(monkeypatch):
    assert compilation.cpu_options("tpu") is None and compilation.step_options("gpu") is None
    monkeypatch.setattr(compilation, "CPU_OPTIONS", {compilation._FUSIONS: "NO_SUCH_TYPE"})
    assert compilation.cpu_options("cpu") == compilation.step_options("cpu")
    for name in ("CPU_OPTIONS", "STEP_OPTIONS"):
        monkeypatch.setattr(compilation, name, {"xla_cpu_no_such_option": ""})
    assert compilation.cpu_options("cpu") is None and compilation.step_options("cpu") is None
    monkeypatch.setattr(compilation, "STEP_OPTIONS", {"xla_cpu_enable_fast_math": False})
    assert compilation.step_options("cpu") == {"xla_cpu_enable_fast_math": False}


def test_a_call_within_another_program_is_a_part_of_it():
    model = models.model_from_config(CONFIGS["llama"])
    alone, within = model.init(jax.random.key(0)), jax.jit(model.init)(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, alone, within)
    doubled = jax.grad(lambda x: compilation.jit(lambda y: y**2)(x))(3.0)
    assert doubled == 6.0
    tree = compilation.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree))
    one = np.ones(2, np.float32)
    for inside in (
        lambda x: tree({"a": x})["a"],
        lambda x: tree(tree={"a": x})["a"],
        lambda x: tree({"a": one})["a"] * x,
    ):
        np.testing.assert_array_equal(jax.jit(inside)(one), 2 * one)
        np.testing.assert_array_equal(jax.vmap(inside)(one[None]), 2 * one[None])


def test_the_first_call_of_a_process_may_be_within_another_program():
    """`specjax train` asks for the shapes of its parameters before it computes anything."""
    model = models.model_from_config(CONFIGS["llama"])
    jax.clear_caches()  # else the shapes are known from an earlier test
    compilation._no_trace.cache_clear()
    jax.eval_shape(lambda: model.init(jax.random.key(0)))
    # Nor is what follows taken for a part of a program.
    doubled = compilation.jit(lambda y: 2 * y)
    assert doubled(1.0) == 2.0
    assert doubled.num_programs() == 1


def test_every_program_of_the_package_is_compiled_so():
    root = pathlib.Path(specjax.__file__).parent
    plain = []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("jax.jit", "jax.pmap"):
                plain.append(f"{path.relative_to(root)}:{node.lineno}")
    assert {place.partition(":")[0] for place in plain} == {"compilation.py"}, plain


def test_the_seconds_of_compilation_are_those_of_new_programs():
    @jax.jit
    def cubed(x):
        return x**3

    ones = {n: jnp.ones(n, jnp.float32) for n in (5, 6)}
    jax.block_until_ready(ones)
    seconds = [compilation.compile_seconds()]
    for n in (5, 5, 6):
        np.testing.assert_array_equal(cubed(ones[n]), 1)
        seconds.append(compilation.compile_seconds())
    assert seconds[0] < seconds[1] == seconds[2] < seconds[3]


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
