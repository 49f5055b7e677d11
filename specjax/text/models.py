"""A pair of models with their text: what decoding needs of two directories."""

import dataclasses
import functools
import hashlib
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.checks import check_path
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

    @functools.cached_property
    def prepared(self) -> Params:
        """The parameters laid out for fast decoding (see `specjax.models.Model.prepare`)."""
        prepare = getattr(self.model, "prepare", None)
        return self.params if prepare is None else prepare(self.params)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the model, its tokenizer's vocabulary and marks, and every parameter."""
        words = self.tokenizer
        marks = (words.eos_ids, words.bos_id, words.add_bos, words.add_eos, words.chat_template)
        config = getattr(self.model, "config", self.model)
        digest = hashlib.sha256(f"{config}\n{words.fingerprint}\n{marks}".encode())
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.params):
            digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
            digest.update(np.ascontiguousarray(leaf).tobytes())
        return digest.hexdigest()[:16]


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """A drafter and a verifier of one vocabulary.

    Attributes:
      drafter: the small model.
      verifier: the large one; its tokenizer and its end-of-sequence tokens are used.

    Raises:
      ValueError: if their vocabularies or meshes differ.
    """

    drafter: TextModel
    verifier: TextModel

    def __post_init__(self) -> None:
        models = (self.drafter, self.verifier)
        _check_vocabularies(
            *((m.name, m.tokenizer.fingerprint, m.model.vocab_size) for m in models)
        )
        if self.drafter.mesh != self.verifier.mesh:
            raise ValueError(
                "drafter and verifier are spread over different meshes: load both with one mesh="
            )


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
    from specjax.checkpoints import read_config

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
    paths = (drafter, verifier)
    for name, path in zip(("drafter", "verifier"), paths, strict=True):
        _check_path(name, path)
    _check_mesh(mesh)
    words = [_tokenizer(path, tokenizer) for path in paths]
    # Before any array is read.
    _check_vocabularies(
        *(
            (os.fspath(path), each.fingerprint, read_config(path).vocab_size)
            for path, each in zip(paths, words, strict=True)
        )
    )
    loaded = [
        load_text_model(path, dtype=dtype, mesh=mesh, tokenizer=each)
        for path, each in zip(paths, words, strict=True)
    ]
    return Pair(*loaded)


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
        raise TypeError(f"mesh={mesh!r} is none: make one with specjax.partitioning.make_mesh")


def _check_vocabularies(drafter: tuple[str, str, int], verifier: tuple[str, str, int]) -> None:
    """Compares (name, tokenizer's fingerprint, vocabulary size) of two models."""
    if drafter[1:] == verifier[1:]:
        return
    described = [
        f"{name} has {size} ids (tokens {words})" for name, words, size in (drafter, verifier)
    ]
    what = "tokenizers" if drafter[1] != verifier[1] else "vocabulary sizes"
    raise ValueError(
        f"drafter and verifier have different {what}: {' but '.join(described)}; both must give "
        "every id the same meaning: choose models of one family"
    )
