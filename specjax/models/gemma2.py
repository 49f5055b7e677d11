"""Gemma 2: soft caps, a sliding window in every other layer, norms before and after each block.

Source: Gemma Team 2024; `transformers/models/gemma2`.
"""

import dataclasses
import functools
from typing import Any

from specjax.errors import UserError
from specjax.models.config import DecoderOnlyConfig, Style
from specjax.models.decoder_only import (
    Constants,
    decoder_only_family,
    decoder_only_names,
    llama_style,
    rotary_from_hf,
    rotary_to_hf,
)
from specjax.models.family import VERBATIM, HFFields, Vocabulary
from specjax.models.position_encoding import rope_frequencies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma2Config(DecoderOnlyConfig):
    """A Gemma 2.

    The stored norm scales are Hugging Face's: the network adds 1 to them.

    Attributes:
      sliding_window: on even layers a query at position t sees keys at t - window + 1 .. t.
      attn_logit_softcap: c in c·tanh(x / c) on attention logits; None for no cap.
      final_logit_softcap: the same on the output logits; None for no cap.
      query_pre_attn_scalar: queries are multiplied by this ** -0.5.
      rope_theta: base of the rotary frequencies.
    """

    sliding_window: int
    tie_embeddings: bool = True
    attn_logit_softcap: float | None = 50.0
    final_logit_softcap: float | None = 30.0
    query_pre_attn_scalar: float = 256.0
    rope_theta: float = 10_000.0

    @property
    def style(self) -> Style:
        layers = range(self.num_layers)
        return llama_style(
            self,
            rope_frequencies(self.head_dim, self.rope_theta),
            **gemma_style(self.embed_dim),
            windows=tuple(None if i % 2 else self.sliding_window for i in layers),
            query_scale=self.query_pre_attn_scalar**-0.5,
            post_norms=True,
            attn_softcap=self.attn_logit_softcap,
            final_softcap=self.final_logit_softcap,
        )


def gemma_style(embed_dim: int) -> dict[str, Any]:
    """The fields of `Style` that all Gemmas share."""
    return {
        "activations": ("gelu", "linear"),
        "plus_one_norms": True,
        "embed_stddev": embed_dim**-0.5,
        "embed_scale": embed_dim**0.5,
    }


# Fields that all later Gemmas may only have with these values.
GEMMA2_CONSTANTS: Constants = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
}


def _from_hf(fields: HFFields) -> Gemma2Config:
    values = fields.values
    if not values.get("hidden_activation"):
        fields.refuse("hidden_act", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    fields.refuse("use_bidirectional_attention", (False,), False)
    sizes = rotary_from_hf(fields, GEMMA2_CONSTANTS, tied=True, head_dim=256, num_key_value_heads=4)
    types = values.get("layer_types")
    # As long as the list: a damaged file may name any number of layers.
    count = len(types) if isinstance(types, list) else 0
    alternating = ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]
    if types is not None and (types != alternating or count != sizes["num_layers"]):
        raise UserError(
            f"layer_types={types} must alternate between sliding_attention and full_attention, as "
            f"in Gemma 2, for num_hidden_layers={sizes['num_layers']}"
        )

    def cap(name: str, default: float) -> float | None:
        # null means no cap; an absent key means the default.
        return fields.positive(name, None) if name in values else default

    return Gemma2Config(
        **sizes,
        # null is refused.
        sliding_window=fields.whole("sliding_window") if "sliding_window" in values else 4096,
        attn_logit_softcap=cap("attn_logit_softcapping", 50.0),
        final_logit_softcap=cap("final_logit_softcapping", 30.0),
        query_pre_attn_scalar=query_scalar(fields),
    )


def _to_hf(config: Gemma2Config) -> dict[str, Any]:
    return {
        **rotary_to_hf(config, GEMMA2_CONSTANTS, 8_192),
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": config.sliding_window,
        "attn_logit_softcapping": config.attn_logit_softcap,
        "final_logit_softcapping": config.final_logit_softcap,
        "query_pre_attn_scalar": whole_scalar(config.query_pre_attn_scalar),
    }


def query_scalar(fields: HFFields) -> float:
    """The field `query_pre_attn_scalar`, which may be absent but not null."""
    name = "query_pre_attn_scalar"
    return fields.positive(name) if name in fields.values else 256.0


def whole_scalar(value: float) -> int:
    """`query_pre_attn_scalar` as transformers 5 reads it."""
    if not value.is_integer():
        raise UserError(
            f"query_pre_attn_scalar={value} must be a whole number for transformers 5 to read the "
            "model; convert it to orbax"
        )
    return int(value)


_size = functools.partial(Gemma2Config.of, 256_000, sliding_window=4_096)

# With norms before and after each block.
GEMMA2_NAMES = decoder_only_names(
    {
        "input_layernorm": "pre_self_attention_layer_norm",
        "post_attention_layernorm": "post_self_attention_layer_norm",
        "pre_feedforward_layernorm": "pre_mlp_layer_norm",
        "post_feedforward_layernorm": "post_mlp_layer_norm",
    }
)
SPECIAL_IDS = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2}
VOCABULARY = Vocabulary(
    file="tokenizer.model",
    types=("bpe",),
    options={
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
        "eos_piece": "<eos>",
        "bos_piece": "<bos>",
        "add_dummy_prefix": False,
        **VERBATIM,
    },
    settings={
        "tokenizer_class": "GemmaTokenizer",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "bos_token": "<bos>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
        "legacy": False,
    },
)

GEMMA2 = decoder_only_family(
    "gemma2",
    config=Gemma2Config,
    architectures=("Gemma2ForCausalLM",),
    special_ids=SPECIAL_IDS,
    names=GEMMA2_NAMES,
    from_hf=_from_hf,
    to_hf=_to_hf,
    presets={
        "gemma2_2b": _size(2_304, 8, 4, 256, 9_216, 26),
        "gemma2_9b": _size(3_584, 16, 8, 256, 14_336, 42),
        # Its queries are scaled by E / H, not by the width of a head.
        "gemma2_27b": _size(4_608, 32, 16, 128, 36_864, 46, query_pre_attn_scalar=144.0),
    },
    vocabulary=VOCABULARY,
)
