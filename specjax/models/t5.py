"""T5: v1.0 (relu, tied), v1.1, FLAN and ByT5 (gated gelu, untied), with T5X's parameter tree.

mT5 is T5 v1.1 with a vocabulary of 101 languages. UMT5 and Pile-T5 have relative position biases
in every layer.

Source: Raffel et al. 2020, Xue et al. 2021 (mT5), 2022 (ByT5), Chung et al. 2023 (UMT5), Sutawika
et al. 2024 (Pile-T5); `t5x/examples/t5/network.py`; `transformers/models/t5`, `mt5`, `umt5`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from specjax.errors import UserError
from specjax.models.config import LayerSpec, ModelConfig, RelativePositions, Style
from specjax.models.family import (
    HEADS,
    Family,
    Field,
    HFFields,
    Renaming,
    T,
    Vocabulary,
    field,
    only,
    renamings,
)
from specjax.models.layers import ACTIVATIONS
from specjax.models.model import Seq2SeqLM


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config(ModelConfig):
    """A T5: v1.0 (`("relu",)`, tied), v1.1 and FLAN (`("gelu", "linear")`, untied).

    Attributes:
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
        names = self.mlp_activations
        listed = isinstance(names, tuple | list) and names
        if not listed or not all(name in ACTIVATIONS for name in names):
            raise UserError(
                f"mlp_activations={names!r} must be a tuple of names, such as ('relu',); it may "
                f"only name {', '.join(ACTIVATIONS)}"
            )
        object.__setattr__(self, "mlp_activations", tuple(names))
        if not 0.0 <= self.dropout_rate < 1.0:
            raise UserError(f"dropout_rate={self.dropout_rate} must be in [0, 1)")
        # The encoder halves the buckets for the two directions; then both halve them into exact and
        # logarithmic buckets. The base of the logarithm is max_distance over the exact buckets.
        if self.relpos_buckets < 4:
            raise UserError(f"relpos_buckets={self.relpos_buckets} must be at least 4")
        if self.relpos_max_distance <= self.relpos_buckets // 2:
            raise UserError(
                f"relpos_max_distance={self.relpos_max_distance} must be more than half of "
                f"relpos_buckets={self.relpos_buckets}"
            )

    @property
    def style(self) -> Style:
        return self._style(self.num_decoder_layers)

    @property
    def encoder_style(self) -> Style:
        return self._style(self.num_encoder_layers)

    def _style(self, layers: int) -> Style:
        scaled = self.tie_embeddings and self.scale_tied_logits
        return Style(
            activations=self.mlp_activations,
            layers=(LayerSpec(),) * layers,
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

# Other names that transformers accepts for a field, in all T5s.
_ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "head_dim": "d_kv",
}


def _check(fields: HFFields, _: Any) -> dict[str, Any]:
    for alias, name in _ALIASES.items():
        if fields.values.get(alias) not in (None, fields.values.get(name)):
            raise UserError(
                f"{alias}={fields.values[alias]!r} differs from {name}="
                f"{fields.values.get(name)!r}, and transformers takes them for the same field; "
                f"remove {alias}"
            )
    fields.refuse("tie_encoder_decoder", (False,), False)
    return {}


def _read_activation(usual: str, fields: HFFields, _: Any) -> dict[str, Any]:
    fields.refuse("feed_forward_proj", tuple(_ACTIVATIONS), usual)
    projection = fields.values.get("feed_forward_proj") or usual
    # transformers saves these two; if a file has them, they have priority.
    gated = projection.startswith("gated-")
    act = "gelu_new" if projection == "gated-gelu" else projection.removeprefix("gated-")
    for name, value in {"dense_act_fn": act, "is_gated_act": gated}.items():
        if fields.values.get(name, value) != value:
            raise UserError(
                f"{name}={fields.values[name]!r} contradicts feed_forward_proj={projection!r}; "
                "correct or remove it"
            )
    return {"mlp_activations": _ACTIVATIONS[projection]}


