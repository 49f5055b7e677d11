"""A fingerprint is the same however an array is split, and another after any change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from specjax import fingerprints
from specjax.fingerprints import digest

DTYPES = ("float32", "bfloat16", "float16", "int8", "int32", "uint16", "bool", "float64", "int64")
SPECS = [(), ("x",), ("y",), (None, "x"), ("x", "y"), ("y", "x"), (("x", "y"),), (None, ("x", "y"))]


def array(shape, dtype="float32"):
    values = np.random.default_rng(0).uniform(1, 100, shape)
    return np.asarray(values > 50 if dtype == "bool" else values).astype(dtype)


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("shape", [(8, 16), (16, 8, 3), (8, 8, 0), (24, 40)])
def test_however_an_array_is_split(mesh, shape, dtype):
    given = array(shape, jnp.dtype(dtype))
    expected = digest({"a": given})
    for spec in SPECS:
        placed = jax.device_put(given, NamedSharding(mesh, jax.P(*spec)))
        assert digest({"a": placed}) == expected, spec
    assert digest({"a": jax.device_put(given, SingleDeviceSharding(jax.devices()[3]))}) == expected


def test_no_copy_of_the_weights_is_made(mesh):
    """A copy on the host would stay as long as the array."""
    placed = jax.device_put(array((8, 16)), NamedSharding(mesh, jax.P("x")))
    digest(placed)
    assert all(part.data._npy_value is None for part in placed.addressable_shards)
    memory = fingerprints._sums.lower(jnp.ones((64, 256, 256)), jnp.dtype("float32"))
    assert memory.compile().memory_analysis().temp_size_in_bytes < 10_000


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_number_of_axes(mesh, dtype):
    for shape in ((), (1,), (8,), (0,), (3, 5), (2, 3, 4), (70_000,), (3, 40_000)):
        given = array(shape, jnp.dtype(dtype))
        own = digest({"a": given})
        assert own == digest({"a": given.copy(order="F")})
        if jnp.asarray(given).dtype == given.dtype:
            assert own == digest({"a": jnp.asarray(given)})
        if given.size:
            changed = given.copy()
            at = tuple(n - 1 for n in shape)
            changed[at] = np.zeros((), given.dtype) if given[at] else np.ones((), given.dtype)
            assert digest({"a": changed}) != own
    eight = jax.device_put(array((8,), jnp.dtype(dtype)), NamedSharding(mesh, jax.P("x")))
    assert digest([eight]) == digest([np.asarray(eight)])


def changes():
    given = array((40, 48))
    yield "none", {"a": given, "b": given + 1}
    rng = np.random.default_rng(1)
    for number, place in enumerate(rng.permutation(given.size)[:600]):
        changed = given.copy()
        changed.reshape(-1).view(np.uint32)[place] ^= np.uint32(1 << (number % 32))
        yield f"bit of {place}", {"a": changed, "b": given + 1}
    # Signs are the highest bits: two changes must not undo each other.
    for places in np.split(rng.permutation(given.size), 960):
        changed = given.copy()
        changed.reshape(-1)[places] *= -1
        yield f"signs of {places}", {"a": changed, "b": given + 1}
    for places in np.split(rng.permutation(given.size), 960)[:200]:
        changed = given.copy()
        changed.reshape(-1)[places] = changed.reshape(-1)[places[::-1]]
        yield f"swap of {places}", {"a": changed, "b": given + 1}
    for name, other in {
        "rows": given[[1, 0, *range(2, 40)]],
        "columns": given[:, [1, 0, *range(2, 48)]],
        "rolled": np.roll(given, 1),
        "reversed": given[::-1],
        "transposed": given.T,
        "reshaped": given.reshape(48, 40),
        "flat": given.reshape(-1),
        "zero": given * 0,
        "minus zero": given * -0.0,
        "negative": -given,
        "doubled": 2 * given,
        "shorter": given[:-1],
        "other bits": given.view(np.int32),
        "wider": given.astype(np.float64),
        "narrower": given.astype(jnp.bfloat16),
    }.items():
        yield name, {"a": other, "b": given + 1}
    yield "names", {"b": given, "a": given + 1}
    yield "name", {"a": given, "c": given + 1}
    yield "nested", {"a": given, "b": {"c": given + 1}}
    yield "fewer", {"a": given}
    for rows in range(1, 6):
        yield f"zeros {rows}", {"a": np.zeros((rows, 4), np.float32)}


def test_every_change_gives_another():
    found: dict[str, str] = {}
    for what, params in changes():
        mark = digest(params)
        assert mark not in found, (what, found.get(mark))
        found[mark] = what
    assert len(found) > 1780
    assert digest({"a": np.ones(3)}, "one") != digest({"a": np.ones(3)}, "two")


def test_fingerprints_stay_what_they_are():
    """Files have them: heads, measured costs, the configurations of runs."""
    rows = np.arange(12, dtype=np.float32).reshape(3, 4) / 7
    assert digest({"a": rows}) == "67d1b8b65a5a0be5"
    assert digest({"a": rows, "b": [np.int8(3)]}, "text") == "158468ebb94a7d5c"
    assert digest({"a": rows}, as_bfloat16=True) == "01a629e9dcc66bfb"


def test_weights_are_known_in_float32_and_bfloat16(mesh):
    narrow = jnp.asarray(array((16, 8))).astype(jnp.bfloat16)
    mark = digest({"a": narrow, "b": jnp.int32(3)}, as_bfloat16=True)
    wide = {"a": narrow.astype(jnp.float32), "b": jnp.int32(3)}
    assert digest(wide, as_bfloat16=True) == mark
    sharding = NamedSharding(mesh, jax.P("y", "x"))
    assert digest({**wide, "a": jax.device_put(wide["a"], sharding)}, as_bfloat16=True) == mark
    assert digest({**wide, "b": jnp.int32(4)}, as_bfloat16=True) != mark
