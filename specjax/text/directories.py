"""Models, bigram tables and built-in pairs ("built-in:gsm8k/drafter") in directories."""

import dataclasses
import difflib
import logging
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from specjax.checkpoints.attachments import (
    AGAIN,
    BIGRAM,
    has_head,
    load_head,
    read_attachment,
    write_attachment,
)
from specjax.checkpoints.heads import has_mtp, is_draft_head, load_draft_head, open_draft_head
from specjax.checkpoints.hf import longest_context
from specjax.checkpoints.loading import Opened, open_checkpoint
from specjax.checks import PathLike, check_flag, check_path, options_of
from specjax.drafting import Bigram
from specjax.errors import MissingFileError, UserError, download
from specjax.memory import nbytes
from specjax.models import PRESETS, Model, ModelConfig, model_from_config
from specjax.models.heads import HeadFiles
from specjax.models.quantised import form_of
from specjax.models.recurrent import empty_memory
from specjax.partitioning import STANDARD_RULES, WHOLE_RULES
from specjax.text.draft_length import LONGEST, RoundCost, draft_length, expected_rounds
from specjax.text.text_models import (
    SAMPLE,
    Pair,
    TextModel,
    Words,
    check_vocabularies,
    translate,
)
from specjax.tokenizers import Tokenizer, load_tokenizer
from specjax.tokenizers.gguf_files import is_gguf

PAIRS = Path(__file__).parents[1] / "pairs"
DEFAULT_PAIR = "multi30k_ende"
PREFIX = "built-in:"
# What the built-in models write.
_ABOUT = {
    "multi30k_ende": "built in: English to German captions",
    "gsm8k": "built in: school math",
    "smollm2": "built in: a draft head of SmolLM2-135M-Instruct",
}
# The arrays of a bigram table by the version: the second has longer contexts.
_TABLES = {1: ("successors",), 2: ("successors", "contexts", "followers")}
_LOGGER = logging.getLogger(__name__)  # the commands print its lines


def built_in_pairs() -> tuple[str, ...]:
    """Returns the names of the installed built-in pairs."""
    return tuple(sorted(path.parent.parent.name for path in PAIRS.glob("*/verifier/config.json")))


def built_in_pair(name: str) -> Path:
    """Returns the directory of a built-in pair."""
    names = built_in_pairs()
    if name not in names:
        raise UserError(
            f"there is no built-in pair {name!r}, only {', '.join(names) or 'none'}: choose "
            "another, or give two directories: load_pair(drafter=..., verifier=...)"
        )
    return PAIRS / name


def real_path(path: PathLike) -> PathLike:
    """Returns the directory of "built-in:PAIR/PART", and any other path unchanged."""
    if not isinstance(path, str) or not path.startswith(PREFIX):
        return path
    name, _, part = path.removeprefix(PREFIX).partition("/")
    # A head has no verifier beside it.
    pair = PAIRS / name if name and (PAIRS / name).is_dir() else built_in_pair(name)
    parts = sorted(each.name for each in pair.iterdir() if each.is_dir())
    if part not in parts:
        raise UserError(f"{path}: no such part of {name}: choose from {', '.join(parts)}")
    return pair / part


def portable_path(path: PathLike) -> str:
    """Returns the absolute path; for a part of a built-in pair its "built-in:" name."""
    absolute = os.path.abspath(os.path.expanduser(real_path(path)))
    if not absolute.startswith(f"{PAIRS}{os.sep}"):
        return absolute
    return PREFIX + os.path.relpath(absolute, PAIRS).replace(os.sep, "/")


def shown_path(path: PathLike) -> str:
    """Returns the "built-in:" name of a part of a built-in pair, and any other path unchanged."""
    name = portable_path(path)
    return name if name.startswith(PREFIX) else os.fspath(path)


