"""Rows that advance and roll back independently give the logits of their own full forward pass."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cpu_kernels
from specjax.models import attention
from specjax.models import cache as cache_lib
from specjax.types import Extended, Prompts
from tests.models.tiny import CONFIGS, error, quick_jit, tiny
from tests.variants import variants

MAX_BLOCK = 4
ROUNDS = 10
MAX_LENGTH = 40
INPUTS = np.random.default_rng(1).integers(0, 48, (3, 7)).astype(np.int32)
LENGTHS = np.array([7, 1, 4], np.int32)


def worst_error(t, extend=None, widths=range(1, MAX_BLOCK + 1), seed=5):
    """Plays a random schedule of blocks and rollbacks; returns the largest error of a logit."""
    extend = extend or t.extend
    rng = np.random.default_rng(seed)
    cache, first, start = t.prefill(t.params, Prompts(INPUTS, LENGTHS), MAX_LENGTH)
    histories = [[int(token)] for token in first]  # the last of a history is not in the cache
    worst = 0.0
    for _ in range(ROUNDS):
        width = int(rng.choice(widths))
        block = rng.integers(0, 48, (3, width)).astype(np.int32)
        block[:, 0] = [history[-1] for history in histories]
        offsets = np.array([len(history) - 1 for history in histories], np.int32)
        out = extend(t.params, cache, block, start + offsets)
        cache = out.cache
        outputs = np.zeros((3, MAX_LENGTH), np.int32)
        for row, (history, tokens) in enumerate(zip(histories, block, strict=True)):
            known = [*history[:-1], *tokens]
            outputs[row, : len(known)] = known
        full = t.full(INPUTS, LENGTHS, outputs)
        expected = np.stack([full[b, o : o + width] for b, o in enumerate(offsets)])
        worst = max(worst, np.abs(out.logits - expected).max() / np.abs(full).max())
        for row, history in enumerate(histories):
            kept = int(rng.integers(0, width))  # of the drafted tokens; one new token follows
            history[-1:] = [*block[row, : kept + 1].tolist(), int(rng.integers(0, 48))]
    lengths = [len(history) for history in histories]
    assert len(set(lengths)) == 3, "the rows did not part"
    assert max(lengths) < MAX_LENGTH - MAX_BLOCK
    return worst


@pytest.mark.parametrize("name", variants(CONFIGS, "t5_v1_1", "gemma2"))
def test_logits_equal_the_full_forward_pass(name):
    assert worst_error(tiny(name)) <= 1e-5


@functools.cache
def _on_tpu(name):
    t = tiny(name)
    model = t.model.for_devices("tpu")
    assert model.layout.by_position
    return t._replace(
        model=model,
        prefill=quick_jit(model.prefill, static_argnums=2),
        extend=quick_jit(model.extend),
    )


@pytest.mark.parametrize("name", variants(CONFIGS, "t5_v1_1", "gemma2"))
def test_logits_equal_the_full_forward_pass_in_the_layout_of_tpus(name):
    """Heads share vectors; a block is written before it is read, or, in `score`, read apart."""
    t = _on_tpu(name)
    assert worst_error(t) <= 1e-5
    model = t.model

    def apart(params, cache, tokens, positions):
        logits, hidden, updates = model.score(params, cache, tokens, positions)
        return Extended(logits, hidden, model.write(cache, updates, positions))

    assert worst_error(t, quick_jit(apart)) <= 1e-5


def _forgets_rollback(self, length, window=None):
    """Sees stale entries too: any position within a block of the row's own position."""
    moved = attention.Memory(self.cache, self.positions + 1)
    return ORIGINAL_BIAS(moved, length, window)


def _shares_positions(self, length, window=None):
    """Masks by the position of the slowest row."""
    moved = attention.Memory(self.cache, jnp.full_like(self.positions, self.positions.min()))
    return ORIGINAL_BIAS(moved, length, window)


def _every_lane(heads, width):
    return jnp.ones((heads, 1, heads * width), bool)


