"""The texts of a comparison, with their references, and how prompts are made from them."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specjax.checks import PathLike, check_path, whole_number
from specjax.data.examples import Example
from specjax.data.few_shot import FewShot, read_inputs
from specjax.errors import UserError
from specjax.evaluation.sandbox import Problem, check_problems, read_problems
from specjax.runs.evaluation import read_references
from specjax.text.requests import chat_options, check_truncate


class Texts(NamedTuple):
    """Texts with their references, perhaps none, and their programming problems, or None.

    The ids of the examples are their places in the file.
    """

    examples: Sequence[Example]
    references: Sequence[Sequence[str]]
    problems: Sequence[Problem] | None = None

    def part(self, start: int, stop: int) -> "Texts":
        return self.in_order(range(start, min(stop, len(self.examples))))

    def in_order(self, order: Sequence[int]) -> "Texts":
        """Returns the texts at some places, in that order."""
        problems = None if self.problems is None else [self.problems[i] for i in order]
        return Texts(
            [self.examples[i] for i in order], [self.references[i] for i in order], problems
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompting:
    """How prompts are made from texts.

    Attributes:
      chat: whether each text is a user's message for the model's chat template; or options of the
        template.
      truncate: where long texts are cut: "end" or "beginning"; None: long texts are errors.
      task: the task that has made the texts from records, or None.
    """

    chat: bool | Mapping[str, Any] = False
    truncate: str | None = None
    task: FewShot | None = None

    def __post_init__(self) -> None:
        chat_options("chat", self.chat)
        check_truncate(self.truncate)


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
    task: FewShot | None = None,
    problems: PathLike | None = None,
) -> Texts:
    """Reads texts and references.

    Args:
      source: see `specjax.data.examples.read_examples`, which also has `format`, `inputs_field`,
        `targets_field` and `split`.
      references: files of references (see `specjax.runs.evaluation.read_references`); None: the
        references of `targets_field` or of the task, if there are any.
      limit: the number of texts, the first of the source; None for all.
      task: makes prompts and references from the source's records; `references` must then be left
        out, or be the name of the same field.
      problems: a file of problems (see `evaluation.programs.read_problems`), a line for each text.

    Raises:
      FileNotFoundError: a file is missing.
      UserError: a file is unreadable, or the references or problems do not match the texts.
    """
    check_path(source, "source=")
    most = None if limit is None else whole_number("limit", limit, low=1)
    fields: dict[str, Any] = {"inputs_field": inputs_field, "targets_field": targets_field}
    in_source = references is None
    if task is not None:
        in_source = in_source or references == getattr(task, "references", None)
        if not in_source or references_field is not None:
            raise UserError(
                "references and references_field must be left out: `task` names the field of "
                "its references"
            )
    elif in_source and references_field is not None:
        raise UserError(
            f"references_field={references_field!r} needs references: give their file, or give "
            "the field of the inputs as `targets_field`"
        )
    elif not in_source and targets_field is not None:
        raise UserError(
            "give either `references` (files) or `targets_field` (a field of the inputs), not both"
        )
    place = os.path.expanduser(source)
    examples = read_inputs(place, format=format, split=split, task=task, **fields)
    name = os.fspath(source)
    if in_source or references is None:
        given = (example.targets for example in examples)
        expected = [(x,) if isinstance(x, str) else tuple(x or ()) for x in given]
    else:
        expected = read_references(references, field=references_field)
        if len(expected) != len(examples):
            raise UserError(
                f"{name} has {len(examples)} texts, but there are {len(expected)} references: give "
                "one for each"
            )
    tests = None
    if problems is not None:
        path = os.fspath(problems)
        tests = read_problems(problems)
        check_problems(tests, [example.inputs for example in examples], path, name)
        tests = tests[:most]
    # Examples keep their references, so that the predictions can be scored later.
    scored = [
        example._replace(targets=texts[0] if len(texts) == 1 else texts or None)
        for example, texts in zip(examples, expected, strict=True)
    ]
    return Texts(scored[:most], expected[:most], tests)
