"""Chat templates: Jinja text that turns a list of messages into a prompt."""

import contextvars
import datetime
import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

from specjax.tokenizers.model_files import read_json_if_there

# The most rounds of a template's loops and calls of its macros; a message needs a few.
MOST_STEPS = 1_000_000
MOST_TEXT = 10_000_000
# The largest whole number; Python prints no more either.
MOST_BITS = 14_000

# The steps of the current rendering, per thread.
_steps: contextvars.ContextVar[int] = contextvars.ContextVar("steps")


def read_chat_template(directory: Path) -> str | None:
    """A directory's chat template.

    `chat_template.jinja` has priority over the `chat_template` of `tokenizer_config.json`; of
    several named templates, `default` is used.

    Args:
      directory: a model's directory.

    Returns:
      The Jinja source, or None if there is none.

    Raises:
      ValueError: for an unreadable file, or named templates without a default.
    """
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 ({error}); restore the file") from None
    config = directory / "tokenizer_config.json"
    template = read_json_if_there(config).get("chat_template")
    if isinstance(template, list):
        if not all(isinstance(e, dict) and isinstance(e.get("name"), str) for e in template):
            raise ValueError(
                f"{config}: chat_template must be text, or a list of objects with name and "
                "template; restore the file"
            )
        named = {entry.get("name"): entry.get("template") for entry in template}
        if "default" not in named:
            raise ValueError(
                f"{config}: none of its chat templates ({', '.join(map(str, named))}) is named "
                "'default'; rename the template to use"
            )
        template = named["default"]
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{config}: chat_template must be text, or a list of named texts")
    return template


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """Renders a conversation in a sandbox, with the names that transformers gives templates.

    Args:
      template: Jinja source.
      messages: dicts with `role` and `content`.
      add_generation_prompt: whether the text ends at the start of the assistant's answer.
      **variables: other variables of the template, such as `bos_token`.

    Returns:
      The prompt's text, with special tokens as text.

    Raises:
      ValueError: for a faulty template, or messages that it rejects.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise ValueError(f"chat messages must be a list of objects, got {messages!r}")
    messages = list(messages)
    for message in messages:
        if not isinstance(message, Mapping):
            raise ValueError(
                'a chat message must be an object, such as {"role": "user", "content": "..."}, '
                f"got {message!r}"
            )
    try:
        pieces = _compiled(template).generate(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            **{"tools": None, "documents": None, **variables},
        )
        return contextvars.copy_context().run(_joined, pieces)
    except Exception as error:  # a template may do anything to the messages
        why = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"the chat template rejects the messages, or is faulty: {why}") from None


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationMarks, jinja2.ext.loopcontrols],
    )
    # Jinja's own tojson escapes HTML.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda text: datetime.datetime.now().strftime(text)
    return environment.from_string(template)


def _joined(pieces: Iterator[str]) -> str:
    _steps.set(0)
    text, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > MOST_TEXT:
            raise jinja2.TemplateError(f"its text has more than {MOST_TEXT:,} characters")
        text.append(piece)
    return "".join(text)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Transformers' environment, with limits on a template's time and memory."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Multiplies, unless the result is larger than any prompt needs."""
        if _size(operator, left, right) > 1:
            raise jinja2.TemplateError(f"its product {operator} is too large")
        return super().call_binop(context, operator, left, right)

    def count_step(self) -> bool:
        """Ends a template that takes more steps than any conversation needs; else True."""
        _steps.set(_steps.get() + 1)
        if _steps.get() > MOST_STEPS:
            raise jinja2.TemplateError(f"it has not ended after {MOST_STEPS:,} steps")
        return True

    def _parse(self, *args: Any) -> nodes.Template:
        """Parses; every part that a template can repeat begins with `count_step`."""
        tree = super()._parse(*args)
        repeated = nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block
        node: Any
        for node in list(tree.find_all(repeated)):
            count = nodes.Call(nodes.EnvironmentAttribute("count_step"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(count))
            if isinstance(node, nodes.For) and node.test is not None:
                # Rounds that the test skips take time as well.
                node.test = nodes.And(count, node.test)
            node.set_lineno(node.lineno).set_environment(self)
        return tree


def _size(operator: str, left: Any, right: Any) -> float:
    """The size of a product, relative to the limit."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length(), right.bit_length()
        return (bits[0] * right if operator == "**" else sum(bits)) / MOST_BITS
    for text, times in ((left, right), (right, left)):
        if isinstance(text, str | bytes | list | tuple) and isinstance(times, int):
            return len(text) * times / MOST_TEXT
    return 0


class _GenerationMarks(jinja2.ext.Extension):
    """`{% generation %}` ... `{% endgeneration %}`, only for training: keeps the body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