def log_models(paths: Mapping[str, PathLike]) -> None:
    """Logs which models are loaded, each with its role; "" for a model without one."""
    shown = {role: shown_path(path) for role, path in paths.items()}
    built_in = [path.removeprefix(PREFIX) for path in shown.values() if path.startswith(PREFIX)]
    pairs = dict.fromkeys(path.partition("/")[0] for path in built_in)
    what = ", ".join(_ABOUT[pair] for pair in pairs if pair in _ABOUT)
    listed = ", ".join(f"{role}={path}" if role else path for role, path in shown.items())
    _LOGGER.info("models: %s%s", listed, f" ({what})" if what else "")


def built_in_table(model: PathLike) -> Path:
    """Returns the bigram table of a built-in model's pair; for other models the default pair's."""
    parts = Path(model).parts
    names = [name for name in built_in_pairs() if parts[:-1] == (PAIRS / name).parts]
    return built_in_pair(names[0] if names else DEFAULT_PAIR) / "bigram"


@options_of("load_text_model")
def load_text_model(
    path: PathLike,
    *,
    dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    tokenizer: PathLike | Tokenizer | None = None,
    check_weights: bool = True,
    head: bool = True,
    replicate: bool = False,
    weights: str | None = None,
    verifier: TextModel | None = None,
) -> TextModel:
    """Loads a model with its tokenizer.

    Args:
      path: a Hugging Face, T5X, MaxText or specjax directory, or a GGUF file (see
        `specjax.checkpoints.load_model`), or a model of a built-in pair, such as
        "built-in:gsm8k/drafter".
      dtype: the dtype of parameters, activations and cache; by default that of the checkpoint.
      mesh: splits the parameters; from `specjax.partitioning.make_mesh`.
      tokenizer: a tokenizer or its path; by default that of the directory.
      check_weights: see `specjax.checkpoints.load_model`.
      head: whether to load the acceptance head, if the directory has it.
      replicate: whether each device of the mesh has the whole model, which then needs no
        collectives; if not, the mesh's axis `model` splits it.
      weights: a form of matrices, such as "int8"; see `specjax.checkpoints.load_model`. Those of a
        draft head are not quantised.
      verifier: of a draft head the model that it is for, whose tokenizer and mesh it has.

    Raises:
      FileNotFoundError: a directory or file is missing.
      UserError: the directory is unreadable, the model does not fit its tokenizer, its head, its
        verifier or the mesh, or a draft head has no verifier.
    """
    check_model_paths({"path": path})
    place = real_path(path)
    _check_mesh(mesh)
    log_models({"": path})
    options: Any = {"dtype": dtype, "mesh": mesh, "check_weights": check_weights, "head": head}
    if is_draft_head(place):
        if verifier is None:
            raise UserError(
                f"{path} is a draft head, which drafts only for its verifier: load both (load_pair)"
            )
        return _load_head(place, verifier, options)
    return _load(place, tokenizer, replicate=replicate, weights=weights, **options)


def _load(
    path: PathLike,
    tokenizer: PathLike | Tokenizer | None,
    *,
    dtype: Any,
    mesh: jax.sharding.Mesh | None,
    check_weights: bool,
    head: bool,
    replicate: bool,
    weights: str | None,
) -> TextModel:
    # Imported here to keep `import specjax` fast: importing Orbax takes long.
    from specjax.checkpoints import load_model, read_config
    from specjax.checkpoints.ignored import check_adapter, ignored_settings

    check_adapter(Path(path))
    words = _tokenizer(path, tokenizer)
    if mesh is not None and not replicate:
        _check_heads(path, read_config(path).num_heads, mesh)
    options: Any = {"dtype": dtype, "mesh": mesh, "check_weights": check_weights}
    rules = WHOLE_RULES if replicate else STANDARD_RULES
    loaded = load_model(path, rules=rules, weights=weights, **options)
    if not 0 <= words.pad_id < loaded.config.vocab_size:
        raise UserError(
            f"{path}: pad_token_id={words.pad_id} must be in 0 .. {loaded.config.vocab_size - 1}: "
            "correct generation_config.json"
        )
    return TextModel(
        dataclasses.replace(loaded.model, split=not replicate),
        loaded.params,
        words,
        mesh,
        os.fspath(path),
        load_head(path, check_weights=check_weights) if head and has_head(path) else None,
        longest_context(loaded.path),
        ignored_settings(Path(path)),
    )


