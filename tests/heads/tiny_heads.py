"""Tiny random verifiers with random heads of every kind, and drafters of them."""

import functools
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import drafting
from specjax.checkpoints import save_draft_head
from specjax.checkpoints.heads import load_draft_head
from specjax.models import Gemma2Config, LlamaConfig, T5Config, model_from_config
from specjax.models.gemma import Gemma3Config
from specjax.models.gemma4 import Gemma4Config
from specjax.models.heads import (
    AssistantConfig,
    BlockConfig,
    EagleConfig,
    ParallelConfig,
    draft_head,
    places_of,
)
from specjax.models.t5 import MT5Config, UMT5Config
from specjax.models.t5gemma import T5Gemma2Config, T5GemmaConfig
from tests.models.tiny import random_params

V = 3
_SIZES = {"embed_dim": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "mlp_dim": 8}
_EAGLE = {"boundaries": (0, 1, 3), "windows": (None,), "own_output": True}
_BLOCK = {"boundaries": (1, 3), "windows": (None, 2), "block_size": 4, "own_output": True}
_CONVOLVED = {"conv_taps": 2, "conv_group": 4}
_DFLASH2 = {"markov": "selector", "markov_rank": 4, "candidates": 2, **_CONVOLVED}
_DOMINO = {"markov": "domino", "markov_rank": 4, "markov_memory": 3, "markov_start": 1}
CONFIGS = {
    "eagle3": (EagleConfig, {**_EAGLE, "norm_before_residual": True}),
    "eagle3_window": (EagleConfig, {**_EAGLE, "windows": (2,), "norm_output": True}),
    "mtp": (EagleConfig, {"boundaries": (4,), "windows": (None,), "projects": True}),
    "dflash": (BlockConfig, {**_BLOCK, "mask_token": 1}),
    "dspark": (
        BlockConfig,
        {
            **_BLOCK,
            "mask_token": 1,
            "from_anchor": True,
            "markov": "rnn",
            "markov_rank": 4,
            "confidence": True,
            "confidence_reads_markov": True,
        },
    ),
    "domino": (BlockConfig, {**_BLOCK, **_DOMINO, "mask_token": 1, "from_anchor": True}),
    "dflash2": (BlockConfig, {**_BLOCK, **_DFLASH2, "mask_token": 1, "causal_windows": False}),
    "peagle": (ParallelConfig, {**_BLOCK, "mask_token": 1, "fc_norm": True}),
}
# Heads of encoder-decoders; the masks of blocks are learnt.
_LEARNT = {"boundaries": (0, 2), "windows": (None, None), "block_size": 3, "mask_token": None}
ENCODED = {
    "eagle3": (EagleConfig, {"boundaries": (1, 3), "windows": (None,), "fc_norm": True}),
    "dflash": (BlockConfig, {**_LEARNT, "own_output": True}),
    "dspark": (
        BlockConfig,
        {**_LEARNT, "from_anchor": True, "markov": "gated", "markov_rank": 4, "confidence": True},
    ),
    "domino": (BlockConfig, {**_LEARNT, **_DOMINO}),
    "dflash2": (BlockConfig, {**_LEARNT, **_DFLASH2, "own_output": True}),
    "peagle": (ParallelConfig, {**_LEARNT, "mask_token": 1}),
}
_T5 = {
    "vocab_size": V, "embed_dim": 8, "num_heads": 2, "head_dim": 6, "mlp_dim": 8,
    "num_encoder_layers": 1, "num_decoder_layers": 3, "relpos_buckets": 8,
    "relpos_max_distance": 12,
}  # fmt: skip
_GEMMA = {**_SIZES, "vocab_size": V, "num_layers": 3, "query_pre_attn_scalar": 4.0}
ENCODERS = {
    "t5": T5Config(**_T5),
    "t5_v1_0": T5Config(**_T5, mlp_activations=("relu",), tie_embeddings=True),
    "mt5": MT5Config(**_T5),
    "umt5": UMT5Config(**_T5),
    "t5gemma": T5GemmaConfig(
        **_GEMMA, sliding_window=3, encoder=Gemma2Config(**_GEMMA, sliding_window=3)
    ),
    "t5gemma2": T5Gemma2Config(
        **_GEMMA, sliding_window=3, eoi_token=2, encoder=Gemma3Config(**_GEMMA, sliding_window=3)
    ),
}


_SHARED = {**_SIZES, "vocab_size": V, "num_layers": 3, "sliding_window": 2, "global_head_dim": 6}
_TYPES = ("sliding_attention", "full_attention", "full_attention")


class TinyHead(NamedTuple):
    """A verifier, and its head with the verifier's parameters that it uses."""

    verifier: object
    verifier_params: object
    head: object
    params: object


