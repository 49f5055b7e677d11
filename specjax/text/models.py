"""Models with their tokenizers: what decoding needs of their directories."""

import dataclasses
import functools
import hashlib
import os
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.checks import check_path
from specjax.partitioning import Partitioner
from specjax.tokenizers import Tokenizer, load_tokenizer
from specjax.types import LanguageModel, Params

PathLike = str | os.PathLike[str]

BUILT_IN = Path(__file__).parents[1] / "pairs" / "multi30k_ende"


@dataclasses.dataclass(frozen=True, eq=False)
class TextModel:
    """A language model that reads and writes text.

    Attributes:
      model: static; see `specjax.types.LanguageModel`.
      params: its parameters.
      tokenizer: its tokenizer.
      mesh: what the parameters are spread over; None for one device.
      name: what messages call it, such as its path.

    Raises:
      ValueError: if the tokenizer knows ids that the model has no row for.
    """

    model: LanguageModel
    params: Params = dataclasses.field(repr=False)
    tokenizer: Tokenizer = dataclasses.field(repr=False)
    mesh: jax.sharding.Mesh | None = None
    name: str = "the model"

    def __post_init__(self) -> None:
        if self.tokenizer.vocab_size > self.model.vocab_size:
            raise ValueError(
                f"{self.name}: the tokenizer has {self.tokenizer.vocab_size} ids but the model's "
                f"vocabulary {self.model.vocab_size}; give the model's own tokenizer"
            )

    @property
    def partitioner(self) -> Partitioner | None:
        """Where its arrays lie on the mesh."""
        return None if self.mesh is None else Partitioner(self.mesh)

    @functools.cached_property
    def prepared(self) -> Params:
        """The parameters laid out for fast decoding (see `specjax.models.Model.prepare`)."""
        return self.model.prepare(self.params)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the model, its tokenizer's vocabulary and marks, and every parameter."""
        words = self.tokenizer
        marks = (words.eos_ids, words.bos_id, words.add_bos, words.add_eos, words.chat_template)
        described = f"{self.model.describe()}\n{words.fingerprint}\n{marks}"
        digest = hashlib.sha256(described.encode())
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.params):
            digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
            digest.update(np.ascontiguousarray(whole(leaf)).tobytes())
        return digest.hexdigest()[:16]


