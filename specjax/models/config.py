"""Configurations of networks: frozen, hashable and without arrays.

Sizes: V `vocab_size`, E `embed_dim`, H `num_heads` of D `head_dim`, K `kv_heads`, M `mlp_dim`.
`model_from_config(config).abstract_params()` is the parameter tree of a configuration. T5's names
are T5X's (unscanned); decoder-only networks use similar names:

    token_embedder/embedding (V, E)
    decoder/layers_i/pre_self_attention_layer_norm/scale (E,)
    decoder/layers_i/self_attention/query/kernel (E, H·D), {key,value}/kernel (E, K·D)
    decoder/layers_i/self_attention/{query,key,value}/bias                  `Style.biases` only
    decoder/layers_i/self_attention/out/bias (E,)                           `Style.out_bias` only
    decoder/layers_i/self_attention/sinks (H,)                              `Style.sinks` only
    decoder/layers_i/self_attention/{query,key}_norm/scale                  `Style.qk_norms` only
    decoder/layers_i/self_attention/out/kernel (H·D, E)
    decoder/layers_i/delta/{query,key,value,gate,beta,decay,out}/kernel     `LayerSpec.delta` only,
    decoder/layers_i/delta/{query,key,value}_conv/kernel (channels, 1, W)   in place of
    decoder/layers_i/delta/{log_rate,rate_bias} (value heads,)              self_attention
    decoder/layers_i/delta/norm/scale
    decoder/layers_i/pre_mlp_layer_norm/scale (E,)
    decoder/layers_i/mlp/{wi_0,wi_1}/kernel (E, M)                          gate, up
    decoder/layers_i/mlp/wo/kernel (M, E)
    decoder/layers_i/mlp/{router (E, X), wi_0, wi_1 (X, E, M), wo (X, M, E)}
                                                        with X experts: `LayerSpec.routing`
    decoder/layers_i/mlp/{router_bias (X,), {wi_0,wi_1}_bias (X, M), wo_bias (X, E)}
                                                        `Routing.biases` only
    decoder/layers_i/mlp/{shared/{wi_0,wi_1,wo}/kernel, shared_gate (E, 1)}
                                                        `Routing.shared_dim` only
    decoder/layers_i/post_{self_attention,mlp}_layer_norm/scale (E,)        `Style.post_norms` only
    decoder/layers_i/experts                            as mlp above, with share_scales (X,), beside
    decoder/layers_i/{router_norm,pre_experts_layer_norm}/scale     the mlp: `Routing.beside_mlp`
    decoder/layers_i/post_{mlp,experts}_norm/scale                          likewise
    layer_inputs/embedding (V, layers·P)                                    `Style.layer_input_dim`
    layer_inputs/{projection/kernel (E, layers·P), norm/scale (P,)}         only, with P
    decoder/layers_i/{input_gate/kernel (E, P), input_out/kernel (P, E)}    likewise
    decoder/layers_i/post_input_layer_norm/scale (E,)                       likewise
    decoder/layers_i/residual_scale (1,)                        `Style.residual_scales` only
    decoder/decoder_norm/scale (E,)
    decoder/logits_dense/kernel (E, V)                                      untied embeddings only

An encoder's layers are `encoder/layers_i`, with `attention` instead of `self_attention`; each layer
of its decoder also has

    decoder/layers_i/encoder_decoder_attention/{query,key,value,out}        not `Style.merged_cross`
    decoder/layers_i/{pre,post}_cross_attention_layer_norm/scale            likewise
    encoder/token_embedder/embedding (V, E of the encoder)                  `Style.own_embedding`
    token_embedder/eoi_embedding (E,)                                       `Style.eoi_token` only
    {encoder,decoder}/relpos_bias/rel_embedding (H, buckets)                `Style.relative`; or in
                                                                            each layer
"""

import abc
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, Self, get_args

import jax.numpy as jnp
import numpy as np

from specjax.checks import join_names
from specjax.errors import UserError

FLOATS = ("float32", "bfloat16", "float16")
_LAYERS = ("num_layers", "num_encoder_layers", "num_decoder_layers", "num_hidden_layers")
_POSITIONS = (
    "sliding_window",
    "original_max_position",
    "original_max_position_embeddings",
    "max_position_embeddings",
)
_MOST = {
    **dict.fromkeys(_LAYERS, 1_000),
    "vocab_size": 2**24,
    **dict.fromkeys(_POSITIONS, 2**31 - 1),
    **dict.fromkeys(("num_experts", "num_local_experts"), 10_000),
    "partial_rotary_factor": 1,
}
_MAY_BE_ZERO = ("dropout_rate", "decoder_start_token", "eoi_token")


