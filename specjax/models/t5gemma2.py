"""T5Gemma 2 (text): Gemma 3's blocks; one attention sees the decoder's and the encoder's tokens.

Checkpoints also have a vision model, which is left out.

Source: Zhang et al. 2025 (arXiv 2512.14856); `transformers/models/t5gemma2`.
"""

import dataclasses
from typing import Any

from specjax.errors import UserError
from specjax.models.config import Style
from specjax.models.family import Family, HFFields, Nested, Renaming, T
from specjax.models.gemma3 import GEMMA3, Gemma3Config
from specjax.models.model import Seq2SeqLM
from specjax.models.t5gemma import (
    T5GEMMA,
    check_encoder,
    check_vocabularies,
    gemma_stack,
    start_from_hf,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Gemma2Config(Gemma3Config):
    """The text network of a T5Gemma 2; the fields of `Gemma3Config` are the decoder's.

    Attributes:
      encoder: the sizes of the encoder, of the decoder's width; its vocabulary and dtypes are the
        decoder's. Of the positions in a window, half precede the query and half follow it.
      decoder_start_token: the first token that the decoder reads; bos in published models.
      eoi_token: the end of an image, a token with an embedding of its own.
    """

    encoder: Gemma3Config
    decoder_start_token: int = 2
    eoi_token: int = 256_000

    parts = {"encoder": Gemma3Config}  # noqa: RUF012

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "encoder", check_encoder(self))
        if self.eoi_token < 0:
            raise UserError(f"T5Gemma2Config: eoi_token={self.eoi_token} must be at least 0")
        if self.encoder.embed_dim != self.embed_dim:
            raise UserError(
                f"T5Gemma2Config: embed_dim={self.embed_dim} must be the encoder's, "
                f"{self.encoder.embed_dim}"
            )
        if not self.tie_embeddings:
            raise UserError("T5Gemma2Config: tie_embeddings=False is not supported")

    @property
    def style(self) -> Style:
        return dataclasses.replace(super().style, eoi_token=self.eoi_token, merged_cross=True)

    @property
    def encoder_config(self) -> Gemma3Config:
        return self.encoder

    @property
    def encoder_style(self) -> Style:
        style = self.encoder.style
        window = self.encoder.sliding_window or 1  # None: no layer has a window
        halves = ((window + 1) // 2 - 1, window // 2)
        windows = tuple(None if w is None else halves for w in style.windows)
        return dataclasses.replace(style, windows=windows, eoi_token=self.eoi_token)


def _from_hf(fields: HFFields) -> T5Gemma2Config:
    outer = fields.part("encoder", "t5gemma2_encoder")
    inner = fields.part("decoder", "t5gemma2_decoder")
    text = outer.read(lambda fields: fields.part("text_config", "t5gemma2_text"))
    encoder: Any = text.read(GEMMA3.from_hf)
    decoder: Any = inner.read(GEMMA3.from_hf)
    check_vocabularies(fields, (encoder.vocab_size, decoder.vocab_size))
    fields.refuse("tie_word_embeddings", (True,), True)
    return T5Gemma2Config(
        **{**vars(decoder), "tie_embeddings": True},
        encoder=encoder,
        decoder_start_token=start_from_hf(fields, inner),
        eoi_token=outer.whole("eoi_token_index", 256_000, least=0),
    )


# The smallest vision model: transformers always makes one.
_VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 14,
    "patch_size": 14,
    "vision_use_head": False,
}


def _to_hf(config: T5Gemma2Config) -> dict[str, Any]:
    shared = {"vocab_size": config.vocab_size, "tie_word_embeddings": True}
    return {
        "encoder": {
            "model_type": "t5gemma2_encoder",
            "text_config": {
                **GEMMA3.to_hf(config.encoder),
                **shared,
                "model_type": "t5gemma2_text",
            },
            "vision_config": dict(_VISION),
            "mm_tokens_per_image": 1,
            "eoi_token_index": config.eoi_token,
            "tie_word_embeddings": True,
        },
        "decoder": {**GEMMA3.to_hf(config), **shared, "model_type": "t5gemma2_decoder"},
        "decoder_start_token_id": config.decoder_start_token,
        "eoi_token_index": config.eoi_token,
        "is_encoder_decoder": True,
        "dropout_rate": 0.0,
        "tie_word_embeddings": True,
    }


def _size(stack: Any) -> T5Gemma2Config:
    stack = stack.replace(vocab_size=262_144, rope_factor=8.0)
    return T5Gemma2Config(**vars(stack), encoder=stack)


_EOI = "model.encoder.embed_tokens.eoi_embedding"

T5GEMMA2 = Family(
    name="t5gemma2",
    config=T5Gemma2Config,
    model=Seq2SeqLM,
    architectures=("T5Gemma2ForConditionalGeneration",),
    special_ids=T5GEMMA.special_ids,
    names=(
        Renaming("model.encoder.embed_tokens.weight", "token_embedder/embedding"),
        Renaming(_EOI, "token_embedder/eoi_embedding"),
        *gemma_stack("model.encoder", "encoder", "attention", qk_norms=True),
        *gemma_stack("model.decoder", "decoder", "self_attention", qk_norms=True),
        Renaming("lm_head.out_proj.weight", "decoder/logits_dense/kernel", T),
    ),
    from_hf=_from_hf,
    to_hf=_to_hf,
    copies=("model.decoder.embed_tokens.weight",),
    second_copies={"model.decoder.embed_tokens.eoi_embedding": _EOI},
    nested=Nested(
        model_type="t5gemma2",
        architectures=("T5Gemma2ForConditionalGeneration",),
        field="",
        # The names in memory; files have the others.
        prefixes={"model.encoder.text_model.": "model.encoder."},
        others=r"model\.encoder\.(vision_tower|multi_modal_projector)\..*",
    ),
    # Source: the published config.json of 270M; the JAX Authors' port for all (`bonsai`).
    presets={
        f"t5gemma2_{size}_{size}": _size(GEMMA3.presets[f"gemma3_{size}"])
        for size in ("270m", "1b", "4b")
    },
    vocabulary=GEMMA3.vocabulary,
)
