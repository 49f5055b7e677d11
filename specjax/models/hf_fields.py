"""The fields of a Hugging Face `config.json`, and those that decoder-only families share."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specjax.errors import UserError
from specjax.models.config import DecoderOnlyConfig, largest


@dataclasses.dataclass(frozen=True)
class HFFields:
    """The values of one `config.json`; errors name the file and the field.

    Attributes:
      values: the JSON object.
      path: of the file, perhaps with the name of an inner object.
      compare_head: finds the checkpoint's output projection, see `head`. It may read two arrays.
    """

    values: Mapping[str, Any]
    path: Path | str
    compare_head: Callable[[], str | None] = lambda: None

    @property
    def head(self) -> str | None:
        """The output projection: "own"; "copied" if it equals the embedding; None if absent."""
        return self.compare_head()

    def number(self, name: str, *default: float | None) -> Any:
        """A finite number, or the default if the field is absent or null."""
        value = self.values.get(name)
        if value is None and default:
            return default[0]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{self.path}: {name}={value!r} must be a number")
        # A whole number too large for a float is damaged.
        if not abs(value) < 1e300:
            raise UserError(f"{self.path}: {name}={repr(value)[:40]} must be finite")
        return value

    def positive(self, name: str, *default: float | None) -> Any:
        """A number above 0."""
        value = self.number(name, *default)
        if value is not None and value <= 0:
            raise UserError(f"{self.path}: {name}={value!r} must be above 0")
        return value

    def whole(self, name: str, *default: int, least: int = 1) -> int:
        """A whole number from `least` to the `largest` of the field."""
        value = self.number(name, *default)
        if not float(value).is_integer() or value < least:
            raise UserError(f"{self.path}: {name}={value!r} must be a whole number >= {least}")
        # Here, before anything is made whose size this is.
        if value > (most := largest(name)):
            raise UserError(f"{self.path}: {name}={value!r} must be at most {most}")
        return int(value)

    def part(self, name: str, model_type: str) -> "HFFields":
        """The fields of an inner object, which may name only this `model_type`."""
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise UserError(f"{self.path}: {name}={value!r} must be an object")
        inner = HFFields(value, f"{self.path}: {name}", self.compare_head)
        inner.refuse("model_type", (model_type,), model_type)
        return inner

    def flag(self, name: str, default: bool | None = None) -> Any:
        """True or false, or the default if the field is absent or null."""
        value = self.values.get(name)
        if not isinstance(value, bool | None):
            raise UserError(f"{self.path}: {name}={value!r} must be true or false")
        return default if value is None else value

    def window(self, default: int | None) -> int | None:
        """The field `sliding_window`; null means no window, and an absent field the default."""
        if self.values.get("sliding_window", default) is None:
            return None
        return self.whole("sliding_window", *(() if default is None else (default,)))

    def refuse(self, name: str, allowed: tuple[Any, ...], default: Any) -> None:
        """Raises ValueError unless the field, or its default, has one of the allowed values."""
        value = self.values.get(name)
        value = default if value is None else value
        if value not in allowed:
            raise UserError(
                f"{self.path}: {name}={value!r} is not supported; it must be "
                f"{' or '.join(repr(a) for a in allowed)}"
            )

    def refuse_others(self, constants: Mapping[str, tuple[Any, ...]]) -> None:
        """Raises ValueError unless each field has one of its values; the first is its default."""
        for name, allowed in constants.items():
            self.refuse(name, allowed, allowed[0])


def decoder_only_from_hf(fields: HFFields, **defaults: int | float | None) -> dict[str, Any]:
    """The fields of a `DecoderOnlyConfig` under Llama's names.

    Args:
      fields: of the `config.json`.
      **defaults: the values of fields that the file may leave out, by Hugging Face's names. By
        default these are `head_dim`, `num_key_value_heads` and `rms_norm_eps`.

    Returns:
      The sizes and the norms' epsilon.

    Raises:
      ValueError: for a value that is not possible.
    """

    def whole(name: str, *fallback: int) -> int:
        # null takes the fallback, an absent field the default of transformers.
        default = defaults.get(name) if name not in fields.values else None
        return fields.whole(name, *(fallback if default is None else (default,)))

    heads = whole("num_attention_heads")
    kv_heads = whole("num_key_value_heads", heads)
    if heads % kv_heads:
        raise UserError(
            f"{fields.path}: num_attention_heads={heads} must be a multiple of "
            f"num_key_value_heads={kv_heads}"
        )
    head_dim = whole("head_dim", whole("hidden_size") // heads)
    if head_dim % 2:
        raise UserError(
            f"{fields.path}: head_dim={head_dim} (by default hidden_size // num_attention_heads) "
            "must be even, for rotary positions"
        )
    return {
        "vocab_size": whole("vocab_size"),
        "embed_dim": whole("hidden_size"),
        "num_heads": heads,
        "head_dim": head_dim,
        "mlp_dim": whole("intermediate_size"),
        "num_layers": whole("num_hidden_layers"),
        "num_kv_heads": kv_heads,
        "norm_eps": fields.positive("rms_norm_eps", defaults.get("rms_norm_eps", 1e-6)),
    }


def decoder_only_to_hf(config: DecoderOnlyConfig) -> dict[str, Any]:
    """Llama's names for the fields of a `DecoderOnlyConfig`.

    Args:
      config: the configuration.

    Returns:
      The fields of a `config.json`, without the family's own.

    Raises:
      ValueError: for sizes that transformers 5 does not read, though 4.x may.
    """
    if config.embed_dim % config.num_heads:
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
    """The rotary base, the kind of scaling and its fields.

    They are in `rope_parameters` (5.x), or in `rope_theta` and `rope_scaling` (4.x). If a file has
    both, 4.x and 5.x take `rope_scaling`.

    Args:
      fields: of the `config.json`.
      default: the base if the file has none.

    Returns:
      The base, Hugging Face's `rope_type`, and the fields that belong to it.

    Raises:
      ValueError: if the fields contradict each other, or do not apply to all layers and dimensions.
    """
    path = fields.path
    found = {name: fields.values.get(name) or {} for name in ("rope_scaling", "rope_parameters")}
    for name, value in found.items():
        if not isinstance(value, dict):
            raise UserError(f"{path}: {name}={value!r} must be an object")
    parameters = found["rope_scaling"] or found["rope_parameters"]
    if nested := [name for name, value in parameters.items() if isinstance(value, dict)]:
        raise UserError(
            f"{path}: rope parameters that apply only to {', '.join(nested)} are not supported; "
            "all layers must share them"
        )
    rope = HFFields(parameters, path)
    theta = float(rope.positive("rope_theta", fields.positive("rope_theta", default)))
    other = found["rope_parameters"].get("rope_theta")
    if other is not None and other != theta:
        raise UserError(
            f"{path}: rope_parameters has rope_theta={other!r}, but rope_scaling, which has "
            f"priority, has {theta!r}; remove one of the two fields"
        )
    for where in (rope, fields):
        where.refuse("partial_rotary_factor", (1, 1.0), 1.0)
    return theta, parameters.get("rope_type") or parameters.get("type") or "default", rope


def default_rope(fields: HFFields, default: float = 10_000.0) -> float:
    """The rotary base of a family whose frequencies are not scaled; see `rope_from_hf`."""
    theta, kind, _ = rope_from_hf(fields, default)
    if kind != "default":
        raise UserError(f"{fields.path}: rope_type={kind!r} is not supported, only 'default'")
    return theta


def rope_to_hf(theta: float, scaling: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The rotary fields of 4.x and of 5.x.

    Args:
      theta: the base.
      scaling: `rope_type` and its fields; None for no scaling.
    """
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": theta},
    }
