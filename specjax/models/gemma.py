"""Gemma 1, 2 and 3 (text).

Gemma 1 scales embeddings by the square root of their width. Gemma 2 has soft caps, a window in
every other layer, and norms before and after each block. Gemma 3 has five layers with a window to
one without, each kind with its own rotation; checkpoints of its larger sizes also have a vision
model, which is left out. The stored norm scales are Hugging Face's: the networks add 1 to them.

Source: Gemma Team 2024 (arXiv 2403.08295, 2408.00118), 2025 (arXiv 2503.19786);
`transformers/models/gemma`, `gemma2`, `gemma3`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specjax.errors import UserError
from specjax.models.config import DecoderOnlyConfig, LayerSpec, Style
from specjax.models.decoder_only import (
    FULL,
    ROPE_PARTS,
    SLIDING,
    RotaryConfig,
    decoder_only_family,
    decoder_only_names,
    llama_rope,
    llama_style,
    rope,
    rope_from_hf,
    rotary_fields,
    sizes,
    types_by_number,
    windows,
)
from specjax.models.family import (
    VERBATIM,
    Constants,
    Field,
    HFFields,
    Nested,
    Vocabulary,
    constants,
    field,
    only,
)
from specjax.models.position_encoding import rope_frequencies
from specjax.models.rope_scaling import RopeScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma2Config(DecoderOnlyConfig):
    """A Gemma 2.

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
    rope_scaling: RopeScaling | None = None

    parts = ROPE_PARTS

    @property
    def style(self) -> Style:
        rope, own = llama_rope(self), self.sliding_window
        windows = (None if i % 2 else own for i in range(self.num_layers))
        return llama_style(
            self,
            [LayerSpec(window=window, rope=rope) for window in windows],
            **shared_style(self.embed_dim),
            query_scale=self.query_pre_attn_scalar**-0.5,
            post_norms=True,
            attn_softcap=self.attn_logit_softcap,
            final_softcap=self.final_logit_softcap,
        )


def shared_style(embed_dim: int) -> dict[str, Any]:
    """The fields of `Style` that all Gemmas share."""
    return {
        "activations": ("gelu", "linear"),
        "plus_one_norms": True,
        "embed_stddev": embed_dim**-0.5,
        "embed_scale": embed_dim**0.5,
    }


# Fields that all later Gemmas may only have with these values.
CONSTANTS: Constants = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
}


_ONE_DIRECTION = constants({"use_bidirectional_attention": (False,)}, written=False)


