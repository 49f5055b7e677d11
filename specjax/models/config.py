"""What a network is made of: frozen, hashable configurations without arrays.

Sizes: V `vocab_size`, E `embed_dim`, H `num_heads` of D `head_dim`, K `num_kv_heads`, M `mlp_dim`.
The parameter tree that belongs to a configuration is `model_from_config(config).abstract_params()`;
its names are T5X's (unscanned) for T5, and the same in spirit for Llama and Gemma 2:

    token_embedder/embedding (V, E)
    decoder/layers_i/pre_self_attention_layer_norm/scale (E,)
    decoder/layers_i/self_attention/query/kernel (E, H·D), {key,value}/kernel (E, K·D)
    decoder/layers_i/self_attention/out/kernel (H·D, E)
    decoder/layers_i/pre_mlp_layer_norm/scale (E,)
    decoder/layers_i/mlp/{wi_0,wi_1}/kernel (E, M)         gate, up
    decoder/layers_i/mlp/wo/kernel (M, E)
    decoder/layers_i/post_{self_attention,mlp}_layer_norm/scale (E,)     Gemma 2 only
    decoder/decoder_norm/scale (E,)
    decoder/logits_dense/kernel (E, V)                     untied embeddings only
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

ACTIVATIONS = ("gelu", "linear", "relu", "silu", "swish")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What every family has.

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

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: for a value out of its range, or a dtype that is not floating.
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

    def __post_init__(self) -> None:
        name = type(self).__name__
        # One spelling per value, so that equal configurations hash alike.
        for field in ("dtype", "param_dtype"):
            object.__setattr__(self, field, _float_dtype(f"{name}: {field}", getattr(self, field)))
        _fix_types(self)
        for field, value in _numbers(self):
            if field in ("dropout_rate", "decoder_start_token"):
                continue  # may be 0
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name}: {field}={value} must be at least 1")
            if isinstance(value, int) and value >= 2**31:
                raise ValueError(f"{name}: {field}={value} must be at most {2**31 - 1}")
            if not 0 < value < float("inf"):
                raise ValueError(f"{name}: {field}={value} must be positive and finite")
        kv_heads = self._kv_heads
        if self.num_heads % kv_heads:
            raise ValueError(
                f"{name}: num_heads={self.num_heads} must be a multiple of num_kv_heads={kv_heads}"
            )
        if hasattr(self, "rope_theta") and self.head_dim % 2:
            raise ValueError(f"{name}: head_dim={self.head_dim} must be even, for rotary positions")

    @property
    def num_layers_in_all(self) -> int:
        """The layers of all stacks."""
        return getattr(self, "num_layers", 0)

    @property
    def num_weights(self) -> int:
        """The entries of kernels and embedding, by arithmetic: no layer is traced."""
        attention = 2 * self.embed_dim * self.head_dim * (self.num_heads + self._kv_heads)
        layers = self.num_layers_in_all * (attention + 3 * self.embed_dim * self.mlp_dim)
        return layers + self._embeddings

    @property
    def _kv_heads(self) -> int:
        return getattr(self, "num_kv_heads", self.num_heads)

    @property
    def _embeddings(self) -> int:
        return self.vocab_size * self.embed_dim * (1 if self.tie_embeddings else 2)

    def replace(self, **changes: Any) -> "ModelConfig":
        """The same configuration with some fields changed.

        Args:
          **changes: the fields.

        Returns:
          A configuration of the same family.

        Raises:
          TypeError: for a value of the wrong type.
          ValueError: for an unknown field or a value out of its range.
        """
        fields = [f.name for f in dataclasses.fields(self)]
        if unknown := sorted(set(changes) - set(fields)):
            raise ValueError(
                f"{type(self).__name__} has no field {', '.join(unknown)}; its fields are "
                f"{', '.join(fields)}"
            )
        return dataclasses.replace(self, **changes)


def _float_dtype(name: str, value: Any) -> Any:
    remedy = "must be a floating dtype, such as float32 or bfloat16"
    try:
        dtype = jnp.dtype(value)
    except Exception:  # NumPy takes a text for a format, and Python's parser for a tuple
        raise ValueError(f"{name}={value!r} {remedy}") from None
    if value is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{name}={value} {remedy}")
    return dtype


def _fix_types(config: Any) -> None:
    """Turns each number of a configuration into its declared type, or raises."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        told = f"{type(config).__name__}: {field.name}={value!r}"
        flag = isinstance(value, (bool, np.bool_))
        if field.type is bool:
            if not flag:
                raise TypeError(f"{told} must be True or False")
            fixed: Any = bool(value)
        elif field.type is int:
            if flag or not isinstance(value, (int, np.integer)):
                raise TypeError(f"{told} must be a whole number, an int")
            fixed = int(value)
        elif field.type is float or (field.type == float | None and value is not None):
            if flag or not isinstance(value, (int, float, np.integer, np.floating)):
                raise TypeError(f"{told} must be a number")
            try:
                fixed = float(value)
            except OverflowError:
                raise TypeError(f"{told} must be a number that a float can hold") from None
        else:
            continue
        object.__setattr__(config, field.name, fixed)