class RelativePositions(NamedTuple):
    """T5's relative position biases; see `specjax.models.position_encoding`."""

    buckets: int
    max_distance: int  # this and all larger distances share the last bucket
    per_layer: bool = False  # else per stack


class DeltaSizes(NamedTuple):
    """The sizes of a gated delta network; see `specjax.models.recurrent`.

    Attributes:
      value_heads: a multiple of `key_heads`, which also counts the queries.
      window: W, the tokens that a convolution sees, the last included.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    window: int


class Routing(NamedTuple):
    """The experts of a layer; see `specjax.models.experts`.

    Attributes:
      experts: their number.
      per_token: how many of them a token uses: the most probable ones.
      mlp_dim: the width of each.
      renormalised: whether the shares of these sum to 1; else they are their probabilities.
      biases: whether the router and each projection of an expert have a bias.
      shared_dim: the width of one more expert, which all tokens use; None: there is none.
      beside_mlp: whether the layer also has a single block, and adds both outputs, each with a
        norm. The router then reads the residual stream, with a norm of its own, and each expert's
        share has a learnt factor.
    """

    experts: int
    per_token: int
    mlp_dim: int
    renormalised: bool
    biases: bool = False
    shared_dim: int | None = None
    beside_mlp: bool = False

    def expected(self, tokens: int) -> float:
        """How many experts so many tokens use together, if each is as probable as any other."""
        return self.experts * (1.0 - (1.0 - self.per_token / self.experts) ** tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What may differ between the layers of a stack, apart from sizes.

    Attributes:
      window: the number of positions that a query sees; None for all. In an encoder, the numbers of
        positions before and after the query.
      rope: D // 2 rotary frequencies in radians per position, or fewer, for the first dimensions of
        a head; None: no rotation.
      delta: the gated delta network in place of attention.
      routing: its experts; None for a single block.
      source: the earlier layer whose keys and values it attends to; None: its own.
      keyed_values: whether its values are what its key kernel makes.
    """

    window: int | tuple[int, int] | None = None
    rope: tuple[float, ...] | None = None
    delta: DeltaSizes | None = None
    routing: Routing | None = None
    source: int | None = None
    keyed_values: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Style:
    """How a stack of layers computes, apart from its sizes. Families differ here.

    Attributes:
      activations: of the feed-forward block, one per input projection; the outputs are multiplied.
      rope_scale: the factor of the cosines and sines of the rotations.
      most_positions: the longest text that the rotations are for; None for any.
      query_scale: the factor of the attention logits; at 1 the initial query kernel is divided by
        sqrt(D) instead.
      biases: whether queries, keys and values have a bias.
      out_bias: whether the output of attention has one.
      sinks: whether each query head has a learned logit in the softmax of its attention, of a
        position without a value.
      qk_norms: "head" for an RMS norm of each head's queries and keys, before any rotation;
        "all" for a norm over all heads; None for none.
      value_norms: whether each head's values have an RMS norm without a scale.
      gated: whether the output of each head of attention is multiplied by the sigmoid of a gate,
        which the query kernel makes, too: it is (E, H·2·D).
      pre_norms: whether a norm precedes each block.
      post_norms: whether a norm follows each block, before the residual addition.
      plus_one_norms: `plus_one` of `RMSNorm`.
      residual_scales: whether a learnt number multiplies the residual stream after each layer.
      layer_input_dim: P, the width of an input that each layer has of each token; see
        `layers.LayerInputs`. None for no such input.
      attn_softcap: c in c·tanh(x / c) on attention logits, or None.
      final_softcap: the same on the output logits.
      embed_stddev: of the initial embedding.
      hidden_scale: the factor of the hidden states before the output projection.
      dropout_rate: of blocks, attention weights and feed-forward layers while training.
      bidirectional_inputs: whether the tokens of a prompt see each other in both directions.
      own_embedding: whether the encoder has its own embedding, not the decoder's.
      eoi_token: a token (end of an image) with an embedding of its own, which is not scaled; None
        for none.
      merged_cross: whether a decoder's self-attention also attends to the encoder's output, under
        one softmax and with the same kernels, instead of a block of its own.
    """

    activations: tuple[str, ...]
    layers: tuple[LayerSpec, ...]
    relative: RelativePositions | None = None
    rope_scale: float = 1.0
    most_positions: int | None = None
    query_scale: float = 1.0
    biases: bool = False
    out_bias: bool = False
    sinks: bool = False
    qk_norms: str | None = None
    value_norms: bool = False
    gated: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    plus_one_norms: bool = False
    residual_scales: bool = False
    layer_input_dim: int | None = None
    attn_softcap: float | None = None
    final_softcap: float | None = None
    embed_stddev: float = 1.0
    embed_scale: float = 1.0
    hidden_scale: float = 1.0
    dropout_rate: float = 0.0
    bidirectional_inputs: bool = False
    own_embedding: bool = False
    eoi_token: int | None = None
    merged_cross: bool = False

    @property
    def cached(self) -> tuple[int, ...]:
        """The layers that make keys and values, in the order of the cache."""
        layers = enumerate(self.layers)
        return tuple(i for i, x in layers if x.source is None and x.delta is None)

    @property
    def deltas(self) -> tuple[DeltaSizes, ...]:
        """Those of the layers that have one."""
        return tuple(x.delta for x in self.layers if x.delta is not None)


