"""Random heads in published formats, on disk, for a verifier."""

import json

import numpy as np
import safetensors.numpy
from flax.traverse_util import flatten_dict

from specjax.models.heads import BlockConfig, EagleConfig, draft_head, kind_of
from specjax.models.llama import LlamaConfig

_LAYER = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 16,
}
FORMATS = ("eagle3", "eagle1", "speculators", "mtp", "zlab", "dspark", "domino", "dflash2")


def write_head(directory, verifier, kind, drafted=None, seed=0, **changes):
    """Writes a head for a verifier's network; of `drafted` only these tokens are drafted."""
    config, depth = verifier.config, len(verifier.config.style.layers)
    width, vocab = config.embed_dim, config.vocab_size
    layer = {**_LAYER, "hidden_size": width, "vocab_size": vocab, "num_hidden_layers": 1}
    sizes = LlamaConfig.of(vocab, width, 2, 1, 8, 16, 1)
    count = None if drafted is None else len(drafted)
    common = {"layers": sizes, "windows": (None,), "boundaries": (1, 2), "draft_vocab": count}
    last = {**common, "boundaries": (depth + 1,), "projects": True}
    first = {**common, "boundaries": tuple(sorted({2, depth // 2, depth - 3}))}
    block = {**common, "block_size": 5, "mask_token": 3}
    markov = {"markov": "vanilla", "markov_rank": 4}
    domino = {"markov": "domino", "markov_rank": 4, "markov_memory": 6, "markov_start": 1}
    selector = {"markov": "selector", "markov_rank": 4, "candidates": 6}
    convolved = {"conv_taps": 2, "conv_group": 4, "causal_windows": False}
    judged = {"confidence": True, "confidence_reads_markov": True}
    of_block = {"target_layer_ids": [0, 1], "mask_token_id": 3}
    of_dflash = {**layer, "block_size": 5, "num_target_layers": depth, "dflash_config": of_block}
    speculators = {
        "transformer_layer_config": layer,
        "speculators_config": {"verifier": {"name_or_path": "some/verifier"}},
        "draft_vocab_size": count or vocab,
    }
    make, values, layers = {
        "eagle3": (
            lambda: EagleConfig(**first, own_output=True),
            {**layer, "draft_vocab_size": count or vocab},
            "midlayer",
        ),
        "eagle1": (lambda: EagleConfig(**last, norms=False, fc_bias=True), layer, "layers.{i}"),
        "speculators": (
            lambda: EagleConfig(**common, own_output=True, own_embedding=True, norm_before_fc=True),
            {
                **speculators,
                "speculators_model_type": "eagle3",
                "eagle_aux_hidden_state_layer_ids": [1, 2],
                "norm_before_fc": True,
            },
            "layers.{i}",
        ),
        "mtp": (
            lambda: EagleConfig(**last, norm_output=True),
            {**speculators, "speculators_model_type": "mtp", "draft_vocab_size": None},
            "mtp_layers.{i}",
        ),
        "zlab": (lambda: BlockConfig(**block), of_dflash, "layers.{i}"),
        "domino": (
            lambda: BlockConfig(**block, **domino, from_anchor=True),
            {
                **of_dflash,
                "dflash_config": {
                    **of_block,
                    "projector_type": "domino",
                    "shift_label": True,
                    "pure_draft_prefix_len": 1,
                    "emb_dim": 4,
                    "gru_hidden_dim": 6,
                },
            },
            "layers.{i}",
        ),
        "dflash2": (
            lambda: BlockConfig(**block, **selector, **convolved),
            {
                **of_dflash,
                "dflash_config": {
                    **of_block,
                    "selector_rank": 4,
                    "selector_top_k": 6,
                    "conv_kernel_size": 2,
                    "conv_group_size": 4,
                },
            },
            "layers.{i}",
        ),
        "dspark": (
            lambda: BlockConfig(**block, **markov, **judged, from_anchor=True, own_output=True),
            {
                **speculators,
                "speculators_model_type": "dspark",
                "aux_hidden_state_layer_ids": [1, 2],
                "block_size": 5,
                "mask_token_id": 3,
                "markov_rank": 4,
                "enable_confidence_head": True,
                "confidence_head_with_markov": True,
            },
            "layers.{i}",
        ),
    }[kind]
    head_config = make()
    head = draft_head(head_config, verifier)
    rng = np.random.default_rng(seed)
    arrays = {}
    for path, leaf in flatten_dict(head.abstract_params()["network"], sep="/").items():
        name = kind_of(head_config).stored(head_config, layers, path)[0].hf
        is_norm = leaf.ndim == 1
        value = rng.uniform(0.5, 1.5, leaf.shape) if is_norm else 0.5 * rng.normal(size=leaf.shape)
        value = value.astype(np.float32)
        value = np.ascontiguousarray(value.T if path.endswith("/kernel") else value)
        arrays[name] = value
    if drafted is not None:
        arrays["d2t"] = np.array(drafted, np.int64) - np.arange(len(drafted))
        arrays["t2d"] = np.isin(np.arange(vocab), drafted)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**values, **changes}))
    safetensors.numpy.save_file(arrays, directory / "model.safetensors")
    return head_config
