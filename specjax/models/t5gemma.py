"""T5Gemma and T5Gemma 2 (text): encoder-decoders of Gemma's blocks.

T5Gemma has Gemma 2's blocks, with cross-attention between; the encoder and the decoder may differ
in all sizes but the vocabulary, and each has its own embedding. T5Gemma 2 has Gemma 3's, and one
attention sees the decoder's and the encoder's tokens; its vision model is left out.

Source: Zhang et al. 2025 (arXiv 2504.06225, 2512.14856); `transformers/models/t5gemma`, `t5gemma2`.
"""

import dataclasses
from typing import Any

from specjax.errors import UserError
from specjax.models.config import Style, with_layers
from specjax.models.decoder_only import ROPE_PARTS
from specjax.models.family import (
    HEADS,
    MLP,
    Family,
    Field,
    HFFields,
    Nested,
    Renaming,
    T,
    field,
    renamings,
)
from specjax.models.gemma import GEMMA2, GEMMA3, Gemma2Config, Gemma3Config
from specjax.models.model import Seq2SeqLM


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5GemmaConfig(Gemma2Config):
    """A T5Gemma; the fields of `Gemma2Config` are the decoder's.

    Attributes:
      encoder: the sizes of the encoder; its vocabulary and dtypes are the decoder's. A query sees
        as many positions before and after its own as the window has.
      decoder_start_token: the first token that the decoder reads; bos in published models.
    """

    encoder: Gemma2Config
    decoder_start_token: int = 2

    parts = {**ROPE_PARTS, "encoder": Gemma2Config}  # noqa: RUF012

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "encoder", _encoder_of(self))

    @property
    def encoder_config(self) -> Gemma2Config:
        return self.encoder

    @property
    def encoder_style(self) -> Style:
        style = self.encoder.style
        # As in transformers 5. Google's code (`gemma/research/t5gemma`) and transformers 4 see one
        # position less on both sides.
        around = (self.encoder.sliding_window,) * 2
        return dataclasses.replace(_around(style, around), own_embedding=True)


# An encoder's style, with positions before and after a query in place of windows.
def _around(style: Style, window: tuple[int, int]) -> Style:
    return with_layers(style, ({"window": x.window and window} for x in style.layers))


# The encoder of a configuration, with the decoder's vocabulary and dtypes.
def _encoder_of(config: Any) -> Any:
    if config.encoder is None:
        name = type(config).__name__
        raise UserError(f"{name}: encoder must be a {config.parts['encoder'].__name__}")
    shared = ("vocab_size", "dtype", "param_dtype")
    return config.encoder.replace(**{field: getattr(config, field) for field in shared})


def _start(fields: HFFields, name: str) -> int:
    decoder = HFFields(fields.objects("decoder"))
    stated = fields if "bos_token_id" in fields.values else decoder
    return fields.whole(name, stated.whole("bos_token_id", 2, least=0), least=0)


_COMMON = (
    field("decoder_start_token_id", "decoder_start_token", _start),
    Field(write=lambda _: {"is_encoder_decoder": True, "dropout_rate": 0.0}),
    field("tie_word_embeddings", "tie_embeddings", HFFields.flag, True),
)


# The fields of both stacks.
def _joint(fields: HFFields, encoder: Any, decoder: Any) -> dict[str, Any]:
    sizes = encoder.vocab_size, decoder.vocab_size
    outer = fields.whole("vocab_size", sizes[0])
    if len({*sizes, outer}) > 1:
        raise UserError(
            "vocab_size of the encoder, the decoder and the model must be the same, got "
            f"{', '.join(map(str, sizes))}, {outer}"
        )
    return {**vars(decoder), "encoder": encoder}


def _read(fields: HFFields, _: Any) -> dict[str, Any]:
    parts = [fields.part(name, "t5_gemma_module") for name in ("encoder", "decoder")]
    stacks = (HFFields({**_DEFAULTS, **x.values}, x.name).read(GEMMA2.from_hf) for x in parts)
    return _joint(fields, *stacks)


# transformers' values for fields that a file leaves out.
_DEFAULTS = {
    "vocab_size": 256_000,
    "hidden_size": 2_304,
    "intermediate_size": 9_216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}


def _write(config: T5GemmaConfig) -> dict[str, Any]:
    stacks = {"encoder": config.encoder, "decoder": config}
    return {
        "vocab_size": config.vocab_size,
        **{
            name: {
                **GEMMA2.to_hf(stack),
                "model_type": "t5_gemma_module",
                "is_decoder": stack is config,
            }
            for name, stack in stacks.items()
        },
    }


