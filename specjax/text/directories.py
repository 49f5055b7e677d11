"""Models, bigram tables and built-in pairs ("built-in:gsm8k/drafter") in directories."""

import dataclasses
import logging
import os
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from specjax.checkpoints.attachments import AGAIN, BIGRAM, read_attachment, write_attachment
from specjax.checks import check_flag, check_path
from specjax.drafting import Bigram
from specjax.errors import UserError
from specjax.models import CausalLM
from specjax.models.int8 import form_of
from specjax.partitioning import STANDARD_RULES, WHOLE_RULES
from specjax.text.heterogeneous_vocabularies import SAMPLE, translate
from specjax.text.text_models import Models, Pair, TextModel, Words, check_vocabularies
from specjax.tokenizers import Tokenizer, load_tokenizer

PAIRS = Path(__file__).parents[1] / "pairs"
DEFAULT_PAIR = "multi30k_ende"
PREFIX = "built-in:"
PathLike = str | os.PathLike[str]
# What the built-in pairs write.
_ABOUT = {"multi30k_ende": "built in: English to German captions", "gsm8k": "built in: school math"}
# The arrays of a bigram table by the version: the second has longer contexts.
_TABLES = {1: ("successors",), 2: ("successors", "contexts", "followers")}
_LOGGER = logging.getLogger(__name__)  # the commands print its lines


def built_in_pairs() -> tuple[str, ...]:
    """Returns the names of the installed built-in pairs."""
    return tuple(sorted(path.parent.parent.name for path in PAIRS.glob("*/verifier/config.json")))


def built_in_pair(name: str) -> Path:
    """Returns the directory of a built-in pair."""
    names = built_in_pairs()
    if not names:
        raise FileNotFoundError(
            f"{PAIRS}: this installation has no built-in pairs: call load_pair("
            "drafter=DIRECTORY, verifier=DIRECTORY), or give --gin.DRAFTER and "
            "--gin.VERIFIER; each directory needs config.json, safetensors and a tokenizer"
        )
    if name not in names:
        raise UserError(
            f"there is no built-in pair {name!r}: choose from {', '.join(names)}, or give two "
            "directories: load_pair(drafter=..., verifier=...)"
        )
    return PAIRS / name


def real_path(path: PathLike) -> PathLike:
    """Returns the directory of "built-in:PAIR/PART", and any other path unchanged."""
    if not isinstance(path, str) or not path.startswith(PREFIX):
        return path
    name, _, part = path.removeprefix(PREFIX).partition("/")
    pair = built_in_pair(name)
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
) -> TextModel:
    """Loads a model with its tokenizer.

    Args:
      path: a Hugging Face, T5X or specjax directory (see `specjax.checkpoints.load_model`), or a
        model of a built-in pair, such as "built-in:gsm8k/drafter".
      dtype: the dtype of parameters, activations and cache; by default that of the checkpoint.
      mesh: splits the parameters; from `specjax.partitioning.make_mesh`.
      tokenizer: a tokenizer or its path; by default that of the directory.
      check_weights: see `specjax.checkpoints.load_model`.
      head: whether to load the acceptance head, if the directory has it.
      replicate: whether each device of the mesh has the whole model, which then needs no
        collectives; if not, the mesh's axis `model` splits it.
      weights: "int8" or "int8+embedding"; see `specjax.checkpoints.load_model`.

    Raises:
      FileNotFoundError: a directory or file is missing.
      UserError: the directory is unreadable, or the model does not fit its tokenizer, its head or
        the mesh.
    """
    place = real_path(path)
    check_model_path("path", place)
    _check_mesh(mesh)
    log_models({"": path})
    return _load(
        place,
        tokenizer,
        dtype=dtype,
        mesh=mesh,
        check_weights=check_weights,
        head=head,
        replicate=replicate,
        weights=weights,
    )


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
    from specjax.checkpoints import has_head, load_head, load_model, read_config
    from specjax.checkpoints.hf import longest_context
    from specjax.checkpoints.ignored import check_adapter, ignored_settings

    check_adapter(Path(path))
    words = _tokenizer(path, tokenizer)
    if mesh is not None and not replicate:
        _check_heads(path, read_config(path).num_heads, mesh)
    rules = WHOLE_RULES if replicate else STANDARD_RULES
    loaded = load_model(
        path, dtype=dtype, mesh=mesh, rules=rules, check_weights=check_weights, weights=weights
    )
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
) -> Pair:
    """Loads a drafter and a verifier; by default a built-in pair.

    `built_in` names one: "multi30k_ende" (two T5 models, English to German captions) or "gsm8k"
    (Llama models, school mathematics); or give two directories. The other options are those of
    `load_text_model`, for both models. `weights` may be for one of them, as in {"verifier":
    "int8"}. With `translate_drafter` the drafter may have another tokenizer; see
    `specjax.text.heterogeneous_vocabularies.translate`. The drafter may be a draft head of the
    verifier (EAGLE, MTP, DFlash, DSpark; see `specjax.checkpoints.heads`), which each device of a
    mesh has whole.

    Raises:
      FileNotFoundError: a directory or file is missing, or there are no built-in pairs.
      UserError: only one path is given, the built-in pair does not exist, a directory is
        unreadable, or the vocabularies differ.
    """
    if (drafter is None) != (verifier is None):
        missing = "drafter" if drafter is None else "verifier"
        raise UserError(
            f"load_pair: {missing} is missing: give both directories, or neither for a built-in "
            "pair"
        )
    if drafter is None or verifier is None:
        directory = built_in_pair(built_in)
        drafter, verifier = directory / "drafter", directory / "verifier"
    check_flag("translate_drafter", translate_drafter)
    options: Any = {"dtype": dtype, "mesh": mesh, "check_weights": check_weights, "head": head}
    whole = ("drafter",) if replicate_drafter else ()
    paths = {"verifier": verifier, "drafter": drafter}
    models = _loaded(paths, tokenizer, whole, weights, options, translate_drafter=translate_drafter)
    return Pair(**models)


