"""Prompts made from templates, with solved examples before each input."""

import dataclasses
import os
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specjax.checks import check_part, whole_number
from specjax.data.examples import (
    Example,
    SourceRecord,
    look_up,
    read_examples,
    read_records,
)
from specjax.errors import UserError

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


@dataclasses.dataclass(frozen=True)
class Template:
    """A text with fields of a record.

    `{question}` is the value of this key; `{answers.text.0}` uses the keys of objects and the
    places in lists; `{answers.0|none}` is "none" if the value is absent or null. A list of texts is
    joined by line breaks. `{{` and `}}` are braces.
    """

    source: str

    def __post_init__(self) -> None:
        for match in _PART.finditer(self.source):
            is_named = match[1] is None or all(match[1].partition("|")[0].split("."))
            if match[0] in ("{", "}") or not is_named:
                raise UserError(
                    f"the template {self.source!r} has an unpaired brace or a field without a name "
                    f"at character {match.start() + 1}: write {{name}}, or {{{{ for a brace"
                )

    @property
    def fields(self) -> tuple[str, ...]:
        """The keys that the template reads, each once."""
        names = (match[1] for match in _PART.finditer(self.source) if match[1] is not None)
        return tuple(dict.fromkeys(re.split(r"[.|]", name)[0] for name in names))

    def fill(self, record: Mapping[str, Any], where: str) -> str:
        """Fills in the record's values."""

        def put(match: re.Match[str]) -> str:
            if match[1] is None:
                return match[0][0]
            value = look_up(record, match[1], where)
            return "\n".join(value) if isinstance(value, tuple) else value

        return _PART.sub(put, self.source)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewShot:
    r"""Makes prompts from records: an instruction, solved examples, then the input.

    All inputs get the same examples. An input that is an example gets the next example instead.

    Attributes:
      prompt: the template of an input (see `Template`), such as "Question: {question}\nAnswer:".
      completion: the template of an example's answer, appended to its prompt, such as " {answer}".
      references: the field of the references, a text or a list of texts, such as "answers.text";
        "answers.text|none" replaces an empty list by "none". None: no references.
      examples: a file, or seqio:TASK, of the examples.
      examples_format: see `read_records`.
      examples_split: the split of a seqio task.
      shots: the number of examples; 0 needs no file.
      seed: the seed for drawing the examples; None takes the first examples.
      instruction: a text before all examples.
      separator: the text between instruction, examples and input.
      limit: the number of inputs to draw, in their order; None takes all.
      limit_seed: the seed of this draw.
    """

    prompt: str
    completion: str = ""
    references: str | None = None
    examples: str | os.PathLike[str] | None = None
    examples_format: str | None = None
    examples_split: str = "train"
    shots: int = 0
    seed: int | None = None
    instruction: str = ""
    separator: str = "\n\n"
    limit: int | None = None
    limit_seed: int = 0

    def __post_init__(self) -> None:
        if not self._templates[0].fields:
            raise UserError(
                f"prompt={self.prompt!r} has no field, so all prompts would be equal: add a field "
                "such as '{question}'"
            )
        for name, low in (("shots", 0), ("limit", 1), ("seed", 0), ("limit_seed", 0)):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), low=low)
        if self.shots and not (self.examples and self.completion):
            raise UserError(
                f"shots={self.shots} needs `examples`, a file, and `completion`, the template of "
                "an answer, such as ' {answer}'"
            )

    def read(
        self,
        source: str | os.PathLike[str],
        *,
        format: str | None = None,
        split: str = "test",
    ) -> list[Example]:
        """Makes the prompts of a source."""
        prompt, answer = self._templates
        shown = self._examples()
        solved = [
            f"{prompt.fill(r.values, r.where)}{answer.fill(r.values, r.where)}" for r in shown
        ]
        records = list(read_records(source, format=format, split=split, header=self._header))
        examples = []
        for place, record in enumerate(self._drawn(records)):
            others = [
                text for text, r in zip(solved, shown, strict=True) if r.values != record.values
            ]
            own = prompt.fill(record.values, record.where)
            if len(others) < self.shots:
                raise UserError(
                    f"{record.where} is itself an example, and no other example can replace it: "
                    f"add examples, or set shots={self.shots - 1}"
                )
            parts = [self.instruction] if self.instruction else []
            text = self.separator.join([*parts, *others[: self.shots], own])
            examples.append(Example(place, text, self._references(record), record.where))
        return examples

    @property
    def _templates(self) -> tuple[Template, Template]:
        return Template(self.prompt), Template(self.completion)

    @property
    def _header(self) -> bool:
        """Whether a TSV must have a header: not if all fields are numbers."""
        names = [name for template in self._templates for name in template.fields]
        if self.references is not None:
            names.append(self.references.partition("|")[0])
        return not all(name.isdecimal() for name in names)

    def _examples(self) -> list[SourceRecord]:
        """The examples, and another example to replace an input that is an example."""
        if not self.shots or self.examples is None:
            return []
        of: dict[str, Any] = {"format": self.examples_format, "split": self.examples_split}
        rows: Iterable[SourceRecord] = read_records(self.examples, header=self._header, **of)
        if self.seed is not None:
            random.Random(self.seed).shuffle(rows := list(rows))
        # Reads no further than needed, because a corpus may be large; drops duplicates.
        kept: list[SourceRecord] = []
        for row in rows:
            if all(row.values != other.values for other in kept):
                kept.append(row)
            if len(kept) > self.shots:
                break
        if len(kept) < self.shots:
            raise UserError(
                f"{os.fspath(self.examples)} has {len(kept)} different examples, but shots="
                f"{self.shots}: add examples, or set shots={len(kept)}"
            )
        return kept

    def _drawn(self, records: Sequence[SourceRecord]) -> Sequence[SourceRecord]:
        if self.limit is None or len(records) <= self.limit:
            return records
        places = random.Random(self.limit_seed).sample(range(len(records)), self.limit)
        return [records[place] for place in sorted(places)]

    def _references(self, record: SourceRecord) -> tuple[str, ...] | None:
        if self.references is None:
            return None
        _, bar, default = self.references.partition("|")
        value = look_up(record.values, self.references, record.where)
        if isinstance(value, str):
            return (value,)
        return value or ((default,) if bar else ("",))


def read_inputs(
    source: str | os.PathLike[str],
    *,
    format: str | None = None,
    inputs_field: str | int | None = None,
    targets_field: str | int | None = None,
    split: str = "test",
    task: FewShot | None = None,
) -> list[Example]:
    """Reads a source (see `read_examples`); a task makes the prompts, else each input is one."""
    if task is None:
        fields: dict[str, Any] = {"inputs_field": inputs_field, "targets_field": targets_field}
        return list(read_examples(source, format=format, split=split, **fields))
    check_part("task", task, ("read",), "FewShot(prompt='Question: {question}')")
    for name, field in (("inputs_field", inputs_field), ("targets_field", targets_field)):
        if field is not None:
            raise UserError(f"{name} must be left out: the task names the fields, got {field!r}")
    return task.read(source, format=format, split=split)