def whole(array: Any) -> np.ndarray:
    """An array's values, also where this process holds only a part of them."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


class Models:
    """Any number of models of one vocabulary, each with its name; `verifier` is the one to follow.

    Args:
      **named: models by their names, such as `verifier=`, `middle=`, `drafter=`.

    Attributes:
      named: name -> model, in the order given.

    Raises:
      TypeError: if one is no `TextModel`.
      ValueError: if none is called verifier, or the vocabularies or meshes differ.
    """

    def __init__(self, **named: TextModel) -> None:
        for name, model in named.items():
            if not isinstance(model, TextModel):
                raise TypeError(f"{name} must be a TextModel, got {type(model).__name__}")
        if "verifier" not in named:
            raise ValueError(
                f"one of the models must be called verifier, got {', '.join(named) or 'none'}"
            )
        self.named = named
        for name, model in named.items():
            _check_vocabularies({name: _words(model), "verifier": _words(self.verifier)})
            if model.mesh != self.verifier.mesh:
                raise ValueError(
                    f"{name} and verifier are spread over different meshes: load both with one "
                    "mesh="
                )

    @property
    def verifier(self) -> TextModel:
        """The model to follow; its tokenizer and its end-of-sequence tokens are used."""
        return self.named["verifier"]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={model.name}" for name, model in self.named.items())
        return f"{type(self).__name__}({shown})"


class Pair(Models):
    """A drafter and a verifier of one vocabulary.

    Args:
      drafter: the small model.
      verifier: the large one; its tokenizer and its end-of-sequence tokens are used.

    Raises:
      TypeError: if one is no `TextModel`.
      ValueError: if their vocabularies or meshes differ.
    """

    def __init__(self, drafter: TextModel, verifier: TextModel) -> None:
        super().__init__(drafter=drafter, verifier=verifier)

    @property
    def drafter(self) -> TextModel:
        """The small model."""
        return self.named["drafter"]


def load_text_model(
    path: PathLike,
    *,
    dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    tokenizer: PathLike | Tokenizer | None = None,
) -> TextModel:
    """Loads one model with its tokenizer.

    Args:
      path: a Hugging Face, T5X or specjax directory (see `specjax.checkpoints.load_model`).
      dtype: of parameters, activations and cache; by default the checkpoint's own.
      mesh: spreads the parameters, from `specjax.partitioning.make_mesh`.
      tokenizer: a tokenizer or its path; by default the directory's own.

    Returns:
      The model.

    Raises:
      FileNotFoundError: for a missing directory or file.
      TypeError: for what is no path or no mesh.
      ValueError: for anything unreadable or unfitting, in one line.
    """
    # Imported here so that `import specjax` stays quick: Orbax alone takes as long as the rest.
    from specjax.checkpoints import load_model

    _check_path("path", path)
    _check_mesh(mesh)
    words = _tokenizer(path, tokenizer)
    loaded = load_model(path, dtype=dtype, mesh=mesh)
    return TextModel(loaded.model, loaded.params, words, mesh, os.fspath(path))


def load_pair(
    *,
    drafter: PathLike | None = None,
    verifier: PathLike | None = None,
    dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    tokenizer: PathLike | Tokenizer | None = None,
) -> Pair:
    """Loads a drafter and a verifier; without paths the built-in pair (English to German captions).

    Args:
      drafter: the small model's directory (see `load_text_model`).
      verifier: the large model's directory.
      dtype: of parameters, activations and caches; by default each checkpoint's own.
      mesh: spreads the parameters, from `specjax.partitioning.make_mesh`.
      tokenizer: of both models, for directories without one (T5X's); a tokenizer or its path.

    Returns:
      The pair.

    Raises:
      FileNotFoundError: for a missing directory or file, or an installation without built-in pair.
      TypeError: for what is no path or no mesh.
      ValueError: if one path is missing, a directory is unreadable, or the vocabularies differ.
    """
    if (drafter is None) != (verifier is None):
        missing = "drafter" if drafter is None else "verifier"
        raise ValueError(
            f"load_pair: {missing}= is not given: give both directories, or neither for the "
            "built-in pair"
        )
    if drafter is None or verifier is None:
        drafter, verifier = BUILT_IN / "drafter", BUILT_IN / "verifier"
        for directory in (drafter, verifier):
            if not (directory / "config.json").is_file():
                raise FileNotFoundError(
                    f"{directory}: this installation has no built-in pair; pass load_pair("
                    "drafter=DIRECTORY, verifier=DIRECTORY), or --gin.DRAFTER and --gin.VERIFIER "
                    "to a command, each with config.json, safetensors and a tokenizer"
                )
    loaded = load_models(
        drafter=drafter, verifier=verifier, dtype=dtype, mesh=mesh, tokenizer=tokenizer
    )
    return Pair(loaded.named["drafter"], loaded.verifier)


def load_models(
    *,
    dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    tokenizer: PathLike | Tokenizer | None = None,
    **paths: PathLike,
) -> Models:
    """Loads any number of models, and checks that they have one vocabulary.

    Args:
      dtype: of parameters, activations and caches; by default each checkpoint's own.
      mesh: spreads the parameters, from `specjax.partitioning.make_mesh`.
      tokenizer: of all models, for directories without one (T5X's); a tokenizer or its path.
      **paths: name -> directory (see `load_text_model`); one of them is `verifier`.

    Returns:
      The models, each under its name.

    Raises:
      FileNotFoundError: for a missing directory or file.
      TypeError: for what is no path or no mesh.
      ValueError: if none is called verifier, a directory is unreadable, or vocabularies differ.
    """
    from specjax.checkpoints import read_config

    if "verifier" not in paths:
        raise ValueError(
            f"load_models: one path must be called verifier, got {', '.join(paths) or 'none'}"
        )
    for name, path in paths.items():
        _check_path(name, path)
    _check_mesh(mesh)
    words = {name: _tokenizer(path, tokenizer) for name, path in paths.items()}
    # Before any array is read.
    sizes = {
        name: (os.fspath(path), words[name].fingerprint, read_config(path).vocab_size)
        for name, path in paths.items()
    }
    for name, size in sizes.items():
        _check_vocabularies({name: size, "verifier": sizes["verifier"]})
    _tell_special_ids(words)
    return Models(
        **{
            name: load_text_model(path, dtype=dtype, mesh=mesh, tokenizer=words[name])
            for name, path in paths.items()
        }
    )


def _tokenizer(path: PathLike, tokenizer: PathLike | Tokenizer | None) -> Tokenizer:
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if tokenizer is None:
        return load_tokenizer(path)
    if tokenizer != "bytes":
        _check_path("tokenizer", tokenizer)
    return load_tokenizer(tokenizer)


def _check_path(name: str, path: Any) -> None:
    check_path(path, f"{name}=")
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"{name}={os.fspath(path)!r}: no such file or directory; a model known by its name on "
            "a hub must be downloaded first"
        )


def _check_mesh(mesh: Any) -> None:
    if mesh is not None and not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(f"mesh must come from specjax.partitioning.make_mesh, got {mesh!r}")


# A model's path, its tokenizer's fingerprint and its vocabulary's size.
_Words = tuple[str, str, int]


def _words(model: TextModel) -> _Words:
    return model.name, model.tokenizer.fingerprint, model.model.vocab_size


def _check_vocabularies(models: dict[str, _Words]) -> None:
    """Compares two models (or one with itself), by name."""
    if len({words[1:] for words in models.values()}) == 1:
        return
    (_, first, _), (_, second, _) = models.values()
    described = [f"{path} has {size} ids (tokens {mark})" for path, mark, size in models.values()]
    what = "tokenizers" if first != second else "vocabulary sizes"
    raise ValueError(
        f"{' and '.join(models)} have different {what}: {' but '.join(described)}; both must give "
        "every id the same meaning: choose models of one family"
    )


def _tell_special_ids(words: dict[str, Tokenizer]) -> None:
    """Warns where a model ends or pads texts with other tokens than the verifier."""
    own = words["verifier"]
    for name, other in words.items():
        for what, ours, theirs in (
            ("ends texts", own.eos_ids, other.eos_ids),
            ("pads prompts", own.pad_id, other.pad_id),
        ):
            if ours != theirs:
                warnings.warn(
                    f"the {name} {what} with {theirs}, the verifier with {ours}: the verifier's "
                    "are used",
                    stacklevel=4,
                )
