"""Arrays are searched for NaN wherever they lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.checkpoints import arrays
from specjax.errors import UserError


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("spec", [(), ("data",), (None, "model"), ("data", "model")])
def test_a_nan_is_found_wherever_it_is(monkeypatch, dtype, spec):
    monkeypatch.setattr(arrays, "_BLOCK", 50)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))

    def check(values):
        arrays.check_shards("w", jax.device_put(values, sharding))

    values = np.ones((6, 12, 7), dtype)
    check(values)
    for place in list(np.ndindex(values.shape))[::97]:
        values[place] = np.nan
        with pytest.raises(UserError) as error:
            check(values)
        assert str(error.value).startswith(f"w has nan at {place}: copy the checkpoint again")
        values[place] = 1
    check(np.zeros((0, 12, 7), dtype))
