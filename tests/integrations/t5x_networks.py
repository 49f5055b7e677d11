"""Tiny networks of T5X, their batches and parameters; imported where T5X is."""

import jax
import numpy as np
import seqio
from flax import core as flax_core
from t5x.examples.decoder_only import network as decoder_only
from t5x.examples.t5 import network

V, L = 24, 8
SIZES = {
    "num_heads": 2,
    "head_dim": 4,
    "mlp_dim": 16,
    "mlp_activations": ("gelu", "linear"),
    "dropout_rate": 0.0,
}
INPUTS = np.array([[5, 6, 7, 1, 0, 0], [9, 8, 1, 0, 0, 0], [3, 3, 3, 3, 3, 1]], np.int32)
PROMPTS = np.array([[0, 5, 4, 3, 0, 0, 0, 0], [0, 7, 1, 0, 0, 0, 0, 0], [0] * 8], np.int32)
BATCH = {
    "encoder_input_tokens": INPUTS,
    "decoder_input_tokens": PROMPTS,
    "decoder_target_tokens": np.zeros_like(PROMPTS),
}
TEXTS = np.array([[5, 6, 7, 1, 8, 9, 1, 0], [9, 1, 4, 4, 1, 0, 0, 0], [3, 3, 3, 3, 1, 2, 0, 0]])
DECODER_BATCH = {
    "decoder_input_tokens": np.pad(TEXTS, ((0, 0), (1, 0)))[:, :-1].astype(np.int32),
    "decoder_target_tokens": TEXTS.astype(np.int32),
    # The start and the inputs, which end with token 1.
    "decoder_causal_attention": np.array([[1] * 5 + [0] * 3, [1] * 3 + [0] * 5, [1] * 6 + [0] * 2]),
}
KEY = np.array([0, 5], np.uint32)


def vocabulary(size=V):
    return seqio.PassThroughVocabulary(size, eos_id=1)


def t5(layers, module=network, vocab=V, **options):
    config = module.T5Config(
        vocab_size=vocab,
        emb_dim=8,
        num_encoder_layers=layers,
        num_decoder_layers=layers,
        **SIZES,
        **options,
    )
    return module.Transformer(config=config)


def decoder(layers, tied=True):
    config = decoder_only.TransformerConfig(
        vocab_size=V, emb_dim=8, num_layers=layers, logits_via_embedding=tied, **SIZES
    )
    return decoder_only.DecoderWrapper(config=config)


def params_of(model, batch, seed=0):
    shapes = {name: value.shape for name, value in batch.items()}
    init = jax.jit(lambda key: model.get_initial_variables(key, shapes)["params"])
    return flax_core.unfreeze(init(jax.random.PRNGKey(seed)))


def predict(model, params, batch, **options):
    """Compiled with the options; `decoder_params` are copied, for T5X adds to them."""

    def run(params, batch, key):
        own = {k: dict(v) if isinstance(v, dict) else v for k, v in options.items()}
        return model.predict_batch_with_aux(params, batch, key, **own)

    return jax.tree.map(np.asarray, jax.jit(run)(params, batch, KEY))