def with_layers(style: Style, changes: Iterable[Mapping[str, Any]]) -> Style:
    """The style with the changes of each layer."""
    pairs = zip(style.layers, changes, strict=True)
    layers = tuple(dataclasses.replace(layer, **change) for layer, change in pairs)
    return dataclasses.replace(style, layers=layers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(abc.ABC):
    """The fields of every family.

    Attributes:
      vocab_size: V, rows of the embedding and width of the logits.
      embed_dim: E, the width of the residual stream.
      num_heads: H, query heads.
      head_dim: D, the width of one head; H·D need not be E.
      mlp_dim: M, the width of the feed-forward block.
      norm_eps: added to the mean square in each RMS norm.
      tie_embeddings: the logits use the embedding instead of `logits_dense`.
      dtype: of the activations and the cache (logits and softmax are float32 always).
      param_dtype: of the parameters that `init` makes.
    """

    vocab_size: int
    embed_dim: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    # Fields that are configurations themselves, by name; in files they are objects.
    parts: ClassVar[Mapping[str, Any]] = {}

    def __post_init__(self) -> None:
        name = type(self).__name__
        # Equal values get the same spelling, so that equal configurations hash alike.
        for field in ("dtype", "param_dtype"):
            object.__setattr__(self, field, float_dtype(getattr(self, field), f"{name}: {field}"))
        check_numbers(self, name)
        if self.num_heads % self.kv_heads:
            raise UserError(
                f"{name}: num_heads={self.num_heads} must be a multiple of "
                f"num_kv_heads={self.kv_heads}"
            )
        if self.num_heads * self.head_dim > 2**20:
            raise UserError(
                f"{name}: num_heads={self.num_heads} times head_dim={self.head_dim} must be at "
                f"most {2**20}"
            )
        if hasattr(self, "rope_theta") and self.head_dim % 2:
            raise UserError(
                f"{name}: head_dim={self.head_dim} must be even, for rotary positions; "
                f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"
            )
        start = getattr(self, "decoder_start_token", 0)
        if not 0 <= start < self.vocab_size:
            raise UserError(
                f"{name}: decoder_start_token={start} must be a token id in "
                f"0 .. {self.vocab_size - 1}"
            )
        for field, part in self.parts.items():
            if not isinstance(value := getattr(self, field), part | None):
                names = " or a ".join(kind.__name__ for kind in kinds_of(part))
                raise UserError(f"{field}={value!r} must be None or a {names}")
        pairs = getattr(self, "rotary_dim", self.head_dim) // 2
        for name in ("short_factors", "long_factors"):
            factors = getattr(getattr(self, "rope_scaling", None), name, None)
            if factors is not None and (count := len(factors)) != pairs:
                raise UserError(
                    f"rope_scaling: {name} must be {pairs} numbers, for head_dim={self.head_dim} "
                    f"and num_heads={self.num_heads}, got {count}"
                )

    @property
    def kv_heads(self) -> int:
        return self.num_heads

    @property
    @abc.abstractmethod
    def style(self) -> Style: ...

    def of_layer(self, number: int) -> "ModelConfig":
        """The configuration with the sizes of a layer, if they differ by layer."""
        return self

    @property
    def encoder_style(self) -> Style | None:
        return None

    @property
    def encoder_config(self) -> "ModelConfig":
        return self

    def replace(self, **changes: Any) -> "ModelConfig":
        """The same configuration with some fields changed.

        Raises:
          UserError: for an unknown field, or a value of a wrong type or out of its range.
        """
        fields = [f.name for f in dataclasses.fields(self)]
        if unknown := sorted(set(changes) - set(fields)):
            raise UserError(
                f"{type(self).__name__} has no field {join_names(unknown)}; its fields are "
                f"{', '.join(fields)}"
            )
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderOnlyConfig(ModelConfig):
    """The fields of every decoder-only family.

    Attributes:
      num_kv_heads: K, a divisor of H.
    """

    num_layers: int
    num_kv_heads: int

    @classmethod
    def of(
        cls,
        vocab: int,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        mlp: int,
        layers: int,
        **others: Any,
    ) -> Self:
        """A configuration of these sizes, in this order, and of other fields by name."""
        return cls(
            vocab_size=vocab,
            embed_dim=width,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            mlp_dim=mlp,
            num_layers=layers,
            **others,
        )

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads


def kinds_of(part: Any) -> tuple[type, ...]:
    """The classes of one of `ModelConfig.parts`: a class, or a union of several."""
    return get_args(part) or (part,)


def largest(field: str) -> int:
    """The largest whole number of a field, by its name here or in a `config.json`."""
    return _MOST.get(field, 2**20)


def common_dtype(dtypes: Iterable[np.dtype]) -> np.dtype:
    """The dtype that holds arrays without loss: their own, or float32 if they differ."""
    distinct = {np.dtype(dtype) for dtype in dtypes}
    only = distinct.pop() if len(distinct) == 1 else np.dtype(np.float32)
    return only if only.name in FLOATS else np.dtype(np.float32)  # float64 is rounded


def float_dtype(value: Any, name: str = "`dtype`") -> np.dtype:
    """The dtype of parameters or activations that a user gives, or names."""
    try:
        dtype = jnp.dtype(value)
    except Exception:  # NumPy parses a text as a format, which Python may parse as a tuple
        dtype = None
    if value is None or dtype is None or dtype.name not in FLOATS:
        raise UserError(f"{name} must be one of {', '.join(FLOATS)}, got {value!r}")
    return dtype


def disk_dtype(arrays: Mapping[str, Any], dtype: Any) -> np.dtype:
    """The dtype of saved arrays: the one that a user gives, or else their `common_dtype`."""
    return common_dtype(x.dtype for x in arrays.values()) if dtype is None else float_dtype(dtype)


def check_numbers(config: Any, name: str) -> None:
    """Converts each number of a dataclass, in place, to its declared type, and checks its range."""
    for field in dataclasses.fields(config):
        what = f"{name}: {field.name}"
        value = _typed(what, field.type, getattr(config, field.name))
        object.__setattr__(config, field.name, value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if field.name in _MAY_BE_ZERO:
            continue  # checked by the class
        if isinstance(value, int) and value < 1:
            raise UserError(f"{what}={value} must be at least 1")
        bounded = isinstance(value, int) or field.name in _MOST
        if bounded and value > (most := largest(field.name)):
            raise UserError(f"{what}={value} must be at most {most}")
        if not 0 < value < float("inf"):
            raise UserError(f"{what}={value} must be positive and finite")


# The types of values that a field of a type may get, and their description.
_TYPES: dict[Any, tuple[Any, str]] = {
    bool: (bool | np.bool_, "True or False"),
    int: (int | np.integer, "a whole number, an int"),
    float: (int | float | np.integer | np.floating, "a number"),
}


def _typed(what: str, declared: Any, value: Any) -> Any:
    for kind, (types, description) in _TYPES.items():
        if declared is kind or (declared == kind | None and value is not None):
            is_flag = isinstance(value, bool | np.bool_)
            if not isinstance(value, types) or is_flag != (kind is bool):
                raise UserError(f"{what}={value!r} must be {description}")
            try:
                return kind(value)
            except OverflowError:
                raise UserError(f"{what}={value!r} is too large for a float") from None
    return value