# Hugging Face's names, after a prefix, of an encoder or a decoder of Gemma's blocks.
def _stack_names(hf: str, stack: str, attention: str) -> list[Renaming]:
    blocks = {"self_attn": (attention, attention)}
    if stack == "decoder":
        blocks["cross_attn"] = ("encoder_decoder_attention", "cross_attention")
    kernels = {f"mlp.{a}_proj": f"mlp/{b}" for a, b in MLP.items()}
    norms = {"feedforward": "mlp"}
    scales: dict[str, str] = {}
    for theirs, (ours, norm) in blocks.items():
        kernels |= {f"{theirs}.{a}_proj": f"{ours}/{b}" for a, b in HEADS.items()}
        scales |= {f"{theirs}.{a}_norm": f"{ours}/{b}_norm" for a, b in HEADS.items()}
        norms[theirs] = norm
    for side in ("pre", "post"):
        scales |= {f"{side}_{a}_layernorm": f"{side}_{b}_layer_norm" for a, b in norms.items()}
    return [
        *renamings(f"{hf}.layers.{{i}}", f"{stack}/layers_{{i}}", kernels, scales),
        *renamings(hf, stack, {}, {"norm": f"{stack}_norm"}),
    ]


# An encoder and a decoder of one size, without shared keys and values.
def _size(width: int, heads: int, mlp: int, layers: int, head_dim: int = 64) -> T5GemmaConfig:
    stack = Gemma2Config.of(
        256_000, width, heads, heads, head_dim, mlp, layers,
        sliding_window=4_096, query_pre_attn_scalar=float(head_dim),
    )  # fmt: skip
    return _joined(stack, stack)


def _joined(encoder: Any, decoder: Any) -> T5GemmaConfig:
    return T5GemmaConfig(**vars(decoder), encoder=encoder)


_2B, _9B = GEMMA2.presets["gemma2_2b"], GEMMA2.presets["gemma2_9b"]

T5GEMMA = Family(
    name="t5gemma",
    config=T5GemmaConfig,
    model=Seq2SeqLM,
    architectures=("T5GemmaForConditionalGeneration",),
    special_ids={
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "decoder_start_token_id": 2,
    },
    names=(
        Renaming("model.decoder.embed_tokens.weight", "token_embedder/embedding"),
        Renaming("model.encoder.embed_tokens.weight", "encoder/token_embedder/embedding"),
        *_stack_names("model.encoder", "encoder", "attention"),
        *_stack_names("model.decoder", "decoder", "self_attention"),
        Renaming("lm_head.out_proj.weight", "decoder/logits_dense/kernel", T),
    ),
    fields=(Field(_read, _write), *_COMMON),
    unused=r"model\.(encoder|decoder)\.rotary_emb\.inv_freq",
    # Source: `gemma/research/t5gemma/config.py` of google-deepmind/gemma.
    presets={
        "t5gemma_s_s": _size(512, 8, 1_024, 8),
        "t5gemma_b_b": _size(768, 12, 2_048, 12),
        "t5gemma_l_l": _size(1_024, 16, 2_816, 24),
        "t5gemma_ml_ml": _size(1_152, 4, 6_912, 26, head_dim=256),
        "t5gemma_xl_xl": _size(2_048, 32, 5_120, 24),
        "t5gemma_2b_2b": _joined(_2B, _2B),
        "t5gemma_9b_2b": _joined(_9B, _2B),
        "t5gemma_9b_9b": _joined(_9B, _9B),
    },
    vocabulary=GEMMA2.vocabulary,
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

    parts = {**ROPE_PARTS, "encoder": Gemma3Config}  # noqa: RUF012

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "encoder", _encoder_of(self))
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
        return dataclasses.replace(_around(style, halves), eoi_token=self.eoi_token)


def _read_2(fields: HFFields, _: Any) -> dict[str, Any]:
    outer = fields.part("encoder", "t5gemma2_encoder")
    inner = fields.part("decoder", "t5gemma2_decoder")
    text = outer.read(lambda fields: fields.part("text_config", "t5gemma2_text"))
    both = _joint(fields, *(part.read(GEMMA3.from_hf) for part in (text, inner)))
    fields.refuse("tie_word_embeddings", (True,), True)
    return {**both, "eoi_token": outer.whole("eoi_token_index", 256_000, least=0)}


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


def _write_2(config: T5Gemma2Config) -> dict[str, Any]:
    tied, eoi = {"tie_word_embeddings": True}, {"eoi_token_index": config.eoi_token}
    text, decoder = (GEMMA3.to_hf(stack) | tied for stack in (config.encoder, config))
    return {
        "vocab_size": config.vocab_size,
        "encoder": {
            "model_type": "t5gemma2_encoder",
            "text_config": {**text, "model_type": "t5gemma2_text"},
            "vision_config": dict(_VISION),
            "mm_tokens_per_image": 1,
            **eoi,
            **tied,
        },
        "decoder": {**decoder, "model_type": "t5gemma2_decoder"},
        **eoi,
    }


def _size_2(stack: Any) -> T5Gemma2Config:
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
        *T5GEMMA.names[2:],
    ),
    fields=(Field(_read_2, _write_2), *_COMMON),
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
        f"t5gemma2_{size}_{size}": _size_2(GEMMA3.presets[f"gemma3_{size}"])
        for size in ("270m", "1b", "4b")
    },
    vocabulary=GEMMA3.vocabulary,
)