def _write_activation(config: T5Config) -> dict[str, Any]:
    names = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    activation = names.get(config.mlp_activations)
    if activation is None:
        raise UserError(
            f"mlp_activations={config.mlp_activations} must be an MLP of transformers' T5, "
            f"{' or '.join(str(a) for a in names)}; or convert it to orbax"
        )
    return {"feed_forward_proj": activation}


def _max_distance(fields: HFFields, name: str) -> int:
    # Half of a decoder's buckets hold one distance each; the others follow.
    buckets = fields.whole("relative_attention_num_buckets", 32, least=4)
    return fields.whole(name, 128, least=buckets // 2 + 1)


def _start(fields: HFFields, name: str) -> int:
    return fields.whole(name, max(0, fields.whole("pad_token_id", 0, least=-1)), least=0)


# `activation` is the `feed_forward_proj` of a file that has none, and `per_layer` says whether
# transformers' network has a relative position bias per layer.
def _fields(head: Field, activation: str, per_layer: bool = False) -> tuple[Field, ...]:
    return (
        Field(_check, lambda _: {"is_encoder_decoder": True}),
        only(relpos_per_layer=per_layer),
        Field(functools.partial(_read_activation, activation), _write_activation),
        field("vocab_size", "vocab_size", HFFields.whole),
        field("d_model", "embed_dim", HFFields.whole),
        field("num_heads", "num_heads", HFFields.whole),
        field("d_kv", "head_dim", HFFields.whole),
        field("d_ff", "mlp_dim", HFFields.whole),
        field("num_layers", "num_encoder_layers", HFFields.whole),
        field(
            "num_decoder_layers",
            "num_decoder_layers",
            lambda fields, name: fields.whole(name, fields.whole("num_layers")),
        ),
        field("layer_norm_epsilon", "norm_eps", HFFields.positive, 1e-6),
        field("relative_attention_num_buckets", "relpos_buckets", HFFields.whole, 32, least=4),
        field("relative_attention_max_distance", "relpos_max_distance", _max_distance),
        field("dropout_rate", "dropout_rate", HFFields.number, 0.1),
        field("decoder_start_token_id", "decoder_start_token", _start),
        head,
    )


# Whether a tied head scales its input.
def _scales(config: T5Config) -> bool:
    return config.tie_embeddings and config.scale_tied_logits


# A head is tied unless the checkpoint's differs from the embedding. `scale_decoder_outputs`
# (transformers 5) says whether a tied head scales its input; without it, as in 4.x, it does.
def _read_head(fields: HFFields, _: Any) -> dict[str, bool]:
    name = "scale_decoder_outputs"
    if fields.values.get(name, ...) is None:  # as in transformers 5, which writes it
        fields = dataclasses.replace(fields, values={**fields.values, name: False})
    untied = _is_untied(fields)
    scales = fields.flag(name, fields.flag("tie_word_embeddings", True))
    return {"tie_embeddings": not untied, "scale_tied_logits": untied or scales}


_SCALED_UNTIED = (
    "scale_decoder_outputs is true, which belongs to a tied head, but lm_head.weight differs from "
    "shared.weight; set it to false if the head is untied"
)


# transformers would scale some untied heads.
def _is_untied(fields: HFFields) -> bool:
    head = fields.head
    said_untied = fields.flag("tie_word_embeddings") is False
    scales = fields.flag("scale_decoder_outputs")
    if head == "copied" or (head is None and not said_untied):
        return False
    if scales and head is None:
        raise UserError(
            "tie_word_embeddings is false and lm_head.weight is absent, but scale_decoder_outputs "
            "is true, which belongs to a tied head; set tie_word_embeddings to true if the head is "
            "tied"
        )
    if scales:
        raise UserError(_SCALED_UNTIED)
    if scales is None and not said_untied:
        raise UserError(
            "lm_head.weight differs from shared.weight, but tie_word_embeddings is not "
            "false, so transformers 4 ties the head and transformers 5 scales its logits; set "
            "tie_word_embeddings to false (or scale_decoder_outputs, of transformers 5) if the "
            "head is untied, as in T5 v1.1 and FLAN-T5"
        )
    return True


def _write_head(config: T5Config) -> dict[str, bool]:
    # Only a tied head scales. 4.x scales every head that the file calls tied, so an equal head that
    # does not scale is called untied: this is right in 4.x and 5.x.
    return dict.fromkeys(("scale_decoder_outputs", "tie_word_embeddings"), _scales(config))


def _stack(stack: str, per_layer: bool) -> list[Renaming]:
    block, layer = f"{stack}.block.{{i}}.layer", f"{stack}/layers_{{i}}"
    blocks = {"0.SelfAttention": ("attention", "attention")}
    if stack == "decoder":
        blocks = {
            "0.SelfAttention": ("self_attention", "self_attention"),
            "1.EncDecAttention": ("encoder_decoder_attention", "cross_attention"),
        }
    last, mlp = len(blocks), ("wi", "wi_0", "wi_1", "wo")
    kernels = {f"{last}.DenseReluDense.{w}": f"mlp/{w}" for w in mlp}
    scales = {f"{last}.layer_norm": "pre_mlp_layer_norm"}
    for i, (theirs, (ours, norm)) in enumerate(blocks.items()):
        kernels |= {f"{theirs}.{a}": f"{ours}/{b}" for a, b in HEADS.items()}
        scales[f"{i}.layer_norm"] = f"pre_{norm}_layer_norm"
    bias = f"{block}.0.SelfAttention.relative_attention_bias"
    if not per_layer:
        bias = bias.replace("{i}", "0")
    return [
        *renamings(block, layer, kernels, scales),
        Renaming(f"{bias}.weight", f"{layer if per_layer else stack}/relpos_bias/rel_embedding", T),
        *renamings(stack, stack, {}, {"final_layer_norm": f"{stack}_norm"}),
    ]


def _names(per_layer: bool = False) -> tuple[Renaming, ...]:
    return (
        Renaming("shared.weight", "token_embedder/embedding"),
        *_stack("encoder", per_layer),
        *_stack("decoder", per_layer),
        Renaming("lm_head.weight", "decoder/logits_dense/kernel", T),
    )


# Widths, heads, widths of the MLP, layers of the encoder and of the decoder.
_SIZES = {
    "small": (512, 6, 1_024, 8, 8),
    "base": (768, 12, 2_048, 12, 12),
    "large": (1_024, 16, 2_816, 24, 24),
    "xl": (2_048, 32, 5_120, 24, 24),
    "xxl": (4_096, 64, 10_240, 24, 24),
}
_BYT5_SIZES = {
    "small": (1_472, 6, 3_584, 12, 4),
    "base": (1_536, 12, 3_968, 18, 6),
    "large": (1_536, 16, 3_840, 36, 12),
    "xl": (2_560, 32, 6_720, 36, 12),
    "xxl": (4_672, 64, 12_352, 36, 12),
}


def _sizes(
    config: type[T5Config],
    vocab_size: int,
    prefix: str,
    names: str = " ".join(_SIZES),
    sizes: Mapping[str, tuple[int, int, int, int, int]] = _SIZES,
) -> dict[str, ModelConfig]:
    return {
        f"{prefix}_{name}": config(
            vocab_size=vocab_size,
            embed_dim=width,
            num_heads=heads,
            head_dim=64,
            mlp_dim=mlp,
            num_encoder_layers=encoder,
            num_decoder_layers=decoder,
        )
        for name, (width, heads, mlp, encoder, decoder) in sizes.items()
        if name in names.split()
    }


# What is not given is as in T5.
def _t5_family(name: str, **fields: Any) -> Family:
    shared: dict[str, Any] = {
        "model": Seq2SeqLM,
        "names": _names(),
        "special_ids": {"eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0},
        # In old checkpoints: of the embedding.
        "copies": ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
        # A bias in v1.0's checkpoints.
        "unused": (
            r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
        ),
        "vocabulary": Vocabulary(
            file="spiece.model",
            types=("unigram", "bpe"),
            options={"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
        ),
    }
    return Family(name=name, **(shared | fields))


T5 = _t5_family(
    "t5",
    config=T5Config,
    architectures=("T5ForConditionalGeneration", "T5WithLMHeadModel"),
    fields=_fields(Field(_read_head, _write_head), "relu"),
    presets={
        **_sizes(T5Config, 32_128, "t5_v1_1"),
        **_sizes(T5Config, 384, "byt5", sizes=_BYT5_SIZES),
    },
)


class MT5Config(T5Config):
    """An mT5; see `T5Config`."""


# Only a head that differs from the embedding is untied. transformers 4 scales the input of a head
# that the file calls tied, and transformers 5 never scales: a file that does not say is refused.
def _read_mt5_head(fields: HFFields, _: Any) -> dict[str, bool]:
    untied = fields.head == "separate"
    said_tied = fields.flag("tie_word_embeddings", True)
    if fields.head is None and not said_tied:
        raise UserError(
            "tie_word_embeddings is false, but lm_head.weight is absent; set it to true if the "
            "head is tied"
        )
    scales = fields.flag("scale_decoder_outputs")
    version = str(fields.values.get("transformers_version") or "4")
    if scales is None and not untied and said_tied and version.split(".")[0] == "4":
        raise UserError(
            "tie_word_embeddings is true; transformers 4 scales the logits of a tied mT5 and "
            "transformers 5 does not; set scale_decoder_outputs to true or false"
        )
    if untied and scales:
        raise UserError(_SCALED_UNTIED)
    return {"tie_embeddings": not untied, "scale_tied_logits": untied or bool(scales)}


def _write_mt5_head(config: MT5Config) -> dict[str, bool]:
    if _scales(config):
        raise UserError(
            "this model scales the logits of a tied head (scale_tied_logits), which transformers' "
            "mT5 does not do; convert it to orbax"
        )
    # A tied head is written as an equal one: 4.x would scale a tied one.
    return {"tie_word_embeddings": False}


MT5 = _t5_family(
    "mt5",
    config=MT5Config,
    architectures=("MT5ForConditionalGeneration",),
    fields=_fields(Field(_read_mt5_head, _write_mt5_head), "gated-gelu"),
    presets=_sizes(MT5Config, 250_112, "mt5"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UMT5Config(T5Config):
    """A UMT5; see `T5Config`."""

    relpos_per_layer: bool = True


# As in transformers 4, a head scales its input if the file calls it tied. transformers 5 scales the
# logits of every UMT5 by `d_model ** -0.5`, also those of untied heads, which were trained without.
def _read_umt5_head(fields: HFFields, _: Any) -> dict[str, bool]:
    scales = fields.flag("scale_decoder_outputs", fields.flag("tie_word_embeddings", True))
    version = str(fields.values.get("transformers_version") or "4").split(".")[0]
    # transformers 5 calls every head tied, and writes those that are not.
    rewritten = version.isdecimal() and int(version) >= 5 and fields.head == "separate"
    untied = True if rewritten else _is_untied(fields)
    return {"tie_embeddings": not untied, "scale_tied_logits": untied or scales}


UMT5 = _t5_family(
    "umt5",
    config=UMT5Config,
    architectures=("UMT5ForConditionalGeneration",),
    names=_names(per_layer=True),
    fields=_fields(
        # An equal head that does not scale is called untied.
        Field(_read_umt5_head, lambda config: {"tie_word_embeddings": _scales(config)}),
        "gated-gelu",
        per_layer=True,
    ),
    presets={
        **_sizes(UMT5Config, 256_384, "umt5", "small base xl xxl"),
        **_sizes(UMT5Config, 32_128, "pile_t5", "base large xl xxl"),
    },
)
