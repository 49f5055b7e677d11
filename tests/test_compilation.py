"""What is compiled for a CPU is right: without the fusions whose code in YNNPACK has faults."""

import ast
import pathlib

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

import specjax
from specjax import compilation, models
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
