"""The arrays of a Hugging Face checkpoint and the parameters they are: one table per family.

`{i}` stands for a layer's number. `T` marks matrices stored the other way round: PyTorch keeps
`[out, in]`, Flax `[in, out]`.
"""

import re
from typing import NamedTuple

from specjax.models import Gemma2Config, LlamaConfig, T5Config
from specjax.models.config import ModelConfig

T = True


class Renaming(NamedTuple):
    """One line of a table.

    Attributes:
      hf: name in the checkpoint.
      path: path in the parameter tree.
      transposed: whether the two are each other's transpose.
    """

    hf: str
    path: str
    transposed: bool = False


def _t5_attention(hf: str, path: str) -> list[Renaming]:
    names = {"q": "query", "k": "key", "v": "value", "o": "out"}
    return [Renaming(f"{hf}.{a}.weight", f"{path}/{b}/kernel", T) for a, b in names.items()]


def _t5_stack(stack: str) -> list[Renaming]:
    """The encoder's or the decoder's block: attention, perhaps cross attention, MLP."""
    block, layer = f"{stack}.block.{{i}}.layer", f"{stack}/layers_{{i}}"
    decoder = stack == "decoder"
    attention, last = ("self_attention", 2) if decoder else ("attention", 1)
    rules = [
        *_t5_attention(f"{block}.0.SelfAttention", f"{layer}/{attention}"),
        Renaming(f"{block}.0.layer_norm.weight", f"{layer}/pre_{attention}_layer_norm/scale"),
        *(
            Renaming(f"{block}.{last}.DenseReluDense.{w}.weight", f"{layer}/mlp/{w}/kernel", T)
            for w in ("wi", "wi_0", "wi_1", "wo")
        ),
        Renaming(f"{block}.{last}.layer_norm.weight", f"{layer}/pre_mlp_layer_norm/scale"),
        Renaming(
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            f"{stack}/relpos_bias/rel_embedding",
            T,
        ),
        Renaming(f"{stack}.final_layer_norm.weight", f"{stack}/{stack}_norm/scale"),
    ]
    if decoder:
        rules += _t5_attention(f"{block}.1.EncDecAttention", f"{layer}/encoder_decoder_attention")
        rules.append(
            Renaming(
                f"{block}.1.layer_norm.weight", f"{layer}/pre_cross_attention_layer_norm/scale"
            )
        )
    return rules


_T5 = (
    Renaming("shared.weight", "token_embedder/embedding"),
    *_t5_stack("encoder"),
    *_t5_stack("decoder"),
    Renaming("lm_head.weight", "decoder/logits_dense/kernel", T),
)


def _decoder_only(norms: dict[str, str]) -> tuple[Renaming, ...]:
    """Llama's names; the families differ in their norms."""
    hf, layer = "model.layers.{i}", "decoder/layers_{i}"
    heads = {"q": "query", "k": "key", "v": "value", "o": "out"}
    mlp = {"gate": "wi_0", "up": "wi_1", "down": "wo"}
    return (
        Renaming("model.embed_tokens.weight", "token_embedder/embedding"),
        *(
            Renaming(f"{hf}.self_attn.{a}_proj.weight", f"{layer}/self_attention/{b}/kernel", T)
            for a, b in heads.items()
        ),
        *(
            Renaming(f"{hf}.mlp.{a}_proj.weight", f"{layer}/mlp/{b}/kernel", T)
            for a, b in mlp.items()
        ),
        *(Renaming(f"{hf}.{a}.weight", f"{layer}/{b}/scale") for a, b in norms.items()),
        Renaming("model.norm.weight", "decoder/decoder_norm/scale"),
        Renaming("lm_head.weight", "decoder/logits_dense/kernel", T),
    )


# The same name means different norms: Llama's post_attention_layernorm precedes the MLP.
_LLAMA = _decoder_only(
    {
        "input_layernorm": "pre_self_attention_layer_norm",
        "post_attention_layernorm": "pre_mlp_layer_norm",
    }
)
_GEMMA2 = _decoder_only(
    {
        "input_layernorm": "pre_self_attention_layer_norm",
        "post_attention_layernorm": "post_self_attention_layer_norm",
        "pre_feedforward_layernorm": "pre_mlp_layer_norm",
        "post_feedforward_layernorm": "post_mlp_layer_norm",
    }
)

TABLES: dict[type[ModelConfig], tuple[Renaming, ...]] = {
    T5Config: _T5,
    LlamaConfig: _LLAMA,
    Gemma2Config: _GEMMA2,
}

# Names under which a checkpoint may hold the embedding a second time (or only there).
EMBEDDING_COPIES: dict[type[ModelConfig], tuple[str, ...]] = {
    T5Config: ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    LlamaConfig: (),
    Gemma2Config: (),
}

# Arrays of old checkpoints that no network reads: constants, and an unused bias of T5 v1.0.
UNUSED: dict[type[ModelConfig], str] = {
    T5Config: r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    LlamaConfig: r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    Gemma2Config: r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
}


def embedding_name(family: type[ModelConfig]) -> str:
    """The checkpoint's name of the embedding."""
    return next(r.hf for r in TABLES[family] if r.path == "token_embedder/embedding")


def to_hf(family: type[ModelConfig], path: str) -> Renaming:
    """Finds a parameter's line, its numbers filled in.

    Args:
      family: the configuration's class.
      path: of the parameter, such as `decoder/layers_3/mlp/wo/kernel`.

    Returns:
      The rule for exactly this parameter.

    Raises:
      KeyError: where the table has no such line (an error of ours, not of the user's).
    """
    number = re.search(r"(?<=/layers_)\d+(?=/)", path)
    layer = number.group() if number else ""
    pattern = path.replace(f"/layers_{layer}/", "/layers_{i}/") if number else path
    for rule in TABLES[family]:
        if rule.path == pattern:
            return Renaming(rule.hf.replace("{i}", layer), path, rule.transposed)
    raise KeyError(f"{family.__name__} has no Hugging Face name for the parameter {path}")
