"""`Family`: everything that specjax has to know about a family of networks.

A family is in a file (`llama.py`, `gemma.py`, `t5.py`) with its configuration, its Hugging Face
names and fields, its published sizes and its vocabulary; and a line of `families.py`.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from specjax.errors import UserError
from specjax.models.config import ModelConfig, largest
from specjax.models.model import Model

T = True  # in tables: stored transposed
# Names of kernels: Hugging Face's, and ours.
HEADS = {"q": "query", "k": "key", "v": "value", "o": "out"}
MLP = {"gate": "wi_0", "up": "wi_1", "down": "wo"}

# Options of SentencePiece's trainer that make every character of a text representable: spaces and
# newlines are kept, and rare characters become bytes.
VERBATIM = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "byte_fallback": True,
    "split_digits": True,
}

_Config = TypeVar("_Config")


@dataclasses.dataclass(frozen=True)
class HFFields:
    """The values of one `config.json`; errors name the field.

    Attributes:
      name: of the file, or of the object inside it.
      compare_head: finds the checkpoint's output projection, see `head`. It may read two arrays.
    """

    values: Mapping[str, Any]
    name: Path | str = ""
    compare_head: Callable[[], str | None] = lambda: None

    def read(self, from_hf: Callable[["HFFields"], _Config]) -> _Config:
        """What a family's `from_hf` makes of the fields, with errors that name the file."""
        try:
            return from_hf(self)
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from None

    @property
    def head(self) -> str | None:
        """The output projection: "separate", "copied" from the embedding, or None if absent."""
        return self.compare_head()

    def number(self, name: str, *default: float | None) -> Any:
        """A finite number, or the default if the field is absent or null."""
        value = self.values.get(name)
        if value is None and default:
            return default[0]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{name}={value!r} must be a number")
        # A whole number too large for a float is damaged.
        if not abs(value) < 1e300:
            raise UserError(f"{name}={repr(value)[:40]} must be finite")
        return value

    def positive(self, name: str, *default: float | None) -> Any:
        """A number above 0."""
        value = self.number(name, *default)
        if value is not None and value <= 0:
            raise UserError(f"{name}={value!r} must be above 0")
        return value

    def whole(self, name: str, *default: int, least: int = 1) -> int:
        """A whole number from `least` to the `largest` of the field."""
        value = self.number(name, *default)
        if not float(value).is_integer() or value < least:
            raise UserError(f"{name}={value!r} must be a whole number >= {least}")
        # Here, before anything is made whose size this is.
        if value > (most := largest(name)):
            raise UserError(f"{name}={value!r} must be at most {most}")
        return int(value)

    def flag(self, name: str, default: bool | None = None) -> Any:
        """True or false, or the default if the field is absent or null."""
        value = self.values.get(name)
        if not isinstance(value, bool | None):
            raise UserError(f"{name}={value!r} must be true or false")
        return default if value is None else value

    def objects(self, name: str) -> dict[str, Any]:
        """An object, empty if the field is absent or null."""
        value = self.values.get(name)
        if not isinstance(value, dict | None):
            raise UserError(f"{name}={value!r} must be an object")
        return value or {}

    def part(self, name: str, model_type: str) -> "HFFields":
        """The fields of an inner object, which may name only this `model_type`."""
        if self.values.get(name) is None:
            raise UserError(f"{name} must be an object, and is missing")
        inner = HFFields(self.objects(name), name, self.compare_head)
        inner.read(lambda fields: fields.refuse("model_type", (model_type,), model_type))
        return inner

    def window(self, default: int | None) -> int | None:
        """The field `sliding_window`; null means no window, and an absent field the default."""
        if self.values.get("sliding_window", default) is None:
            return None
        return self.whole("sliding_window", *(() if default is None else (default,)))

    def refuse(self, name: str, allowed: tuple[Any, ...], default: Any) -> None:
        """Refuses a file unless the field, or its default, has one of the allowed values."""
        value = self.values.get(name)
        value = default if value is None else value
        if value not in allowed:
            choices = " or ".join(repr(a) for a in allowed)
            raise UserError(f"{name}={value!r} is not supported; it must be {choices}")


Constants = Mapping[str, tuple[Any, ...]]


class Field(NamedTuple):
    """A line of the table of a family's fields: some of a configuration, here and in a file.

    Attributes:
      read: ours, from those of a `config.json` and from ours of earlier lines.
      write: those of a `config.json`, from a configuration.
    """

    read: Callable[[HFFields, Mapping[str, Any]], Mapping[str, Any]] = lambda fields, ours: {}
    write: Callable[[Any], Mapping[str, Any]] = lambda config: {}


def field(
    hf: str,
    ours: str,
    kind: Callable[..., Any],
    *default: Any,
    write: Callable[[Any], Any] | None = None,
    **options: Any,
) -> Field:
    """One field of a file that is one of ours.

    `kind` reads its value, such as `HFFields.whole`; `write` makes it from a configuration.
    """
    return Field(
        lambda fields, _: {ours: kind(fields, hf, *default, **options)},
        lambda config: {hf: getattr(config, ours) if write is None else write(config)},
    )


def constants(allowed: Constants, written: bool = True) -> Field:
    """Fields of a file that may have only these values; the first is the default."""

    def read(fields: HFFields, _: Any) -> dict[str, Any]:
        for name, values in allowed.items():
            fields.refuse(name, values, values[0])
        return {}

    first = {name: values[0] for name, values in allowed.items() if written}
    return Field(read, lambda _: first)


