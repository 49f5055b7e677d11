"""Trees of tokens: every node gets the logits of its own path, in every family of networks."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.blocks import part_of, shape_of
from specjax.models import CausalLM, LayerSpec, LlamaConfig, model_from_config
from specjax.models.config import RelativePositions
from specjax.models.gemma import Gemma3Config
from specjax.models.llama_variants import SmolLM3Config
from specjax.models.qwen import Qwen3Config
from specjax.partitioning import Partitioner, make_mesh
from specjax.types import Prompts
from tests.models.test_int8 import quantise
from tests.models.tiny import CONFIGS, error, quick_jit, random_params
from tests.variants import variants

ROWS, NODES, ROUNDS, MAX_LENGTH = 3, 8, 6, 40
SPLITS = (0, 1, 4, NODES)
INPUTS = np.random.default_rng(1).integers(0, 40, (ROWS, 7)).astype(np.int32)
LENGTHS = np.array([7, 1, 4], np.int32)

_SIZES = {"vocab_size": 48, "embed_dim": 16, "num_heads": 4, "head_dim": 8, "mlp_dim": 24}
_ROTARY = {**_SIZES, "num_kv_heads": 2, "num_layers": 2}


class PrefixConfig(LlamaConfig):
    """T5X's decoder-only network in which the tokens of a prompt see each other."""

    @property
    def style(self):
        layers, relative = (LayerSpec(),) * self.num_layers, RelativePositions(8, 12)
        plain = {"layers": layers, "relative": relative, "bidirectional_inputs": True}
        return dataclasses.replace(super().style, **plain)


MORE = {
    "gemma3": Gemma3Config(
        **_ROTARY,
        sliding_window=4,
        layer_types=("sliding_attention", "full_attention"),
        rope_theta=900.0,
        local_rope_theta=50.0,
        rope_factor=4.0,
        query_pre_attn_scalar=8.0,
    ),
    "qwen3": Qwen3Config(**_ROTARY),
    "smollm3": SmolLM3Config(**_ROTARY, rotated=(True, False)),
    # Only the window depends on positions.
    "windows": SmolLM3Config(**_ROTARY, rotated=(False, False), sliding_window=3),
    "prefix_lm": PrefixConfig(**{**_ROTARY, "num_kv_heads": 4}),
}
PADDED, INT8 = "llama, padded", "gemma2, int8"
NAMES = [*CONFIGS, *MORE, PADDED, INT8]
# Biases per layer; two windows, two bases and shared vectors; a padded vocabulary.
QUICK = [("t5_v1_0", "cpu"), ("gemma3", "tpu"), (PADDED, "cpu")]


def network(name, platform="cpu"):
    """A model for devices of a platform, and random parameters."""
    config = {**CONFIGS, **MORE}[name.split(",")[0]]
    whole = name == "prefix_lm"
    model = CausalLM(config) if whole else model_from_config(config)
    params = random_params(model)
    if name == PADDED:
        model = dataclasses.replace(model, tokens=41)
    params = quantise(params) if name == INT8 else params
    return model.for_devices(platform), params


def random_parents(rng):
    """`[B, G]`: deep trees, in which nodes of several depths alternate."""
    steps = rng.integers(1, 4, (ROWS, NODES - 1))
    return np.maximum(np.arange(NODES - 1) + 1 - steps, 0).astype(np.int32)


def path_to(parents, node):
    """The numbers of the nodes from node 0 to `node`, without node 0."""
    path = []
    while node:
        path.append(int(node))
        node = parents[node - 1]
    return path[::-1]


