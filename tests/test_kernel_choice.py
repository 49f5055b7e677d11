"""Kernels stand in programs for one TPU alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax import kernel_choice
from specjax.kernel_choice import on_one_tpu


def _kernel(x, scale):
    assert x.ndim == 2 and scale.ndim == 1
    return jnp.tan(x) * scale[:, None], jnp.sum(x, axis=1)


def _plain(x, scale):
    assert x.ndim == 1 and scale.ndim == 0
    return jnp.sin(x) * scale, jnp.sum(x)


def _chosen(x, scale=2.0):
    return on_one_tpu(x, jnp.asarray(scale), kernel=_kernel, plain=_plain)


def _text(function, *args):
    return jax.jit(function).trace(*args).lower(lowering_platforms=("tpu",)).as_text()


def _check(x, got):
    np.testing.assert_allclose(got[0], 2.0 * np.sin(x), rtol=1e-6)
    np.testing.assert_allclose(got[1], x.sum(-1), rtol=1e-6)


def test_plain_code_runs_here():
    x = np.arange(24.0, dtype=np.float32).reshape(2, 4, 3)
    twice = jax.vmap(jax.vmap(_chosen))
    for function in (twice, jax.jit(twice)):
        _check(x, function(x))
    _check(x[0, 0], _chosen(x[0, 0]))
    turned = jax.vmap(_chosen, in_axes=1)(x[0])
    _check(x[0].T, turned)


def test_it_is_differentiated_as_plain_code():
    x = jnp.arange(6.0).reshape(2, 3)
    grad = jax.grad(lambda x: jnp.sum(jax.vmap(_chosen)(x)[0]))(x)
    np.testing.assert_allclose(grad, 2.0 * jnp.cos(x), rtol=1e-6)


def test_rows_on_one_tpu_have_the_kernel():
    text = _text(jax.vmap(jax.vmap(_chosen)), jnp.ones((2, 5, 3)))
    assert "hlo.tan" in text and "hlo.sine" not in text
    assert "tensor<10x3xf32>" in text
    # One row alone is no rows.
    assert "hlo.sine" in _text(_chosen, jnp.ones(3))


def test_flattened_rows_keep_their_places():

    x = np.arange(30.0, dtype=np.float32).reshape(2, 5, 3)
    out, total = kernel_choice._flatten_rows(_kernel, 2)(x, np.full((2, 5), 2.0, np.float32))
    np.testing.assert_allclose(out, 2.0 * np.tan(x), rtol=1e-5)
    np.testing.assert_allclose(total, x.sum(-1))


def test_a_mesh_has_plain_code_unless_its_devices_are_told_apart():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    rows = PartitionSpec("data")
    x = jax.device_put(jnp.ones((4, 3)), NamedSharding(mesh, rows))
    text = _text(jax.vmap(_chosen), x)
    assert "hlo.sine" in text and "hlo.tan" not in text
    sharded = functools.partial(jax.shard_map, jax.vmap(_chosen), mesh=mesh, in_specs=rows)
    text = _text(sharded(out_specs=(rows, rows), check_vma=False), x)
    assert "hlo.tan" in text and "hlo.sine" not in text
    text = _text(sharded(out_specs=(rows, rows)), x)
    assert "hlo.sine" in text and "hlo.tan" not in text
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(sharded(out_specs=(PartitionSpec(), PartitionSpec())))(x)