@options_of("load_pair")
def load_pair(
    built_in: str = DEFAULT_PAIR,
    *,
    drafter: PathLike | None = None,
    verifier: PathLike | None = None,
    dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    tokenizer: PathLike | Tokenizer | None = None,
    check_weights: bool = True,
    head: bool = True,
    replicate_drafter: bool = False,
    weights: str | Mapping[str, str | None] | None = None,
    translate_drafter: bool = False,
    others: Mapping[str, PathLike] = MappingProxyType({}),
) -> Pair:
    """Loads a drafter and a verifier, or a verifier alone; by default a built-in pair.

    `built_in` names one: "multi30k_ende" (two T5 models, English to German captions) or "gsm8k"
    (Llama models, school mathematics); or give two directories, or `verifier` for a single model,
    which a `Decoder` lets decode alone, or with drafting="Lookup()". The other options are those of
    `load_text_model`, for both models. `weights` may be for one of them, as in {"verifier":
    "int8"}. With `translate_drafter` the drafter may have another tokenizer; see
    `specjax.text.text_models.translate`. The drafter may be a draft head of the verifier (EAGLE,
    P-EAGLE, MTP, DFlash, DFlash 2, DSpark, Domino; see `specjax.models.heads`), which each device
    of a mesh has whole.
    `others` are directories of more models by their names, as {"middle": DIR}.

    Raises:
      FileNotFoundError: a directory or file is missing, or there are no built-in pairs.
      UserError: only the drafter is given, the built-in pair does not exist, a directory is
        unreadable, or the vocabularies differ.
    """
    given = {"verifier": verifier, "drafter": drafter, **others}
    paths = {name: path for name, path in given.items() if path is not None}
    if not paths:
        paths = {name: built_in_pair(built_in) / name for name in ("verifier", "drafter")}
    check_model_paths(paths)
    if "verifier" not in paths:
        raise UserError(
            "load_pair: verifier is missing: give both directories, neither for a built-in pair, "
            "or verifier alone for a single model"
        )
    check_flag("translate_drafter", translate_drafter)
    # Imported here to keep `import specjax` fast: importing Orbax takes long.
    from specjax.checkpoints import read_config

    for name in weights if isinstance(weights, Mapping) else ():
        if name not in paths:
            raise UserError(
                f"weights has {name!r}, but the models are {', '.join(paths)}: correct the name"
            )
    forms = {name: form_of(weights, name) for name in paths}
    paths = {name: real_path(path) for name, path in paths.items()}
    log_models(paths)
    _check_mesh(mesh)
    heads = {name: path for name, path in paths.items() if is_draft_head(path)}
    if "verifier" in heads:
        raise UserError(f"verifier={heads['verifier']} is a draft head: give the model it is for")
    for name in heads:
        if isinstance(weights, Mapping) and forms[name] is not None:
            raise UserError(
                f"weights must not name {name}: the weights of a head are not quantised"
            )
    paths = {name: path for name, path in paths.items() if name not in heads}
    words = {name: _tokenizer(path, tokenizer) for name, path in paths.items()}
    # The vocabularies are compared before arrays are read.
    sizes = {
        name: Words.of(os.fspath(path), words[name], read_config(path).vocab_size)
        for name, path in paths.items()
    }
    same = all(words["verifier"].fingerprint == other.fingerprint for other in words.values())
    if same or not translate_drafter:
        for name, size in sizes.items():
            check_vocabularies(name, size, sizes["verifier"])
        _warn_of_special_ids(words)
    options: Any = {"dtype": dtype, "mesh": mesh, "check_weights": check_weights, "head": head}
    whole = ("drafter",) if replicate_drafter else ()
    models = {
        name: _load(path, words[name], replicate=name in whole, weights=forms[name], **options)
        for name, path in paths.items()
    }
    if translate_drafter and not same:
        models["drafter"] = translate(models["drafter"], models["verifier"], SAMPLE)
    for name, path in heads.items():
        models[name] = _load_head(path, models["verifier"], options)
    return Pair(**models)