def _check_gemma2(fields: HFFields, ours: Mapping[str, Any]) -> dict[str, Any]:
    if not fields.values.get("hidden_activation"):
        fields.refuse("hidden_act", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    types = fields.values.get("layer_types")
    if types not in (None, [*types_by_number(ours["num_layers"], 2)]):
        raise UserError(
            f"layer_types={types} must alternate between sliding_attention and full_attention, as "
            f"in Gemma 2, for num_hidden_layers={ours['num_layers']}"
        )
    return {}


# A reader of fields of which null does not mean the default.
def _else(default: float, kind: Callable[..., Any], *null: None) -> Callable[..., Any]:
    return lambda fields, name: kind(fields, name, *null) if name in fields.values else default


def _whole_scalar(config: Any) -> int:
    value = config.query_pre_attn_scalar
    if not value.is_integer():
        raise UserError(
            f"query_pre_attn_scalar={value} must be a whole number for transformers 5 to read the "
            "model; convert it to orbax"
        )
    return int(value)


_QUERY_SCALAR = field(
    *("query_pre_attn_scalar",) * 2, _else(256.0, HFFields.positive), write=_whole_scalar
)


_gemma2_size = functools.partial(Gemma2Config.of, 256_000, sliding_window=4_096)

# With norms before and after each block.
_NAMES = decoder_only_names(
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
    names=_NAMES,
    fields=(
        *rotary_fields(
            CONSTANTS, rope(8_192), tie_word_embeddings=True, head_dim=256, num_key_value_heads=4
        ),
        Field(_check_gemma2, lambda _: {"hidden_act": "gelu_pytorch_tanh"}),
        _ONE_DIRECTION,
        field("sliding_window", "sliding_window", _else(4_096, HFFields.whole)),
        # null means no cap.
        field("attn_logit_softcapping", "attn_logit_softcap", _else(50.0, HFFields.positive, None)),
        field(
            "final_logit_softcapping", "final_logit_softcap", _else(30.0, HFFields.positive, None)
        ),
        _QUERY_SCALAR,
    ),
    presets={
        "gemma2_2b": _gemma2_size(2_304, 8, 4, 256, 9_216, 26),
        "gemma2_9b": _gemma2_size(3_584, 16, 8, 256, 14_336, 42),
        # Its queries are scaled by E / H, not by the width of a head.
        "gemma2_27b": _gemma2_size(4_608, 32, 16, 128, 36_864, 46, query_pre_attn_scalar=144.0),
    },
    vocabulary=VOCABULARY,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaConfig(RotaryConfig):
    """A Gemma 1."""

    tie_embeddings: bool = True

    @property
    def style(self) -> Style:
        return dataclasses.replace(super().style, **shared_style(self.embed_dim))


_GEMMA1: Constants = {
    # "gelu" has always meant the tanh approximation here.
    "hidden_act": ("gelu_pytorch_tanh", "gelu"),
    "hidden_activation": ("gelu_pytorch_tanh", None),
    "attention_bias": (False,),
}


GEMMA = decoder_only_family(
    "gemma",
    config=GemmaConfig,
    architectures=("GemmaForCausalLM",),
    special_ids=SPECIAL_IDS,
    fields=(
        _ONE_DIRECTION,
        *rotary_fields(
            _GEMMA1, rope(8_192), tie_word_embeddings=True, num_key_value_heads=16, head_dim=256
        ),
        only(sliding_window=None),
    ),
    presets={
        "gemma_2b": GemmaConfig.of(256_000, 2_048, 8, 1, 256, 16_384, 18),
        "gemma_7b": GemmaConfig.of(256_000, 3_072, 16, 16, 256, 24_576, 28),
    },
    vocabulary=VOCABULARY,
)


def refuse_scaling(config: RotaryConfig) -> None:
    """Refuses a scaling of the rotations, of which layers with and without a window have two."""
    if config.rope_scaling is not None:
        raise UserError(f"rope_scaling={config.rope_scaling} must be None: give rope_factor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Config(RotaryConfig):
    """The text network of a Gemma 3.

    Attributes:
      rope_theta: base of the rotary frequencies in layers without a window.
      local_rope_theta: base in layers with a window.
      rope_factor: the frequencies of layers without a window are divided by this.
      query_pre_attn_scalar: queries are multiplied by this ** -0.5.
    """

    tie_embeddings: bool = True
    rope_theta: float = 1e6
    local_rope_theta: float = 10_000.0
    rope_factor: float = 1.0
    query_pre_attn_scalar: float = 256.0

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_scaling(self)

    @property
    def style(self) -> Style:
        every = rope_frequencies(self.head_dim, self.rope_theta) / np.float32(self.rope_factor)
        local = rope_frequencies(self.head_dim, self.local_rope_theta)
        full = LayerSpec(rope=tuple(every.tolist()))
        sliding = LayerSpec(rope=tuple(local.tolist()), window=self.sliding_window)
        return llama_style(
            self,
            [full if window is None else sliding for window in self.windows],
            **shared_style(self.embed_dim),
            query_scale=self.query_pre_attn_scalar**-0.5,
            qk_norms="head",
            post_norms=True,
        )


# What files of Gemma 3 and 4 may leave out; those of the larger sizes do.
SIZES: dict[str, Any] = {
    "hidden_size": 2_304,
    "intermediate_size": 9_216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
}


def _read_ropes(fields: HFFields, _: Any) -> dict[str, Any]:
    # By type of layer in 5.x, in single fields in 4.x.
    both = fields.objects("rope_parameters")
    if unknown := sorted(set(both) - {FULL, SLIDING}):
        raise UserError(
            f"rope_parameters names {unknown[0]!r}; it must name {FULL!r} and {SLIDING!r}"
        )

    def one(
        kind: str, single: str, default: float, scaling: dict[str, Any]
    ) -> tuple[float, str, HFFields]:
        parameters = HFFields(both).objects(kind)
        theta = fields.positive(single, default)
        inner = {"rope_parameters": {**parameters, **scaling}, "rope_theta": theta}
        return rope_from_hf(HFFields(inner), default)

    scaling = fields.objects("rope_scaling")
    if scaling.get("type", "default") not in ("default", scaling.get("rope_type")):
        raise UserError(
            f"rope_scaling has type={scaling['type']!r}, which transformers 4 applies and "
            "transformers 5 does not; name it rope_type if the model was trained with it"
        )
    theta, kind, rope = one(FULL, "rope_theta", 1e6, scaling)
    local, local_kind, _ = one(SLIDING, "rope_local_base_freq", 10_000.0, {})
    if kind not in ("default", "linear") or local_kind != "default":
        raise UserError(
            f"rope_type={kind!r} of {FULL} must be 'default' or 'linear', and {local_kind!r} of "
            f"{SLIDING} 'default'"
        )
    factor = float(rope.positive("factor")) if kind == "linear" else 1.0
    return {"rope_theta": theta, "local_rope_theta": local, "rope_factor": factor}


def _write_ropes(config: Gemma3Config) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "default"}
    if config.rope_factor != 1.0:
        scaling = {"rope_type": "linear", "factor": config.rope_factor}
    local = {"rope_type": "default", "rope_theta": config.local_rope_theta}
    return {
        "max_position_embeddings": 32_768,
        "rope_theta": config.rope_theta,  # 4.x, with the next two
        "rope_local_base_freq": config.local_rope_theta,
        "rope_scaling": None if config.rope_factor == 1.0 else scaling,
        "rope_parameters": {
            FULL: {**scaling, "rope_theta": config.rope_theta},
            SLIDING: local,
        },
    }


def _pattern(fields: HFFields, ours: Mapping[str, Any]) -> tuple[str, ...]:
    return types_by_number(ours["num_layers"], fields.whole("sliding_window_pattern", 6))


def _gemma3_size(window: int, vocab: int, *sizes: int, **others: Any) -> Gemma3Config:
    types = types_by_number(sizes[-1], 6)
    return Gemma3Config.of(vocab, *sizes, sliding_window=window, layer_types=types, **others)


GEMMA3 = decoder_only_family(
    "gemma3_text",
    config=Gemma3Config,
    architectures=("Gemma3ForCausalLM",),
    special_ids=SPECIAL_IDS,
    names=_NAMES,
    fields=(
        constants(CONSTANTS),
        _ONE_DIRECTION,
        constants(
            {"attn_logit_softcapping": (None,), "final_logit_softcapping": (None,)}, written=False
        ),
        *sizes(**SIZES, vocab_size=262_208, num_hidden_layers=26),
        windows(_pattern, 4_096, unused=4_096),
        Field(_read_ropes, _write_ropes),
        _QUERY_SCALAR,
    ),
    nested=Nested(
        model_type="gemma3",
        architectures=("Gemma3ForConditionalGeneration",),
        field="text_config",
        # Published files, and those of transformers 5.
        prefixes={"language_model.": "", "model.language_model.": "model."},
        others=r"(model\.)?(vision_tower|multi_modal_projector)\..*",
    ),
    presets={
        "gemma3_270m": _gemma3_size(512, 262_144, 640, 4, 1, 256, 2_048, 18),
        "gemma3_1b": _gemma3_size(512, 262_144, 1_152, 4, 1, 256, 6_912, 26),
        "gemma3_4b": _gemma3_size(1_024, 262_208, 2_560, 8, 4, 256, 10_240, 34, rope_factor=8.0),
        "gemma3_12b": _gemma3_size(1_024, 262_208, 3_840, 16, 8, 256, 15_360, 48, rope_factor=8.0),
        "gemma3_27b": _gemma3_size(
            1_024, 262_208, 5_376, 32, 16, 128, 21_504, 62,
            rope_factor=8.0, query_pre_attn_scalar=168.0,
        ),
    },
    vocabulary=VOCABULARY,
)  # fmt: skip
