"""One clear line for each prompt that does not fit."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import check_prompts
from tests.models.tiny import tiny

INPUTS = np.full((3, 6), 5)
LENGTHS = np.array([6, 1, 3])


def _check(name="llama", inputs=INPUTS, lengths=LENGTHS, max_length=8, **options):
    check_prompts(tiny(name).model, inputs, lengths, max_length, **options)


def test_what_fits_passes():
    _check()
    _check(new_tokens=2)
    _check("t5_v1_1", max_length=3, new_tokens=2)  # inputs take none of the decoder's cache
    _check(prefix=np.full((3, 2), 1), prefix_lengths=np.array([2, 0, 1]))
    _check(inputs=np.where(np.arange(6) < LENGTHS[:, None], 5, 99))  # padding is not looked at


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 5}, "row 0: a prompt of 6 tokens need 6 cache positions but there are 5: "),
        ({"new_tokens": 3}, "row 0: a prompt of 6 tokens and 3 new tokens need 9 .* to 9 or short"),
        (
            {"prefix": np.full((3, 4), 1), "prefix_lengths": np.array([0, 1, 4]), "max_length": 6},
            "row 2: a prompt of 7 tokens need 7",
        ),
        (
            {"name": "t5_v1_1", "prefix": np.full((3, 4), 1), "max_length": 4},
            "row 0: a prompt of 5 tokens need 5",
        ),
        ({"lengths": np.array([6, 0, 3])}, "inputs row 1 has length 0: give every row at least"),
        ({"lengths": np.array([6, 7, 3])}, "inputs row 1 has length 7: inputs has room for 6"),
        ({"inputs": INPUTS + 43}, "inputs row 0 has token 48 at position 0: .* in 0 .. 47; is th"),
        ({"inputs": -INPUTS}, "inputs row 0 has token -5 at position 0"),
        ({"prefix": np.full((3, 1), 48)}, "prefix row 0 has token 48"),
        ({"prefix": np.full((2, 1), 4)}, "prefix has 2 rows but inputs have 3"),
        ({"inputs": INPUTS[0]}, r"inputs is int64\[6\]: must be an integer array \[rows, tokens\]"),
        ({"inputs": INPUTS * 1.0}, r"inputs is float64\[3, 6\]"),
        ({"lengths": LENGTHS[:2]}, r"lengths of inputs are int64\[2\]: .* array \[3\], one per r"),
    ],
)
def test_what_does_not_fit_is_named_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        _check(**options)
    assert "\n" not in str(caught.value)


def test_shapes_and_dtypes_are_checked_when_tracing():
    t = tiny("t5_v1_1")
    cache, _, positions = t.prefill(t.params, np.ones((3, 7), np.int32), np.full(3, 2), 40)
    tokens = jnp.ones((3, 2), jnp.int32)
    for bad, message in (
        ((tokens[:2], positions[:2]), "tokens have 2 rows but the cache has 3"),
        ((tokens[:, 0], positions), r"tokens is int32\[3\]"),
        ((tokens.astype(jnp.float32), positions), r"tokens is float32\[3, 2\]"),
        ((tokens, positions[:2]), r"lengths of tokens are int32\[2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            t.model.extend(t.params, cache, *bad)
    with pytest.raises(ValueError, match=r"encoder_mask has shape \[3, 1\]: must be .* \[3, 2\]"):
        t.model.apply(t.params, tokens, tokens, encoder_mask=jnp.ones((3, 1), bool))
    with pytest.raises(ValueError, match="prefix has 2 rows but inputs have 3"):
        t.model.prefill(t.params, tokens, positions + 1, 40, tokens[:2])
