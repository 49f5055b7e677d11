"""T5: v1.0 (relu, tied) and v1.1 / FLAN (gated gelu, untied), with T5X's parameter tree.

Source: Raffel et al. 2020; `t5x/examples/t5/network.py`; `transformers/models/t5`.
"""

import dataclasses
from typing import Any

from specjax.models.config import ModelConfig, RelativePositions, Style
from specjax.models.family import Family, Renaming, T, Vocabulary
from specjax.models.hf_fields import HFFields
from specjax.models.layers import ACTIVATIONS
from specjax.models.seq2seq_lm import Seq2SeqLM


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config(ModelConfig):
    """A T5: v1.0 (`("relu",)`, tied), v1.1 and FLAN (`("gelu", "linear")`, untied).

    Attributes:
      num_encoder_layers: the number of layers.
      num_decoder_layers: the number of layers.
      mlp_activations: one per input projection of the feed-forward block; their outputs are
        multiplied. "gelu" is the tanh approximation. One activation names its kernel `wi`,
        several `wi_0`, `wi_1`, ....
      relpos_buckets: buckets of relative positions (32); at least 4.
      relpos_max_distance: distances from here on share the last bucket (128); more than half the
        buckets, each of which has one distance in the decoder.
      relpos_per_layer: each layer has its own bias, `layers_i/relpos_bias` (T5X's
        scalable_t5), instead of one per stack.
      scale_tied_logits: with tied embeddings, multiply the decoder's output by E ** -0.5 before
        the embedding (T5 v1.0, T5X). Without effect when untied.
      dropout_rate: used only when `apply` gets a dropout key.
      decoder_start_token: the first token that the decoder reads; the pad token in published T5s.
    """

    num_encoder_layers: int
    num_decoder_layers: int
    mlp_activations: tuple[str, ...] = ("gelu", "linear")
    relpos_buckets: int = 32
    relpos_max_distance: int = 128
    relpos_per_layer: bool = False
    scale_tied_logits: bool = True
    dropout_rate: float = 0.0
    decoder_start_token: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.mlp_activations, str):
            raise TypeError(
                f"mlp_activations={self.mlp_activations!r} must be a tuple of names; write "
                f"({self.mlp_activations!r},)"
            )
        object.__setattr__(self, "mlp_activations", tuple(self.mlp_activations))
        unknown = [a for a in self.mlp_activations if a not in ACTIVATIONS]
        if unknown or not self.mlp_activations:
            raise ValueError(
                f"mlp_activations={self.mlp_activations} may only name {', '.join(ACTIVATIONS)}"
            )
        if not 0.0 <= self.dropout_rate < 1.0:
            raise ValueError(f"dropout_rate={self.dropout_rate} must be in [0, 1)")
        # The encoder halves the buckets for the two directions; then both halve them into exact and
        # logarithmic buckets. The base of the logarithm is max_distance over the exact buckets.
        if self.relpos_buckets < 4:
            raise ValueError(f"relpos_buckets={self.relpos_buckets} must be at least 4")
        if self.relpos_max_distance <= self.relpos_buckets // 2:
            raise ValueError(
                f"relpos_max_distance={self.relpos_max_distance} must be more than half of "
                f"relpos_buckets={self.relpos_buckets}"
            )
        if not 0 <= self.decoder_start_token < self.vocab_size:
            raise ValueError(
                f"decoder_start_token={self.decoder_start_token} must be a token id in "
                f"0 .. {self.vocab_size - 1}"
            )

    @property
    def style(self) -> Style:
        """The style of the decoder."""
        return self._style(self.num_decoder_layers)

    @property
    def encoder_style(self) -> Style:
        """The style of the encoder."""
        return self._style(self.num_encoder_layers)

    def _style(self, layers: int) -> Style:
        scaled = self.tie_embeddings and self.scale_tied_logits
        return Style(
            activations=self.mlp_activations,
            windows=(None,) * layers,
            ropes=(None,) * layers,
            relative=RelativePositions(
                self.relpos_buckets, self.relpos_max_distance, self.relpos_per_layer
            ),
            hidden_scale=self.embed_dim**-0.5 if scaled else 1.0,
            dropout_rate=self.dropout_rate,
        )


