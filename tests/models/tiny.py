"""Tiny models of every family, random in every array, and jitted once."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import Gemma2Config, LlamaConfig, T5Config, model_from_config
from specjax.models.gemma import Gemma3Config
from specjax.models.gemma4 import Gemma4Config
from specjax.models.llama_variants import GptOssConfig, MixtralConfig
from specjax.models.qwen_hybrid import Qwen3NextConfig, Qwen35Config
from specjax.models.rope_scaling import Llama3RopeScaling
from specjax.models.t5 import UMT5Config
from specjax.models.t5gemma import T5Gemma2Config, T5GemmaConfig

_T5 = {
    "vocab_size": 48, "embed_dim": 16, "num_heads": 2, "head_dim": 12, "mlp_dim": 24,
    "num_encoder_layers": 2, "num_decoder_layers": 2, "relpos_buckets": 8,
    "relpos_max_distance": 12,
}  # fmt: skip
_DECODER = {
    "vocab_size": 48, "embed_dim": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
    "mlp_dim": 24, "num_layers": 2,
}  # fmt: skip
_WIDE = {"embed_dim": 24, "num_heads": 2, "num_kv_heads": 1, "head_dim": 6, "num_layers": 3}
_WINDOW = {"sliding_window": 5}
_GEMMA = {**_WINDOW, "query_pre_attn_scalar": 8.0}
_SPARSE = {"num_experts": 4, "num_experts_per_tok": 2}
_DELTA = {
    "linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_num_value_heads": 4,
    "linear_value_head_dim": 5,
}  # fmt: skip
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
CONFIGS = {
    # With a relative position bias per layer, as T5X's scanned checkpoints may have it.
    "t5_v1_0": T5Config(
        **_T5, mlp_activations=("relu",), tie_embeddings=True, relpos_per_layer=True
    ),
    "t5_v1_1": T5Config(**_T5),
    # Deep encoder, shallow decoder, as ByT5.
    "umt5": UMT5Config(**{**_T5, "num_encoder_layers": 3, "num_decoder_layers": 1}),
    "llama": LlamaConfig(**{**_DECODER, "num_kv_heads": 4}),
    "llama_grouped_tied": LlamaConfig(
        **_DECODER,
        tie_embeddings=True,
        rope_scaling=Llama3RopeScaling(
            factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=16
        ),
    ),
    "mixtral": MixtralConfig(**_DECODER, **_WINDOW, **_SPARSE, dense_layers=(0,), expert_dim=12),
    "gpt_oss": GptOssConfig(**_DECODER, **_WINDOW, **_SPARSE, layer_types=(SLIDING, FULL)),
    "t5gemma": T5GemmaConfig(
        **_DECODER,
        **_GEMMA,
        encoder=Gemma2Config(**{**_DECODER, **_WIDE}, sliding_window=3, query_pre_attn_scalar=16.0),
    ),
    "t5gemma2": T5Gemma2Config(
        **{**_DECODER, "num_heads": 2, "num_kv_heads": 1},
        **_GEMMA,
        layer_types=(SLIDING, FULL),
        eoi_token=7,
        encoder=Gemma3Config(**{**_DECODER, "num_kv_heads": 4}, sliding_window=3),
    ),
    "gemma2": Gemma2Config(**_DECODER, **_GEMMA),
    # Two sizes of layers, the last of each shared, one kind with keys as values; all that may be.
    "gemma4": Gemma4Config(
        **{**_DECODER, "mlp_dim": 20, "num_layers": 4, "num_kv_heads": 4},
        **_WINDOW,
        **_SPARSE,
        layer_types=(SLIDING, FULL) * 2,
        global_head_dim=14,
        num_global_kv_heads=2,
        keys_are_values=True,
        num_shared_layers=2,
        wide_shared_mlps=True,
        layer_input_dim=10,
        expert_dim=12,
    ),
    # Recurrent layers around one with attention.
    "qwen3_5": Qwen35Config(
        **{**_DECODER, "num_layers": 3}, **_DELTA, layer_types=(LINEAR, FULL, LINEAR)
    ),
    # Experts in one of two layers, with one that all tokens share.
    "qwen3_next": Qwen3NextConfig(
        **_DECODER,
        **_DELTA,
        **_SPARSE,
        layer_types=(LINEAR, FULL),
        expert_dim=12,
        shared_expert_dim=10,
        dense_layers=(0,),
    ),
}


def random_params(model, seed=0):
    """Unlike in `model.init`, all norms differ, so that a mix-up shows."""
    rng = np.random.default_rng(seed)
    dtype = model.config.param_dtype
    style = model.config.style
    low = -0.5 if style.plus_one_norms else 0.5

    def draw(path, leaf):
        norm = leaf.ndim == 1
        value = rng.uniform(low, low + 1, leaf.shape) if norm else 0.3 * rng.normal(size=leaf.shape)
        if style.query_scale == 1.0 and "query_norm" in str(path):
            value *= 0.3  # nothing else scales the logits of attention
        return jnp.asarray(value, jnp.float32).astype(dtype)

    return jax.tree_util.tree_map_with_path(draw, model.abstract_params())


class Tiny(NamedTuple):
    """A model, its parameters, and its functions compiled once per shape."""

    model: object
    params: object
    apply: object
    prefill: object
    extend: object

    @property
    def has_encoder(self):
        return self.model.config.encoder_style is not None

    def full(self, inputs, input_lengths, outputs):
        """Logits `[B, N, V]` of outputs `[B, N]` after their prompts, in one full forward pass.

        Row b's entry n predicts the token after `outputs[b, n]`. The outputs begin with the token
        that `prefill` returns.
        """
        if self.has_encoder:
            mask = np.arange(inputs.shape[1]) < np.asarray(input_lengths)[:, None]
            return np.asarray(self.apply(self.params, inputs, outputs, encoder_mask=mask))
        rows = []
        width = inputs.shape[1] + outputs.shape[1]
        for row, length, output in zip(inputs, input_lengths, outputs, strict=True):
            tokens = np.concatenate([row[: length - 1], output])
            rows.append(np.pad(tokens, (0, width - len(tokens))))
        logits = np.asarray(self.apply(self.params, np.stack(rows)))
        starts = np.asarray(input_lengths) - 1
        return np.stack([logits[b, s : s + outputs.shape[1]] for b, s in enumerate(starts)])


# These tests mostly compile; the last compiler passes change nothing that they check.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
quick_jit = functools.partial(jax.jit, compiler_options=QUICK)


@functools.cache
def tiny(name):
    """The model of that name in `CONFIGS`."""
    model = model_from_config(CONFIGS[name])
    return Tiny(
        model,
        random_params(model),
        quick_jit(model.apply),
        quick_jit(model.prefill, static_argnums=2),
        quick_jit(model.extend),
    )


def error(ours, theirs):
    """max |difference| as a fraction of max |theirs|."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape
    return np.abs(ours - theirs).max() / np.abs(theirs).max()
