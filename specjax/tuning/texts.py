"""The models of a tuning run, its prompts, and the verifier's own texts for them."""

import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.checks import check_path
from specjax.runs.inputs import tokens_of
from specjax.text import Decoder, Models, Pair, TextModel
from specjax.text.built_in import real_path

PathLike = str | os.PathLike[str]


class Texts(NamedTuple):
    """Known texts.

    Attributes:
      prompts: the tokens of each row.
      outputs: the tokens that follow, the end-of-sequence token included where a text has one.
    """

    prompts: Sequence[np.ndarray]
    outputs: Sequence[np.ndarray]


def check_drafters(drafters: Any) -> None:
    """Raises unless they are directories of further drafters."""
    if isinstance(drafters, str | os.PathLike):
        raise TypeError(f"drafters must be a tuple of directories, got {drafters!r}: write (...,)")
    for i, path in enumerate(drafters):
        check_path(path, f"drafters[{i}]=")


def load_drafters(
    make_pair: Callable[[], Pair],
    make_model: Callable[..., TextModel],
    paths: Sequence[PathLike],
) -> dict[str, TextModel]:
    """All models by name: the verifier, then the drafters, the largest first.

    Args:
      make_pair: gives the verifier and a drafter.
      make_model: loads a further drafter from its directory.
      paths: their directories; they are called `drafter_2`, `drafter_3`, ...

    Raises:
      ValueError: if one is given twice, or has another vocabulary.
    """
    pair = make_pair()
    verifier = pair.verifier
    places = {os.path.realpath(verifier.name): "the verifier"}
    named = {"drafter": pair.drafter.name}
    named |= {f"drafter_{i + 2}": os.fspath(path) for i, path in enumerate(paths)}
    for name, path in named.items():
        place = os.path.realpath(os.path.expanduser(real_path(path)))
        if place in places:
            raise ValueError(f"{name}={path} is the same as {places[place]}: give each model once")
        places[place] = name
    found = {"drafter": pair.drafter}
    for name, path in list(named.items())[1:]:
        found[name] = make_model(os.path.expanduser(path), mesh=verifier.mesh)
        Models(**{name: found[name], "verifier": verifier})  # one vocabulary
    sizes = {
        name: sum(int(np.size(leaf)) for leaf in jax.tree.leaves(model.params))
        for name, model in found.items()
    }
    order = sorted(found, key=lambda name: -sizes[name])
    return {"verifier": verifier, **{name: found[name] for name in order}}


def encode_prompts(
    decoder: Decoder, prompts: Sequence[str], *, chat: bool, truncate: str | None = None
) -> list[np.ndarray]:
    """The tokens of each prompt; see `specjax.runs.inputs.tokens_of`."""
    return [
        tokens_of(decoder, text, f"prompt {i}", chat=chat, truncate=truncate)
        for i, text in enumerate(prompts)
    ]


def verifier_texts(
    verifier: TextModel, decoder: Decoder, prompts: Sequence[np.ndarray], seed: int
) -> Texts:
    """What the verifier writes.

    Args:
      verifier: the model.
      decoder: of it alone.
      prompts: the tokens of each.
      seed: of the draws.

    Returns:
      The texts, in order.

    Raises:
      ValueError: the model gives NaN.
    """
    asked: list[Any] = list(prompts)
    outputs = []
    for row in decoder(asked, seed=seed, progress=False):
        if row.error is not None:
            raise ValueError(f"{verifier.name}: {row.error}: look at the weights")
        end = [] if row.eos_id is None else [row.eos_id]
        outputs.append(np.asarray([*row.tokens, *end], np.int32))
    return Texts(prompts, outputs)


def fingerprints(models: Mapping[str, TextModel]) -> dict[str, str]:
    """Name -> what tells a model from others."""
    return {name: model.fingerprint for name, model in models.items()}


def digest_of(tokens: Sequence[np.ndarray]) -> str:
    """A hash of the tokens of prompts."""
    return hashlib.sha256(b"".join(_bytes(prompt) for prompt in tokens)).hexdigest()


def tell(text: str) -> None:
    """Tells how far a run is."""
    print(f"specjax: {text}", file=sys.stderr, flush=True)


def _bytes(prompt: np.ndarray) -> bytes:
    """Of its tokens, and its end."""
    return (" ".join(map(str, prompt.tolist())) + "\n").encode()
