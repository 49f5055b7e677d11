"""Models with their tokenizers, loaded from directories."""

import dataclasses
import functools
import os
from collections.abc import Collection, Iterable
from typing import Any

import jax
import numpy as np

from specjax.acceptance_head import Head
from specjax.checks import check_part, check_path, check_static
from specjax.models.model import Model, platforms_of
from specjax.partitioning import STANDARD_RULES, WHOLE_RULES, Partitioner
from specjax.text.built_in import DEFAULT_PAIR, built_in_pair, real_path
from specjax.text.fingerprint import digest, weights_fingerprint
from specjax.text.vocabularies import Words, check_vocabularies, tell_special_ids
from specjax.tokenizers import Tokenizer, load_tokenizer
from specjax.types import LanguageModel, Params

PathLike = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True, eq=False)
class TextModel:
    """A language model that reads and writes text.

    Attributes:
      model: static; see `specjax.types.LanguageModel`.
      params: its parameters.
      tokenizer: its tokenizer.
      mesh: the mesh that the parameters are split over; None for one device.
      name: its name in messages, such as its path.
      head: its acceptance head, which says how likely a verifier accepts its drafts, or None.

    Raises:
      TypeError: if the model, the tokenizer or the head is not what it must be.
      ValueError: if the tokenizer has ids that the model has not, or the head is of another model.
    """

    model: LanguageModel
    params: Params = dataclasses.field(repr=False)
    tokenizer: Tokenizer = dataclasses.field(repr=False)
    mesh: jax.sharding.Mesh | None = None
    name: str = "the model"
    head: Head | None = None

    def __post_init__(self) -> None:
        if isinstance(self.model, Model):
            ways = 1 if self.partitioner is None else self.partitioner.ways("kv_heads")
            object.__setattr__(self, "model", self.model.for_devices(self.platform, ways))
        methods = ("vocab_size", "prompt_positions", "prefill", "score", "write")
        check_part("model", self.model, methods, "models.T5(config)")
        check_static("model", self.model)
        reads = ("vocab_size", "eos_ids", "encode", "decode")
        check_part("tokenizer", self.tokenizer, reads, "tokenizers.load_tokenizer(DIRECTORY)")
        if self.tokenizer.vocab_size > self.model.vocab_size:
            raise ValueError(
                f"{self.name}: the tokenizer has {self.tokenizer.vocab_size} ids, but the model's "
                f"vocabulary has {self.model.vocab_size}: give the model's own tokenizer"
            )
        if not isinstance(self.head, Head | None):
            raise TypeError(f"head must come from checkpoints.load_head, got {self.head!r}")
        if self.head is not None:
            self.head.check_drafter(self.name, self.width, self.weights_fingerprint)

    @property
    def partitioner(self) -> Partitioner | None:
        """The partitioner for its mesh; None without a mesh."""
        return None if self.mesh is None else Partitioner(self.mesh)

    @property
    def platform(self) -> str:
        """Of the devices that hold its parameters: "cpu", "gpu" or "tpu"."""
        return min(platforms_of(next(iter(jax.tree.leaves(self.params)), None)))

    @functools.cached_property
    def prepared(self) -> Params:
        """The parameters prepared for fast decoding (see `specjax.models.Model.prepare`)."""
        return self.model.prepare(self.params)

    @functools.cached_property
    def continues_prompts(self) -> bool:
        """Whether outputs go on with their prompt's text; those of an encoder-decoder do not."""
        short, long = (self.model.prompt_positions(n, 0) for n in (1, 2))
        return bool(short != long)

    @functools.cached_property
    def width(self) -> int:
        """D, the width of its last hidden states."""
        one: Any = np.ones((1, 1), np.int32)

        def read(params: Params) -> Any:
            filled = self.model.prefill(params, one, one[0], 2)
            tokens = filled.tokens[:, None]
            return self.model.extend(params, filled.cache, tokens, filled.positions)

        return jax.eval_shape(read, self.params).hidden.shape[-1]

    @functools.cached_property
    def weights_fingerprint(self) -> str:
        """A hash of the weights as bfloat16 has them, by which a head knows its drafter.

        It is the same for a checkpoint loaded as float32 or bfloat16, or written as bfloat16.
        """
        return weights_fingerprint(self.params)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the model, its tokenizer's vocabulary and settings, and every parameter."""
        words = self.tokenizer
        marks = (words.eos_ids, words.bos_id, words.add_bos, words.add_eos, words.chat_template)
        return digest(self.params, f"{self.model.describe()}\n{words.fingerprint}\n{marks}")


