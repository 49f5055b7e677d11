"""The names and values with which `specjax infer` decodes with a setting."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.data.examples import SEQIO_PREFIX
from specjax.data.few_shot import FewShot
from specjax.text import Branches, Cascade, Lookup, TextModel
from specjax.text.directories import portable_path
from specjax.text.parts import Part
from specjax.text.requests import check_truncate, checked_chat
from specjax.text.setting import Setting

_FILE = "runs/infer.gin"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompting:
    """How prompts are made from texts, and how models are loaded.

    Attributes:
      chat: whether each text is a user's message for the model's chat template; or options of the
        template.
      truncate: where long texts are cut: "end" or "beginning"; None: long texts are errors.
      task: the task that has made the texts from records, or None.
      dtype: None: that of each checkpoint.
      tokenizer: its path, if the models' directories have none.
      weights: the form of their matrices; see `specjax.load_pair`.
    """

    chat: bool | Mapping[str, Any] = False
    truncate: str | None = None
    task: FewShot | None = None
    dtype: Any = None
    tokenizer: str | os.PathLike[str] | None = None
    weights: str | Mapping[str, str | None] | None = None

    def __post_init__(self) -> None:
        checked_chat("chat", self.chat)
        check_truncate(self.truncate)

    def names(self) -> dict[str, str]:
        """Returns gin names -> values, for any working directory and inputs without answers."""
        weights = dict(self.weights) if isinstance(self.weights, Mapping) else self.weights
        tokenizer = None if self.tokenizer is None else portable_path(self.tokenizer)
        values = {
            "DTYPE": self.dtype_name,
            "TOKENIZER": tokenizer,
            "WEIGHTS": weights,
            "CHAT": self.chat,
            "TRUNCATE": self.truncate,
        }
        names = {name: repr(value) for name, value in values.items()}
        if isinstance(self.task, FewShot):
            examples = self.task.examples
            if examples is not None and not os.fspath(examples).startswith(SEQIO_PREFIX):
                examples = portable_path(examples)
            task = dataclasses.replace(self.task, limit=None, references=None, examples=examples)
            names["TASK"] = "@FewShot()"
            for field in dataclasses.fields(task):
                value = getattr(task, field.name)
                if value != field.default:
                    names[f"FewShot.{field.name}"] = repr(value)
        return names

    @property
    def dtype_name(self) -> str | None:
        """The name of the dtype, such as "bfloat16", or None."""
        if self.dtype is None or isinstance(self.dtype, str):
            return self.dtype
        return np.dtype(self.dtype).name


def infer_names(
    setting: Setting,
    models: Mapping[str, TextModel],
    options: Mapping[str, Any],
    prompts: Prompting,
) -> dict[str, str]:
    """Returns all names, and their values as gin code.

    Args:
      options: more options of every decoder, such as `max_new_tokens` and `batch_size`.
    """
    # The drafter of an earlier grid may not be loaded.
    loaded = {"drafter": models["verifier"], **models}
    drafter = loaded[setting.drafter].name if setting.drafter in loaded else setting.drafter
    paths = {"VERIFIER": models["verifier"].name, "DRAFTER": drafter}
    values = dataclasses.asdict(setting) | {"drafting": _portable(setting, models)}
    del values["drafter"], values["widths"], values["costs"]  # not of gin files
    return {
        **{name: repr(portable_path(path)) for name, path in paths.items()},
        **prompts.names(),
        **{name.upper(): repr(value) for name, value in {**options, **values}.items()},
    }


def _portable(setting: Setting, models: Mapping[str, TextModel]) -> str | None:
    """How drafts are made, with full paths of the models and tables."""
    plan = setting.part("drafting")
    moved = _with_full_paths(plan, models)
    if repr(moved) == repr(plan):
        return setting.drafting
    return str(Part.of(moved))


def _with_full_paths(plan: Any, models: Mapping[str, TextModel]) -> Any:
    if isinstance(plan, Branches):
        parts = tuple(_with_full_paths(part, models) for part in plan.parts)
        return dataclasses.replace(plan, parts=parts)
    if isinstance(plan, Cascade):
        paths = [
            name
            if name == "drafter"
            else portable_path(models[name].name if name in models else name)
            for name in plan.models
        ]
        last = _with_full_paths(plan.last, models)
        return dataclasses.replace(plan, models=tuple(paths), last=last)
    if not isinstance(plan, Lookup) or not isinstance(plan.bigram, str | os.PathLike):
        return plan
    if plan.bigram == "built-in":
        return plan
    return dataclasses.replace(plan, bigram=portable_path(plan.bigram))


def words(names: Mapping[str, str]) -> list[str]:
    """Returns the arguments of `specjax infer`."""
    return [f"--gin_file={_FILE}", *(f"--gin.{name}={value}" for name, value in names.items())]


def infer_gin(
    title: str, names: Mapping[str, str], file: str | os.PathLike[str], more: Sequence[str] = ()
) -> str:
    """Returns a gin file for `specjax infer`: its comment begins with `title` and `more`."""
    lines = [
        *(f"# {line}" for line in (title, *more)),
        "#",
        f"#   specjax infer --gin_file={os.fspath(file)} \\",
        "#     --gin.INPUT=FILE --gin.OUTPUT_DIR=DIRECTORY",
        "",
        f"include '{_FILE}'",
        "",
        *(f"{name} = {value}" for name, value in names.items()),
    ]
    return "\n".join(lines) + "\n"
