"""The names of `specjax infer`, and their values, by which it decodes as a setting does."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.data.examples import SEQIO_PREFIX
from specjax.data.few_shot import FewShot
from specjax.text import TextModel
from specjax.text.directories import portable_path
from specjax.text.setting import Setting

_FILE = "runs/infer.gin"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompting:
    """How prompts are made of texts, and what decodes them besides a setting.

    Attributes:
      chat: whether each text is a user's message for the model's chat template.
      truncate: where texts that are too long are cut: "end" or "beginning"; None refuses them.
      task: what has made the texts of records, or None.
      dtype: of the models; None for that of each checkpoint.
      tokenizer: its path, where the models' directories have none.
    """

    chat: bool = False
    truncate: str | None = None
    task: FewShot | None = None
    dtype: Any = None
    tokenizer: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.chat, bool):
            raise TypeError(f"chat must be True or False, got {self.chat!r}")
        if self.truncate not in (None, "end", "beginning"):
            raise ValueError(f"truncate must be None, 'end' or 'beginning', got {self.truncate!r}")

    def names(self) -> dict[str, str]:
        """In gin's language, for use from any directory, also for inputs without answers."""
        found = {"DTYPE": repr(self.dtype), "TOKENIZER": repr(self._tokenizer())}
        found |= {"CHAT": repr(self.chat), "TRUNCATE": repr(self.truncate)}
        if isinstance(self.task, FewShot):
            examples = self.task.examples
            if examples is not None and not os.fspath(examples).startswith(SEQIO_PREFIX):
                examples = portable_path(examples)
            task = dataclasses.replace(self.task, limit=None, references=None, examples=examples)
            found["TASK"] = "@FewShot()"
            for field in dataclasses.fields(task):
                value = getattr(task, field.name)
                if value != field.default:
                    found[f"FewShot.{field.name}"] = repr(value)
        return found

    def _tokenizer(self) -> str | None:
        return None if self.tokenizer is None else portable_path(self.tokenizer)


def infer_names(
    setting: Setting,
    models: Mapping[str, TextModel],
    options: Mapping[str, Any],
    prompts: Prompting,
) -> dict[str, str]:
    """All names, and their values in gin's language.

    Args:
      setting: what to decode with.
      models: by name.
      options: further ones of every decoder, such as `max_new_tokens` and `batch_size`.
      prompts: how prompts are made.
    """
    drafter = models.get(setting.drafter, models.get("drafter", models["verifier"]))
    paths = {"VERIFIER": models["verifier"].name, "DRAFTER": drafter.name}
    return {
        **{name: repr(portable_path(path)) for name, path in paths.items()},
        **prompts.names(),
        **{name.upper(): repr(value) for name, value in options.items()},
        **setting.to_gin(),
    }


def words(names: Mapping[str, str]) -> list[str]:
    """The words behind `specjax infer`."""
    return [f"--gin_file={_FILE}", *(f"--gin.{name}={value}" for name, value in names.items())]


def gin_text(
    told: str, names: Mapping[str, str], file: str | os.PathLike[str], more: Sequence[str] = ()
) -> str:
    """A gin file for `specjax infer`.

    Args:
      told: what it decodes with, for a comment.
      names: of `infer_names`.
      file: where it will be, for a comment.
      more: further lines of the comment.
    """
    lines = [
        *(f"# {line}" for line in (told, *more)),
        "#",
        f"#   specjax infer --gin_file={os.fspath(file)} \\",
        "#     --gin.INPUT=FILE --gin.OUTPUT_DIR=DIRECTORY",
        "",
        f"include '{_FILE}'",
        "",
        *(f"{name} = {value}" for name, value in names.items()),
    ]
    return "\n".join(lines) + "\n"
