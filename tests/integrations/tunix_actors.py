"""Tiny networks of tunix with random weights, and a tokenizer whose texts are numbers."""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.integrations.with_tunix import import_tunix

import_tunix()

import qwix
from tunix.models.gemma import model as gemma
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3
from tunix.rl import common

PAD, EOS, BOS, VOCAB = 0, 1, 2, 16


@contextlib.contextmanager
def as_tunix_runs():
    """tunix's code mixes dtypes and ranks, in threads of its own too, and has warnings."""
    settings = {"jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}
    before = {name: getattr(jax.config, name) for name in settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for name, value in settings.items():
                jax.config.update(name, value)
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name, value)


class Numbers:
    """Texts such as "3 4 5" are their ids."""

    def encode(self, text):
        return [int(word) for word in text.split()]

    def decode(self, ids):
        return " ".join(map(str, ids))

    def bos_id(self):
        return BOS

    def eos_id(self):
        return EOS

    def pad_id(self):
        return PAD


_SIZES = {
    "num_layers": 2, "embed_dim": 16, "hidden_dim": 24, "num_heads": 4, "head_dim": 8,
    "num_kv_heads": 2,
}  # fmt: skip
_LLAMA = {**_SIZES, "vocab_size": VOCAB, "norm_eps": 1e-5}
_GEMMA2 = {
    **_SIZES, "num_embed": VOCAB, "final_logit_softcap": 3.0, "attn_logits_soft_cap": 5.0,
    "use_post_attn_norm": True, "use_post_ffw_norm": True, "sliding_window_size": 4,
    "attention_types": (gemma.AttentionType.LOCAL_SLIDING, gemma.AttentionType.GLOBAL),
}  # fmt: skip
_GEMMA3 = {
    **_SIZES, "num_layers": 7, "num_embed": VOCAB, "sliding_window_size": 4,
    "global_base_frequency": 1_000_000, "global_scale_factor": 8.0, "param_dtype": jnp.float32,
}  # fmt: skip
_BY_WIDTH = gemma3.QueryPreAttentionNormalisation.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS
# The bases of Llama 3 and Qwen 3 are not what tunix rotates with.
ACTORS = {
    "llama3": (
        llama3.Llama3,
        llama3.ModelConfig(**_LLAMA, rope_theta=500, weight_tying=False),
    ),
    "llama3_tied": (llama3.Llama3, llama3.ModelConfig(**_LLAMA, rope_theta=500, weight_tying=True)),
    "qwen2": (qwen2.Qwen2, qwen2.ModelConfig(**_LLAMA, rope_theta=500)),
    "qwen3_tied": (
        qwen3.Qwen3,
        qwen3.ModelConfig(**_LLAMA, rope_theta=500, use_tied_embedding=True),
    ),
    "gemma2": (gemma.Gemma, gemma.ModelConfig(**_GEMMA2)),
    "gemma2_joint": (gemma.Gemma, gemma.ModelConfig(**{**_GEMMA2, "num_kv_heads": 4})),
    "gemma3": (gemma3.Gemma3, gemma3.ModelConfig(**_GEMMA3)),
    "gemma3_joint": (
        gemma3.Gemma3,
        gemma3.ModelConfig(**{**_GEMMA3, "num_kv_heads": 4, "query_pre_attn_norm": _BY_WIDTH}),
    ),
}


def make_actor(name, seed=0, adapters=False):
    """A network whose arrays all are random, norms and zeros too."""
    kind, config = ACTORS[name]
    with as_tunix_runs():
        actor = kind(config, rngs=nnx.Rngs(0))
        if adapters:
            provider = qwix.LoraProvider(module_path=".*(einsum|proj)", rank=2, alpha=3.0)
            inputs = actor.get_model_input()
            actor = qwix.apply_lora_to_model(actor, provider, rngs=nnx.Rngs(1), **inputs)
        change(actor, seed)
    return actor


def change(actor, seed, kind=nnx.Param):
    """Adds random numbers to the arrays of a kind, as a step of training would."""
    rng = np.random.default_rng(seed)

    def changed(x):
        return x + jnp.asarray(0.2 * rng.normal(size=x.shape), x.dtype)

    nnx.update(actor, jax.tree.map(changed, nnx.state(actor, kind)))


def scores(actor, prompts, outputs, temperature=1.0):
    """tunix's own log-probabilities of outputs after prompts, which are padded on the left."""
    with as_tunix_runs():
        definition, state = nnx.split(actor)
        return np.asarray(
            common.compute_per_token_logps(
                definition,
                state,
                prompt_tokens=jnp.asarray(prompts),
                completion_tokens=jnp.asarray(outputs),
                pad_id=PAD,
                eos_id=EOS,
                temperature=temperature,
            )
        )


def mesh_of(fsdp=1, tp=1, first=0):
    devices = jax.devices()[first : first + fsdp * tp]
    return jax.sharding.Mesh(np.asarray(devices).reshape(fsdp, tp), ("fsdp", "tp"))