def load_models(
    *,
    dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    tokenizer: PathLike | Tokenizer | None = None,
    check_weights: bool = True,
    head: bool = True,
    replicate: Collection[str] = (),
    weights: str | Mapping[str, str | None] | None = None,
    **paths: PathLike,
) -> Models:
    """Loads any number of models with the same vocabulary, each from its directory.

    The options are those of `load_text_model`; `replicate` has names of models, and `weights` may
    be a mapping from names. One of the names in `paths` is `verifier`.

    Raises:
      FileNotFoundError: a directory or file is missing.
      UserError: there is no verifier, `replicate` has another name, a directory is unreadable, or
        the vocabularies differ.
    """
    if "verifier" not in paths:
        raise UserError(
            f"load_models: verifier is missing, got {', '.join(paths) or 'no paths'}: give its path"
        )
    if unknown := [name for name in replicate if name not in paths]:
        raise UserError(
            f"replicate has {unknown[0]!r}, but the models are {', '.join(paths)}: correct the name"
        )
    options: Any = {"dtype": dtype, "mesh": mesh, "check_weights": check_weights, "head": head}
    return Models(**_loaded(paths, tokenizer, replicate, weights, options))


def _loaded(
    paths: dict[str, PathLike],
    tokenizer: PathLike | Tokenizer | None,
    replicate: Collection[str],
    weights: str | Mapping[str, str | None] | None,
    options: dict[str, Any],
    *,
    translate_drafter: bool = False,
) -> dict[str, TextModel]:
    """The models by name; the vocabularies are compared before arrays are read."""
    from specjax.checkpoints import is_draft_head, read_config

    if isinstance(weights, Mapping) and (unknown := [x for x in weights if x not in paths]):
        raise UserError(
            f"weights has {unknown[0]!r}, but the models are {', '.join(paths)}: correct the name"
        )
    forms = {name: form_of(weights, name) for name in paths}
    paths = {name: real_path(path) for name, path in paths.items()}
    for name, path in paths.items():
        check_model_path(name, path)
    log_models(paths)
    _check_mesh(options["mesh"])
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
    sizes = {
        name: Words.of(os.fspath(path), words[name], read_config(path).vocab_size)
        for name, path in paths.items()
    }
    same = all(words["verifier"].fingerprint == other.fingerprint for other in words.values())
    if same or not translate_drafter:
        for name, size in sizes.items():
            check_vocabularies({name: size, "verifier": sizes["verifier"]})
        _warn_of_special_ids(words)
    models = {
        name: _load(path, words[name], replicate=name in replicate, weights=forms[name], **options)
        for name, path in paths.items()
    }
    if translate_drafter and not same:
        models["drafter"] = translate(models["drafter"], models["verifier"], SAMPLE)
    for name, path in heads.items():
        models[name] = _load_head(path, models["verifier"], options)
    return models


def _load_head(path: PathLike, verifier: TextModel, options: Mapping[str, Any]) -> TextModel:
    from specjax.checkpoints import load_draft_head

    if not isinstance(verifier.model, CausalLM):
        raise UserError(
            f"{path} is a draft head, for a decoder-only verifier: give another drafter"
        )
    where = None if verifier.mesh is None else NamedSharding(verifier.mesh, jax.P())
    head, params = load_draft_head(
        path,
        verifier.model,
        dtype=options["dtype"],
        sharding=where,
        check_weights=options["check_weights"],
    )
    head = head.for_devices(verifier.platform)
    return TextModel(head, params, verifier.tokenizer, verifier.mesh, os.fspath(path))


def _warn_of_special_ids(words: dict[str, Tokenizer]) -> None:
    """Warns if a model ends or pads texts with other tokens than the verifier."""
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


def check_model_path(name: str, path: Any) -> None:
    """Raises unless the path, a value of `name`, is there."""
    check_path(path, f"{name}=")
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"{name}={os.fspath(path)!r}: no such file or directory: check the path; download "
            "models from a hub first"
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
            f"choose MESH_MODEL from {', '.join(map(str, fitting))}, or replicate a small drafter "
            "(REPLICATE_DRAFTER)"
        )


def save_bigram(directory: str | os.PathLike[str], bigram: Bigram) -> None:
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


def load_bigram(directory: str | os.PathLike[str], *, check_weights: bool = True) -> Bigram:
    """Reads a table of `save_bigram`; `Bigram.table` checks that it belongs to a model.

    Args:
      directory: written by `save_bigram`.
      check_weights: whether to compare the files with their checksums.

    Raises:
      FileNotFoundError: there is no table, or a file is missing.
      UserError: a file is damaged.
    """
    place = Path(directory)
    if not (place / f"{BIGRAM}.json").is_file():
        raise FileNotFoundError(
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
