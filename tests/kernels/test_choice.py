"""Kernels stand in programs for one TPU alone."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.kernels.choice import on_one_tpu


def _chosen(x):
    return on_one_tpu(x, kernel=lambda x: jnp.tan(x), plain=lambda x: jnp.sin(x))


def _text(function, *args):
    return jax.jit(function).trace(*args).lower(lowering_platforms=("tpu",)).as_text()


def test_plain_code_runs_here():
    x = jnp.arange(6.0).reshape(2, 3)
    for function in (_chosen, jax.jit(_chosen), jax.vmap(_chosen), jax.jit(jax.vmap(_chosen))):
        np.testing.assert_allclose(function(x), np.sin(x), rtol=1e-6)


def test_one_tpu_has_the_kernel():
    text = _text(_chosen, jnp.ones(3))
    assert "tan" in text and "sine" not in text


def test_a_mesh_has_plain_code_unless_its_devices_are_told_apart():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    rows = PartitionSpec("data")
    x = jax.device_put(jnp.ones(4), NamedSharding(mesh, rows))
    text = _text(_chosen, x)
    assert "sine" in text and "tan" not in text
    text = _text(jax.shard_map(_chosen, mesh=mesh, in_specs=rows, out_specs=rows), x)
    assert "tan" in text and "sine" not in text