class Schedule:
    """Plays trees, paths and rollbacks, and compares every node with its path read alone."""

    def __init__(self, model, params, *, wrong=None):
        self.model, self.params = model, params
        self.wrong = wrong or (lambda tree: tree)
        self.read, self.write = quick_jit(model.score_tree), quick_jit(model.write)
        self.keep = quick_jit(model.keep)
        self.prefill = quick_jit(model.prefill, static_argnums=2)
        self.extend = quick_jit(model.extend)

    def alone(self, histories, parents, block):
        """`[B, N, V]`: the logits of each node, its path read into a cache of its own."""
        texts = np.zeros((ROWS, NODES, 26), np.int32)
        last = np.zeros((ROWS, NODES), np.int32)
        for row, node in np.ndindex(ROWS, NODES):
            way = [block[row, i] for i in path_to(parents[row], node)]
            text = [*histories[row], *way]
            texts[row, node, : len(text)] = text
            last[row, node] = len(text) - 1
        each = Prompts(np.repeat(INPUTS, NODES, axis=0), np.repeat(LENGTHS, NODES, axis=0))
        filled = self.prefill(self.params, each, MAX_LENGTH)
        texts = texts.reshape(ROWS * NODES, -1)
        out = self.extend(self.params, filled.cache, texts, filled.positions)
        found = np.asarray(out.logits)[np.arange(ROWS * NODES), last.reshape(-1)]
        return found.reshape(ROWS, NODES, -1)

    def levels(self, cache, block, at, tree):
        """The logits of parts of a tree that are read after each other, and the cache."""
        found = []
        for start, end in itertools.pairwise(SPLITS):
            part = self.wrong(part_of(tree, start, end))
            out = self.extend(self.params, cache, block[:, start:end], at, part)
            cache = out.cache
            found.append(out.logits)
        return np.concatenate(found, axis=1), cache

    def worst(self, rounds=ROUNDS, seed=0):
        """The largest error of a logit, as a fraction of the largest logit."""
        rng, worst = np.random.default_rng(seed), 0.0
        now, first, start = self.prefill(self.params, Prompts(INPUTS, LENGTHS), MAX_LENGTH)
        histories = [[int(token)] for token in first]  # the last of a history is not in the cache
        for _ in range(rounds):
            parents = random_parents(rng)
            tree = jax.tree.map(np.asarray, shape_of(jnp.asarray(parents)))
            block = rng.integers(0, 40, (ROWS, NODES)).astype(np.int32)
            block[:, 0] = [history[-1] for history in histories]
            at = np.asarray(start) + np.array([len(h) - 1 for h in histories], np.int32)
            whole, _, updates = self.read(self.params, now, block, at, self.wrong(tree))
            want = self.alone(histories, parents, block)
            by_level, cache = self.levels(now, block, at, tree)
            worst = max(worst, error(whole, want), error(by_level, want))
            now = cache if rng.random() < 0.5 else self.write(now, updates, at)
            # A path and then arbitrary numbers; a new token follows it.
            nodes = rng.integers(-90, 90, (ROWS, NODES - 1)).astype(np.int32)
            for row, history in enumerate(histories):
                path = path_to(parents[row], rng.integers(NODES))
                nodes[row, : len(path)] = path
                history += block[row, path].tolist()
            now = self.keep(now, at, nodes)
            for history in histories:
                end = max(1, len(history) - int(rng.integers(0, 3)))  # falls back
                history[end:] = [int(rng.integers(0, 40))]
        if rounds == ROUNDS:
            assert len({len(history) for history in histories}) == ROWS, "the rows did not part"
            assert max(map(len, histories)) > 8, "the texts are no longer than the windows"
        return worst


CASES = list(itertools.product(NAMES, ("cpu", "tpu")))


@pytest.mark.parametrize(("name", "platform"), variants(CASES, *QUICK, several=True))
def test_every_node_gets_the_logits_of_its_path(name, platform):
    """At once and level by level; after paths that were kept, and rollbacks.

    In the layout of TPUs, `extend` writes the nodes before it reads them; `score_tree` does not.
    """
    model, params = network(name, platform)
    assert model.layout.by_position == (platform == "tpu")
    assert Schedule(model, params).worst() <= 2e-5


def _by_slot(tree):
    return tree._replace(depths=np.broadcast_to(np.arange(tree.depths.shape[1]), tree.depths.shape))


def _sees_siblings(tree):
    later = np.arange(tree.depths.shape[1])
    numbers = later[-tree.seen.shape[1] :]
    return tree._replace(seen=np.broadcast_to(later <= numbers[:, None], tree.seen.shape))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [*((name, _by_slot) for name in ("t5_v1_1", "llama", "windows")), ("llama", _sees_siblings)],
)
def test_the_comparison_sees_wrong_places(name, wrong):
    assert Schedule(*network(name), wrong=wrong).worst(rounds=2) > 1e-3


def test_the_comparison_sees_a_path_that_is_not_kept():
    schedule = Schedule(*network("llama"))
    schedule.keep = lambda cache, positions, nodes: cache
    assert schedule.worst(rounds=2) > 1e-3