# Our "gelu" is the tanh approximation, which Hugging Face calls gelu_new. Hugging Face's "gelu" is
# exact, but T5's "gated-gelu" has always meant gelu_new.
_ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "relu": ("relu",),
    "gelu_new": ("gelu",),
    "silu": ("silu",),
    "gated-gelu": ("gelu", "linear"),
    "gated-gelu_new": ("gelu", "linear"),
    "gated-relu": ("relu", "linear"),
    "gated-silu": ("silu", "linear"),
}


def _from_hf(fields: HFFields) -> T5Config:
    """See `Family`; a head is tied unless the checkpoint's differs from the embedding.

    `scale_decoder_outputs` (transformers 5) says whether a tied head scales its input. Without it,
    a tied head always scales, as in 4.x.
    """
    fields.refuse("feed_forward_proj", tuple(_ACTIVATIONS), "relu")
    buckets = fields.whole("relative_attention_num_buckets", 32, least=4)
    untied = _is_untied(fields)
    scales = fields.flag("scale_decoder_outputs")
    if scales is None:
        scales = fields.flag("tie_word_embeddings", True)
    return T5Config(
        vocab_size=fields.whole("vocab_size"),
        embed_dim=fields.whole("d_model"),
        num_heads=fields.whole("num_heads"),
        head_dim=fields.whole("d_kv"),
        mlp_dim=fields.whole("d_ff"),
        num_encoder_layers=fields.whole("num_layers"),
        num_decoder_layers=fields.whole("num_decoder_layers", fields.whole("num_layers")),
        mlp_activations=_ACTIVATIONS[fields.values.get("feed_forward_proj") or "relu"],
        norm_eps=fields.positive("layer_norm_epsilon", 1e-6),
        relpos_buckets=buckets,
        # Half of a decoder's buckets hold one distance each; the others follow.
        relpos_max_distance=fields.whole(
            "relative_attention_max_distance", 128, least=buckets // 2 + 1
        ),
        dropout_rate=fields.number("dropout_rate", 0.1),
        decoder_start_token=fields.whole(
            "decoder_start_token_id", max(0, fields.number("pad_token_id", 0)), least=0
        ),
        tie_embeddings=not untied,
        scale_tied_logits=untied or scales,
    )


def _is_untied(fields: HFFields) -> bool:
    """Whether the head differs from the embedding.

    Raises:
      ValueError: if transformers would scale the logits of an untied head.
    """
    path, head = fields.path, fields.head
    said_untied = fields.flag("tie_word_embeddings") is False
    scales = fields.flag("scale_decoder_outputs")
    if head == "copied" or (head is None and not said_untied):
        return False
    if scales and head is None:
        raise ValueError(
            f"{path}: tie_word_embeddings is false and lm_head.weight is absent, but "
            "scale_decoder_outputs is true, which belongs to a tied head; set tie_word_embeddings "
            "to true if the head is tied"
        )
    if scales:
        raise ValueError(
            f"{path}: scale_decoder_outputs is true, which belongs to a tied head, but "
            "lm_head.weight differs from shared.weight; set it to false if the head is untied"
        )
    if scales is None and not said_untied:
        raise ValueError(
            f"{path}: lm_head.weight differs from shared.weight, but tie_word_embeddings is not "
            "false, so transformers 4 ties the head and transformers 5 scales its logits; set "
            "tie_word_embeddings to false if the head is untied, as in T5 v1.1 and FLAN-T5"
        )
    return True