def only(**values: Any) -> Field:
    """Fields of ours of which transformers' network has one value."""

    def write(config: Any) -> dict[str, Any]:
        for name, value in values.items():
            if (own := getattr(config, name)) != value:
                raise UserError(
                    f"{name}={own!r} must be {value!r} for transformers to read the model; "
                    "convert it to orbax"
                )
        return {}

    return Field(write=write)


class Renaming(NamedTuple):
    """The names of a parameter, in a Hugging Face checkpoint and here; `{i}` is a layer's number.

    `{e}` is the number of a matrix, an expert's, among those that the parameter stacks.

    Attributes:
      transposed: whether the two arrays are transposes of each other: PyTorch keeps `[out, in]`,
        Flax `[in, out]`.
      part: the checkpoint's array joins several parameters along their outputs, and this is their
        order; None if it has only this parameter.
      groups: the field of the configuration that counts the groups of outputs, each of which an
        array joins by itself; None: there is one.
      alternating: they are joined along its last axis instead, where they alternate.
      expert: the number of the matrix that the checkpoint's array is, of a parameter that stacks
        several; None if it is the whole parameter.
    """

    hf: str
    path: str
    transposed: bool = False
    part: int | None = None
    groups: str | None = None
    alternating: bool = False
    expert: int | None = None

    def arrays(self, shape: tuple[int, ...]) -> list["Renaming"]:
        """The checkpoint's arrays, of which there are several for `{e}`.

        `shape` is the parameter's.
        """
        if "{e}" not in self.hf:
            return [self]
        return [
            self._replace(hf=self.hf.replace("{e}", str(number)), expert=number)
            for number in range(shape[0])
        ]


def renamings(
    hf: str, ours: str, kernels: Mapping[str, str], scales: Mapping[str, str]
) -> list[Renaming]:
    """The names below two prefixes of kernels, which are transposed, and of norms' scales."""
    return [
        *(Renaming(f"{hf}.{a}.weight", f"{ours}/{b}/kernel", T) for a, b in kernels.items()),
        *(Renaming(f"{hf}.{a}.weight", f"{ours}/{b}/scale") for a, b in scales.items()),
    ]


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """How a family's published vocabularies are made.

    Attributes:
      file: the SentencePiece model's name in a Hugging Face directory.
      types: of SentencePiece models that transformers reads there, the usual type first; it reads
        every Llama's and Gemma's as BPE.
      options: of SentencePiece's trainer.
      settings: of `tokenizer_config.json`.
    """

    file: str
    types: tuple[str, ...]
    options: Mapping[str, Any]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Nested:
    """A larger Hugging Face network that has a network of the family inside, beside other parts.

    Attributes:
      field: the field of its `config.json` that has the inner fields; "" if they are its own.
      prefixes: beginnings of the inner arrays' names, and their replacements.
      others: a pattern of the names of arrays of other parts, which are left out.
    """

    model_type: str
    architectures: tuple[str, ...]
    field: str
    prefixes: Mapping[str, str]
    others: str


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of networks.

    Attributes:
      name: in specjax's files, and as Hugging Face's `model_type`.
      model: `CausalLM` or `Seq2SeqLM`.
      architectures: Hugging Face's names of its class, the usual one first.
      special_ids: the ids that transformers assumes if files have none, named as in `config.json`.
      fields: those of its configuration in a `config.json`.
      copies: names under which a checkpoint may hold the embedding a second time, or its only copy;
        of a tied network the head's name is one, too.
      second_copies: other arrays that a checkpoint may hold twice: name of the copy -> name of the
        array, which it must equal.
      unused: a pattern of the names of arrays in old checkpoints that no network reads.
      nested: the larger network that may contain it in a checkpoint.
      presets: its published sizes.
      vocabulary: None if specjax cannot train its vocabularies.
    """

    name: str
    config: type[ModelConfig]
    model: type[Model]
    architectures: tuple[str, ...]
    special_ids: Mapping[str, int]
    names: tuple[Renaming, ...]
    fields: tuple[Field, ...]
    copies: tuple[str, ...] = ()
    second_copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unused: str = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
    nested: Nested | None = None
    presets: Mapping[str, ModelConfig] = dataclasses.field(default_factory=dict)
    vocabulary: Vocabulary | None = None

    def from_hf(self, fields: HFFields) -> ModelConfig:
        ours: dict[str, Any] = {}
        for line in self.fields:
            ours |= line.read(fields, ours)
        return self.config(**ours)

    def to_hf(self, config: ModelConfig) -> dict[str, Any]:
        """Its fields, without dtypes and special ids; refuses what transformers has not."""
        return {name: x for line in self.fields for name, x in line.write(config).items()}

    def hf_names(self, path: str) -> list[Renaming]:
        """All entries of a parameter, such as `decoder/layers_3/mlp/wo/kernel`; a file has one."""
        number = re.search(r"(?<=/layers_)\d+(?=/)", path)
        layer = number.group() if number else ""
        pattern = path.replace(f"/layers_{layer}/", "/layers_{i}/") if number else path
        found = [
            line._replace(hf=line.hf.replace("{i}", layer), path=path)
            for line in self.names
            if line.path == pattern
        ]
        if not found:
            raise KeyError(f"{self.name} has no Hugging Face name for the parameter {path}")
        return found