def _load_head(path: PathLike, verifier: TextModel, options: Mapping[str, Any]) -> TextModel:
    assert isinstance(verifier.model, Model)
    where = None if verifier.mesh is None else NamedSharding(verifier.mesh, jax.P())
    head, params = load_draft_head(
        path,
        verifier.model,
        verifier_params=verifier.params if options["check_weights"] else None,
        dtype=options["dtype"],
        sharding=where,
        check_weights=options["check_weights"],
    )
    return TextModel(head, params, verifier.tokenizer, verifier.mesh, os.fspath(path))


def _warn_of_special_ids(words: dict[str, Tokenizer]) -> None:
    verifier = words["verifier"]
    for name, other in words.items():
        for what, ours, theirs in (
            ("ends texts", verifier.eos_ids, other.eos_ids),
            ("pads prompts", verifier.pad_id, other.pad_id),
        ):
            if ours != theirs:
                warnings.warn(
                    f"the {name} {what} with {theirs}, the verifier with {ours}: using the tokens "
                    "of the verifier",
                    stacklevel=4,
                )


def _tokenizer(path: PathLike, tokenizer: PathLike | Tokenizer | None) -> Tokenizer:
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if tokenizer is None:
        return load_tokenizer(path)
    if tokenizer != "bytes":
        check_model_path("tokenizer", tokenizer)
    return load_tokenizer(tokenizer)


def check_model_paths(paths: Mapping[str, Any]) -> None:
    """Refuses what is no path of a model, built in or in a directory, by their names."""
    for name, path in paths.items():
        place = real_path(path)
        check_model_path(name, place)
        if os.path.isfile(place) and not is_gguf(Path(place)):
            raise UserError(
                f"{name}={os.fspath(path)!r} is a file: give the directory of a model, or a .gguf "
                "file"
            )


def check_model_path(name: str, path: Any) -> None:
    """Refuses a path, the value of `name`, that is not there."""
    check_path(path, f"{name}=")
    if not os.path.exists(path):
        raise MissingFileError(
            f"{name}={os.fspath(path)!r}: no such file or directory: check the path; download "
            f"models from a hub first{download(path)}"
        )


def _check_mesh(mesh: Any) -> None:
    if mesh is not None and "model" not in getattr(mesh, "axis_names", ()):
        raise UserError(f"mesh must come from specjax.partitioning.make_mesh, got {mesh!r}")


def _check_heads(path: PathLike, heads: int, mesh: jax.sharding.Mesh) -> None:
    ways = mesh.shape["model"]
    if heads % ways:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0]
        raise UserError(
            f"the mesh's model={ways} does not divide the {heads} heads of {os.fspath(path)}: "
            f"choose `model` from {', '.join(map(str, fitting))}, or give each device a small "
            "drafter (replicate_drafter=True)"
        )


def save_bigram(directory: PathLike, bigram: Bigram) -> None:
    """Writes `bigram.json` and `bigram.safetensors` into a new or empty directory.

    Ids below 2**16 - 1 take two bytes each. A table without longer contexts is written in version 1
    of the format.
    """
    size = bigram.successors.size
    kind = np.uint16 if size < 2**16 else np.uint32
    version = 1 if bigram.order == 2 else 2
    arrays = {name: getattr(bigram, name) for name in _TABLES[version]}
    # The number of ids stands for "none".
    stored = {name: np.where(ids < 0, size, ids).astype(kind) for name, ids in arrays.items()}
    values = {
        "version": version,
        "ids": size,
        "tokenizer_fingerprint": bigram.tokenizer_fingerprint,
        "notes": dict(bigram.notes),
    }
    write_attachment(Path(directory), BIGRAM, values, stored)


