"""The kernels compile for the TPUs that XLA's compiler knows, where libtpu is installed."""

import importlib.util
import os
import subprocess
import sys

import pytest

_PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from specjax import sampling
from specjax.types import Sampling

devices = topologies.get_topology_desc(platform="tpu", topology_name={topology!r}).devices
where = SingleDeviceSharding(devices[0])
for rows, vocab in ((8, 32128), (3, 1000), (9, 256000)):
    levels = sampling.draws.num_uniforms(vocab)

    def run(x, y, temperature, uniforms):
        at = jax.vmap(Sampling)(temperature)
        p, tokens = jax.vmap(sampling.distributions.drawn)(x, at, uniforms)
        q = jax.vmap(sampling.distributions.distribution)(y, at)
        return p, tokens, jax.vmap(sampling.draws.draw)(q, uniforms)

    shapes = [((rows, vocab), "float32")] * 2 + [((rows,), "float32")]
    shapes += [((rows, levels), "float32")]
    args = [jax.ShapeDtypeStruct(*shape, sharding=where) for shape in shapes]
    text = jax.jit(run).lower(*args).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3, text
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize(
    ("topology", "kind"),
    [("v5e:2x2", "v5litepod-4"), ("v5p:2x2x1", "v5p-8"), ("v6e:2x2", "v6e-4")],
)
def test_kernels_compile(topology, kind):
    own = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": kind,
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    program = _PROGRAM.format(topology=topology)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
