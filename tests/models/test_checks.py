"""Shapes and dtypes that do not agree give an error of one line at trace time."""

import jax.numpy as jnp
import pytest

from specjax.types import Prompts
from tests.models.tiny import tiny

TOKENS = jnp.ones((3, 2), jnp.int32)
LENGTHS = jnp.full(3, 2, jnp.int32)


def _cache(t):
    return t.prefill(t.params, Prompts(TOKENS, LENGTHS), 8).cache


def test_blocks_that_do_not_agree_with_their_cache_are_refused():
    t = tiny("t5_v1_1")
    cache = _cache(t)
    for bad, message in (
        (
            (TOKENS[:2], LENGTHS),
            r"tokens must be integers of shape \[3, 1 or more\], got int32\[2, 2\]",
        ),
        ((TOKENS[:, 0], LENGTHS), r"tokens must be integers of shape .*, got int32\[3\]"),
        ((TOKENS.astype(jnp.float32), LENGTHS), r"tokens must be .*, got float32\[3, 2\]"),
        ((TOKENS, LENGTHS[:2]), r"positions must be integers of shape \[3\], got int32\[2\]"),
        (
            (TOKENS, LENGTHS.astype(jnp.float32)),
            r"positions must be integers of shape \[3\], got float32\[3\]",
        ),
        ((TOKENS, [1, 1, 1]), r"positions must be integers .* \[3\], got a list: use numpy"),
        (([[1]] * 3, LENGTHS), "tokens must be integers .*, got a list"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            t.model.extend(t.params, cache, *bad)
        assert "\n" not in str(caught.value)
    _, _, updates = t.model.score(t.params, cache, TOKENS, LENGTHS)
    with pytest.raises(ValueError, match=r"positions must be .* \[3\], got int32\[2\]"):
        t.model.write(cache, updates, LENGTHS[:2])


@pytest.mark.parametrize("name", ["t5_v1_1", "llama", "gemma2"])
def test_a_block_without_tokens_is_refused(name):
    t = tiny(name)
    none = TOKENS[:, :0]
    for call in (
        lambda: t.model.extend(t.params, _cache(t), none, LENGTHS),
        lambda: t.model.prefill(t.params, Prompts(none, LENGTHS), 8),
        lambda: t.model.apply(t.params, *[none] * (1 + t.has_encoder)),
    ):
        with pytest.raises(ValueError, match=r"must be .* 1 or more\], got int32\[3, 0\]"):
            call()


@pytest.mark.parametrize("name", ["t5_v1_1", "llama"])
def test_prompts_of_wrong_shapes_are_refused(name):
    model, params = tiny(name).model, tiny(name).params
    for bad, max_length, message in (
        ((TOKENS, LENGTHS[:2]), 8, r"input_lengths must be .* \[3\], got int32\[2\]"),
        ((TOKENS, LENGTHS), 0, "max_length must be at least 1, got 0"),
        ((TOKENS.tolist(), LENGTHS), 8, "inputs must be integers .*, got a list"),
        (
            (TOKENS, LENGTHS, TOKENS[:2]),
            8,
            r"prefix must be .* \[3, 0 or more\], got int32\[2, 2\]",
        ),
        ((TOKENS, LENGTHS, TOKENS[:, 0]), 8, r"prefix must be .*, got int32\[3\]"),
        ((TOKENS, LENGTHS, None, LENGTHS), 8, "prefix_lengths must be None if prefix is None"),
    ):
        with pytest.raises(ValueError, match=message):
            model.prefill(params, Prompts(*bad), max_length)


def test_an_encoder_mask_of_another_shape_is_refused():
    t = tiny("t5_v1_1")
    with pytest.raises(ValueError, match=r"encoder_mask must have .* \[3, 2\], got \[3, 1\]"):
        t.model.apply(t.params, TOKENS, TOKENS, encoder_mask=jnp.ones((3, 1), bool))
