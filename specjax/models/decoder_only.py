"""What decoder-only families share: Llama's style, names and fields, and windows by layer."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from specjax.errors import UserError
from specjax.models.config import DecoderOnlyConfig, Routing, Style
from specjax.models.family import HEADS, MLP, Family, HFFields, Renaming, T
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
        return llama_style(self, windows=self.windows, **self.differences)


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
        layers = range(self.num_layers)
        routings = (None if layer in self.dense_layers else self.routing for layer in layers)
        return dataclasses.replace(super().style, routings=tuple(routings))  # type: ignore[safe-super]


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


def llama_style(config: Any, rotated: int | None = None, **changes: Any) -> Style:
    """Llama's style with changes, for a configuration with `rope_theta`.

    The first `rotated` dimensions of a head are rotated, all by default.
    """
    scaling = getattr(config, "rope_scaling", None)
    frequencies = scaling.frequencies if scaling is not None else rope_frequencies
    rope = tuple(
        frequencies(rotated or config.head_dim, config.rope_theta).astype(np.float32).tolist()
    )
    fields: dict[str, Any] = {
        "activations": ("silu", "linear"),
        "windows": (None,) * config.num_layers,
        "ropes": (rope,) * config.num_layers,
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
    return (
        Renaming("model.embed_tokens.weight", "token_embedder/embedding"),
        *(
            line
            for a, b in HEADS.items()
            for line in (
                Renaming(f"{attention}.{a}_proj.weight", f"{ours}/{b}/kernel", T),
                Renaming(f"{attention}.{a}_proj.bias", f"{ours}/{b}/bias"),
                Renaming(f"{attention}.{a}_norm.weight", f"{ours}/{b}_norm/scale"),
            )
        ),
        *(
            Renaming(f"{hf}.mlp.{a}_proj.weight", f"{layer}/mlp/{b}/kernel", T)
            for a, b in MLP.items()
        ),
        *(Renaming(f"{hf}.{a}.weight", f"{layer}/{b}/scale") for a, b in norms.items()),
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


# Fields of a family that may have only these values; the first is the default, and is written.
Constants = Mapping[str, tuple[Any, ...]]
SILU: Constants = {"hidden_act": ("silu", "swish")}
UNBIASED: Constants = {**SILU, "attention_bias": (False,)}
NO_BIASES: Constants = {**UNBIASED, "mlp_bias": (False,)}


def decoder_only_from_hf(fields: HFFields, **defaults: int | float | None) -> dict[str, Any]:
    """The fields of a `DecoderOnlyConfig` under Llama's names.

    Args:
      fields: of the `config.json`.
      **defaults: the values of fields that the file may leave out, besides `head_dim`,
        `num_key_value_heads` and `rms_norm_eps`, by Hugging Face's names.
    """

    def whole(name: str, *fallback: int) -> int:
        # null takes the fallback, an absent field the default of transformers.
        default = defaults.get(name) if name not in fields.values else None
        return fields.whole(name, *(fallback if default is None else (default,)))

    heads = whole("num_attention_heads")
    return {
        "vocab_size": whole("vocab_size"),
        "embed_dim": whole("hidden_size"),
        "num_heads": heads,
        "head_dim": whole("head_dim", whole("hidden_size") // heads),
        "mlp_dim": whole("intermediate_size"),
        "num_layers": whole("num_hidden_layers"),
        "num_kv_heads": whole("num_key_value_heads", heads),
        "norm_eps": fields.positive("rms_norm_eps", defaults.get("rms_norm_eps", 1e-6)),
    }


def decoder_only_to_hf(config: DecoderOnlyConfig, any_heads: bool = False) -> dict[str, Any]:
    """Llama's names for the fields of a `DecoderOnlyConfig`, without the family's own.

    With `any_heads` transformers lets their number be no divisor of the width.

    Raises:
      UserError: for sizes that transformers 5 does not read, though 4.x may.
    """
    if config.embed_dim % config.num_heads and not any_heads:
        raise UserError(
            f"embed_dim={config.embed_dim} must be a multiple of num_heads={config.num_heads} for "
            "transformers 5 to read the model; convert it to orbax"
        )
    return {
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
    }


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


def rope_to_hf(theta: float, scaling: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The rotary fields of 4.x and of 5.x; `scaling` is `rope_type` and its fields."""
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": theta},
    }


def rotary_from_hf(
    fields: HFFields,
    constants: Constants,
    *,
    theta: float = 10_000.0,
    tied: bool = False,
    scaling: Callable[[HFFields, str, HFFields], RopeScaling | None] = scaling_from_hf,
    **defaults: Any,
) -> dict[str, Any]:
    """Sizes, rotary base and scaling, and tied embeddings of a family.

    Args:
      fields: of the `config.json`.
      constants: the fields that may have only certain values.
      theta: the rotary base of a file that has none.
      tied: whether the embeddings of a file that does not say are tied.
      scaling: reads the scaling of the rotary frequencies.
      **defaults: see `decoder_only_from_hf`.
    """
    fields.refuse_others(constants)
    sizes = decoder_only_from_hf(fields, **defaults)
    base, kind, rope = rope_from_hf(fields, theta)
    if kind == "yarn" and base <= 1:
        raise UserError(f"rope_theta={base} must be above 1 for YaRN")
    return {
        **sizes,
        "rope_theta": base,
        "rope_scaling": scaling(fields, kind, rope),
        "tie_embeddings": fields.flag("tie_word_embeddings", tied),
    }


def rotary_to_hf(
    config: Any, constants: Constants, longest: int, any_heads: bool = False
) -> dict[str, Any]:
    """The inverse of `rotary_from_hf`; `longest` is the usual `max_position_embeddings`."""
    scaling, longest = scaling_to_hf(config.rope_scaling, longest)
    return {
        **decoder_only_to_hf(config, any_heads),
        **{name: allowed[0] for name, allowed in constants.items()},
        "max_position_embeddings": longest,
        **rope_to_hf(config.rope_theta, scaling),
    }


def experts_from_hf(fields: HFFields, experts: int, used: int) -> dict[str, Any]:
    """`num_experts` and `num_experts_per_tok` of `WithExperts`, with defaults."""
    names = [name for name in ("num_experts", "num_local_experts") if name in fields.values]
    counts = {name: fields.whole(name, experts) for name in names}
    if len(set(counts.values())) > 1:
        raise UserError(f"num_experts and num_local_experts differ, {counts}: remove one of them")
    return {
        "num_experts": next(iter(counts.values()), experts),
        "num_experts_per_tok": fields.whole("num_experts_per_tok", used),
    }


def experts_to_hf(config: WithExperts, name: str) -> dict[str, int]:
    """The inverse of `experts_from_hf`; `name` is Hugging Face's for the number of experts."""
    return {name: config.num_experts, "num_experts_per_tok": config.num_experts_per_tok}


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
