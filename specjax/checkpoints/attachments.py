"""Parts of a model that are trained separately: acceptance heads and bigram tables on disk.

Each is a directory with a JSON file, a safetensors file of the same name and their checksums. It is
written completely or not at all.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from specjax.acceptance_head import Head, HeadConfig
from specjax.checkpoints.arrays import check_finite, flatten, unflatten
from specjax.checks import PathLike
from specjax.errors import MissingFileError, UserError
from specjax.tokenizers.model_files import read_json, write_json
from specjax.writing import CHECKSUMS_NAME, find_damage, new_directory, write_checksums

HEAD_NAME = "acceptance_head"
HEAD, BIGRAM = "head", "bigram"
AGAIN = {
    HEAD: "copy the head again, or train it again (specjax train head)",
    BIGRAM: "copy the table again, or make it again (specjax train bigram)",
}


def save_head(directory: PathLike, head: Head) -> Path:
    """Writes `acceptance_head/` into a drafter's directory; an earlier head is renamed."""
    place = Path(directory) / HEAD_NAME
    check_head_place(directory)
    values = {
        "version": 1,
        "config": dataclasses.asdict(head.config),
        "drafter_fingerprint": head.drafter_fingerprint,
        "rejection_weight": head.rejection_weight,
        "notes": dict(head.notes),
    }
    write_attachment(place, HEAD, values, flatten(head.params), replace=True)
    return place


def check_head_place(directory: PathLike) -> None:
    """Checks, before long work, that `save_head` would not replace anything except a head."""
    place = Path(directory) / HEAD_NAME
    if place.is_dir() and ((place / f"{HEAD}.json").is_file() or not any(place.iterdir())):
        return
    if os.path.lexists(place):
        raise FileExistsError(f"{place} is not an acceptance head: move it, or use another place")


def has_head(directory: PathLike) -> bool:
    """Whether a drafter's directory has an acceptance head."""
    return os.path.lexists(Path(directory) / HEAD_NAME)


def load_head(directory: PathLike, *, check_weights: bool = True) -> Head:
    """Reads the head of a drafter's directory; see `Head.check_drafter`.

    With `check_weights`, the files are compared with their checksums, and the arrays are searched
    for NaN and infinity.
    """
    place = Path(directory) / HEAD_NAME
    if not place.is_dir():
        raise MissingFileError(f"{place}: no such directory: train a head (specjax train head)")
    values, arrays = read_attachment(place, HEAD, (1,), check_weights)
    if check_weights:
        for name, array in arrays.items():
            check_finite(f"{place}: {name}", array, (0,) * array.ndim)
    config = values.get("config")
    try:
        return Head(
            HeadConfig(**config if isinstance(config, dict) else {"config": config}),
            unflatten(arrays),
            values.get("drafter_fingerprint"),  # type: ignore[arg-type]
            values.get("rejection_weight"),  # type: ignore[arg-type]
            values.get("notes", {}),
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"{place}: {error}: {AGAIN[HEAD]}") from None


def write_attachment(
    place: Path,
    name: str,
    values: Mapping[str, Any],
    arrays: Mapping[str, Any],
    replace: bool = False,
) -> None:
    """Writes `name.json`, `name.safetensors` and their checksums: all or nothing."""
    with new_directory(place, replace=replace) as partial:
        data = safetensors.numpy.save({n: np.asarray(x) for n, x in arrays.items()})
        # Not save_file, whose files only their owner can read.
        (partial / f"{name}.safetensors").write_bytes(data)
        write_json(partial / f"{name}.json", values)
        write_checksums(partial)


def read_attachment(
    place: Path, name: str, versions: tuple[int, ...], check: bool
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The values and the arrays of a directory that `write_attachment` wrote."""
    again = AGAIN[name]
    if check and (why := find_damage(place)):
        raise UserError(
            f"{place}: {why}: {again}; if you changed it on purpose, load it with "
            f"check_weights=False, but do not delete {CHECKSUMS_NAME}"
        )
    values = read_json(place / f"{name}.json")
    if (version := values.get("version")) not in versions:
        raise UserError(
            f"{place / f'{name}.json'}: version={version!r} must be "
            f"{' or '.join(map(str, versions))} for this specjax to read it; use the specjax that "
            "wrote it"
        )
    path = place / f"{name}.safetensors"
    try:
        return values, safetensors.numpy.load(path.read_bytes())
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no such file: {again}") from None
    except (safetensors.SafetensorError, KeyError) as error:  # KeyError: a dtype NumPy lacks
        raise UserError(f"{path} is cut short or damaged ({error}): {again}") from None
