"""Prompts made from templates, with solved examples before each input."""

import dataclasses
import functools
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specjax.checks import PathLike, check_part, short_repr, whole_fields
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
    examples: PathLike | None = None
    examples_format: str | None = None
    examples_split: str = "train"
    shots: int = 0
    seed: int | None = None
    instruction: str = ""
    separator: str = "\n\n"
    limit: int | None = None
    limit_seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt", "completion", "references", "instruction", "separator"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name != "references"):
                raise UserError(f"{name} must be a text, got {short_repr(value)}")
        if not self._templates[0].fields:
            raise UserError(
                f"prompt={self.prompt!r} has no field, so all prompts would be equal: add a field "
                "such as '{question}'"
            )
        whole_fields(self, shots=0, limit=1, seed=0, limit_seed=0)
        if self.shots and not (self.examples and self.completion):
            raise UserError(
                f"shots={self.shots} needs `examples`, a file, and `completion`, the template of "
                "an answer, such as ' {answer}'"
            )

    def read(
        self,
        source: PathLike,
        *,
        format: str | None = None,
        split: str = "test",
    ) -> list[Example]:
        """Makes the prompts of a source."""
        records = list(read_records(source, format=format, split=split, header=self._header))
        if self.limit is not None and len(records) > self.limit:
            places = random.Random(self.limit_seed).sample(range(len(records)), self.limit)
            records = [records[place] for place in sorted(places)]
        return self.prompts(records)

    def prompts(self, records: Sequence[SourceRecord]) -> list[Example]:
        prompt, answer = self._templates
        solved = [prompt.fill(x, where) + answer.fill(x, where) for where, x in self.drawn]
        examples = []
        for place, (where, values) in enumerate(records):
            pairs = zip(solved, self.drawn, strict=True)
            others = [text for text, example in pairs if example.values != values]
            if len(others) < self.shots:
                raise UserError(
                    f"{self.examples} has {len(others)} different examples besides {where}, but "
                    f"shots={self.shots}: add examples, or set shots={len(others)}"
                )
            parts = [self.instruction] if self.instruction else []
            text = self.separator.join([*parts, *others[: self.shots], prompt.fill(values, where)])
            targets = None
            if self.references is not None:
                _, bar, default = self.references.partition("|")
                found = look_up(values, self.references, where)
                targets = (found,) if isinstance(found, str) else found or (default if bar else "",)
            examples.append(Example(place, text, targets, where))
        return examples

    @functools.cached_property
    def drawn(self) -> list[SourceRecord]:
        """The examples, and one more, which replaces an input that is an example."""
        drawn: list[SourceRecord] = []
        if self.shots and self.examples is not None:
            of: dict[str, Any] = {"format": self.examples_format, "split": self.examples_split}
            rows: Iterable[SourceRecord] = read_records(self.examples, header=self._header, **of)
            if self.seed is not None:
                random.Random(self.seed).shuffle(rows := list(rows))
            # A corpus may be too large to read.
            for row in rows:
                if all(row.values != other.values for other in drawn):
                    drawn.append(row)
                if len(drawn) > self.shots:
                    break
        return drawn

    @property
    def _header(self) -> bool:
        """Whether a TSV has a header: one whose fields are all numbers has none."""
        names = [name for template in self._templates for name in template.fields]
        names += [self.references.partition("|")[0]] if self.references else []
        return not all(name.isdecimal() for name in names)

    @property
    def _templates(self) -> tuple[Template, Template]:
        return Template(self.prompt), Template(self.completion)


def read_inputs(
    source: PathLike,
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