def _writes_nothing(at, layout, keys, values, *new):
    return keys, values


ORIGINAL_BIAS = attention.Memory.bias
WRONG = [
    ("t5_v1_1", "cpu", attention.Memory, "bias", _forgets_rollback),
    ("gemma2", "cpu", attention.Memory, "bias", _shares_positions),
    ("t5_v1_1", "tpu", attention, "_lanes", _every_lane),
    ("t5_v1_1", "tpu", attention, "write_layer", _writes_nothing),
]


@pytest.mark.parametrize(("name", "platform", "owner", "attribute", "wrong"), WRONG)
def test_the_comparison_sees_wrong_code(patched, name, platform, owner, attribute, wrong):
    t = _on_tpu(name) if platform == "tpu" else tiny(name)
    patched.setattr(owner, attribute, wrong)
    patched.setattr(cpu_kernels, "available", lambda: False)  # theirs read no stale entries
    assert worst_error(t, quick_jit(lambda *args: t.model.extend(*args)), [MAX_BLOCK]) > 1e-3


def test_the_window_matters():
    """Without it Gemma 2's logits would differ, so the schedule goes past it."""
    t = tiny("gemma2")
    wide = type(t.model)(t.model.config.replace(sliding_window=100))
    assert worst_error(t, quick_jit(wide.extend), [MAX_BLOCK]) > 1e-3


@pytest.mark.parametrize("name", variants(CONFIGS, "t5_v1_1", "gemma2"))
def test_padding_changes_nothing(name):
    t = tiny(name)
    block = np.random.default_rng(3).integers(0, 48, (3, MAX_BLOCK)).astype(np.int32)

    def logits(inputs, max_length):
        cache, _, positions = t.prefill(t.params, Prompts(inputs, LENGTHS), max_length)
        return t.extend(t.params, cache, block, positions).logits

    plain = logits(INPUTS, MAX_LENGTH)
    rubbish = np.where(np.arange(7) < LENGTHS[:, None], INPUTS, 47).astype(np.int32)
    assert error(logits(rubbish, MAX_LENGTH), plain) == 0
    # The padding may reach past the cache; only the prompts must fit.
    nines, threes = (
        logits(np.pad(INPUTS, ((0, 0), (0, 5)), constant_values=value), 11) for value in (9, 3)
    )
    assert error(nines, threes) == 0
    # Products of another shape are rounded otherwise: the T5s, whose logits attention does not
    # scale down, make 1e-5 of it.
    assert error(nines, plain) <= (2e-5 if t.has_encoder else 2e-6)


@pytest.mark.parametrize("name", variants(["t5_v1_0", "gemma2", "gemma4", "qwen3_5"], "gemma2"))
def test_integers_of_all_dtypes_give_the_same(name):
    """Sums and differences of positions exceed the range of 8-bit and unsigned integers."""
    t = tiny(name)
    cache, _, start = t.prefill(t.params, Prompts(INPUTS, LENGTHS), 300)
    block = np.random.default_rng(2).integers(0, 48, (3, MAX_BLOCK)).astype(np.int32)
    far = np.array([126, 0, 5], np.int32)  # a block from 126 ends past int8
    for positions in (np.asarray(start), far):
        expected = t.extend(t.params, cache, block, positions)
        for dtype in (np.int8, np.uint8, np.uint32, np.int16):
            out = t.extend(t.params, cache, block.astype(dtype), positions.astype(dtype))
            jax.tree.map(np.testing.assert_array_equal, out, expected)


@pytest.mark.parametrize("name", ["t5_v1_1", "gemma2"])
def test_a_prefill_holds_no_mask(name):
    """The executable computes the P x P mask and does not store it."""
    t = tiny(name)
    tokens, lengths = np.ones((1, 1500), np.int32), np.ones(1, np.int32)
    options = (tokens, lengths) if t.has_encoder else ()  # a prefix as long, for the decoder

    def prefill(params, *prefix):
        return t.model.prefill(params, Prompts(tokens, lengths, *prefix), 2000)

    lowered = jax.jit(prefill).lower(t.params, *options)
    constants = re.findall(
        r"stablehlo.constant dense<\S+ : tensor<([\dx]+)x[a-z]+\d+>", lowered.as_text()
    )
    sizes = [np.prod([int(n) for n in shape.split("x")]) for shape in constants]
    assert sizes, "no constants were read"
    assert max(sizes) < 100_000