def load_bigram(directory: PathLike, *, check_weights: bool = True) -> Bigram:
    """Reads a table of `save_bigram`; `Bigram.table` checks that it belongs to a model.

    Raises:
      FileNotFoundError: there is no table, or a file is missing.
      UserError: a file is damaged, by its checksum if `check_weights`.
    """
    check_path(directory, "directory=")
    place = Path(directory)
    if not os.path.isfile(place / f"{BIGRAM}.json"):
        raise MissingFileError(
            f"{place}: no bigram table found: make a table with `specjax train bigram`"
        )
    values, arrays = read_attachment(place, BIGRAM, tuple(_TABLES), check_weights)
    try:
        stored = {name: arrays[name] for name in _TABLES[values["version"]]}
        size = stored["successors"].size
        for name, ids in stored.items():
            if ids.dtype not in (np.uint16, np.uint32):
                raise UserError(f"{name} must be uint16 or uint32, got {ids.dtype}")
        return Bigram(
            tokenizer_fingerprint=values["tokenizer_fingerprint"],
            notes=values["notes"],
            **{n: np.where(ids >= size, -1, ids.astype(np.int32)) for n, ids in stored.items()},
        )
    except KeyError as error:
        raise UserError(f"{place} lacks {error}: {AGAIN[BIGRAM]}") from None
    except ValueError as error:
        raise UserError(f"{place}: {error}: {AGAIN[BIGRAM]}") from None


# Longest texts, in tokens, for which the largest batch is computed.
CONTEXTS = (1_024, 4_096, 16_384, 65_536)
# The share of a device's memory for parameters and caches; the rest is for temporary arrays.
_USABLE = 0.9


@dataclasses.dataclass(frozen=True)
class Inspected:
    """A checkpoint whose arrays have not been read, or a published size.

    Attributes:
      path: its directory, or the name of the size.
      model: the model, with parameters and activations in `dtype`, as its cache.
      opened: the sizes of its arrays, and its special ids; None for a published size.
      tokenizer: its tokenizer, or None if the directory has none.
    """

    path: str
    model: Model
    dtype: Any
    opened: Opened | None = None
    tokenizer: Tokenizer | None = None

    @property
    def params(self) -> int:
        return self.model.num_params()

    def read_params(self, tokens: int = 1) -> int:
        """The parameters that a pass of so many tokens reads; see `Model.params_read`."""
        return round(sum(self.model.params_read(tokens).values()))

    def cache_bytes(self, tokens: int) -> int:
        """The bytes of the cache of one row of tokens; of an encoder-decoder, of either side."""
        config, deltas = self.model.config, self.model.config.style.deltas
        layers = [config.of_layer(i) for i in config.style.cached]
        numbers = sum(layer.kv_heads * layer.head_dim for layer in layers)
        entries = 2 * tokens * numbers * self.dtype.itemsize
        given = deltas, 1, self.model.rollback, self.dtype
        return entries + nbytes(jax.eval_shape(lambda: empty_memory(*given)).layers)

    def summary(self) -> dict[str, Any]:
        """The figures by name, as JSON values; sizes in bytes."""
        config, words = self.model.config, self.tokenizer
        on_disk: Counter[str] = Counter()
        context: int | None = None
        eos: tuple[int, ...] = ()
        if self.opened is not None:
            for spec in self.opened.reader.specs.values():
                on_disk[spec.label or spec.dtype.name] += spec.stored_bytes or spec.nbytes
            context = longest_context(self.opened.path)
            eos = self.opened.ids.eos
        return {
            "path": self.path,
            "family": type(config).__name__.removesuffix("Config"),
            "format": "published size" if self.opened is None else self.opened.format,
            "parameters": self.params,
            "bytes_on_disk": dict(on_disk),
            "bytes_in_memory": self.params * self.dtype.itemsize,
            "bytes_read_per_pass": self.read_params() * self.dtype.itemsize,
            "bytes_read_per_6_tokens": self.read_params(6) * self.dtype.itemsize,
            "rows_of_the_embedding": config.vocab_size,
            "tokens": None if words is None else words.vocab_size,
            "special_ids": {} if self.opened is None else self.opened.ids.to_json(),
            "eos": {str(i): None if words is None else words.token(i) for i in eos},
            "context": context,
            "cache_bytes_per_row_and_1000_tokens": self.cache_bytes(1_000),
            "chat_template": words is not None and words.chat_template is not None,
            "mtp_head": self.opened is not None and has_mtp(self.opened.path),
        }