class Models:
    """Any number of models of one vocabulary, each with a name; one is the `verifier`.

    Args:
      **named: models by their names, such as `verifier=`, `middle=`, `drafter=`.

    Attributes:
      named: name -> model, in the order given.

    Raises:
      TypeError: if a model is not a `TextModel`.
      ValueError: if there is no verifier, or the vocabularies or meshes differ.
    """

    def __init__(self, **named: TextModel) -> None:
        for name, model in named.items():
            if not isinstance(model, TextModel):
                raise TypeError(f"{name} must be a TextModel, got {type(model).__name__}")
        if "verifier" not in named:
            raise ValueError(
                f"one of the models must be called verifier, got {', '.join(named) or 'no models'}"
            )
        self.named = named
        for name, model in named.items():
            check_vocabularies({name: _words(model), "verifier": _words(self.verifier)})
            if model.mesh != self.verifier.mesh:
                raise ValueError(
                    f"{name} and verifier have different meshes: load both with one mesh="
                )

    @property
    def verifier(self) -> TextModel:
        """The verifier; its tokenizer and its end-of-sequence tokens are used."""
        return self.named["verifier"]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={model.name}" for name, model in self.named.items())
        return f"{type(self).__name__}({shown})"


class Pair(Models):
    """A drafter and a verifier of one vocabulary.

    Args:
      drafter: the small model.
      verifier: the large model; its tokenizer and its end-of-sequence tokens are used.

    Raises:
      TypeError: if a model is not a `TextModel`.
      ValueError: if their vocabularies or meshes differ.
    """

    def __init__(self, drafter: TextModel, verifier: TextModel) -> None:
        super().__init__(drafter=drafter, verifier=verifier)

    @property
    def fingerprint(self) -> str:
        """A hash of the drafter and one of the verifier."""
        return f"{self.drafter.fingerprint}+{self.verifier.fingerprint}"

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
    check_weights: bool = True,
    head: bool = True,
    replicate: bool = False,
) -> TextModel:
    """Loads one model with its tokenizer.

    Args:
      path: a Hugging Face, T5X or specjax directory (see `specjax.checkpoints.load_model`), or a
        model of a built-in pair, such as "built-in:gsm8k/drafter".
      dtype: the dtype of parameters, activations and cache; by default that of the checkpoint.
      mesh: splits the parameters; from `specjax.partitioning.make_mesh`.
      tokenizer: a tokenizer or its path; by default that of the directory.
      check_weights: see `specjax.checkpoints.load_model`.
      head: whether to load the acceptance head in the directory, if there is one.
      replicate: whether each device of the mesh has the whole model, which then computes without
        collectives; else the mesh's axis `model` splits it.

    Returns:
      The model.

    Raises:
      FileNotFoundError: a directory or file is missing.
      TypeError: `path` is not a path or `mesh` is not a mesh.
      ValueError: the directory is unreadable; model and tokenizer, or its head, do not agree; or
        the mesh does not divide the model's heads.
    """
    # Imported here to keep `import specjax` fast: Orbax alone takes as long as all else.
    from specjax.checkpoints import has_head, load_head, load_model, read_config

    path = real_path(path)
    _check_path("path", path)
    _check_mesh(mesh)
    words = _tokenizer(path, tokenizer)
    if mesh is not None and not replicate:
        _check_heads(path, read_config(path).num_heads, mesh)
    rules = WHOLE_RULES if replicate else STANDARD_RULES
    loaded = load_model(path, dtype=dtype, mesh=mesh, rules=rules, check_weights=check_weights)
    if not 0 <= words.pad_id < loaded.config.vocab_size:
        raise ValueError(
            f"{path}: pad_token_id={words.pad_id} must be in 0 .. {loaded.config.vocab_size - 1}: "
            "correct generation_config.json"
        )
    found = load_head(path, check_weights=check_weights) if head and has_head(path) else None
    model, name = dataclasses.replace(loaded.model, split=not replicate), os.fspath(path)
    return TextModel(model, loaded.params, words, mesh, name, found)


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
) -> Pair:
    """Loads a drafter and a verifier; by default a built-in pair.

    Args:
      built_in: without paths, the name of the pair: "multi30k_ende" (two T5s, English to German
        captions) or "gsm8k" (Llamas, questions of school mathematics).
      drafter: the small model's directory (see `load_text_model`).
      verifier: the large model's directory.
      dtype: the dtype of parameters, activations and caches; by default that of each checkpoint.
      mesh: splits the parameters; from `specjax.partitioning.make_mesh`.
      tokenizer: a tokenizer or its path, for both models if their directories have none (T5X).
      check_weights: see `specjax.checkpoints.load_model`.
      head: whether to load the acceptance heads in the directories, if there are any.
      replicate_drafter: see `replicate` of `load_text_model`; for small drafters.

    Returns:
      The pair.

    Raises:
      FileNotFoundError: a directory or file is missing, or the installation has no built-in pair.
      TypeError: a path is not a path or `mesh` is not a mesh.
      ValueError: only one path is given, no built-in pair has this name, a directory is unreadable,
        or the vocabularies differ.
    """
    if (drafter is None) != (verifier is None):
        missing = "drafter" if drafter is None else "verifier"
        raise ValueError(
            f"load_pair: {missing}= is not given: give both directories, or none for the "
            "built-in pair"
        )
    if drafter is None or verifier is None:
        found = built_in_pair(built_in)
        drafter, verifier = found / "drafter", found / "verifier"
    loaded = load_models(
        drafter=drafter,
        verifier=verifier,
        dtype=dtype,
        mesh=mesh,
        tokenizer=tokenizer,
        check_weights=check_weights,
        head=head,
        replicate=("drafter",) if replicate_drafter else (),
    )
    return Pair(loaded.named["drafter"], loaded.verifier)