def _numbers(config: Any) -> list[tuple[str, float]]:
    """The fields that are numbers, with their values."""
    values = [(f.name, getattr(config, f.name)) for f in dataclasses.fields(config)]
    return [(n, v) for n, v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config(ModelConfig):
    """T5: v1.0 (`("relu",)`, tied), v1.1 and FLAN (`("gelu", "linear")`, untied).

    Attributes:
      num_encoder_layers: how many.
      num_decoder_layers: how many.
      mlp_activations: one per input projection of the feed-forward block; their outputs are
        multiplied. "gelu" is the tanh approximation. One activation names its kernel `wi`,
        several `wi_0`, `wi_1`, ....
      relpos_buckets: buckets of relative positions (32); at least 4.
      relpos_max_distance: distances from here on share the last bucket (128); more than half the
        buckets, each of which has one distance in the decoder.
      relpos_per_layer: each layer has a bias of its own, `layers_i/relpos_bias` (T5X's
        scalable_t5), instead of one per stack.
      scale_tied_logits: with tied embeddings, multiply the decoder's output by E ** -0.5 before
        the embedding (T5 v1.0, T5X). Without effect when untied.
      dropout_rate: used only when `T5.apply` gets a dropout key.
      decoder_start_token: what the decoder reads first; the pad token in all published T5s.

    Source: Raffel et al. 2020, and `t5x/examples/t5/network.py`.
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
                f"mlp_activations={self.mlp_activations} must be names out of "
                f"{', '.join(ACTIVATIONS)}"
            )
        if not 0.0 <= self.dropout_rate < 1.0:
            raise ValueError(f"dropout_rate={self.dropout_rate} must be in [0, 1)")
        # The encoder halves the buckets for the two directions, and both halve what they have into
        # exact and logarithmic ones; the logarithm's base is max_distance over the exact ones.
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
    def num_layers_in_all(self) -> int:
        """The layers of both stacks."""
        return self.num_encoder_layers + self.num_decoder_layers

    @property
    def num_weights(self) -> int:
        """See `ModelConfig`; a layer of the decoder has two attentions."""
        attentions = self.num_encoder_layers + 2 * self.num_decoder_layers
        kernels = (len(self.mlp_activations) + 1) * self.embed_dim * self.mlp_dim
        attention = 4 * self.embed_dim * self.head_dim * self.num_heads
        return attentions * attention + self.num_layers_in_all * kernels + self._embeddings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3RopeScaling:
    """The `llama3` stretching of rotary frequencies (Llama 3.1 and later).

    Attributes:
      factor: low frequencies are divided by this.
      low_freq_factor: wavelengths above `original_max_position / low_freq_factor` are divided.
      high_freq_factor: wavelengths below `original_max_position / high_freq_factor` are kept.
      original_max_position: the context length before stretching.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: for a factor that is not positive, or `low_freq_factor >= high_freq_factor`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        _fix_types(self)
        for field, value in _numbers(self):
            if not 0 < value < float("inf"):
                raise ValueError(f"rope_scaling: {field}={value} must be positive and finite")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"rope_scaling: low_freq_factor={self.low_freq_factor} must be less than "
                f"high_freq_factor={self.high_freq_factor}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """Llama 1, 2 and 3: RoPE, grouped queries, SwiGLU, RMS norms.

    Attributes:
      num_layers: how many.
      num_kv_heads: K, key and value heads; H is a multiple of it.
      rope_theta: base of the rotary frequencies.
      rope_scaling: None, or a `Llama3RopeScaling`.
    """

    num_layers: int
    num_kv_heads: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: Llama3RopeScaling | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.rope_scaling, Llama3RopeScaling | None):
            raise TypeError(
                f"rope_scaling={self.rope_scaling!r} must be None or a Llama3RopeScaling"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma2Config(ModelConfig):
    """Gemma 2: soft caps, sliding window on layers 0, 2, ..., norms before and after each block.

    The stored norm scales are Hugging Face's: the network adds 1 to them.

    Attributes:
      num_layers: how many.
      num_kv_heads: K, key and value heads; H is a multiple of it.
      sliding_window: on even layers a query at position t sees keys at t - window + 1 .. t.
      attn_logit_softcap: c in c·tanh(x / c) on attention logits; None for no cap.
      final_logit_softcap: the same on the output logits; None for no cap.
      query_pre_attn_scalar: queries are multiplied by this ** -0.5.
      rope_theta: base of the rotary frequencies.
    """

    num_layers: int
    num_kv_heads: int
    sliding_window: int
    tie_embeddings: bool = True
    attn_logit_softcap: float | None = 50.0
    final_logit_softcap: float | None = 30.0
    query_pre_attn_scalar: float = 256.0
    rope_theta: float = 10_000.0


FAMILIES: dict[str, type[ModelConfig]] = {
    "t5": T5Config,
    "llama": LlamaConfig,
    "gemma2": Gemma2Config,
}


def config_to_dict(config: ModelConfig) -> dict[str, Any]:
    """The configuration as JSON types, with its family under `"family"`.

    Args:
      config: one of the configurations above.

    Returns:
      A dict that `json.dumps` takes and `config_from_dict` reads back.
    """
    family = next(name for name, cls in FAMILIES.items() if type(config) is cls)
    values = dataclasses.asdict(config)
    for name in ("dtype", "param_dtype"):
        values[name] = np.dtype(values[name]).name
    return {"family": family, **values}


def config_from_dict(values: dict[str, Any]) -> ModelConfig:
    """The inverse of `config_to_dict`.

    Args:
      values: the family and the fields.

    Returns:
      The configuration.

    Raises:
      ValueError: for an unknown family or field, or a missing or impossible value, whatever its
        type: they come from a file.
    """
    values = dict(values)
    family = values.pop("family", None)
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"family={family!r} must be one of {', '.join(FAMILIES)}")
    cls = FAMILIES[family]
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(values) - set(fields))
    missing = sorted(
        name
        for name, f in fields.items()
        if f.default is dataclasses.MISSING and name not in values
    )
    if unknown or missing:
        raise ValueError(
            f"configuration of family {family!r}: "
            + "; ".join(
                f"{what} fields {', '.join(names)}"
                for what, names in (("unknown", unknown), ("missing", missing))
                if names
            )
        )
    try:
        if isinstance(values.get("rope_scaling"), dict):
            values["rope_scaling"] = Llama3RopeScaling(**values["rope_scaling"])
        return cls(**values)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"configuration of family {family!r}: {error}") from None