@dataclasses.dataclass(frozen=True)
class InspectedHead:
    """A draft head whose arrays have not been read.

    Attributes:
      path: its directory.
      dtype: of parameters and cache.
      opened: its files.
    """

    path: str
    dtype: Any
    opened: HeadFiles

    @property
    def params(self) -> int:
        """The parameters of its own; those that it shares with the verifier do not count."""
        return sum(self._sizes.values())

    def read_params(self) -> int:
        """The parameters that a pass reads, perhaps the verifier's output; of embeddings a row."""
        own = round(sum(n * self.opened.share_read(name) for name, n in self._sizes.items()))
        if "lm_head.weight" in self._sizes or self.opened.head.reads_memory:
            return own
        return own + self.opened.layers.vocab_size * self.opened.width

    def cache_bytes(self, tokens: int) -> int:
        """The bytes of the cache of one row of tokens."""
        layers = self.opened.layers
        count = 0 if self.opened.head.reads_memory else layers.num_layers
        return 2 * tokens * count * layers.kv_heads * layers.head_dim * self.dtype.itemsize

    @property
    def _sizes(self) -> dict[str, int]:
        specs = self.opened.reader.specs
        return {n: math.prod(x.shape) for n, x in specs.items() if x.dtype.kind not in "ib"}

    def summary(self) -> dict[str, Any]:
        """The figures by name, as JSON values; sizes in bytes."""
        opened, on_disk = self.opened, Counter[str]()
        for spec in opened.reader.specs.values():
            on_disk[spec.label or spec.dtype.name] += spec.nbytes
        return {
            "path": self.path,
            "family": f"{opened.kind} head",
            "format": opened.format,
            "parameters": self.params,
            "bytes_on_disk": dict(on_disk),
            "bytes_in_memory": self.params * self.dtype.itemsize,
            "bytes_read_per_pass": self.read_params() * self.dtype.itemsize,
            "rows_of_the_embedding": opened.layers.vocab_size,
            "tokens": opened.fields.values.get("draft_vocab_size") or opened.layers.vocab_size,
            "verifier": {
                "name": opened.verifier,
                "width": opened.width,
                "layers": opened.num_layers,
                "boundaries": opened.boundaries and list(opened.boundaries),
                "cross_layer": opened.cross_layer,
            },
            "reads_memory": opened.head.reads_memory,
            "cache_bytes_per_row_and_1000_tokens": self.cache_bytes(1_000),
        }