@pytest.mark.parametrize("name", variants(NAMES, "umt5", "gemma2"))
def test_a_chain_as_a_tree_is_the_chain(name):
    model, params = network(name)
    filled = quick_jit(model.prefill, static_argnums=2)(
        params, Prompts(INPUTS, LENGTHS), MAX_LENGTH
    )
    block = np.random.default_rng(2).integers(0, 40, (ROWS, 5)).astype(np.int32)
    tree = shape_of(jnp.tile(jnp.arange(4, dtype=jnp.int32), (ROWS, 1)))
    given = params, filled.cache, block, filled.positions
    want, found = quick_jit(model.score)(*given), quick_jit(model.score_tree)(*given, tree)
    for theirs, ours in zip(jax.tree.leaves(want), jax.tree.leaves(found), strict=True):
        assert error(ours, theirs) <= 1e-6
    nodes = np.tile(np.arange(1, 5, dtype=np.int32), (ROWS, 1))
    written = model.write(filled.cache, want[2], filled.positions)
    kept = model.keep(written, filled.positions, nodes)
    jax.tree.map(np.testing.assert_array_equal, kept, written)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_nan_stays_in_its_node(platform):
    model, params = network("llama", platform)
    table = params["token_embedder"]["embedding"].at[11].set(jnp.nan)
    params = {**params, "token_embedder": {**params["token_embedder"], "embedding": table}}
    prompt = Prompts(jnp.array([[3, 4, 5]]), jnp.array([3]))
    filled = quick_jit(model.prefill, static_argnums=2)(params, prompt, 9)
    given, at = (params, filled.cache), filled.positions
    read = quick_jit(model.score_tree)
    tree = shape_of(jnp.array([[0, 0, 1, 2, 3]], jnp.int32))
    block = jnp.array([[5, 11, 6, 7, 8, 9]])
    found, _, updates = read(*given, block, at, tree)
    nan = np.isnan(np.asarray(found[0]))
    assert nan[1].all() and not np.delete(nan, 1, axis=0).any()
    plain = jnp.where(block == 11, 12, block)
    beside = [0, 2, 4]  # not below it
    want = read(*given, plain, at, tree)[0][0, beside]
    assert error(found[0, beside], want) <= 1e-6
    # Its slot, and slots past the end, leave no NaN in the cache.
    extend = quick_jit(model.extend)
    both = extend(*given, block, at, tree)
    assert error(both.logits[0, beside], want) <= 2e-6 and np.isnan(both.logits[0, 1]).all()
    want = extend(*given, jnp.array([[5, 6, 8, 9]]), at).logits[:, 3:]
    for cache in (model.write(filled.cache, updates, at), both.cache):
        kept = model.keep(cache, at, jnp.array([[2, 4, 1, 99, -99]]))
        assert not any(np.isnan(x).any() for x in (*kept.keys, *kept.values))
        after = extend(params, kept, jnp.array([[9]]), at + 3).logits
        assert error(after, want) <= 2e-5


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_entries_past_the_end_are_dropped(platform):
    model, params = network("t5_v1_1", platform)
    filled = jax.eval_shape(lambda: model.prefill(params, Prompts(INPUTS, LENGTHS), 5))
    rng = np.random.default_rng(0)
    full = jax.tree.map(lambda x: rng.random(x.shape).astype(x.dtype), filled.cache)
    layout, nodes = model.layout, np.array([[2, 1, 9]] * ROWS, np.int32)
    kept = model.keep(full, np.array([0, 2, 4], np.int8), nodes)
    axes = [(layout.key_axis, "keys"), (layout.value_axis, "values")]
    for axis, name in axes:
        for old, new in zip(getattr(full, name), getattr(kept, name), strict=True):
            old, new = (np.moveaxis(x, 1 + axis, 1) for x in (old, new))
            np.testing.assert_array_equal(new[0, [0, 1, 2, 4]], old[0, [0, 2, 1, 4]])
            np.testing.assert_array_equal(new[1, :5], old[1, [0, 1, 2, 4, 3]])
            np.testing.assert_array_equal(new[2], old[2])
    jax.tree.map(np.testing.assert_array_equal, kept.cross, full.cross)


@pytest.mark.parametrize("name", ["t5_v1_1", "llama"])
def test_a_tree_on_a_mesh_is_the_tree_on_one_device(name):
    model, params = network(name)
    rows = [np.repeat(x, 2, axis=0)[:4] for x in (INPUTS, LENGTHS)]
    block = np.random.default_rng(2).integers(0, 40, (4, 6)).astype(np.int32)
    tree = shape_of(jnp.array([[0, 0, 1, 2, 4]] * 4, jnp.int32))
    nodes = np.array([[2, 4, 5, 0, 0]] * 4, np.int32)

    def both(params, inputs, lengths, block, nodes):
        cache, _, at = model.prefill(params, Prompts(inputs, lengths), 20)
        first, _, updates = model.score_tree(params, cache, block[:, :3], at, part_of(tree, 0, 3))
        cache = model.write(cache, updates, at)
        second, _, updates = model.score_tree(params, cache, block[:, 3:], at, part_of(tree, 3, 6))
        cache = model.keep(model.write(cache, updates, at + 3), at, nodes)
        return first, second, model.extend(params, cache, block[:, :2], at + 4).logits

    want = quick_jit(both)(params, *rows, block, nodes)
    partitioner = Partitioner(make_mesh(2, 4))
    placed = jax.device_put(params, partitioner.param_shardings(model, params))
    found = quick_jit(both)(placed, *partitioner.place_rows((*rows, block, nodes)))
    for ours, theirs in zip(found, want, strict=True):
        assert error(ours, theirs) <= 1e-5
