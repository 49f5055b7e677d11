"""Random heads in published formats, on disk, for a verifier."""

import json

import numpy as np
import safetensors.numpy

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
FORMATS = ("eagle3", "eagle1", "speculators", "mtp", "zlab", "dspark")


def write_head(directory, verifier, kind, drafted=None, seed=0, **changes):
    """Writes a head for a verifier's network; of `drafted` only these tokens are drafted."""
    config, depth = verifier.config, len(verifier.config.style.layers)
    width, vocab = config.embed_dim, config.vocab_size
    layer = {**_LAYER, "hidden_size": width, "vocab_size": vocab, "num_hidden_layers": 1}
    sizes = LlamaConfig(
        vocab_size=vocab, embed_dim=width, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=16,
        num_layers=1,
    )  # fmt: skip
    common = {"layers": sizes, "windows": (None,), "boundaries": (1, 2)}
    common["draft_vocab"] = None if drafted is None else len(drafted)
    eagle3 = tuple(sorted({2, depth // 2, depth - 3}))
    theirs = {"name_or_path": "some/verifier", "architectures": None}
    speculators = {
        "transformer_layer_config": layer,
        "speculators_config": {"verifier": theirs},
        "draft_vocab_size": len(drafted or range(vocab)),
    }
    block = {"block_size": 5, "mask_token": 3}
    ids = {"target_layer_ids": [0, 1], "mask_token_id": 3}
    markov = {
        "markov": "vanilla",
        "markov_rank": 4,
        "confidence": True,
        "confidence_reads_markov": True,
    }
    head_config, values, layers = {
        "eagle3": lambda: (
            EagleConfig(**{**common, "boundaries": eagle3}, own_output=True),
            {**layer, "draft_vocab_size": len(drafted or range(vocab))},
            "midlayer",
        ),
        "eagle1": lambda: (
            EagleConfig(
                **{**common, "boundaries": (depth + 1,)}, projects=True, norms=False, fc_bias=True
            ),
            layer,
            "layers.{i}",
        ),
        "speculators": lambda: (
            EagleConfig(**common, own_output=True, own_embedding=True, norm_before_fc=True),
            {
                **speculators,
                "speculators_model_type": "eagle3",
                "eagle_aux_hidden_state_layer_ids": [1, 2],
                "norm_before_fc": True,
            },
            "layers.{i}",
        ),
        "mtp": lambda: (
            EagleConfig(**{**common, "boundaries": (depth + 1,)}, projects=True, norm_output=True),
            {**speculators, "speculators_model_type": "mtp", "draft_vocab_size": None},
            "mtp_layers.{i}",
        ),
        "zlab": lambda: (
            BlockConfig(**common, **block),
            {**layer, "block_size": 5, "num_target_layers": depth, "dflash_config": ids},
            "layers.{i}",
        ),
        "dspark": lambda: (
            BlockConfig(**common, **block, **markov, from_anchor=True, own_output=True),
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
    }[kind]()
    head = draft_head(head_config, verifier)
    rng = np.random.default_rng(seed)
    arrays = {}
    for path, shape in _shapes(head.abstract_params()["network"]).items():
        name = kind_of(head_config).stored(head_config, layers, path)[0].hf
        value = rng.normal(size=shape) if len(shape) > 1 else rng.uniform(0.5, 1.5, shape)
        value = (0.5 * value if len(shape) > 1 else value).astype(np.float32)
        value = np.ascontiguousarray(value.T if path.endswith("kernel") else value)
        arrays[name] = value
    if drafted is not None:
        arrays["d2t"] = np.array(drafted, np.int64) - np.arange(len(drafted))
        arrays["t2d"] = np.isin(np.arange(vocab), drafted)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**values, **changes}))
    safetensors.numpy.save_file(arrays, directory / "model.safetensors")
    return head_config


def _shapes(tree, path=""):
    if hasattr(tree, "shape"):
        return {path.lstrip("/"): tree.shape}
    found = {}
    for name, inner in tree.items():
        found |= _shapes(inner, f"{path}/{name}")
    return found
