"""The table of families and functions that use it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.checks import join_names
from specjax.errors import UserError
from specjax.models.config import ModelConfig, kinds_of
from specjax.models.family import Family
from specjax.models.gemma import GEMMA, GEMMA2, GEMMA3
from specjax.models.gemma4 import GEMMA4, GEMMA4_UNIFIED
from specjax.models.llama import LLAMA
from specjax.models.llama_variants import (
    GPT_OSS,
    MISTRAL,
    MIXTRAL,
    OLMO2,
    OLMOE,
    PHI3,
    SMOLLM3,
)
from specjax.models.model import Model
from specjax.models.qwen import QWEN2, QWEN3, QWEN3_MOE
from specjax.models.qwen_hybrid import QWEN3_NEXT, QWEN35, QWEN35_MOE
from specjax.models.t5 import MT5, T5, UMT5
from specjax.models.t5gemma import T5GEMMA, T5GEMMA2

# By name; a custom family is another entry.
FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        T5, MT5, UMT5, T5GEMMA, T5GEMMA2,
        LLAMA, QWEN2, QWEN3, QWEN3_MOE, QWEN3_NEXT, QWEN35, QWEN35_MOE,
        MISTRAL, MIXTRAL, OLMO2, OLMOE, SMOLLM3, PHI3, GPT_OSS,
        GEMMA, GEMMA2, GEMMA3, GEMMA4, GEMMA4_UNIFIED,
    )
}  # fmt: skip

# The published sizes by name.
PRESETS: dict[str, ModelConfig] = {
    name: config for family in FAMILIES.values() for name, config in family.presets.items()
}


def family_of(config: ModelConfig) -> Family:
    """The family of a configuration."""
    for family in FAMILIES.values():
        if type(config) is family.config:
            return family
    names = ", ".join(family.config.__name__ for family in FAMILIES.values())
    raise UserError(f"`config` must be one of {names}, got a {type(config).__name__}")


def model_from_config(config: ModelConfig) -> Model:
    """The model of a configuration: a `CausalLM` or a `Seq2SeqLM`."""
    return family_of(config).model(config)


def preset(name: str, **changes: Any) -> ModelConfig:
    """The configuration of a published size.

    Args:
      name: one of `PRESETS`, such as `"t5_v1_1_base"`.
      **changes: fields to change, such as `dtype="bfloat16"`.

    Raises:
      UserError: for an unknown name or field, or a value of a wrong type or out of its range.
    """
    if name not in PRESETS:
        raise UserError(f"`name` must be one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name].replace(**changes)


def config_to_dict(config: ModelConfig) -> dict[str, Any]:
    """The configuration as JSON types, with its family; `config_from_dict` reads it back."""
    return {"family": family_of(config).name, **_json_types(dataclasses.asdict(config))}


def _json_types(values: Mapping[str, Any]) -> dict[str, Any]:
    dtypes = {name: values[name].name for name in ("dtype", "param_dtype") if name in values}
    parts = {name: _json_types(part) for name, part in values.items() if isinstance(part, dict)}
    return {**values, **dtypes, **parts}


def config_from_dict(values: Mapping[str, Any]) -> ModelConfig:
    """The configuration that `config_to_dict` or a JSON file describes.

    A field with a default may be left out.

    Raises:
      UserError: for an unknown family or field, a missing field, or a value of a wrong type or out
        of its range.
    """
    values = dict(values)
    name = values.pop("family", None)
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(f"family={name!r} must be one of {', '.join(FAMILIES)}")
    try:
        return _from_fields(FAMILIES[name].config, values)
    except UserError as error:
        raise UserError(f"configuration of family {name!r}: {error}") from None


# The class that has these fields, or the first.
def _kind_of(part: Any, values: Mapping[str, Any]) -> type[Any]:
    kinds = kinds_of(part)
    fitting = (k for k in kinds if set(values) <= {f.name for f in dataclasses.fields(k)})
    return next(fitting, kinds[0])


def _from_fields(kind: Any, values: Mapping[str, Any]) -> Any:
    fields = {f.name: f.default is dataclasses.MISSING for f in dataclasses.fields(kind)}
    wrong = {
        "unknown": sorted(set(values) - set(fields)),
        "missing": sorted(n for n, required in fields.items() if required and n not in values),
    }
    if any(wrong.values()):
        faults = (
            f"{problem} fields {join_names(names)}" for problem, names in wrong.items() if names
        )
        raise UserError("; ".join(faults))
    parts = {
        name: _from_fields(_kind_of(part, values[name]), values[name])
        for name, part in getattr(kind, "parts", {}).items()
        if isinstance(values.get(name), dict)
    }
    return kind(**{**values, **parts})