def load_models(
    *,
    dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    tokenizer: PathLike | Tokenizer | None = None,
    check_weights: bool = True,
    head: bool = True,
    replicate: Collection[str] = (),
    **paths: PathLike,
) -> Models:
    """Loads any number of models, and checks that they have one vocabulary.

    Args:
      dtype: the dtype of parameters, activations and caches; by default that of each checkpoint.
      mesh: splits the parameters; from `specjax.partitioning.make_mesh`.
      tokenizer: a tokenizer or its path, for all models if their directories have none (T5X).
      check_weights: see `specjax.checkpoints.load_model`.
      head: whether to load the acceptance heads in the directories, if there are any.
      replicate: the names of models of which each device has the whole (see `load_text_model`).
      **paths: name -> directory (see `load_text_model`); one of them is `verifier`.

    Returns:
      The models, each under its name.

    Raises:
      FileNotFoundError: a directory or file is missing.
      TypeError: a path is not a path or `mesh` is not a mesh.
      ValueError: there is no verifier, a directory is unreadable, or the vocabularies differ.
    """
    from specjax.checkpoints import read_config

    if "verifier" not in paths:
        raise ValueError(
            f"load_models: one path must be called verifier, got {', '.join(paths) or 'no paths'}"
        )
    paths = {name: real_path(path) for name, path in paths.items()}
    for name, path in paths.items():
        _check_path(name, path)
    _check_mesh(mesh)
    words = {name: _tokenizer(path, tokenizer) for name, path in paths.items()}
    # Checked before any array is read.
    sizes = {
        name: (os.fspath(path), words[name].fingerprint, read_config(path).vocab_size)
        for name, path in paths.items()
    }
    for name, size in sizes.items():
        check_vocabularies({name: size, "verifier": sizes["verifier"]})
    tell_special_ids(words)
    options: Any = {"dtype": dtype, "mesh": mesh, "check_weights": check_weights, "head": head}
    return Models(
        **{
            name: load_text_model(
                path, tokenizer=words[name], replicate=name in replicate, **options
            )
            for name, path in paths.items()
        }
    )


def any_float32(models: Iterable[TextModel]) -> bool:
    """Whether products of float32 may take part; of a network that is not ours nobody knows."""
    configs = [getattr(model.model, "config", None) for model in models]
    return any(getattr(config, "dtype", np.float32) == np.float32 for config in configs)


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
            f"{name}={os.fspath(path)!r}: no such file or directory: check the path; a model on a "
            "hub must be downloaded first"
        )


def _check_mesh(mesh: Any) -> None:
    if mesh is not None and not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(f"mesh must come from specjax.partitioning.make_mesh, got {mesh!r}")
    if mesh is not None and "model" not in mesh.shape:
        axes = ", ".join(mesh.axis_names)
        raise ValueError(
            f"mesh must have an axis called model, got {axes}: make it with "
            "specjax.partitioning.make_mesh"
        )


def _check_heads(path: PathLike, heads: int, mesh: jax.sharding.Mesh) -> None:
    ways = mesh.shape["model"]
    if heads % ways:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(
            f"the mesh's model={ways} does not divide the {heads} heads of {os.fspath(path)}: "
            f"choose one of {', '.join(map(str, fitting))} (MESH_MODEL), or let each device have "
            "all of a drafter (replicate_drafter, REPLICATE_DRAFTER)"
        )


def _words(model: TextModel) -> Words:
    return model.name, model.tokenizer.fingerprint, model.model.vocab_size
