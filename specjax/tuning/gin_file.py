"""What was chosen, as a gin file for `specjax infer`."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from specjax.data import FewShot
from specjax.data.examples import SEQIO_PREFIX
from specjax.text.built_in import portable_path
from specjax.tuning.hierarchies import Hierarchy
from specjax.tuning.settings import RULES, Setting

_ALONE = "methods/verifier_alone.gin"
# The files of `methods` that are not called as their rules, but with underscores.
_FILES = MappingProxyType(
    {
        "ChowLog": "chow_log",
        "DiffLog": "diff_log",
        "OPTLog": "opt_log",
        "TokenV1": "token_v1",
        "TokenV2": "token_v2",
        "TokenV3": "token_v3",
        "LossyTuned": "lossy_tuned",
    }
)


class Reference(str):
    """A reference in gin's language, such as `@Block()`, and no text."""


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
        return _ALONE, values
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
    told = (f"{chosen.described(names)}: {why}", "tune_drafts")
    return _text(*told, (method,), values, file)


def setting_bindings(setting: Setting) -> tuple[list[str], dict[str, Any]]:
    """What decodes with a setting with `specjax infer`, but its models.

    Args:
      setting: what to decode with.

    Returns:
      The files of its method and policy, and the values of their names and those of
      `runs/infer.gin`; some are a `Reference`.
    """
    values: dict[str, Any] = {
        name.upper(): getattr(setting, name) for name in ("temperature", "top_k", "top_p")
    }
    if not setting.max_draft:
        return [_ALONE], values
    files = [f"methods/{_FILES.get(setting.rule, setting.rule.lower())}.gin"]
    if setting.strength is not None:
        strength, *_ = dataclasses.fields(RULES[setting.rule])  # type: ignore[arg-type]
        values[strength.name.upper()] = setting.strength
    if setting.stopping == "chance":  # the one policy without a file of its own
        values["STOPPING"] = Reference("@Survival()")
        values["Survival.estimate"] = Reference("@ConfidenceEstimate()")
        values["Survival.threshold"] = setting.threshold
    elif setting.stopping is not None:
        files.append(f"methods/adaptive_{setting.stopping}.gin")
        values["THRESHOLD"] = setting.threshold
    values["MAX_DRAFT"] = setting.max_draft
    values["VERIFICATION"] = Reference(f"@{setting.verification}()")
    return files, values


def setting_text(
    setting: Setting,
    why: str,
    paths: Mapping[str, str],
    settings: Mapping[str, Any],
    file: str | os.PathLike[str],
) -> str:
    """A gin file that decodes with a setting.

    Args:
      setting: what was chosen.
      why: in words, for a comment.
      paths: name -> directory of the models.
      settings: other names of `runs/infer.gin` and their values.
      file: where it will be, for a comment.

    Returns:
      Its text.
    """
    files, values = setting_bindings(setting)
    drafter = setting.drafter if setting.max_draft else "drafter"
    models = {"VERIFIER": paths["verifier"], "DRAFTER": paths[drafter]}
    values |= {**{name: portable_path(path) for name, path in models.items()}, **settings}
    return _text(f"{setting.described()}: {why}", "tune", files, values, file)


def prompt_names(chat: bool, truncate: str | None, task: FewShot | None) -> dict[str, Any]:
    """Names of `runs/infer.gin` and their values by which it makes the same prompts of records.

    Args:
      chat: whether each text is a user's message for the model's chat template.
      truncate: where texts that are too long are cut, or None.
      task: what makes the texts of records, or None.
    """
    names: dict[str, Any] = {"CHAT": True} if chat else {}
    if truncate is not None:
        names["TRUNCATE"] = truncate
    if isinstance(task, FewShot):
        names["TASK"] = Reference("@FewShot()")
        for field in dataclasses.fields(task):
            value = getattr(task, field.name)
            if value != field.default:
                names[f"FewShot.{field.name}"] = value
    return names


def task_of_all(task: FewShot | None) -> FewShot | None:
    """The task for a gin file that is for all inputs, also without answers, from any directory."""
    if not isinstance(task, FewShot):
        return task
    examples = task.examples
    if examples is not None and not os.fspath(examples).startswith(SEQIO_PREFIX):
        examples = portable_path(examples)
    return dataclasses.replace(task, num_inputs=None, references=None, examples=examples)


def portable_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same values of `runs/infer.gin`, for use from any directory."""
    given = settings.get("TOKENIZER")
    if not isinstance(given, str | os.PathLike):
        return dict(settings)
    return {**settings, "TOKENIZER": portable_path(given)}


def written(value: Any) -> str:
    """A value in gin's language; a text that begins with `@` is one, unless it is a `Reference`."""
    return str(value) if isinstance(value, Reference) else repr(value)


def referring(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as a gin file's author quotes them: `'@Mean()'` and `'%X'` are references."""
    return {
        name: Reference(value) if isinstance(value, str) and value[:1] in ("@", "%") else value
        for name, value in values.items()
    }


def _text(
    told: str,
    command: str,
    files: Sequence[str],
    values: Mapping[str, Any],
    file: str | os.PathLike[str],
) -> str:
    lines = [
        f"# {told}.",
        f"# Made by `specjax {command}`; results.json has the figures.",
        "#",
        f"#   specjax infer --gin_file={os.fspath(file)} \\",
        "#     --gin.INPUT=FILE --gin.OUTPUT_DIR=DIRECTORY",
        "",
        *(f"include '{name}'" for name in ("runs/infer.gin", *files)),
        "",
        *(f"{name} = {written(value)}" for name, value in values.items()),
    ]
    return "\n".join(lines) + "\n"