def inspect(path: PathLike, *, dtype: Any = None) -> Inspected | InspectedHead:
    """Opens a checkpoint without reading its arrays.

    Args:
      path: the directory of a model or of a draft head; a name such as "built-in:gsm8k/drafter"; or
        one of `specjax.models.PRESETS`, such as "qwen3_8b", if there is no such directory.
      dtype: of parameters and activations when it is loaded; by default bfloat16.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      UserError: the checkpoint is unreadable or of an unknown family.
    """
    check_path(path, "path=")
    name = os.fspath(path)
    dtype = jnp.dtype("bfloat16" if dtype is None else dtype)

    def model(config: ModelConfig) -> Model:
        return model_from_config(config.replace(dtype=dtype, param_dtype=dtype))

    if name in PRESETS and not os.path.exists(name):
        return Inspected(name, model(PRESETS[name]), dtype)
    place = real_path(name)
    if not os.path.exists(place):
        if near := _near_preset(name):
            what = f"{name}: no such directory or size{download(name)}"
            raise MissingFileError(f"{what}; did you mean {near}?")
        open_checkpoint(place)  # says so
    if is_draft_head(place):
        return InspectedHead(name, dtype, open_draft_head(place))
    opened = open_checkpoint(place)
    try:
        words = load_tokenizer(place)
    except FileNotFoundError:
        words = None
    return Inspected(name, model(opened.config), dtype, opened, words)


def _near_preset(name: str) -> str | None:
    """A published size with a similar name, such as qwen3_0.6b for Qwen/Qwen3-0.6B."""
    plain = {re.sub(r"[^a-z0-9]", "", size): size for size in PRESETS}
    wanted = re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower())
    near = difflib.get_close_matches(wanted, plain, n=1)
    return plain[near[0]] if near else None


def as_pair(
    drafter: Inspected | InspectedHead,
    verifier: Inspected | InspectedHead,
    memory: float | None,
    acceptance: float,
) -> dict[str, Any]:
    """Whether two models are a pair, what a draft costs, and what fits a device.

    Args:
      memory: that of a device in bytes; None leaves out `batches`.
      acceptance: the rate at which drafted tokens are accepted, for `max_draft`.

    Returns:
      JSON values: `pair` (True, why not, or None for published sizes), `c` (the bytes that a
      drafter's pass reads, over those of the verifier's), of a pair `max_draft` (the best G if
      passes took the time of these bytes) with `why`, and `batches` (the largest batch by the
      length of prompt and output together, in tokens; 0: none).
    """
    opened = drafter.opened is not None and verifier.opened is not None
    c = drafter.read_params() / verifier.read_params()
    values: dict[str, Any] = {
        "pair": (_why_not(drafter, verifier) or True) if opened else None,
        "c": c,
    }
    is_head = isinstance(drafter, InspectedHead)
    if values["pair"] is True or not (opened or is_head):
        longest, at_once = LONGEST, False
        if isinstance(drafter, InspectedHead) and isinstance(verifier, Inspected):
            most = drafter.opened.config_for(verifier.model).most_drafts
            if at_once := most is not None:
                longest = most
        tokens = expected_rounds(acceptance, longest)
        rounds = [RoundCost(g, 1 if at_once else g, c, 1.0, each) for g, each in tokens.items()]
        values |= draft_length(rounds)._asdict()
    if memory is not None:
        both = (drafter, verifier)
        left = _USABLE * memory - sum(each.params * each.dtype.itemsize for each in both)
        rows = {n: sum(each.cache_bytes(n) for each in both) for n in CONTEXTS}
        values["batches"] = {n: max(0, int(left // row)) for n, row in rows.items()}
    return values


def _why_not(drafter: Inspected | InspectedHead, verifier: Inspected | InspectedHead) -> str | None:
    if isinstance(verifier, InspectedHead):
        return f"{verifier.path} is a draft head, which needs the model that it is for"
    if isinstance(drafter, InspectedHead):
        try:
            drafter.opened.config_for(verifier.model)
        except UserError as error:
            return str(error)
        return None
    words = []
    for each in (drafter, verifier):
        if each.tokenizer is None:
            return f"{each.path} has no tokenizer: give its files as tokenizer=PATH to what decodes"
        words.append(Words.of(each.path, each.tokenizer, each.model.vocab_size))
    try:
        check_vocabularies("drafter", *words)
    except UserError as error:
        return str(error)
    return None
