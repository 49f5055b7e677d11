"""Gemma 3 (text): five layers with a window to one without, each kind with its own rotation.

Checkpoints of the larger sizes also have a vision model, which is left out.

Source: Gemma Team 2025 (arXiv 2503.19786); `transformers/models/gemma3`.
"""

import dataclasses
from typing import Any

import numpy as np

from specjax.errors import UserError
from specjax.models.config import Style
from specjax.models.decoder_only import (
    FULL,
    SLIDING,
    RotaryConfig,
    decoder_only_family,
    decoder_only_from_hf,
    decoder_only_to_hf,
    rope_from_hf,
    types_of_layers,
    windows_from_hf,
)
from specjax.models.family import HFFields, Nested
from specjax.models.gemma2 import (
    GEMMA2_CONSTANTS,
    GEMMA2_NAMES,
    SPECIAL_IDS,
    VOCABULARY,
    gemma_style,
    query_scalar,
    whole_scalar,
)
from specjax.models.position_encoding import rope_frequencies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Config(RotaryConfig):
    """The text network of a Gemma 3.

    The stored norm scales are Hugging Face's: the network adds 1 to them.

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

    @property
    def style(self) -> Style:
        every = rope_frequencies(self.head_dim, self.rope_theta) / np.float32(self.rope_factor)
        local = rope_frequencies(self.head_dim, self.local_rope_theta)
        ropes = {FULL: tuple(every.tolist()), SLIDING: tuple(local.tolist())}
        return dataclasses.replace(
            super().style,
            **gemma_style(self.embed_dim),
            ropes=tuple(ropes[kind] for kind in types_of_layers(self)),
            query_scale=self.query_pre_attn_scalar**-0.5,
            qk_norms="head",
            post_norms=True,
        )


def gemma3_types(count: int, every: int = 6) -> tuple[str, ...]:
    """The types of the layers: each `every`-th has no window."""
    return tuple(FULL if (i + 1) % every == 0 else SLIDING for i in range(count))


def _from_hf(fields: HFFields) -> Gemma3Config:
    fields.refuse_others(GEMMA2_CONSTANTS)
    fields.refuse("use_bidirectional_attention", (False,), False)
    fields.refuse("attn_logit_softcapping", (None,), None)
    fields.refuse("final_logit_softcapping", (None,), None)
    # Files of the larger sizes leave out what the 4B has.
    sizes = decoder_only_from_hf(
        fields,
        vocab_size=262_208,
        hidden_size=2_304,
        intermediate_size=9_216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
    )
    count = sizes["num_layers"]
    types = gemma3_types(count, fields.whole("sliding_window_pattern", 6))
    window = fields.window(4_096)
    return Gemma3Config(
        **sizes,
        **windows_from_hf(fields, window, types, count),
        **_ropes(fields),
        query_pre_attn_scalar=query_scalar(fields),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
    )


def _ropes(fields: HFFields) -> dict[str, Any]:
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

    theta, kind, rope = one(FULL, "rope_theta", 1e6, fields.objects("rope_scaling"))
    local, local_kind, _ = one(SLIDING, "rope_local_base_freq", 10_000.0, {})
    if kind not in ("default", "linear") or local_kind != "default":
        raise UserError(
            f"rope_type={kind!r} of {FULL} must be 'default' or 'linear', and {local_kind!r} of "
            f"{SLIDING} 'default'"
        )
    factor = float(rope.positive("factor")) if kind == "linear" else 1.0
    return {"rope_theta": theta, "local_rope_theta": local, "rope_factor": factor}


def _to_hf(config: Gemma3Config) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "default"}
    if config.rope_factor != 1.0:
        scaling = {"rope_type": "linear", "factor": config.rope_factor}
    local = {"rope_type": "default", "rope_theta": config.local_rope_theta}
    return {
        **decoder_only_to_hf(config),
        **{name: allowed[0] for name, allowed in GEMMA2_CONSTANTS.items()},
        "sliding_window": config.sliding_window or 4_096,
        "layer_types": types_of_layers(config),
        "query_pre_attn_scalar": whole_scalar(config.query_pre_attn_scalar),
        "max_position_embeddings": 32_768,
        "rope_theta": config.rope_theta,  # 4.x, with the next two
        "rope_local_base_freq": config.local_rope_theta,
        "rope_scaling": None if config.rope_factor == 1.0 else scaling,
        "rope_parameters": {
            FULL: {**scaling, "rope_theta": config.rope_theta},
            SLIDING: local,
        },
    }


def _size(window: int, vocab: int, *sizes: int, **others: Any) -> Gemma3Config:
    types = gemma3_types(sizes[-1])
    return Gemma3Config.of(vocab, *sizes, sliding_window=window, layer_types=types, **others)


GEMMA3 = decoder_only_family(
    "gemma3_text",
    config=Gemma3Config,
    architectures=("Gemma3ForCausalLM",),
    special_ids=SPECIAL_IDS,
    names=GEMMA2_NAMES,
    from_hf=_from_hf,
    to_hf=_to_hf,
    nested=Nested(
        model_type="gemma3",
        architectures=("Gemma3ForConditionalGeneration",),
        field="text_config",
        # Published files, and those of transformers 5.
        prefixes={"language_model.": "", "model.language_model.": "model."},
        others=r"(model\.)?(vision_tower|multi_modal_projector)\..*",
    ),
    presets={
        "gemma3_270m": _size(512, 262_144, 640, 4, 1, 256, 2_048, 18),
        "gemma3_1b": _size(512, 262_144, 1_152, 4, 1, 256, 6_912, 26),
        "gemma3_4b": _size(1_024, 262_208, 2_560, 8, 4, 256, 10_240, 34, rope_factor=8.0),
        "gemma3_12b": _size(1_024, 262_208, 3_840, 16, 8, 256, 15_360, 48, rope_factor=8.0),
        "gemma3_27b": _size(
            1_024, 262_208, 5_376, 32, 16, 128, 21_504, 62,
            rope_factor=8.0, query_pre_attn_scalar=168.0,
        ),
    },
    vocabulary=VOCABULARY,
)  # fmt: skip
