"""What was chosen, as a gin file for `specjax infer`."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.text.built_in import portable_path
from specjax.tuning.hierarchies import Hierarchy


def gin_bindings(
    hierarchy: Hierarchy, paths: Sequence[str], bigram: Any
) -> tuple[str, dict[str, Any]]:
    """What decodes in that way with `specjax infer`.

    Args:
      hierarchy: what to decode with.
      paths: of the verifier and the drafters.
      bigram: the table's directory, where one copies with it.

    Returns:
      The file of the method, and the values of its names and those of `runs/infer.gin`.
    """
    values: dict[str, Any] = {"VERIFIER": paths[0]}
    if hierarchy.models:
        values["DRAFTER"] = paths[hierarchy.models[0]]
    if not hierarchy.lengths:
        return "methods/verifier_alone.gin", values
    if hierarchy.copies:
        values["BIGRAM"] = bigram if hierarchy.copies == "bigram" else None
    if len(hierarchy.lengths) > 1:
        values["MODELS"] = ("drafter", *(paths[i] for i in hierarchy.models[1:]))
        if not hierarchy.copies:
            values["LAST"] = None
        values |= {"LENGTHS": hierarchy.lengths, "LENIENCE": hierarchy.lenience}
        return "methods/cascade.gin", values
    values["MAX_DRAFT"] = hierarchy.lengths[0][0]
    if not hierarchy.models:
        return "methods/max_gram.gin", values
    if not hierarchy.copies:
        return "methods/lossless.gin", values
    values |= {"MIN_MATCH": hierarchy.min_match, "MAX_COPY": hierarchy.max_copy}
    return "methods/lookup_first.gin", values


def gin_text(
    chosen: Hierarchy,
    why: str,
    paths: Mapping[str, str],
    settings: Mapping[str, Any],
    bigram: str | os.PathLike[str] | None,
    file: str | os.PathLike[str],
) -> str:
    """A gin file that decodes with what was chosen.

    Args:
      chosen: what was chosen.
      why: in words, for a comment.
      paths: name -> directory of the verifier, then of the drafters; `drafter` is among them.
      settings: other names of `runs/infer.gin` and their values.
      bigram: see `text.Lookup`.
      file: where it will be, for a comment.

    Returns:
      Its text.
    """
    names = list(paths)
    places = [portable_path(path) for path in paths.values()]
    first = chosen.models[0] if chosen.models else names.index("drafter")
    if bigram is not None and bigram != "built-in":
        bigram = portable_path(bigram)
    method, values = gin_bindings(chosen, places, bigram)
    values |= {"DRAFTER": places[first], **settings}
    lines = [
        f"# {chosen.described(names)}: {why}.",
        "# Made by `specjax tune_drafts`; results.json has the figures.",
        "#",
        f"#   specjax infer --gin_file={os.fspath(file)} \\",
        "#     --gin.INPUT=FILE --gin.OUTPUT_DIR=DIRECTORY",
        "",
        "include 'runs/infer.gin'",
        f"include '{method}'",
        "",
        *(f"{name} = {value!r}" for name, value in values.items()),
    ]
    return "\n".join(lines) + "\n"