def _to_hf(config: T5Config) -> dict[str, Any]:
    if config.relpos_per_layer:
        raise ValueError(
            "this model has a relative position bias per layer (relpos_per_layer), but "
            "transformers' T5 has a bias per stack; convert it to orbax"
        )
    names = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    activation = names.get(config.mlp_activations)
    if activation is None:
        raise ValueError(
            f"mlp_activations={config.mlp_activations} must be an MLP of transformers' T5, "
            f"{' or '.join(str(a) for a in names)}; or convert it to orbax"
        )
    # Only a tied head scales. 4.x scales every head that the file calls tied, so an equal head that
    # does not scale is called untied: this is right in 4.x and 5.x.
    scales = config.tie_embeddings and config.scale_tied_logits
    return {
        "d_model": config.embed_dim,
        "d_kv": config.head_dim,
        "d_ff": config.mlp_dim,
        "num_heads": config.num_heads,
        "num_layers": config.num_encoder_layers,
        "num_decoder_layers": config.num_decoder_layers,
        "feed_forward_proj": activation,
        "layer_norm_epsilon": config.norm_eps,
        "relative_attention_num_buckets": config.relpos_buckets,
        "relative_attention_max_distance": config.relpos_max_distance,
        "dropout_rate": config.dropout_rate,
        "decoder_start_token_id": config.decoder_start_token,
        "is_encoder_decoder": True,
        "scale_decoder_outputs": scales,
        "tie_word_embeddings": scales,
    }


def _attention(hf: str, path: str) -> list[Renaming]:
    names = {"q": "query", "k": "key", "v": "value", "o": "out"}
    return [Renaming(f"{hf}.{a}.weight", f"{path}/{b}/kernel", T) for a, b in names.items()]


def _stack(stack: str) -> list[Renaming]:
    """The encoder's or the decoder's block: attention, perhaps cross-attention, MLP."""
    block, layer = f"{stack}.block.{{i}}.layer", f"{stack}/layers_{{i}}"
    decoder = stack == "decoder"
    attention, last = ("self_attention", 2) if decoder else ("attention", 1)
    dense = f"{block}.{last}.DenseReluDense"
    lines = [
        *_attention(f"{block}.0.SelfAttention", f"{layer}/{attention}"),
        Renaming(f"{block}.0.layer_norm.weight", f"{layer}/pre_{attention}_layer_norm/scale"),
        *(
            Renaming(f"{dense}.{w}.weight", f"{layer}/mlp/{w}/kernel", T)
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
        cross, norm = f"{layer}/encoder_decoder_attention", "pre_cross_attention_layer_norm"
        lines += _attention(f"{block}.1.EncDecAttention", cross)
        lines.append(Renaming(f"{block}.1.layer_norm.weight", f"{layer}/{norm}/scale"))
    return lines


def _size(width: int, heads: int, mlp: int, layers: int) -> T5Config:
    return T5Config(
        vocab_size=32_128,
        embed_dim=width,
        num_heads=heads,
        head_dim=64,
        mlp_dim=mlp,
        num_encoder_layers=layers,
        num_decoder_layers=layers,
    )


T5 = Family(
    name="t5",
    config=T5Config,
    model=Seq2SeqLM,
    architectures=("T5ForConditionalGeneration", "T5WithLMHeadModel"),
    special_ids={"eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0},
    names=(
        Renaming("shared.weight", "token_embedder/embedding"),
        *_stack("encoder"),
        *_stack("decoder"),
        Renaming("lm_head.weight", "decoder/logits_dense/kernel", T),
    ),
    from_hf=_from_hf,
    to_hf=_to_hf,
    copies=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    # A bias in v1.0's checkpoints.
    unused=r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    presets={
        "t5_v1_1_small": _size(512, 6, 1_024, 8),
        "t5_v1_1_base": _size(768, 12, 2_048, 12),
        "t5_v1_1_large": _size(1_024, 16, 2_816, 24),
        "t5_v1_1_xl": _size(2_048, 32, 5_120, 24),
        "t5_v1_1_xxl": _size(4_096, 64, 10_240, 24),
    },
    vocabulary=Vocabulary(
        file="spiece.model",
        types=("unigram", "bpe"),
        options={"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    ),
)