def llama(vocab=V, seed=0, scale=2.0, layers=3):
    """A random Llama; its logits are as far apart as `scale` makes them."""
    model = model_from_config(LlamaConfig(vocab_size=vocab, num_layers=layers, **_SIZES))
    params = random_params(model, seed)
    dense = params["decoder"]["logits_dense"]
    dense["kernel"] = scale * dense["kernel"]
    embedder = params["token_embedder"]
    embedder["embedding"] = 3.0 * embedder["embedding"]
    return model, params


@functools.cache
def tiny_head(name, vocab=V, mapped=None, seed=5):
    """The head of that name in `CONFIGS`; of `mapped` only these tokens are drafted."""
    model, params = llama(vocab)
    kind, fields = CONFIGS[name]
    layers = len(fields["windows"])
    sizes = LlamaConfig(vocab_size=vocab, num_layers=layers, **_SIZES)
    count = None if mapped is None else len(mapped)
    head = draft_head(kind(layers=sizes, draft_vocab=count, **fields), model)
    return _with_params(model, params, head, mapped, seed)


def _with_params(model, params, head, mapped, seed):
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name = jax.tree_util.keystr(path)
        value = rng.normal(size=leaf.shape) if leaf.ndim > 1 else rng.uniform(0.5, 1.5, leaf.shape)
        far = 1.0 if "logits_dense" in name or "embedding" in name else 0.6
        far = 0.3 if "conv" in name else far  # wider ones sharpen attention until floats differ
        return jnp.asarray(far * value if leaf.ndim > 1 else value, jnp.float32)

    own = jax.tree_util.tree_map_with_path(draw, head.abstract_params())
    if mapped is not None:
        own["places"] = jnp.asarray(places_of(np.array(mapped), model.vocab_size))
    return TinyHead(model, params, head, head.joined(own, params))


@functools.cache
def tiny_assistant(clusters=None):
    """A Gemma 4, whose last layer attends to another's keys, and its assistant."""
    config = Gemma4Config(**_SHARED, layer_types=_TYPES, num_shared_layers=1)
    model = model_from_config(config)
    params = random_params(model, 0)
    embedder = params["token_embedder"]
    embedder["embedding"] = 3.0 * embedder["embedding"]
    sizes = Gemma4Config(**{**_SHARED, "embed_dim": 6}, layer_types=_TYPES)
    windows = tuple(window and window + 1 for window in sizes.windows)
    fields = {"clusters": clusters, "own_output": True, "boundaries": (4,), "windows": windows}
    head = draft_head(AssistantConfig(layers=sizes, **fields), model)
    tiny = _with_params(model, params, head, None, 5)
    if clusters is not None:
        order = np.random.default_rng(0).permutation(V).reshape(clusters, -1)
        tiny.params["clusters"] = jnp.asarray(order, jnp.int32)
    return tiny


def drafter_of(tiny, max_draft, stopping=None, copies=None, **options):
    """The chain drafter of a head, and its parameters; perhaps with up to `copies` before it."""
    is_block = tiny.head.most_drafts is not None
    kind = drafting.heads.BlockDrafter if is_block else drafting.heads.EagleDrafter
    policy, own = (stopping or drafting.FixedLength()).bind()
    params = drafting.chain.ChainParams(tiny.params, own)
    if copies is None:
        return kind(tiny.head, max_draft, policy, **options), params
    copier = drafting.Lookup(max_copy=copies, vocab_size=tiny.verifier.vocab_size)
    drafter = kind(tiny.head, max_draft, policy, **options)
    return drafting.lookup.LookupFirst(copier, drafter, min_match=1), ((), params)


@functools.cache
def encoded_head(name, encoder="t5", vocab=V, mapped=None, seed=5):
    """A head of `ENCODED` that was in a file, which reads the output of one of `ENCODERS`."""
    model = model_from_config(ENCODERS[encoder].replace(vocab_size=vocab))
    params = random_params(model, 3)
    kind, fields = ENCODED[name]
    sizes = LlamaConfig(vocab_size=vocab, num_layers=len(fields["windows"]), **_SIZES)
    count = None if mapped is None else len(mapped)
    head = draft_head(kind(layers=sizes, cross_layer=1, draft_vocab=count, **fields), model)
    tiny = _with_params(model, params, head, mapped, seed)
    with tempfile.TemporaryDirectory() as place:
        save_draft_head(Path(place) / "head", head, tiny.params, verifier_params=params)
        read, own = load_draft_head(Path(place) / "head", model, verifier_params=params)
    assert read == head
    return tiny._replace(params=read.joined(own, params))
