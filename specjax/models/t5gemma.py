"""T5Gemma: an encoder and a decoder of Gemma 2's blocks, with cross-attention between.

The two may differ in all sizes but the vocabulary, and each has its own embedding.

Source: Zhang et al. 2025 (arXiv 2504.06225); `transformers/models/t5gemma`.
"""

import dataclasses
from typing import Any

from specjax.errors import UserError
from specjax.models.config import Style
from specjax.models.family import HEADS, MLP, Family, HFFields, Renaming, T
from specjax.models.gemma2 import GEMMA2, Gemma2Config
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

    parts = {"encoder": Gemma2Config}  # noqa: RUF012

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "encoder", check_encoder(self))

    @property
    def encoder_config(self) -> Gemma2Config:
        return self.encoder

    @property
    def encoder_style(self) -> Style:
        style = self.encoder.style
        # As in transformers 5. Google's code (`gemma/research/t5gemma`) and transformers 4 see one
        # position less on both sides.
        around = (self.encoder.sliding_window,) * 2
        windows = tuple(None if w is None else around for w in style.windows)
        return dataclasses.replace(style, windows=windows, own_embedding=True)


def check_encoder(config: Any) -> Any:
    """The encoder of a configuration, with the decoder's vocabulary and dtypes."""
    if config.encoder is None:
        name = type(config).__name__
        raise UserError(f"{name}: encoder must be a {config.parts['encoder'].__name__}")
    shared = ("vocab_size", "dtype", "param_dtype")
    return config.encoder.replace(**{field: getattr(config, field) for field in shared})


def start_from_hf(fields: HFFields, decoder: HFFields) -> int:
    """The first token of the decoder: `decoder_start_token_id`, else bos."""
    stated = fields if "bos_token_id" in fields.values else decoder
    bos = stated.whole("bos_token_id", 2, least=0)
    return fields.whole("decoder_start_token_id", bos, least=0)


def check_vocabularies(fields: HFFields, sizes: tuple[int, ...]) -> None:
    """The vocabularies of the parts of a `config.json` must be one."""
    outer = fields.whole("vocab_size", sizes[0])
    if len({*sizes, outer}) > 1:
        raise UserError(
            "vocab_size of the encoder, the decoder and the model must be the same, got "
            f"{', '.join(map(str, sizes))}, {outer}"
        )


def _from_hf(fields: HFFields) -> T5GemmaConfig:
    parts = [fields.part(name, "t5_gemma_module") for name in ("encoder", "decoder")]
    stacks: list[Any] = [
        HFFields({**_DEFAULTS, **part.values}, part.name).read(GEMMA2.from_hf) for part in parts
    ]
    encoder, decoder = stacks
    check_vocabularies(fields, (encoder.vocab_size, decoder.vocab_size))
    values = {**vars(decoder), "tie_embeddings": fields.flag("tie_word_embeddings", True)}
    start = start_from_hf(fields, parts[1])
    return T5GemmaConfig(**values, encoder=encoder, decoder_start_token=start)


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


def _to_hf(config: T5GemmaConfig) -> dict[str, Any]:
    def stack(sizes: Gemma2Config, is_decoder: bool) -> dict[str, Any]:
        return {
            **GEMMA2.to_hf(sizes),
            "model_type": "t5_gemma_module",
            "vocab_size": config.vocab_size,
            "is_decoder": is_decoder,
        }

    return {
        "encoder": stack(config.encoder, False),
        "decoder": stack(config, True),
        "decoder_start_token_id": config.decoder_start_token,
        "is_encoder_decoder": True,
        "dropout_rate": 0.0,
        "tie_word_embeddings": config.tie_embeddings,
    }


def gemma_stack(hf: str, stack: str, attention: str, qk_norms: bool = False) -> list[Renaming]:
    """Hugging Face's names of an encoder or a decoder of Gemma's blocks.

    Args:
      hf: their prefix.
      stack: "encoder" or "decoder".
      attention: the name of self-attention here.
      qk_norms: whether there are norms of queries and keys.
    """
    block, layer = f"{hf}.layers.{{i}}", f"{stack}/layers_{{i}}"
    blocks = {"self_attn": (attention, attention)}
    if stack == "decoder":
        blocks["cross_attn"] = ("encoder_decoder_attention", "cross_attention")
    lines = []
    for theirs, (ours, norm) in blocks.items():
        lines += [
            Renaming(f"{block}.{theirs}.{a}_proj.weight", f"{layer}/{ours}/{b}/kernel", T)
            for a, b in HEADS.items()
        ]
        if qk_norms:
            lines += [
                Renaming(f"{block}.{theirs}.{a}_norm.weight", f"{layer}/{ours}/{b}_norm/scale")
                for a, b in (("q", "query"), ("k", "key"))
            ]
        lines += [
            Renaming(
                f"{block}.{side}_{theirs}_layernorm.weight",
                f"{layer}/{side}_{norm}_layer_norm/scale",
            )
            for side in ("pre", "post")
        ]
    lines += [
        Renaming(f"{block}.mlp.{a}_proj.weight", f"{layer}/mlp/{b}/kernel", T)
        for a, b in MLP.items()
    ]
    lines += [
        Renaming(
            f"{block}.{side}_feedforward_layernorm.weight", f"{layer}/{side}_mlp_layer_norm/scale"
        )
        for side in ("pre", "post")
    ]
    return [*lines, Renaming(f"{hf}.norm.weight", f"{stack}/{stack}_norm/scale")]


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
        *gemma_stack("model.encoder", "encoder", "attention"),
        *gemma_stack("model.decoder", "decoder", "self_attention"),
        Renaming("lm_head.out_proj.weight", "decoder/logits_dense/kernel", T),
    ),
    from_hf=_from_hf,
    to_hf=_to_hf,
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
