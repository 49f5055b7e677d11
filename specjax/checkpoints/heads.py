"""Acceptance heads on disk: `acceptance_head/` in the directory of a drafter, all or nothing."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from specjax.acceptance_head import Head, HeadConfig
from specjax.acceptance_head.head import head_shapes
from specjax.checkpoints.arrays import ArraySpec, compare, flatten, unflatten
from specjax.checkpoints.hf import write_json
from specjax.checksums import CHECKSUMS_NAME, find_damage, write_checksums
from specjax.tokenizers.model_files import read_json
from specjax.writing import new_directory

HEAD_NAME = "acceptance_head"
_CONFIG, _ARRAYS = "head.json", "head.safetensors"
_VERSION = 1
_AGAIN = "copy the head again, or train it again (specjax train_head)"


def save_head(directory: str | os.PathLike[str], head: Head) -> Path:
    """Writes a head into a drafter's directory, in the place of an earlier one.

    Args:
      directory: the drafter's; takes `acceptance_head/` with `head.json` and `head.safetensors`.
      head: the head.

    Returns:
      The path of `acceptance_head`.

    Raises:
      FileExistsError: `acceptance_head` there is no head's directory.
      OSError: it cannot be written.
    """
    place = Path(directory) / HEAD_NAME
    check_head_place(directory)
    arrays = {name: np.asarray(x) for name, x in flatten(head.params).items()}
    with new_directory(place, replace=True) as partial:
        # Not save_file, whose files only their owner can read.
        (partial / _ARRAYS).write_bytes(safetensors.numpy.save(arrays))
        write_json(
            partial / _CONFIG,
            {
                "version": _VERSION,
                "config": dataclasses.asdict(head.config),
                "drafter_fingerprint": head.drafter_fingerprint,
                "rejection_weight": head.rejection_weight,
                "notes": dict(head.notes),
            },
        )
        write_checksums(partial)
    return place


def check_head_place(directory: str | os.PathLike[str]) -> None:
    """Makes sure, before long work, that `save_head` would replace nothing but a head.

    Args:
      directory: the drafter's.

    Raises:
      FileExistsError: `acceptance_head` there is something else.
    """
    place = Path(directory) / HEAD_NAME
    if place.is_dir() and ((place / _CONFIG).is_file() or not any(place.iterdir())):
        return
    if os.path.lexists(place):
        raise FileExistsError(f"{place} holds no acceptance head: move it, or choose another place")


def has_head(directory: str | os.PathLike[str]) -> bool:
    """Whether a drafter's directory holds an acceptance head."""
    return os.path.lexists(Path(directory) / HEAD_NAME)


def load_head(directory: str | os.PathLike[str], *, check_weights: bool = True) -> Head:
    """Reads the head of a drafter's directory.

    Args:
      directory: the drafter's, which holds `acceptance_head/`.
      check_weights: whether to compare the files with their checksums, and to search the arrays
        for NaN and infinity.

    Returns:
      The head. Whose it is, `Head.check_drafter` tells.

    Raises:
      FileNotFoundError: there is none, or a file of it is missing.
      OSError: a file cannot be read.
      ValueError: a file is damaged, or its arrays are not those of its configuration.
    """
    place = Path(directory) / HEAD_NAME
    if not place.is_dir():
        raise FileNotFoundError(f"{place}: no such directory: train a head (specjax train_head)")
    if check_weights and (why := find_damage(place)):
        raise ValueError(
            f"{place}: {why}: {_AGAIN}; if you have changed it yourself, load it with "
            f"check_weights=False, not without {CHECKSUMS_NAME}"
        )
    values = read_json(place / _CONFIG)
    config = _config(place / _CONFIG, values)
    params = unflatten(_arrays(place / _ARRAYS, config, check_weights))
    weight: Any = values.get("rejection_weight")
    fingerprint, notes = values.get("drafter_fingerprint"), values.get("notes", {})
    if not isinstance(fingerprint, str) or not fingerprint or not isinstance(notes, dict):
        raise ValueError(
            f"{place / _CONFIG}: drafter_fingerprint must be a text and notes an object: {_AGAIN}"
        )
    try:
        return Head(config, params, fingerprint, weight, notes)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place / _CONFIG}: {error}: {_AGAIN}") from None


def _config(file: Path, values: Mapping[str, Any]) -> HeadConfig:
    if values.get("version") != _VERSION:
        raise ValueError(
            f"{file}: version={values.get('version')!r} must be {_VERSION} for this specjax to "
            "read it; use the specjax that wrote it"
        )
    config = values.get("config")
    names = {field.name for field in dataclasses.fields(HeadConfig)}
    if not isinstance(config, dict) or set(config) != names:
        raise ValueError(
            f"{file}: config must be an object with {', '.join(sorted(names))}: {_AGAIN}"
        )
    try:
        return HeadConfig(**config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}: {_AGAIN}") from None


def _arrays(path: Path, config: HeadConfig, check_finite: bool) -> dict[str, np.ndarray]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file: {_AGAIN}") from None
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error.strerror}): correct that") from None
    try:
        found = safetensors.numpy.load(data)
    except (safetensors.SafetensorError, KeyError) as error:  # KeyError: a dtype NumPy lacks
        raise ValueError(f"{path} is cut short or damaged ({error}): {_AGAIN}") from None
    shapes = {name: tuple(leaf.shape) for name, leaf in flatten(head_shapes(config)).items()}
    specs = {name: ArraySpec(x.shape, x.dtype) for name, x in found.items()}
    compare(specs, shapes).raise_if_any(path, f"{_CONFIG} says otherwise: {_AGAIN}")
    for name, array in found.items():
        if array.dtype != np.float32:
            raise ValueError(f"{path}: {name} must be float32, got {array.dtype}: {_AGAIN}")
        if check_finite and not np.isfinite(array).all():
            raise ValueError(f"{path}: {name} has NaN or infinity: {_AGAIN}")
    return {name: found[name] for name in shapes}
