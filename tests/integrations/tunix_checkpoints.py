"""Tiny checkpoints that tunix writes, with the logits of its own forward pass.

`python -m tests.integrations.tunix_checkpoints DIR` writes the cases of `CASES` into DIR; packed
like MaxText's, they are `tests/checkpoints/tunix.zip`. It needs google-tunix.
"""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.models.gemma import model as gemma
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3
from tunix.sft.checkpoint_manager import CheckpointManager

from specjax.checkpoints.hf import config_to_hf
from specjax.models import Gemma2Config, LlamaConfig
from specjax.models.decoder_only import types_by_number
from specjax.models.gemma import Gemma3Config
from specjax.models.qwen import Qwen2Config, Qwen3Config
from specjax.tokenizers.model_files import SpecialIds, write_json

_SAME = {"num_layers": 2, "embed_dim": 8, "num_heads": 4, "head_dim": 6, "num_kv_heads": 2}
_THEIRS = {**_SAME, "hidden_dim": 8}
_OURS = {**_SAME, "mlp_dim": 8, "vocab_size": 24}
_LLAMA = {**_THEIRS, "vocab_size": 24, "norm_eps": 1e-5, "rope_theta": 1_000_000}
_ROTARY = {"norm_eps": 1e-5, "rope_theta": 1e6}
_WINDOW = {"sliding_window": 5, "query_pre_attn_scalar": 6.0}
# By case: tunix's network and configuration, and ours.
CASES = {
    "llama3": (
        llama3.Llama3,
        llama3.ModelConfig(**_LLAMA, weight_tying=False),
        LlamaConfig(**_OURS, **_ROTARY),
    ),
    "qwen2": (qwen2.Qwen2, qwen2.ModelConfig(**_LLAMA), Qwen2Config(**_OURS, **_ROTARY)),
    "qwen3": (
        qwen3.Qwen3,
        qwen3.ModelConfig(**_LLAMA, use_tied_embedding=True),
        Qwen3Config(**_OURS, **_ROTARY, tie_embeddings=True),
    ),
    "gemma2": (
        gemma.Gemma,
        gemma.ModelConfig(
            **_THEIRS,
            num_embed=24,
            final_logit_softcap=30.0,
            attn_logits_soft_cap=50.0,
            use_post_attn_norm=True,
            use_post_ffw_norm=True,
            sliding_window_size=5,
            attention_types=(gemma.AttentionType.LOCAL_SLIDING, gemma.AttentionType.GLOBAL),
        ),
        Gemma2Config(**_OURS, **_WINDOW),
    ),
    # Of as many heads of keys as of queries, which tunix stores in one array.
    "gemma3": (
        gemma3.Gemma3,
        gemma3.ModelConfig(
            **{**_THEIRS, "num_layers": 6, "num_kv_heads": 4},
            num_embed=24,
            sliding_window_size=5,
            global_base_frequency=1_000_000,
            param_dtype=jnp.float32,
        ),
        Gemma3Config(
            **{**_OURS, "num_layers": 6, "num_kv_heads": 4},
            **_WINDOW,
            layer_types=types_by_number(6, 6),
        ),
    ),
}


def main():
    for case, (network, theirs, ours) in CASES.items():
        directory = Path(sys.argv[1]).absolute() / case
        model = network(theirs, rngs=nnx.Rngs(0))
        rng = np.random.default_rng(0)
        state = nnx.state(model, nnx.Param)
        for path, leaf in nnx.to_flat_state(state):
            drawn = rng.integers(-4, 5, leaf.get_value().shape) / 16
            norm = path[-1] == "w" and drawn.ndim == 1  # Gemma's networks add the 1
            leaf.set_value(jnp.asarray(drawn + norm, jnp.float32))
        nnx.update(model, state)
        ids = jnp.asarray(np.random.default_rng(1).integers(3, 24, (2, 9)), jnp.int32)
        positions = jnp.tile(jnp.arange(9, dtype=jnp.int32), (2, 1))
        visible = jnp.tile(jnp.tril(jnp.ones((9, 9), bool)), (2, 1, 1))
        logits, _ = model(ids, positions, None, visible)
        manager = CheckpointManager(str(directory))
        manager.save(1, model, force=True)
        manager.close()
        np.save(directory / "logits.npy", np.asarray(logits, np.float32))
        config = config_to_hf(ours, SpecialIds(), np.dtype(np.float32))
        write_json(directory / "config.json", config)


if __name__ == "__main__":
    main()
