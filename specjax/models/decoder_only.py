"""What decoder-only families share: Llama's style, names and fields, and windows by layer."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from specjax.errors import UserError
from specjax.models.config import DecoderOnlyConfig, LayerSpec, Routing, Style, with_layers
from specjax.models.family import (
    HEADS,
    MLP,
    Constants,
    Family,
    Field,
    HFFields,
    Renaming,
    T,
    constants,
    field,
    renamings,
)
from specjax.models.model import CausalLM
from specjax.models.position_encoding import rope_frequencies
from specjax.models.rope_scaling import RopeScaling, scaling_from_hf, scaling_to_hf

SLIDING, FULL = "sliding_attention", "full_attention"
ROPE_PARTS: Mapping[str, Any] = {"rope_scaling": RopeScaling}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryConfig(DecoderOnlyConfig):
    """A decoder-only network with rotary positions, perhaps with windows.

    Attributes:
      rope_theta: base of the rotary frequencies.
      rope_scaling: how they are changed for longer texts.
      sliding_window: in a layer with a window, a query at position t sees keys at t - window + 1
        .. t; None: no layer has a window.
      layer_types: for each layer, "sliding_attention" or "full_attention", as in Hugging Face's
        files; empty: all layers have the window, or none if `sliding_window` is None.
    """

    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()

    parts: ClassVar[Mapping[str, Any]] = ROPE_PARTS

    # The fields of `Style` in which a family differs from Llama.
    differences: ClassVar[Mapping[str, Any]] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        types = self.layer_types
        if types not in ((), []):
            _check_types(types, self.num_layers)
        object.__setattr__(self, "layer_types", tuple(types))
        if SLIDING in types and self.sliding_window is None:
            raise UserError(f"layer_types names {SLIDING}, so sliding_window must be given")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer, None for all positions."""
        types = self.layer_types or (SLIDING,) * self.num_layers
        return tuple(self.sliding_window if kind == SLIDING else None for kind in types)

    @property
    def style(self) -> Style:
        rope = llama_rope(self)
        layers = [LayerSpec(window=window, rope=rope) for window in self.windows]
        return llama_style(self, layers, **self.differences)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithExperts(DecoderOnlyConfig):
    """What networks whose layers have experts have in common, before another configuration.

    Attributes:
      num_experts: X, of a layer.
      num_experts_per_tok: how many of them a token uses.
      expert_dim: the width of an expert; None: `mlp_dim`.
      renormalised: whether the shares of a token's experts sum to 1; else they are the router's
        probabilities.
      dense_layers: the numbers, from 0, of the layers that have a block of width `mlp_dim` instead.
    """

    num_experts: int
    num_experts_per_tok: int
    expert_dim: int | None = None
    renormalised: bool = False
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_experts_per_tok > self.num_experts:
            raise UserError(
                f"num_experts_per_tok={self.num_experts_per_tok} must be at most "
                f"num_experts={self.num_experts}"
            )
        dense = self.dense_layers
        layers = range(self.num_layers)
        possible = isinstance(dense, tuple | list)
        if not possible or not all(type(number) is int and number in layers for number in dense):
            raise UserError(
                f"dense_layers={dense!r} must be numbers of layers in 0 .. {self.num_layers - 1}"
            )
        object.__setattr__(self, "dense_layers", tuple(sorted(set(dense))))

    @property
    def routing(self) -> Routing:
        return Routing(
            self.num_experts,
            self.num_experts_per_tok,
            self.expert_dim or self.mlp_dim,
            self.renormalised,
        )

    @property
    def style(self) -> Style:
        style = super().style  # type: ignore[safe-super]
        sparse = {"routing": self.routing}
        changes = ({} if i in self.dense_layers else sparse for i in range(self.num_layers))
        return with_layers(style, changes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig(WithExperts, RotaryConfig):
    """A rotary network whose layers have experts."""


def types_by_number(count: int, every: int, others: str = SLIDING) -> tuple[str, ...]:
    """The types of layers of which each `every`-th has full attention, as by default in files."""
    return tuple(FULL if (i + 1) % every == 0 else others for i in range(count))


def _check_types(types: Any, count: int) -> None:
    if not isinstance(types, list | tuple) or not all(kind in (SLIDING, FULL) for kind in types):
        raise UserError(f"layer_types={types!r} may only name {SLIDING} and {FULL}")
    if len(types) != count:
        raise UserError(f"layer_types has {len(types)} names, but there are {count} layers")


def llama_rope(config: Any, rotated: int | None = None) -> tuple[float, ...]:
    """The frequencies of the first `rotated` dimensions of a head, by default of all."""
    scaling = config.rope_scaling
    frequencies = scaling.frequencies if scaling is not None else rope_frequencies
    rope = frequencies(rotated or config.head_dim, config.rope_theta)
    return tuple(rope.astype(np.float32).tolist())


def llama_style(config: Any, layers: Iterable[LayerSpec], **changes: Any) -> Style:
    """Llama's style with changes."""
    scaling = config.rope_scaling
    fields: dict[str, Any] = {
        "activations": ("silu", "linear"),
        "layers": tuple(layers),
        "rope_scale": 1.0 if scaling is None else scaling.attention_factor,
        "most_positions": getattr(scaling, "most_positions", None),
        "query_scale": config.head_dim**-0.5,
        "embed_stddev": config.embed_dim**-0.5 if config.tie_embeddings else 1.0,
    }
    return Style(**(fields | changes))


def decoder_only_names(norms: Mapping[str, str]) -> tuple[Renaming, ...]:
    """Llama's names, which most decoder-only families have; they differ in their norms.

    The entries include biases and norms of queries and keys, which not all networks have.

    Args:
      norms: from Hugging Face's name of each norm of a layer to ours. The same name can mean
        different norms: Llama's post_attention_layernorm precedes the MLP.
    """
    hf, layer = "model.layers.{i}", "decoder/layers_{i}"
    attention, ours = f"{hf}.self_attn", f"{layer}/self_attention"
    kernels = {f"{a}_proj": b for a, b in HEADS.items()}
    return (
        Renaming("model.embed_tokens.weight", "token_embedder/embedding"),
        *renamings(attention, ours, kernels, {f"{a}_norm": f"{b}_norm" for a, b in HEADS.items()}),
        *(Renaming(f"{attention}.{a}.bias", f"{ours}/{b}/bias") for a, b in kernels.items()),
        *renamings(hf, layer, {f"mlp.{a}_proj": f"mlp/{b}" for a, b in MLP.items()}, norms),
        Renaming("model.norm.weight", "decoder/decoder_norm/scale"),
        Renaming("lm_head.weight", "decoder/logits_dense/kernel", T),
    )


def names_of_experts(block: str, kernels: Mapping[str, str]) -> tuple[Renaming, ...]:
    """The names of a layer's router and experts.

    Args:
      block: Hugging Face's name of the feed-forward block.
      kernels: from Hugging Face's name of each matrix of an expert to ours.
    """
    hf, ours = f"model.layers.{{i}}.{block}", "decoder/layers_{i}/mlp"
    return (
        Renaming(f"{hf}.gate.weight", f"{ours}/router", T),
        *(Renaming(f"{hf}.experts.{{e}}.{a}.weight", f"{ours}/{b}", T) for a, b in kernels.items()),
    )


LLAMA_NAMES = decoder_only_names(
    {
        "input_layernorm": "pre_self_attention_layer_norm",
        "post_attention_layernorm": "pre_mlp_layer_norm",
    }
)


# Those of OLMoE and Qwen.
EXPERTS_NAMES = (
    *names_of_experts("mlp", {f"{hf}_proj": ours for hf, ours in MLP.items()}),
    *LLAMA_NAMES,
)


def decoder_only_family(name: str, **fields: Any) -> Family:
    """A family of decoder-only networks; what is not given is as in Llama."""
    return Family(
        name=name, **{"model": CausalLM, "names": LLAMA_NAMES, "special_ids": {}, **fields}
    )


SILU: Constants = {"hidden_act": ("silu", "swish")}
UNBIASED: Constants = {**SILU, "attention_bias": (False,)}
NO_BIASES: Constants = {**UNBIASED, "mlp_bias": (False,)}


def sizes(
    *, any_heads: bool = False, mlp: str = "intermediate_size", **absent: Any
) -> tuple[Field, ...]:
    """The fields of a `DecoderOnlyConfig` under Llama's names.

    Args:
      any_heads: whether transformers lets their number be no divisor of the width.
      mlp: the name of the width of the feed-forward block.
      **absent: the values of fields that a file may leave out, besides `head_dim`,
        `num_key_value_heads`, `rms_norm_eps` and `tie_word_embeddings`.
    """

    # null takes the usual value, an absent field the default of transformers.
    def size(fields: HFFields, name: str, *usual: int) -> int:
        value = absent.get(name) if name not in fields.values else None
        return fields.whole(name, *(usual if value is None else (value,)))

    def width(fields: HFFields, name: str) -> int:
        return size(fields, name, size(fields, "hidden_size") // size(fields, heads))

    def heads_read(fields: HFFields, name: str) -> int:
        return size(fields, name, size(fields, heads))

    def heads_written(config: DecoderOnlyConfig) -> int:
        if config.embed_dim % config.num_heads and not any_heads:
            raise UserError(
                f"embed_dim={config.embed_dim} must be a multiple of num_heads={config.num_heads} "
                "for transformers 5 to read the model; convert it to orbax"
            )
        return config.num_heads

    heads, eps, tied = "num_attention_heads", "rms_norm_eps", "tie_word_embeddings"
    return (
        field("vocab_size", "vocab_size", size),
        field("hidden_size", "embed_dim", size),
        field(heads, "num_heads", size, write=heads_written),
        field("head_dim", "head_dim", width),
        field(mlp, "mlp_dim", size),
        field("num_hidden_layers", "num_layers", size),
        field("num_key_value_heads", "num_kv_heads", heads_read),
        field(eps, "norm_eps", HFFields.positive, absent.get(eps, 1e-6)),
        field(tied, "tie_embeddings", HFFields.flag, absent.get(tied, False)),
    )


def rope_from_hf(fields: HFFields, default: float = 10_000.0) -> tuple[float, str, HFFields]:
    """The rotary base, the kind of scaling (Hugging Face's `rope_type`) and its fields.

    They are in `rope_parameters` (5.x), or in `rope_theta` and `rope_scaling` (4.x). If a file has
    both, 4.x and 5.x take `rope_scaling`.
    """
    newer = fields.objects("rope_parameters")
    parameters = fields.objects("rope_scaling") or newer
    if nested := [name for name, value in parameters.items() if isinstance(value, dict)]:
        raise UserError(
            f"rope parameters that apply only to {', '.join(nested)} are not supported; all layers "
            "must share them"
        )
    rope = HFFields(parameters)
    theta = float(rope.positive("rope_theta", fields.positive("rope_theta", default)))
    other = newer.get("rope_theta")
    if other is not None and other != theta:
        raise UserError(
            f"rope_parameters has rope_theta={other!r}, but rope_scaling, which has priority, has "
            f"{theta!r}; remove one of the two fields"
        )
    for where in (rope, fields):
        where.refuse("partial_rotary_factor", (1, 1.0), 1.0)
    return theta, parameters.get("rope_type") or parameters.get("type") or "default", rope


def rope(
    longest: int,
    theta: float = 10_000.0,
    scaling: Callable[..., RopeScaling | None] = scaling_from_hf,
) -> Field:
    """The rotary base and scaling.

    Args:
      longest: the usual `max_position_embeddings`.
      theta: the base of a file that has none.
      scaling: see `scaling_from_hf`.
    """

    def read(fields: HFFields, _: Any) -> dict[str, Any]:
        base, kind, parameters = rope_from_hf(fields, theta)
        if kind == "yarn" and base <= 1:
            raise UserError(f"rope_theta={base} must be above 1 for YaRN")
        return {"rope_theta": base, "rope_scaling": scaling(fields, kind, parameters)}

    def write(config: Any) -> dict[str, Any]:
        stretching, positions = scaling_to_hf(config.rope_scaling, longest)
        base = {"rope_theta": config.rope_theta}
        return {
            "max_position_embeddings": positions,
            **base,  # 4.x, with the next one
            "rope_scaling": stretching,
            "rope_parameters": {**(stretching or {"rope_type": "default"}), **base},
        }

    return Field(read, write)


def rotary_fields(fixed: Constants, rotation: Field, **others: Any) -> tuple[Field, ...]:
    """The fields of a Llama: see `constants`, `rope`, and `sizes` for the others."""
    return constants(fixed), *sizes(**others), rotation


def experts(count: int, used: int, name: str = "num_experts") -> tuple[Field, ...]:
    """The numbers of `WithExperts`, with defaults; `name` is that of experts in what is written."""

    def read(fields: HFFields, _: Any) -> dict[str, Any]:
        names = [name for name in ("num_experts", "num_local_experts") if name in fields.values]
        counts = {name: fields.whole(name, count) for name in names}
        if len(set(counts.values())) > 1:
            raise UserError(
                f"num_experts and num_local_experts differ, {counts}: remove one of them"
            )
        return {"num_experts": next(iter(counts.values()), count)}

    per_token = "num_experts_per_tok"
    return (
        Field(read, lambda config: {name: config.num_experts}),
        field(per_token, per_token, HFFields.whole, used),
    )


def windows(
    usual: Callable[[HFFields, Mapping[str, Any]], Sequence[str]],
    size: int | None,
    flagged: bool = False,
    unused: int | None = None,
) -> Field:
    """`sliding_window` and `layer_types` of a `RotaryConfig`.

    Args:
      usual: the types of layers that a file does not list.
      size: the window of a file that has none.
      flagged: whether there are windows only if `use_sliding_window` is true.
      unused: what is written if no layer has a window.
    """

    def read(fields: HFFields, ours: Mapping[str, Any]) -> dict[str, Any]:
        count = ours["num_layers"]
        window, types = None, [FULL] * count
        if not flagged or fields.flag("use_sliding_window", False):
            window = fields.window(size)
            types = types if flagged and window is None else [*usual(fields, ours)]
        return windows_from_hf(fields, window, types, count)

    def write(config: RotaryConfig) -> dict[str, Any]:
        types = types_of_layers(config)
        windowed = SLIDING in types
        return {
            **({"use_sliding_window": windowed} if flagged else {}),
            "sliding_window": config.sliding_window if windowed else unused,
            "layer_types": types,
        }

    return Field(read, write)


def windows_from_hf(
    fields: HFFields, window: int | None, types: Sequence[str], count: int
) -> dict[str, Any]:
    """`sliding_window` and `layer_types` of a `RotaryConfig`.

    The types of the `count` layers are those that the file lists, else `types`.
    """
    if (listed := fields.values.get("layer_types")) is not None:
        types = listed
    _check_types(types, count)
    if SLIDING not in types:
        return {"sliding_window": None, "layer_types": ()}
    if window is None:
        raise UserError(f"layer_types names {SLIDING!r}, but no sliding_window")
    return {"sliding_window": window, "layer_types": tuple(types) if FULL in types else ()}


def types_of_layers(config: RotaryConfig) -> list[str]:
    """The types of all layers, for Hugging Face's files."""
    return [FULL if window is None else SLIDING for window in config.windows]
