"""The texts of a sweep, with their references."""

import os
from collections.abc import Sequence
from typing import NamedTuple

from specjax.checks import check_path, whole_number
from specjax.data import Example, read_examples
from specjax.runs.predictions import read_references

PathLike = str | os.PathLike[str]


class Texts(NamedTuple):
    """n texts.

    Attributes:
      examples: their ids are their places in the file.
      references: for each text one or several.
    """

    examples: list[Example]
    references: list[tuple[str, ...]]


def read_texts(
    source: PathLike,
    *,
    references: PathLike | Sequence[PathLike] | None = None,
    references_field: str | int | None = None,
    format: str | None = None,
    inputs_field: str | int | None = None,
    targets_field: str | int | None = None,
    split: str = "validation",
    limit: int | None = None,
) -> Texts:
    """Reads texts and references.

    Args:
      source: see `specjax.data.read_examples`.
      references: files of references (see `specjax.runs.predictions.read_references`); None takes
        those of `targets_field`.
      references_field: see `read_references`.
      format: see `read_examples`.
      inputs_field: likewise.
      targets_field: likewise.
      split: likewise.
      limit: how many texts are taken, the first ones; None for all.

    Returns:
      The texts.

    Raises:
      FileNotFoundError: a file is missing.
      TypeError: a path is not a path.
      ValueError: a file is unreadable, or there are no references, or not one for each text.
    """
    check_path(source, "source=")
    most = None if limit is None else whole_number("limit", limit, low=1)
    if (references is None) == (targets_field is None):
        raise ValueError(
            "give the references once: a file of them (references) or the field of the texts' own "
            "file (targets_field)"
        )
    fields = {"inputs_field": inputs_field, "targets_field": targets_field}
    found = list(
        read_examples(os.path.expanduser(source), format=format, split=split, **fields)  # type: ignore[arg-type]
    )
    if references is not None:
        wanted = read_references(references, field=references_field)
        if len(wanted) != len(found):
            raise ValueError(
                f"{os.fspath(source)} has {len(found)} texts, but there are {len(wanted)} "
                "references: give one line of references for each text"
            )
    else:
        wanted = [(example.targets or "",) for example in found]
    # A text with one reference keeps it, so that its predictions can be scored by themselves.
    examples = [
        example._replace(targets=texts[0] if len(texts) == 1 else None)
        for example, texts in zip(found, wanted, strict=True)
    ]
    return Texts(examples[:most], wanted[:most])
