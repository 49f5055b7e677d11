"""The kernels of draws compile for the TPUs that XLA knows, where libtpu is installed."""

import pytest

from tests.models import test_compiled_kernels as of_models

pytestmark = of_models.pytestmark
_PROGRAM = """
import jax
from jax.sharding import SingleDeviceSharding
from benchmarks.tpu.topologies import mesh_of
from specjax.sampling import distributions, draws
from specjax.types import Sampling

where = SingleDeviceSharding(mesh_of({chip!r}, 1, 1).devices.item(0))
for rows, vocab in ((8, 32128), (3, 1000), (9, 256000)):
    levels = draws.num_uniforms(vocab)

    def run(x, y, temperature, uniforms):
        at = jax.vmap(Sampling)(temperature)
        p, tokens = jax.vmap(distributions.draw_from_logits)(x, at, uniforms)
        q = jax.vmap(distributions.distribution)(y, at)
        return p, tokens, jax.vmap(draws.draw)(q, uniforms)

    shapes = [(rows, vocab), (rows, vocab), (rows,), (rows, levels)]
    args = [jax.ShapeDtypeStruct(shape, "float32", sharding=where) for shape in shapes]
    text = jax.jit(run).lower(*args).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3, text
"""


@pytest.mark.parametrize("chip", of_models.CHIPS)
def test_kernels_compile(chip):
    of_models._run(_PROGRAM.format(chip=chip), of_models.CHIPS[chip])
