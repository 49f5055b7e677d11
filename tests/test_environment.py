"""What of compiling a run records: the options on a CPU, the precision of products elsewhere."""

import jax
import pytest

from specjax import compilation, cpu_kernels
from specjax import environment as environments
from specjax.environment import compiling, environment
from specjax.runs.run_directory import difference
from specjax.training.trainer import training_environment as of_training


def test_on_a_cpu_the_options_are_recorded():
    if jax.default_backend() != "cpu":
        pytest.skip("XLA's compiler for CPUs")
    options = [compilation.cpu_options("cpu"), compilation.step_options("cpu")]
    # A product of float32 is one on a CPU: the precision would refuse runs for nothing.
    kernels = environments.machine().rsplit(", ", 1)[1]
    assert kernels.startswith("no ") != cpu_kernels.available()
    wanted = {"compiler_options": options, "cpu_kernels": kernels}
    assert compiling() == wanted == compiling(float32=False)
    assert environment()["compiler_options"] == of_training()["compiler_options"] == options


def test_elsewhere_the_precision_is_recorded_where_it_counts(monkeypatch):
    monkeypatch.setattr(environments.jax, "default_backend", lambda: "tpu")
    assert compiling() == {"float32_products": "HIGHEST"}
    with jax.default_matmul_precision("bfloat16"):
        assert compiling() == {"float32_products": "bfloat16"}
    assert compiling(float32=False) == {}


def test_a_record_of_before_is_told_apart():
    ours = environment()
    name, value = next(iter(compiling().items()))
    before = {key: x for key, x in ours.items() if key != name}
    shown = repr(value)[:100] + "..." * (len(repr(value)) > 100)
    assert difference(before, ours) == f"{name}: None there, {shown} here"