def test_a_forced_prefix_equals_extending_by_it():
    t = tiny("t5_v1_1")
    prefix = np.random.default_rng(4).integers(0, 48, (3, 3)).astype(np.int32)
    sizes = np.array([3, 0, 2], np.int32)
    forced = t.prefill(t.params, Prompts(INPUTS, LENGTHS, prefix, sizes), MAX_LENGTH)
    cache, first, positions = t.prefill(t.params, Prompts(INPUTS, LENGTHS), MAX_LENGTH)
    np.testing.assert_array_equal(forced.positions, positions + sizes)
    tokens = np.concatenate([np.asarray(first)[:, None], prefix], axis=1)
    np.testing.assert_array_equal(forced.tokens, tokens[np.arange(3), sizes])
    whole = t.extend(t.params, cache, tokens, positions)
    last = t.extend(t.params, forced.cache, np.asarray(forced.tokens)[:, None], forced.positions)
    expected = np.asarray(whole.logits)[np.arange(3), sizes]
    assert error(last.logits[:, 0], expected) <= 1e-5


@pytest.mark.parametrize(
    ("name", "platform"),
    [("llama", "cpu"), ("llama", "tpu"), ("gemma4", "cpu"), ("gemma4", "tpu"), ("qwen3_5", "cpu")],
)
def test_stale_nan_is_not_seen(name, platform):
    t = tiny(name)
    table = t.params["token_embedder"]["embedding"].at[11].set(jnp.nan)
    params = {**t.params, "token_embedder": {**t.params["token_embedder"], "embedding": table}}
    model = t.model.for_devices(platform)
    prefill, extend = quick_jit(model.prefill, static_argnums=2), quick_jit(model.extend)
    cache = prefill(params, Prompts(jnp.array([[3, 4, 5]]), jnp.array([3])), 20).cache
    for token, at in ((5, 2), (11, 3), (11, 4), (7, 3)):
        logits, _, cache = extend(params, cache, jnp.array([[token]]), jnp.array([at]))
        assert np.isnan(logits).all() == (token == 11)


@pytest.mark.parametrize(("heads", "length"), [(2, 3), (4, 33)])
def test_attention_by_position(heads, length):
    config = CONFIGS["llama"].replace(embed_dim=32)
    x, bias = jax.random.normal(jax.random.key(0), (2, length, 32)), attention.block_bias(length)

    def run(layout):
        one = attention.Attention(config, config.style, layout)
        both = lambda m, x: m(x, [attention.Segment(*m.keys_values(x), bias)])  # noqa: E731

        @quick_jit
        def outputs(x):
            params = one.init(jax.random.key(1), x, method=both)
            return one.apply(params, x, method=both)

        return outputs(x)

    want = run(cache_lib.CacheLayout())
    np.testing.assert_allclose(run(cache_lib.CacheLayout(heads, True)), want, atol=1e-5)


def test_what_falls_past_the_end_is_dropped_where_blocks_are_written_first():
    t = _on_tpu("gemma2")
    cache, _, _ = t.prefill(t.params, Prompts(INPUTS, LENGTHS), MAX_LENGTH)
    block = np.full((3, 3), 7, np.int32)
    after = t.extend(t.params, cache, block, np.full(3, MAX_LENGTH - 1, np.int32)).cache
    for old, new in zip(cache.keys + cache.values, after.keys + after.values, strict=True):
        np.testing.assert_array_equal(new[:, :-1], old[:, :-1])
        assert (np.asarray(new[:, -1]) != np.asarray(old[:, -1])).any()
